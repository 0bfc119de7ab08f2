"""The measured step of each stage, to hold against its prediction."""

from __future__ import annotations

from collections import defaultdict

from stepsplit.analyzer.buckets import StepSplit
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.report import ComparedStage
from stepsplit.analyzer.split.run import RunSplit


def compared_stages(found: RunSplit, prediction: Prediction) -> tuple[ComparedStage, ...]:
    """The stages of which the recording has steps, first to last."""
    steps: dict[int, list[StepSplit]] = defaultdict(list)
    for rank in found.ranks:
        steps[found.layout.stage(rank.trace.rank)] += rank.steps
    middle = {stage: _median(rows) for stage, rows in sorted(steps.items()) if rows}
    return tuple(
        ComparedStage(stage, one.rank, one.step, one.kind, one.split, prediction.splits[stage])
        for stage, one in middle.items()
        if stage < len(prediction.splits)
    )


def _median(steps: list[StepSplit]) -> StepSplit:
    """The full step of median length; of all steps where none is full."""
    full = [step for step in steps if step.kind == "full"] or steps
    return sorted(full, key=lambda step: step.split.step_ns)[(len(full) - 1) // 2]
