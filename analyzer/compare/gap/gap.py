"""A run against its model: the splits, the calls, the memory, and what explains the difference."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.compare.gap.calls import compared_calls
from stepsplit.analyzer.compare.gap.doubts import doubts
from stepsplit.analyzer.compare.gap.memory import compared_memory
from stepsplit.analyzer.compare.gap.price import Price
from stepsplit.analyzer.compare.gap.seen import Seen
from stepsplit.analyzer.compare.gap.stages import compared_stages
from stepsplit.analyzer.compare.gap.waterfall import Sides, waterfall
from stepsplit.analyzer.compare.gap.wires import Wires, no_wires
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.report import ComparedStage, Gap, Report
from stepsplit.analyzer.split.run import RunSplit


def gap_of(
    found: RunSplit,
    prediction: Prediction,
    price: Price,
    report: Report,
    notes: Sequence[str] = (),
    wires: Wires = no_wires,
) -> Gap:
    """The run, whose report is this, held against the prediction; notes say what else to doubt,
    wires what joins the ranks.

    Raises UsageError where the recording has no step.
    """
    stages = compared_stages(found, prediction)
    if not stages:
        raise UsageError("the recording has no step to hold against a model")
    shown, seen = max(stages, key=_work_ns), Seen.of(found, prediction)
    return Gap(
        stages=stages,
        stage=shown.stage,
        rows=waterfall(Sides(seen, prediction, price, report, shown)),
        calls=compared_calls(seen, prediction, wires) if shown.kind == "full" else (),
        memory=compared_memory(report.memory or (), found.layout, prediction),
        low_ns=prediction.low_ns,
        high_ns=prediction.high_ns,
        confidence=prediction.confidence,
        notes=(*notes, *doubts(found, prediction, len(stages), shown), *prediction.notes),
    )


def _work_ns(stage: ComparedStage) -> int:
    return stage.predicted.step_ns - stage.predicted.bubble_ns
