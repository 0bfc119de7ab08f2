"""Causes of a regression: the bucket, axis, collective and rank that changed between the sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, WAITS
from stepsplit.analyzer.regression.checks import CallsDelta, Cause, CheckedMetric
from stepsplit.analyzer.regression.compare import CallKind
from stepsplit.analyzer.regression.metrics import EXPOSED, RunMetrics
from stepsplit.analyzer.report.axis_names import name_group

MAX_CAUSES = 6

SAME_BYTES = 0.01
"""More calls of bytes that differ by less than this are the same bytes in smaller messages."""

MAX_SIZES = 4
"""Sizes of calls that a cause names."""

_BUCKETS_OF: Mapping[str, Sequence[str]] = {
    **{bucket: (bucket,) for bucket in BUCKETS},
    **dict.fromkeys(("step", "mfu", "hfu"), BUCKETS),
    **dict.fromkeys(("exposed_comm", "overlap"), EXPOSED),
    "busbw": ("collective", "p2p"),
    "bubble_fraction": ("bubble",),
}
"""The buckets that explain a change of each metric."""


@dataclass(frozen=True, slots=True)
class TimeDelta:
    """Increase of a bucket in the mean step of a rank, on one axis or (None) in total."""

    bucket: str
    axis: str | None
    delta_ns: int

    def __str__(self) -> str:
        where = "" if self.axis is None else f" on {self.axis}"
        longer = units.format_signed_milliseconds(self.delta_ns)
        return f"{self.bucket}{where}: {longer} per step and rank"


@dataclass(frozen=True, slots=True)
class BlameDelta:
    """Increase of the waits caused by a rank per step, summed over all waiting ranks."""

    rank: int
    cause: str
    axis: str | None
    delta_ns: int


@dataclass(frozen=True, slots=True)
class _Deltas:
    """All differences between the sides, largest increase first."""

    times: Sequence[TimeDelta]
    blame: Sequence[BlameDelta]
    calls: Sequence[CallsDelta]
    candidate: RunMetrics


def explain_regression(
    regressed: Sequence[CheckedMetric],
    calls: Sequence[CallsDelta],
    names: Mapping[str, str],
    baseline: Sequence[RunMetrics],
    candidate: Sequence[RunMetrics],
) -> tuple[Cause, ...]:
    """The likely causes of the regressions; counts first because they are exact.

    calls have the names that screens show, which names gives by the axis of the metrics.
    """
    sides = (*baseline, *candidate)
    time_kinds = dict.fromkeys((row.bucket, row.axis) for run in sides for row in run.times)
    times = [
        TimeDelta(*kind, _compute_mean_ns(kind, candidate) - _compute_mean_ns(kind, baseline))
        for kind in time_kinds
    ]
    culprits = dict.fromkeys(
        (row.rank, row.cause, row.axis)
        for run in sides
        for row in run.blame
        if row.rank is not None
    )
    blame = [
        BlameDelta(*kind, _compute_caused_ns(kind, candidate) - _compute_caused_ns(kind, baseline))
        for kind in culprits
    ]
    moved = _Deltas(
        sorted(times, key=lambda row: -row.delta_ns),
        sorted(blame, key=lambda row: -row.delta_ns),
        calls,
        candidate[-1],
    )
    found: list[Cause] = []
    for name in dict.fromkeys(judged.metric for judged in regressed):
        metric, _, rest = name.partition(".")
        axis = rest.split(".")[0] or None
        if metric in ("calls", "bytes"):
            found += _find_more_calls(axis and names.get(axis, axis), moved)
        elif metric in _BUCKETS_OF:
            found += _explain_buckets(_BUCKETS_OF[metric], axis, moved)
    ordered = sorted(found, key=lambda cause: (cause.bucket is not None, -cause.moved_ns))
    return tuple({cause.message: cause for cause in ordered}.values())[:MAX_CAUSES]


def _compute_mean_ns(kind: tuple[str, str | None], runs: Sequence[RunMetrics]) -> int:
    """The median over the runs; a run has a bucket on an axis at most once."""
    values = [
        sum(row.mean_ns for row in run.times if (row.bucket, row.axis) == kind) for run in runs
    ]
    return int(median(values))


def _compute_caused_ns(kind: tuple[int, str, str | None], runs: Sequence[RunMetrics]) -> int:
    values = [
        sum(row.caused_ns for row in run.blame if (row.rank, row.cause, row.axis) == kind)
        for run in runs
    ]
    return int(median(values))


def compute_call_deltas(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> tuple[CallsDelta, ...]:
    """The calls of both sides by kind, largest increase in time first."""
    before, own = _collect_calls(baseline), _collect_calls(candidate)
    rows = []
    for kind in dict.fromkeys((*before, *own)):
        (calls, ns), (own_calls, own_ns) = before.get(kind, (0, 0)), own.get(kind, (0, 0))
        rows.append(CallsDelta(*kind, calls, own_calls, ns, own_ns))
    return tuple(sorted(rows, key=lambda row: row.baseline_ns - row.candidate_ns))


def _collect_calls(runs: Sequence[RunMetrics]) -> Mapping[CallKind, tuple[int, int]]:
    """By kind: medians over the runs of (calls per step, ns of these calls per step)."""
    by_run = [
        {row.kind: (row.calls, row.calls * (row.transfer_ns + row.wait_ns)) for row in rows}
        for rows in (reversed(run.calls or ()) for run in runs)
    ]
    # In the order of the runs: of rows with the same kind in a run, the first counts.
    kinds = dict.fromkeys(row.kind for run in runs for row in run.calls or ())
    medians = {}
    for kind in kinds:
        found = [one.get(kind, (0, 0)) for one in by_run]
        medians[kind] = int(median(n for n, _ in found)), int(median(ns for _, ns in found))
    return medians


def _find_more_calls(axis: str | None, moved: _Deltas) -> Iterator[Cause]:
    """Causes for each axis and op with more calls or bytes per step than in the baseline."""
    kinds = dict.fromkeys((row.axis, row.op) for row in moved.calls)
    for on, op in kinds:
        rows = [
            row
            for row in moved.calls
            if (row.axis, row.op) == (on, op) and row.candidate != row.baseline
        ]
        more = sum(row.candidate - row.baseline for row in rows)
        before, now = _sum_bytes(rows, "baseline"), _sum_bytes(rows, "candidate")
        if axis not in (None, on) or (more <= 0 and now <= before):
            continue
        text = f"{on} {op}: {more:+,} calls per step (baseline: {_format_sizes(rows, 'baseline')}; "
        text += f"candidate: {_format_sizes(rows, 'candidate')})"
        if more > 0 and before and abs(now / before - 1) <= SAME_BYTES:
            text += ", same bytes in smaller messages"
        grown = max(rows, key=lambda row: row.candidate - row.baseline)
        ns = sum(row.candidate_ns - row.baseline_ns for row in rows)
        group = _find_only_group(on, moved.candidate)
        yield Cause(None, on, op, grown.message_bytes, None, group, ns, text)


def _sum_bytes(rows: Sequence[CallsDelta], side: str) -> int:
    return sum(getattr(row, side) * (row.message_bytes or 0) for row in rows)


def _format_sizes(rows: Sequence[CallsDelta], side: str) -> str:
    counts = [(getattr(row, side), row.message_bytes) for row in rows if getattr(row, side)]
    sizes = [
        f"{n:,} of {'unknown size' if b is None else units.format_size(b)}"
        for n, b in counts[:MAX_SIZES]
    ]
    rest = sum(n for n, _ in counts[MAX_SIZES:])
    return " + ".join([*sizes, *([f"{rest:,} of other sizes"] if rest else [])]) or "none"


def _find_only_group(axis: str | None, run: RunMetrics) -> tuple[int, ...]:
    """The ranks of the axis's group; () if it has several."""
    groups = [group.ranks for group in run.groups if name_group(group) == axis]
    return groups[0] if len(groups) == 1 else ()


