"""What the first lines of every screen and page say of a run: its mean step, part by part.

A mean adds up, a median does not. So the parts of a step (buckets, axes, shares) are means over
ranks and full steps, and medians describe the length of the step alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from statistics import median

from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, MEMOS, Split
from stepsplit.analyzer.report.step_rows import (
    ExposedRow,
    StepRow,
    compute_step_median_ns,
    select_full_steps,
)

ON_AXES = ("collective", "p2p", "skew", "bubble")
"""The buckets that ExposedRow has by axis."""

_LEAST_FOR_P99 = 100
"""Rank-steps from which on one in a hundred is at least one."""


class AxisTime(Struct, frozen=True):
    """The part of a bucket on one axis of the mesh.

    Attributes:
        axis: mesh axis, or the name of the group as in GroupRow; None if unknown.
        ns: mean per rank and step.
    """

    axis: str | None
    ns: int


class BucketMean(Struct, frozen=True):
    """One bucket of the mean step.

    Attributes:
        bucket: name of the bucket.
        mean_ns: mean per rank and step.
        share: share of the step, 0..1.
        by_axis: its parts by axis, which add up to mean_ns; empty if it has none.
        worst_rank: the rank with the largest mean.
        worst_ns: the mean of that rank.
    """

    bucket: str
    mean_ns: int
    share: float
    by_axis: tuple[AxisTime, ...]
    worst_rank: int
    worst_ns: int


class LackingRow(Struct, frozen=True):
    """What a recording lacks.

    Attributes:
        lack: what it is, in words: a value of Lack.
        ranks: the ranks that lack it, or that are missing; empty for the whole recording.
    """

    lack: str
    ranks: tuple[int, ...]


def describe_lacks(lacks: Sequence[LackingRow]) -> str:
    """What a recording lacks, as the first line says it; "" if it lacks nothing."""
    parts = []
    for row in lacks:
        some = f"rank{'s' if row.ranks[1:] else ''} {units.format_number_list(row.ranks)}"
        parts.append(f"{row.lack} ({some})" if row.ranks else row.lack)
    return f"incomplete recording: {'; '.join(parts)}" if parts else ""


class Summary(Struct, frozen=True):
    """The mean step of a run over ranks and full steps (all steps if none is full).

    The buckets add up to step_ns, and the axes of a bucket to the bucket, to the nanosecond.

    Attributes:
        steps: number of steps.
        step_ns: mean duration of a step.
        median_ns: median duration over ranks and steps.
        p99_ns: 99th percentile over ranks and steps; None if they are fewer than 100.
        slowest_ns: duration of the slowest step: of each step, the median over the ranks.
        buckets: the seven buckets, in the order of BUCKETS.
        overlapped_ns: mean of the communication overlapped by compute.
        bubble_covered_ns: mean of the communication inside the pipeline bubble.
        fused_ns: mean of the kernels that compute and communicate.
        ambiguous_ns: mean of the gaps whose cause is not certain.
        lacks: what the recording lacks, which is said before all else; empty in older reports.
    """

    steps: int
    step_ns: int
    median_ns: int
    p99_ns: int | None
    slowest_ns: int
    buckets: tuple[BucketMean, ...]
    overlapped_ns: int
    bubble_covered_ns: int
    fused_ns: int
    ambiguous_ns: int
    lacks: tuple[LackingRow, ...] = ()


def summarize(
    steps: Iterable[StepRow],
    exposed: Iterable[ExposedRow],
    lacks: tuple[LackingRow, ...] = (),
) -> Summary | None:
    """The mean step of these rows; None without steps. Without exposed it has no axes."""
    rows = select_full_steps(steps)
    if not rows:
        return None
    by_axis = _sum_by_axis({(row.rank, row.step) for row in rows}, exposed)
    by_rank: dict[int, list[StepRow]] = defaultdict(list)
    by_step: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        by_rank[row.rank].append(row)
        by_step[row.step].append(row.step_ns)
    of_rank = {rank: compute_mean_split(own).buckets_ns for rank, own in sorted(by_rank.items())}
    mean = compute_mean_split(rows)
    buckets, spent_ns = [], 0
    for place, (bucket, mean_ns) in enumerate(zip(BUCKETS, mean.buckets_ns, strict=True)):
        total_ns = sum(getattr(row, f"{bucket}_ns") for row in rows)
        axes = by_axis[bucket]
        # A report may have exposed rows of some calls only; what they leave is on no known axis.
        if axes and total_ns != axes.total():
            axes[None] += total_ns - axes.total()
        # The division goes on from bucket to bucket, or axes would not add up to their bucket.
        parts_ns = divide_parts(list(axes.values()), len(rows), start=spent_ns % len(rows))
        spent_ns += total_ns
        assert not axes or sum(parts_ns) == mean_ns, f"time is lost on the axes of {bucket}"
        worst = max(of_rank, key=lambda rank: of_rank[rank][place])
        buckets.append(
            BucketMean(
                bucket=bucket,
                mean_ns=mean_ns,
                share=total_ns / (sum(row.step_ns for row in rows) or 1),
                by_axis=tuple(map(AxisTime, axes, parts_ns)),
                worst_rank=worst,
                worst_ns=of_rank[worst][place],
            )
        )
    # In the order of time, so that 99 of 100 are at most as long.
    lengths_ns = sorted(row.step_ns for row in rows)
    return Summary(
        steps=len(by_step),
        step_ns=mean.step_ns,
        median_ns=compute_step_median_ns(rows),
        p99_ns=lengths_ns[-1 - len(rows) // 100] if len(rows) >= _LEAST_FOR_P99 else None,
        slowest_ns=int(max(median(own) for own in by_step.values())),
        buckets=tuple(buckets),
        overlapped_ns=mean.overlapped_ns,
        bubble_covered_ns=mean.bubble_covered_ns,
        fused_ns=mean.fused_ns,
        ambiguous_ns=mean.ambiguous_ns,
        lacks=lacks,
    )


def _sum_by_axis(
    full: set[tuple[int, int]], exposed: Iterable[ExposedRow]
) -> dict[str, Counter[str | None]]:
    """By bucket, the time on each axis in these steps, each a rank and a number."""
    sums: dict[str, Counter[str | None]] = {bucket: Counter() for bucket in BUCKETS}
    for row in exposed:
        if (row.rank, row.step) in full:
            for bucket in ON_AXES:
                ns = getattr(row, f"{bucket}_ns")
                if ns:
                    sums[bucket][row.axis] += ns
    return sums


def sum_exposed_by_phase(
    steps: Iterable[StepRow], exposed: Iterable[ExposedRow]
) -> dict[tuple[str | None, str], Counter[str]]:
    """Exposed communication and bubble in the full steps by axis and phase, in ns: "transfer",
    "skew", "bubble"."""
    full = {(row.rank, row.step) for row in select_full_steps(steps)}
    sums: dict[tuple[str | None, str], Counter[str]] = defaultdict(Counter)
    for row in exposed:
        if (row.rank, row.step) in full:
            parts = sums[row.axis, row.phase]
            parts["transfer"] += row.collective_ns + row.p2p_ns
            parts["skew"] += row.skew_ns
            parts["bubble"] += row.bubble_ns
    return sums


def compute_mean_step_ns(steps: Iterable[StepRow]) -> int:
    """The mean step in ns over ranks and full steps; 0 without steps."""
    rows = select_full_steps(steps)
    return sum(row.step_ns for row in rows) // len(rows) if rows else 0


def compute_mean_split(rows: Sequence[StepRow]) -> Split:
    """The mean of the steps in whole ns, rounded so that the buckets add up to the mean step."""
    sums = [sum(getattr(row, f"{bucket}_ns") for row in rows) for bucket in BUCKETS]
    memos = [sum(getattr(row, memo) for row in rows) // len(rows) for memo in MEMOS]
    mean = Split(*divide_parts(sums, len(rows)), *memos)
    assert mean.step_ns == sum(row.step_ns for row in rows) // len(rows), "time is lost in a mean"
    return mean


def divide_parts(parts: Sequence[int], by: int, start: int = 0) -> list[int]:
    """Each part divided by `by`, in whole numbers that add up to the sum divided, and floored.

    The running sums are divided, so that each part is off by less than 1; start comes before them.
    """
    ends = [total // by for total in accumulate(parts, initial=start)]
    return [end - begin for begin, end in pairwise(ends)]


def round_parts(parts: Sequence[int], unit: int) -> list[int]:
    """Each part in whole units that add up to the sum of the parts, rounded to the nearest one."""
    return divide_parts(parts, unit, start=unit // 2)


def round_shares(parts: Sequence[int]) -> list[float]:
    """The share of each part in their sum, 0..1: in whole permille that add up to 1."""
    return [share / 1000 for share in round_parts([1000 * ns for ns in parts], sum(parts) or 1)]
