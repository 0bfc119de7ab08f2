"""A calibration as JSON: the constants before and after, and how well they explain the runs."""

from __future__ import annotations

import json
from dataclasses import asdict

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.compare.calibrate.calibrate import Calibration, Explained

SCHEMA = "stepsplit.calibration/1"


def to_json(found: Calibration) -> str:
    """The text of the file, ended by a newline."""
    body = {
        "schema": SCHEMA,
        "known": asdict(found.known),
        "hardware": asdict(found.hardware),
        "transfers": [asdict(one) for one in found.transfers],
        "stages": [_stage(one) for one in found.stages],
    }
    return json.dumps(body, indent=1) + "\n"


def _stage(one: Explained) -> dict[str, object]:
    measured = _split(one.measured) | {"step_ns": one.step_ns}
    predicted = _split(one.predicted) | {"step_ns": one.predicted.step_ns}
    return {"run": one.run, "stage": one.stage, "measured": measured, "predicted": predicted}


def _split(split: Split) -> dict[str, int]:
    return asdict(split)
