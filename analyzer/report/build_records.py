"""What the ranks told of themselves -> rows of the report: memory, and what the profiler cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from stepsplit.analyzer.report.report import MemoryRow
from stepsplit.collectors.rank_record import MemoryState, RankRecord

FEWEST_STEPS = 3
"""So many steps beside the profiler are needed to say what it cost."""


def memory_rows(records: Sequence[RankRecord]) -> tuple[MemoryRow, ...] | None:
    """A row for each rank that measured its memory; None where none did."""
    rows = (_row(r.rank.rank, r.memory) for r in records if r.memory is not None)
    return tuple(rows) or None


def profiling_slowdown(records: Sequence[RankRecord]) -> float | None:
    """How much longer steps took under the profiler than beside it, as a part of the latter.

    The median over the ranks of the ratio of their medians, less 1; None where too few steps beside
    it were timed. Steps differ from each other by more than that: a small negative value is noise.
    """
    ratios = [
        median(times.profiled_ns) / median(beside) - 1
        for times in (record.steps for record in records)
        if len(beside := (*times.before_ns, *times.after_ns)) >= FEWEST_STEPS and times.profiled_ns
    ]
    return median(ratios) if ratios else None


def _row(rank: int, memory: MemoryState) -> MemoryRow:
    return MemoryRow(
        rank=rank,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        activations_bytes=memory.activations_bytes,
        transient_bytes=None,
        other_bytes=None,
    )
