"""The ranks of several roles on the clock of all of them: their phases, and whom they wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, structs

from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.buckets import WAITS
from stepsplit.analyzer.diagnose.rl_windows import JobRole, map_to_unix_ns
from stepsplit.analyzer.report.roles import PhaseSpan
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import Int64

SHORTEST = 0.0005
"""Of the RL step: a shorter link of the path is part of the one before it, and a shorter pause
between two spans of a phase is part of it. At a tenth of it the path of a job that calls a
collective in each layer has thousands of links, at ten times it the reward of a rule is none."""

MOST_SPANS = 20_000
"""Spans of phases in roles.json: those of more ranks are left out, the last ones first."""

RolePhases = Mapping[str, Sequence[Mapping[str, Intervals]]]
"""The phases of each rank of each role, in own ns."""


class RankOnClock(Struct, frozen=True):
    """A rank on the clock of all roles; times in Unix ns, intervals sorted and without overlap.

    wait_* are its waits in communication for a recorded rank that comes later: from the start to
    when that rank comes, with its place in the list of all ranks. phase_* are its phases and marks.
    """

    role: JobRole
    rank: RankSplit
    wait_start: Int64
    wait_until: Int64
    wait_owner: Int64
    phase_start: Int64
    phase_end: Int64
    phase_name: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.role.name}/{self.rank.trace.rank}"


def list_ranks(roles: Sequence[JobRole], phases: RolePhases) -> list[RankOnClock]:
    places = {
        (role.program, rank.trace.rank): place
        for place, (role, rank) in enumerate((r, rank) for r in roles for rank in r.ranks)
    }
    found = []
    for role in roles:
        for rank, spans in zip(role.ranks, phases[role.name], strict=True):
            wait_start, wait_until, wait_owner = _list_waits(role, rank)
            owner = np.array(
                [places.get((role.program, one), -1) for one in wait_owner.tolist()], dtype=np.int64
            )
            known_owner = owner >= 0
            start = np.concatenate([one.start_ns for one in spans.values()] or [_NONE])
            end = np.concatenate([one.end_ns for one in spans.values()] or [_NONE])
            names = np.repeat(np.arange(len(spans)), [len(one) for one in spans.values()])
            order = np.argsort(start, kind="stable")
            known = list(spans)
            found.append(
                RankOnClock(
                    role,
                    rank,
                    wait_start[known_owner],
                    wait_until[known_owner],
                    owner[known_owner],
                    map_to_unix_ns(role.split, rank, start[order]),
                    map_to_unix_ns(role.split, rank, end[order]),
                    tuple(known[name] for name in names[order].tolist()),
                )
            )
    return found


_NONE = np.zeros(0, dtype=np.int64)


def _list_waits(role: JobRole, rank: RankSplit) -> tuple[Int64, Int64, Int64]:
    """The waits of the rank for one that comes later: from when, until that one comes, and its
    number."""
    split, exposed = role.split, rank.attribution.exposed
    matched = split.matched
    is_wait = np.isin(exposed.bucket, WAITS) & (exposed.owner >= 0) & (exposed.call >= 0)
    rows = np.flatnonzero(is_wait & (exposed.end_ns > exposed.start_ns))
    rows = rows[np.argsort(exposed.start_ns[rows], kind="stable")]
    start = map_to_unix_ns(split, rank, exposed.start_ns[rows])
    end = map_to_unix_ns(split, rank, exposed.end_ns[rows])
    own = matched.slice_trace(split.ranks.index(rank)).start
    shared = matched.shared[own + exposed.call[rows]]
    come = end.copy()
    for number in np.unique(exposed.owner[rows]).tolist():
        at = next((at for at, one in enumerate(split.ranks) if one.trace.rank == number), None)
        if at is None:
            continue
        calls = matched.slice_trace(at)
        of_owner = np.flatnonzero((matched.shared[calls] >= 0) & matched.leads[calls])
        labels = matched.shared[calls][of_owner]
        order = np.argsort(labels, kind="stable")
        place = np.searchsorted(labels[order], shared)
        place = np.minimum(place, max(len(labels) - 1, 0))
        arrival = map_to_unix_ns(split, split.ranks[at], matched.start_ns[calls][of_owner][order])
        if len(labels):
            is_same = (exposed.owner[rows] == number) & (labels[order][place] == shared)
            come = np.where(is_same, np.minimum(come, arrival[place]), come)
    # A rank that had come before is not waited for: what follows its data, such as the host.
    later = come > start
    return start[later], come[later], exposed.owner[rows][later].astype(np.int64)


def list_spans(
    ranks: Sequence[RankOnClock], edges: Int64, numbers: Sequence[int]
) -> tuple[PhaseSpan, ...]:
    """The phases of the ranks in the RL steps, without pauses that cannot be seen in a picture."""
    spans: list[PhaseSpan] = []
    least_ns = int(SHORTEST * int(np.diff(edges).mean()))
    for one in ranks:
        role, rank, own = one.role.name, one.rank.trace.rank, list[PhaseSpan]()
        for at, number in enumerate(numbers):
            begin, end = int(edges[at]), int(edges[at + 1])
            first = int(np.searchsorted(one.phase_end, begin, side="right"))
            last = int(np.searchsorted(one.phase_start, end, side="left"))
            for row in range(first, last):
                name = one.phase_name[row]
                start_ns = max(int(one.phase_start[row]), begin) - int(edges[0])
                end_ns = min(int(one.phase_end[row]), end) - int(edges[0])
                before = own[-1] if own and own[-1].step == number else None
                if before and before.phase == name and start_ns - before.end_ns <= least_ns:
                    own[-1] = structs.replace(before, end_ns=end_ns)
                elif end_ns - start_ns > least_ns:
                    own.append(PhaseSpan(role, rank, number, name, start_ns, end_ns))
        if len(spans) + len(own) > MOST_SPANS:
            break
        spans += own
    return tuple(spans)
