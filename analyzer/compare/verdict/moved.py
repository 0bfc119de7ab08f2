"""What differs between the sides: calls by kind, and times by bucket and axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepsplit.analyzer.compare.verdict.run_facts import RunFacts
from stepsplit.analyzer.compare.verdict.verdict import CallsMoved

_Kind = tuple[str, str, str | None, int | None]


@dataclass(frozen=True, slots=True)
class TimeMoved:
    """By how much a rank's mean step is longer in a bucket, on an axis or (None) in all."""

    bucket: str
    axis: str | None
    moved_ns: int


@dataclass(frozen=True, slots=True)
class BlameMoved:
    """How much more waiting a rank causes in a step; every rank's waiting counts."""

    rank: int
    cause: str
    axis: str | None
    moved_ns: int


def calls_moved(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> tuple[CallsMoved, ...]:
    """The kinds of calls whose number changed, or whose time did, those that take most longer
    first."""
    one, other = _calls(baseline), _calls(candidate)
    none = (0, 0)
    rows = [
        CallsMoved(*kind, one.get(kind, none)[0], other.get(kind, none)[0],
                   one.get(kind, none)[1], other.get(kind, none)[1])
        for kind in dict.fromkeys((*one, *other))
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.baseline_ns - row.candidate_ns))


def _calls(runs: Sequence[RunFacts]) -> Mapping[_Kind, tuple[int, int]]:
    """By kind: medians over the runs of (calls a step, ns that a step's calls take)."""
    kinds = dict.fromkeys(
        (row.axis, row.op, row.dtype, row.message_bytes) for run in runs for row in run.calls or ()
    )
    return {kind: _middle(kind, runs) for kind in kinds}


def _middle(kind: _Kind, runs: Sequence[RunFacts]) -> tuple[int, int]:
    found = [
        next(
            ((row.calls, row.calls * (row.transfer_ns + row.wait_ns)) for row in run.calls or ()
             if (row.axis, row.op, row.dtype, row.message_bytes) == kind),
            (0, 0),
        )
        for run in runs
    ]  # fmt: skip
    return int(median(one[0] for one in found)), int(median(one[1] for one in found))


def times_moved(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> tuple[TimeMoved, ...]:
    """Each bucket, in all and by axis, by the medians over runs; what grew most first."""
    kinds = dict.fromkeys(
        (row.bucket, row.axis) for run in (*baseline, *candidate) for row in run.times
    )
    rows = [
        TimeMoved(*kind, _mean_ns(kind, candidate) - _mean_ns(kind, baseline)) for kind in kinds
    ]
    return tuple(sorted(rows, key=lambda row: -row.moved_ns))


def _mean_ns(kind: tuple[str, str | None], runs: Sequence[RunFacts]) -> int:
    values = [
        sum(row.mean_ns for row in run.times if (row.bucket, row.axis) == kind) for run in runs
    ]
    return int(median(values))


def blame_moved(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> tuple[BlameMoved, ...]:
    """Each rank that causes waiting, by the medians over runs; whose waiting grew most first."""
    kinds = dict.fromkeys(_culprits((*baseline, *candidate)))
    rows = [
        BlameMoved(*kind, _caused_ns(kind, candidate) - _caused_ns(kind, baseline))
        for kind in kinds
    ]
    return tuple(sorted(rows, key=lambda row: -row.moved_ns))


def _culprits(runs: Sequence[RunFacts]) -> Iterator[tuple[int, str, str | None]]:
    for run in runs:
        for row in run.blame:
            if row.rank is not None:
                yield row.rank, row.cause, row.axis


def _caused_ns(kind: tuple[int, str, str | None], runs: Sequence[RunFacts]) -> int:
    values = [
        sum(row.caused_ns for row in run.blame if (row.rank, row.cause, row.axis) == kind)
        for run in runs
    ]
    return int(median(values))
