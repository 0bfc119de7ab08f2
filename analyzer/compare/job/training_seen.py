"""The [training] table of a recording."""

from __future__ import annotations

import re
from collections import Counter

from stepsplit.analyzer.compare.job.framework_seen import framework_seen
from stepsplit.analyzer.model.config_table import Table
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.split.strategy_evidence import accumulated_microbatches
from stepsplit.collectors.run_spec import RunSpec, Training

_AS_STATED = ("seq_len", "micro_batch", "global_batch", "microbatches", "optimizer")
_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of traces and of torch for RUN.toml's; 8 bits are in no message."""


def training_seen(spec: RunSpec | None, found: RunSplit) -> Table:
    """What run.json says of a step, and where it is silent what the steps show."""
    said = (spec.training if spec else None) or Training()
    values = {
        **{key: getattr(said, key) for key in _AS_STATED},
        "microbatches": said.microbatches or _microbatches(found),
        "dtype": _DTYPES.get(said.dtype or "", said.dtype) or _dtype(found),
        "recompute": said.recompute or _detail(found, "recompute"),
        "offload": _offload(said, found),
        "framework": framework_seen(spec, found),
    }
    if values["global_batch"] is not None:
        values["microbatches"] = None
    return Table("run.json", "training", {k: v for k, v in values.items() if v is not None})


def _microbatches(found: RunSplit) -> int | None:
    """How many pass a rank in a step; one where its steps show neither pipeline nor more."""
    if found.schedule is not None:
        return found.schedule.microbatches
    counted = accumulated_microbatches(found.strategies)
    if counted is not None:
        return counted
    return 1 if found.strategies and not found.layout.pipelines else None


def _dtype(found: RunSplit) -> str | None:
    """8 bits where they are seen, else the type of most bytes that ranks send."""
    if _detail(found, "fp8") is not None:
        return "fp8"
    moved: Counter[str] = Counter()
    for one in found.collectives:
        moved[one.dtype.lower()] += one.count * max(0, one.message_bytes)
    names = [_DTYPES[name] for name, _ in moved.most_common() if name in _DTYPES]
    return next(iter(names), None)


def _offload(said: Training, found: RunSplit) -> list[str] | None:
    """The states that live elsewhere; run.json may list several with commas."""
    if said.offload:
        return re.split(r"[,\s]+", said.offload.strip())
    seen = [one.detail for one in found.strategies if one.name == "offload"]
    return seen or None


def _detail(found: RunSplit, name: str) -> str | None:
    """What is said of the strategy, None where it is not seen."""
    return next((one.detail for one in found.strategies if one.name == name), None)
