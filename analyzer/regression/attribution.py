"""Attribution of a regression: the bucket, axis, collective and rank that changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.regression.check_result import CallsMoved, Cause, Judged
from stepsplit.analyzer.regression.metrics import COMMUNICATION, RunFacts

# Why a candidate regressed: the bucket, axis, collective and rank that moved.

MOST = 6

SAME_BYTES = 0.01

KINDS = 4

_WAITS = ("skew", "bubble")

_BUCKETS_OF: Mapping[str, Sequence[str]] = {
    **{bucket: (bucket,) for bucket in BUCKETS},
    **dict.fromkeys(("step", "mfu", "hfu"), BUCKETS),
    **dict.fromkeys(("exposed_comm", "overlap"), COMMUNICATION),
    "busbw": ("collective", "p2p"),
    "bubble_fraction": ("bubble",),
}
"""Where to look for what moved a metric."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """All that moved between the sides."""

    times: Sequence[TimeMoved]
    blame: Sequence[BlameMoved]
    calls: Sequence[CallsMoved]
    candidate: RunFacts


def causes_of(
    regressed: Sequence[Judged],
    calls: Sequence[CallsMoved],
    baseline: Sequence[RunFacts],
    candidate: Sequence[RunFacts],
) -> tuple[Cause, ...]:
    """What is behind the metrics that regressed: counts first, they are exact."""
    moved = _Moved(
        times_moved(baseline, candidate), blame_moved(baseline, candidate), calls, candidate[-1]
    )
    names = dict.fromkeys(judged.metric for judged in regressed)
    found = [cause for name in names for cause in _of_metric(name, moved)]
    ordered = sorted(found, key=lambda cause: (cause.bucket is not None, -cause.moved_ns))
    return tuple({cause.message: cause for cause in ordered}.values())[:MOST]


def _of_metric(name: str, moved: _Moved) -> Iterator[Cause]:
    metric, _, rest = name.partition(".")
    axis = rest.split(".")[0] or None
    if metric in ("calls", "bytes"):
        yield from _more_calls(axis, moved)
    elif metric in _BUCKETS_OF:
        yield from _of_buckets(_BUCKETS_OF[metric], axis, moved)


def _more_calls(axis: str | None, moved: _Moved) -> Iterator[Cause]:
    """An axis and op with more calls or bytes a step than before."""
    kinds = dict.fromkeys((row.axis, row.op) for row in moved.calls)
    for on, op in kinds:
        rows = [row for row in moved.calls if (row.axis, row.op) == (on, op)]
        changed = [row for row in rows if row.candidate != row.baseline]
        if (axis is None or on == axis) and _grew(changed):
            yield _calls_cause(on, op, changed, moved)


def _grew(rows: Sequence[CallsMoved]) -> bool:
    more = sum(row.candidate - row.baseline for row in rows)
    return more > 0 or _bytes(rows, "candidate") > _bytes(rows, "baseline")


def _bytes(rows: Sequence[CallsMoved], side: str) -> int:
    return sum(getattr(row, side) * (row.message_bytes or 0) for row in rows)


def _calls_cause(axis: str, op: str, rows: Sequence[CallsMoved], moved: _Moved) -> Cause:
    grown = max(rows, key=lambda row: row.candidate - row.baseline)
    before, now = (sum(getattr(row, side) for row in rows) for side in ("baseline", "candidate"))
    one, other = _bytes(rows, "baseline"), _bytes(rows, "candidate")
    told = f"{axis} {op}: {now - before:+,} calls a step ({_kinds(rows, 'baseline')} before, "
    told += f"{_kinds(rows, 'candidate')} now)"
    if now > before and one and abs(other / one - 1) <= SAME_BYTES:
        told += ": the same bytes in smaller pieces"
    ns = sum(row.candidate_ns - row.baseline_ns for row in rows)
    groups = [group.ranks for group in moved.candidate.groups if group.axis == axis]
    return Cause(
        None, axis, op, grown.message_bytes, None, groups[0] if len(groups) == 1 else (), ns, told
    )


def _kinds(rows: Sequence[CallsMoved], side: str) -> str:
    held = [(getattr(row, side), row.message_bytes) for row in rows if getattr(row, side)]
    told = [f"{n:,} of {'unknown size' if b is None else units.size(b)}" for n, b in held[:KINDS]]
    rest = sum(n for n, _ in held[KINDS:])
    return " + ".join([*told, *([f"{rest:,} of other sizes"] if rest else [])]) or "none"


def _of_buckets(buckets: Sequence[str], axis: str | None, moved: _Moved) -> Iterator[Cause]:
    """The bucket among them that grew most, on the axis on which it did."""
    rows = [row for row in moved.times if row.bucket in buckets and row.moved_ns > 0]
    on_axis = [row for row in rows if row.axis is not None and axis in (None, row.axis)]
    best = [row for row in rows if row.axis is None][:1]
    found = next((row for row in on_axis if best and row.bucket == best[0].bucket), None)
    for row in [found] if found else best:
        yield _wait(row, moved) if row.bucket in _WAITS else _transfer(row, moved)


def _wait(row: TimeMoved, moved: _Moved) -> Cause:
    told = _told(row)
    blamed = [one for one in moved.blame if one.moved_ns > 0 and row.axis in (None, one.axis)]
    if not blamed:
        return Cause(row.bucket, row.axis, None, None, None, (), row.moved_ns, told)
    worst = blamed[0]
    group = _group_of(worst.rank, row.axis, moved.candidate)
    longer = units.milliseconds(worst.moved_ns)
    whom = f"its group ({units.listed(group)})" if group else "others"
    told += f"; rank {worst.rank} ({worst.cause}) makes {whom} wait {longer} a step longer"
    op = next((c.op for c in moved.calls if row.axis in (None, c.axis)), None)
    return Cause(row.bucket, row.axis, op, None, worst.rank, group, row.moved_ns, told)


def _group_of(rank: int, axis: str | None, run: RunFacts) -> tuple[int, ...]:
    """Whom the rank shares the axis with; () where that is not known."""
    groups = (group.ranks for group in run.groups if group.axis == axis and rank in group.ranks)
    return next(groups, ())


def _transfer(row: TimeMoved, moved: _Moved) -> Cause:
    told = _told(row)
    grown = next((one for one in moved.calls if one.axis == row.axis), None)
    if grown is None or grown.candidate_ns <= grown.baseline_ns:
        return Cause(row.bucket, row.axis, None, None, None, (), row.moved_ns, told)
    size = "" if grown.message_bytes is None else f" of {units.size(grown.message_bytes)}"
    told += f"; most in {grown.op}{size}, {grown.candidate:,} calls a step"
    groups = [group.ranks for group in moved.candidate.groups if group.axis == row.axis]
    group = groups[0] if len(groups) == 1 else ()
    return Cause(
        row.bucket, row.axis, grown.op, grown.message_bytes, None, group, row.moved_ns, told
    )


def _told(row: TimeMoved) -> str:
    where = "" if row.axis is None else f" on {row.axis}"
    return f"{row.bucket}{where}: {units.signed_milliseconds(row.moved_ns)} a step and rank"


# What differs between the sides: calls by kind, and times by bucket and axis.

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
