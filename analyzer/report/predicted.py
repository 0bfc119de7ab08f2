"""The prediction that a report holds, and the job that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.config_file import job_in
from stepsplit.analyzer.model.config_table import Table
from stepsplit.analyzer.model.hardware_config import hardware_file
from stepsplit.analyzer.model.prediction import Prediction, prediction_from_json, prediction_to_json
from stepsplit.analyzer.report.report import Report


def body_of(prediction: Prediction) -> dict[str, Any]:
    """The prediction as report.json holds it."""
    return msgspec.json.decode(prediction_to_json(prediction), type=dict[str, Any])


def prediction_of(report: Report) -> Prediction | None:
    """What the run should cost, None where it was held against no model. Raises DataError."""
    if report.prediction is None:
        return None
    return prediction_from_json(msgspec.json.encode(report.prediction).decode(), "report.json")


def job_body(run: Table) -> dict[str, Any]:
    """The tables of a RUN.toml by name, as report.json holds them: what they take from a file of
    the hardware stands in them, and no file is named."""
    tables = {name: dict(cast(Mapping[str, object], own)) for name, own in run.values.items()}
    hardware = tables.setdefault("hardware", {})
    file = hardware_file(Table(run.where, "hardware", hardware))
    if file is not None:
        tables["hardware"] = hardware = {**file.values, **hardware}
    for key in ("file", "measured"):
        hardware.pop(key, None)
    return msgspec.json.decode(msgspec.json.encode(tables), type=dict[str, Any])


def job_of_report(report: Report) -> Job | None:
    """The job that the run was held against, None where there is none. Raises DataError."""
    return None if report.job is None else job_in(Table("report.json", "", report.job))