def _explain_buckets(buckets: Sequence[str], axis: str | None, moved: _Deltas) -> Iterator[Cause]:
    """The bucket that grew most, on the axis with the largest increase."""
    rows = [row for row in moved.times if row.bucket in buckets and row.delta_ns > 0]
    on_axis = [row for row in rows if row.axis is not None and axis in (None, row.axis)]
    best = [row for row in rows if row.axis is None][:1]
    found = next((row for row in on_axis if best and row.bucket == best[0].bucket), None)
    for row in [found] if found else best:
        is_blamed = row.bucket in (*(bucket.label for bucket in WAITS), *_WORK_CAUSES)
        yield _explain_delay(row, moved) if is_blamed else _explain_transfer(row, moved)


_WORK_CAUSES = {"compute": ("compute", "imbalance"), "copy": ("copy",), "idle": ("host",)}
"""What a rank whose work grows is blamed for."""


def _explain_delay(row: TimeDelta, moved: _Deltas) -> Cause:
    """The cause of longer waits, or of more work, with the rank that delays others by it."""
    causes = _WORK_CAUSES.get(row.bucket)
    blamed = [
        one
        for one in moved.blame
        if one.delta_ns > 0
        and row.axis in (None, one.axis)
        and (causes is None or one.cause in causes)
    ]
    if not blamed:
        return Cause(row.bucket, row.axis, None, None, None, (), row.delta_ns, str(row))
    worst = blamed[0]
    # Waits in total are not those of the groups that are along no single axis.
    groups = (g.ranks for g in moved.candidate.groups if row.axis and g.axis == row.axis)
    group = next((ranks for ranks in groups if worst.rank in ranks), ())
    longer = units.format_milliseconds(worst.delta_ns)
    whom = f"its group ({units.format_number_list(group)})" if group else "other ranks"
    text = f"{row}; rank {worst.rank} ({worst.cause}) delays {whom} by {longer} more per step"
    op = next((c.op for c in moved.calls if row.axis in (None, c.axis)), None)
    return Cause(row.bucket, row.axis, op, None, worst.rank, group, row.delta_ns, text)


def _explain_transfer(row: TimeDelta, moved: _Deltas) -> Cause:
    grown = next((one for one in moved.calls if one.axis == row.axis), None)
    if grown is None or grown.candidate_ns <= grown.baseline_ns:
        return Cause(row.bucket, row.axis, None, None, None, (), row.delta_ns, str(row))
    size = "" if grown.message_bytes is None else f" of {units.format_size(grown.message_bytes)}"
    text = f"{row}; mostly {grown.op}{size}, {grown.candidate:,} calls per step"
    group = _find_only_group(row.axis, moved.candidate)
    return Cause(
        row.bucket, row.axis, grown.op, grown.message_bytes, None, group, row.delta_ns, text
    )
