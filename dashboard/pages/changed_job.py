"""A recorded job with what an address changes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.config_file import job_in
from stepsplit.analyzer.model.config_table import Table
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.dashboard.pages.address import Chosen

SIZES = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "micro_batch", "global_batch")
AS_IT_IS = "as recorded"
_TABLE = {"micro_batch": "training", "global_batch": "training", "recompute": "training"}
_INSTEAD = {
    "dp_replicate": ("dp", "world_size", "gpus"),
    "dp_shard": ("dp", "world_size", "gpus"),
    "global_batch": ("microbatches",),
}
"""Keys of a RUN.toml that say the same in other words."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The job as changed and its prediction, or why there can be no such job."""

    job: Job | None
    prediction: Prediction | None
    fault: str


def changed_job(values: Mapping[str, Any], chosen: Chosen) -> Changed:
    """The job of those tables of a RUN.toml with what the address changes."""
    tables = {name: dict(own) for name, own in values.items()}
    for key, value in _asked(chosen).items():
        own = tables.setdefault(_TABLE.get(key, "parallel"), {})
        own[key] = value
        for other in _INSTEAD.get(key, ()):
            own.pop(other, None)
    if (preset := chosen.text("hardware")) not in (None, AS_IT_IS):
        tables["hardware"] = {"preset": preset}
    try:
        job = job_in(Table("this page", "", tables))
        return Changed(job, predict(job), "")
    except StepsplitError as error:
        return Changed(None, None, str(error))


def _asked(chosen: Chosen) -> dict[str, object]:
    """What the address changes, by the keys of a RUN.toml."""
    asked: dict[str, object] = {
        key: number for key in SIZES if (number := chosen.whole(key)) is not None
    }
    for key in ("schedule", "recompute"):
        if (word := chosen.text(key)) not in (None, AS_IT_IS):
            asked[key] = word
    return asked
