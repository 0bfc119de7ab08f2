"""The table [training] of a job.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from stepsplit.analyzer.model.config import (
    Framework,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    Recompute,
    RecomputePart,
    State,
    Target,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    TomlTable,
    collect_kinds,
    decode_keys,
    replace_aliases,
    select_fields,
)
from stepsplit.analyzer.model.framework_defaults import choose_weight_dtype, framework_defaults
from stepsplit.analyzer.model.key_aliases import VALUE_ALIASES
from stepsplit.analyzer.model.profile import list_framework_aliases, list_frameworks, load_framework

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full", "sqrt")

STATES: tuple[State, ...] = get_args(State)

_TRAINING_KINDS: Mapping[str, Any] = {
    **collect_kinds(TrainingConfig),
    "microbatches": int,
    "recompute": str | frozenset[RecomputePart],
    "offload": Target | frozenset[State],
}

TRAINING_KEYS = tuple(_TRAINING_KINDS)


def decode_training(table: TomlTable, mistakes: Mistakes) -> TomlTable:
    """Decodes the table's values; recompute = "every-4" and offload = "cpu" become fields."""
    needed = ("seq_len", "micro_batch")
    aliases = {**VALUE_ALIASES, "framework": list_framework_aliases()}
    kinds = {**_TRAINING_KINDS, "framework": Literal[list_frameworks()]}
    stated = decode_keys(replace_aliases(table, aliases), kinds, mistakes, needed)
    if not {"global_batch", "microbatches"} & table.values.keys():
        hint = "give global_batch (sequences per step, all ranks) or microbatches (per rank)"
        mistakes.append(table.build_error("global_batch", "missing", hint))
    recompute = stated.get("recompute", "none")
    if isinstance(recompute, frozenset):
        stated |= {"recompute": "none", "recompute_parts": recompute}
    elif match := re.fullmatch(r"every-0*([1-9]\d{0,17})", recompute, re.ASCII):
        stated |= {"recompute": "every", "recompute_every": int(match[1])}
    elif recompute not in RECOMPUTES:
        hint = f"write {', '.join(RECOMPUTES)} or every-4"
        mistakes.append(table.build_error("recompute", f"{recompute!r} is unknown", hint))
    if isinstance(stated.get("offload"), str):
        stated |= {"offload": frozenset({"optimizer"}), "offload_to": stated["offload"]}
    return replace(table, values=stated)


def complete_training(
    table: TomlTable,
    layout: ParallelConfig,
    framework: Framework,
    model: ModelConfig,
    hardware: HardwareConfig,
) -> TrainingConfig:
    """Completes the decoded table with the framework's defaults. Raises DataError."""
    stated = table.values
    dtype = stated.get("dtype", "bf16")
    defaults = framework_defaults(framework, dtype, layout, model, hardware)
    if (
        not stated.get("master_weights", True)
        and not load_framework(framework).memory.copies_weights
    ):
        # torch's optimizers make moments in the dtype of the weights, as autograd does gradients.
        defaults |= {"gradient_dtype": choose_weight_dtype(dtype), "moments_dtype": "bf16"}
    resolved = {"framework": framework, "global_batch": _infer_global_batch(table, layout.dp)}
    return TrainingConfig(**{**defaults, **select_fields(TrainingConfig, stated), **resolved})


def _infer_global_batch(table: TomlTable, dp: int) -> int:
    """The key global_batch, or microbatches x micro_batch x dp."""
    stated = table.values
    if "microbatches" not in stated:
        return int(stated["global_batch"])
    microbatches, micro_batch = stated["microbatches"], stated["micro_batch"]
    product = int(microbatches * micro_batch * dp)
    if stated.get("global_batch", product) != product:
        problem = (
            f"{stated['global_batch']} does not match microbatches ({microbatches}) x "
            f"micro_batch ({micro_batch}) x dp ({dp}) = {product}"
        )
        raise table.build_error("global_batch", problem, "remove one of them")
    return product
