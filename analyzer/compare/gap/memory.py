"""Peaks of memory, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.gap import ComparedMemory
from stepsplit.analyzer.report.report import MemoryRow
from stepsplit.analyzer.split.mesh.layout import Layout


def compared_memory(
    rows: Sequence[MemoryRow], layout: Layout, prediction: Prediction
) -> tuple[ComparedMemory, ...]:
    """The fullest rank of each stage; none where no rank measured its peak."""
    fullest: dict[int, ComparedMemory] = {}
    for row in rows:
        stage, peak = layout.stage(row.rank), row.peak_allocated_bytes
        if peak is None or stage >= len(prediction.memory):
            continue
        if stage not in fullest or peak > fullest[stage].measured_bytes:
            expected = prediction.memory[stage].total_bytes
            fullest[stage] = ComparedMemory(stage, row.rank, peak, expected)
    return tuple(fullest[stage] for stage in sorted(fullest))
