"""Memory by category, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.model.prediction import Prediction, StageMemory
from stepsplit.analyzer.report.report import ComparedMemory, MemoryRow
from stepsplit.analyzer.split.mesh import RankLayout

_CATEGORIES = ("weights", "gradients", "optimizer", "activations")


def compared_memory(
    rows: Sequence[MemoryRow], layout: RankLayout, prediction: Prediction
) -> tuple[ComparedMemory, ...]:
    """Of each stage its peak and each category, on the rank that held most of it; none of what no
    rank measured."""
    fullest: dict[tuple[int, str], ComparedMemory] = {}
    for row in rows:
        stage = layout.stage(row.rank)
        if stage < len(prediction.memory):
            for one in _of_rank(row, stage, prediction.memory[stage]):
                known = fullest.get((stage, one.category))
                if known is None or one.measured_bytes > known.measured_bytes:
                    fullest[stage, one.category] = one
    return tuple(sorted(fullest.values(), key=lambda one: one.stage))


def _of_rank(row: MemoryRow, stage: int, expected: StageMemory) -> list[ComparedMemory]:
    sides = [("peak", row.peak_allocated_bytes, expected.total_bytes)]
    sides += [
        (name, getattr(row, f"{name}_bytes"), getattr(expected, f"{name}_bytes"))
        for name in _CATEGORIES
    ]
    return [
        ComparedMemory(stage, row.rank, held, predicted, name)
        for name, held, predicted in sides
        if held is not None
    ]
