"""The middle of a run: medians over its full steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import StepRow


@dataclass(frozen=True, slots=True)
class BucketMedian:
    """One bucket over the full steps: its median in ns, its share of all time, and its worst rank.

    worst_ns is the worst rank's own median.
    """

    bucket: str
    median_ns: int
    share: float
    worst_rank: int
    worst_ns: int


def full_steps(steps: Iterable[StepRow]) -> tuple[StepRow, ...]:
    """The steps that medians are taken over; all of them where none is full."""
    rows = tuple(steps)
    return tuple(row for row in rows if row.kind == "full") or rows


def step_median_ns(steps: Iterable[StepRow]) -> int:
    """The median step in ns, over ranks and full steps; 0 where there is none."""
    return int(median([row.step_ns for row in full_steps(steps)] or [0]))


def bucket_medians(steps: Iterable[StepRow]) -> tuple[BucketMedian, ...]:
    """One row a bucket, in the order of BUCKETS. Shares are of the sums, so they add up to one."""
    rows = full_steps(steps)
    total = sum(row.step_ns for row in rows) or 1
    return tuple(_bucket(bucket, rows, total) for bucket in BUCKETS) if rows else ()


def _bucket(bucket: str, rows: Sequence[StepRow], total: int) -> BucketMedian:
    value = {id(row): getattr(row, f"{bucket}_ns") for row in rows}
    ranks = sorted({row.rank for row in rows})
    of_rank = {rank: int(median(value[id(r)] for r in rows if r.rank == rank)) for rank in ranks}
    worst = max(ranks, key=lambda rank: of_rank[rank])
    return BucketMedian(
        bucket, int(median(value.values())), sum(value.values()) / total, worst, of_rank[worst]
    )
