"""A report in the few numbers that a comparison is about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.compare.runs.comparison import Side
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.report import Report, StepRow, full_steps, step_median_ns

_MEMOS = ("overlapped_ns", "bubble_covered_ns", "fused_ns")


def side_of(report: Report) -> Side:
    """The run by its full steps. Raises UsageError where it has no step."""
    rows = full_steps(report.steps)
    if not rows:
        raise UsageError(f"{report.run.name}: no step to compare; record at least one whole step")
    steps_ns = _steps_ns(rows)
    return Side(
        name=report.run.name,
        steps=len(steps_ns),
        median_ns=step_median_ns(rows),
        low_ns=min(steps_ns),
        high_ns=max(steps_ns),
        mean=mean_split(rows),
        bubble_fraction=None if report.pipeline is None else report.pipeline.bubble_fraction,
        peak_allocated_bytes=peak_bytes(report),
        mfu=report.mfu,
    )


def mean_split(rows: Sequence[StepRow]) -> Split:
    """The mean of the steps in whole ns, so rounded that its buckets add up to the mean step."""
    sums = [sum(getattr(row, f"{bucket}_ns") for row in rows) for bucket in BUCKETS]
    ends = [total // len(rows) for total in accumulate(sums, initial=0)]
    memos = [sum(getattr(row, memo) for row in rows) // len(rows) for memo in _MEMOS]
    mean = Split(*(end - start for start, end in pairwise(ends)), *memos)
    assert mean.step_ns == sum(row.step_ns for row in rows) // len(rows), "time is lost in a mean"
    return mean


def _steps_ns(rows: Sequence[StepRow]) -> list[int]:
    """Each step's median over the ranks."""
    numbers = sorted({row.step for row in rows})
    return [int(median(row.step_ns for row in rows if row.step == n)) for n in numbers]


def peak_bytes(report: Report) -> int | None:
    """The peak of the fullest rank, None where none is known."""
    peaks = [row.peak_allocated_bytes for row in report.memory or ()]
    return max((peak for peak in peaks if peak is not None), default=None)
