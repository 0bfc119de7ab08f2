"""The prediction that a report holds."""

from __future__ import annotations

from typing import Any

import msgspec

from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.wire import from_json, to_json
from stepsplit.analyzer.report.report import Report


def body_of(prediction: Prediction) -> dict[str, Any]:
    """The prediction as report.json holds it."""
    return msgspec.json.decode(to_json(prediction), type=dict[str, Any])


def prediction_of(report: Report) -> Prediction | None:
    """What the run should cost, None where it was held against no model. Raises DataError."""
    if report.prediction is None:
        return None
    return from_json(msgspec.json.encode(report.prediction).decode(), "report.json")
