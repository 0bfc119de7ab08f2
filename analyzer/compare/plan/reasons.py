"""Why a runner-up lost: what its step has more of than the best's."""

from __future__ import annotations

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.compare.plan.plan import Candidate, Reason, RunnerUp

BY_AXIS = ("collective", "p2p")
"""Buckets that are told axis by axis."""


def runner_up(best: Candidate, other: Candidate) -> RunnerUp:
    """The other one, with what each bucket of its step takes longer."""
    return RunnerUp(
        candidate=other,
        behind_ns=other.step_ns - best.step_ns,
        more_bytes=other.peak_bytes - best.peak_bytes,
        reasons=reasons_of(best, other),
    )


def reasons_of(best: Candidate, other: Candidate) -> tuple[Reason, ...]:
    """Every difference; they add up to that of the steps but for a ns of rounding a message."""
    more = other.split - best.split
    found = [
        Reason(bucket, "", ns)
        for bucket, ns in zip(BUCKETS, more.buckets_ns, strict=True)
        if ns and bucket not in BY_AXIS
    ]
    here, there = dict(best.exposed_ns), dict(other.exposed_ns)
    for axis in sorted({*here, *there}):
        ns = there.get(axis, 0) - here.get(axis, 0)
        if ns:
            found.append(Reason("p2p" if axis == "pp" else "collective", axis, ns))
    return tuple(sorted(found, key=lambda reason: -reason.delta_ns))
