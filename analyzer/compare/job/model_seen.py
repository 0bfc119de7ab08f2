"""The [model] table of a recording."""

from __future__ import annotations

from dataclasses import asdict

from stepsplit.analyzer.model.config_table import Table
from stepsplit.collectors.run_spec import ModelSpec, RunSpec

_COUNTED = "parameters"
"""What a model's sizes make up; no RUN.toml states it."""


def model_seen(spec: RunSpec | None) -> Table:
    """What run.json says of the model's shape; empty where it says nothing."""
    shape = (spec.model if spec else None) or ModelSpec()
    told = {k: v for k, v in asdict(shape).items() if v is not None and k != _COUNTED}
    return Table("run.json", "model", told)
