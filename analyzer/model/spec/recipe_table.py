"""A [training] table -> Recipe."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.habits import habits_of
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.recipe import (
    DTYPES,
    OPTIMIZERS,
    Dtype,
    Framework,
    Recipe,
    Recompute,
    Target,
)
from stepsplit.analyzer.model.spec.table import Table
from stepsplit.analyzer.model.spec.transformer import Transformer

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full", "sqrt")
TARGETS: tuple[Target, ...] = ("cpu", "nvme")
STATES = ("optimizer", "parameters", "activations")
_USUAL: Dtype = "bf16"
_EVERY = "every-"
_KEYS = (
    "seq_len", "micro_batch", "global_batch", "microbatches", "dtype", "optimizer", "recompute",
    "framework", "offload", "offload_to", "flash_attention", "dropout", "fused_loss",
    "gradient_dtype", "activation_dtype",
)  # fmt: skip
_SAME = {"adamw": "adam", "sgd_momentum": "sgd-momentum", "adam_8bit": "adam-8bit"}
"""Other words for the same optimizer."""


def recipe_of(
    table: Table, layout: Layout, framework: Framework, model: Transformer, hardware: Hardware
) -> Recipe:
    """The recipe that the table states, and the framework's habits elsewhere. Raises DataError."""
    table.knows(*_KEYS)
    table.needs("seq_len", "micro_batch")
    dtype = table.one_of("dtype", DTYPES, _USUAL)
    habits = habits_of(framework, dtype, layout, model, hardware)
    recompute, every = _recompute(table)
    offload, offload_to = _offload(table)
    return Recipe(
        seq_len=table.count("seq_len", 0),
        micro_batch=table.count("micro_batch", 0),
        global_batch=_global_batch(table, layout.dp),
        dtype=dtype,
        optimizer=table.same(_SAME).one_of("optimizer", OPTIMIZERS, "adam"),
        recompute=recompute,
        recompute_every=every,
        framework=framework,
        gradient_dtype=table.one_of("gradient_dtype", DTYPES, habits.gradient_dtype),
        activation_dtype=table.one_of("activation_dtype", DTYPES, habits.activation_dtype),
        flash_attention=table.flag("flash_attention", habits.flash_attention),
        dropout=table.flag("dropout", habits.dropout),
        fused_loss=table.flag("fused_loss", habits.fused_loss),
        offload=offload,
        offload_to=offload_to,
    )


def _global_batch(table: Table, dp: int) -> int:
    """As stated, or microbatches x micro_batch x dp."""
    if "microbatches" not in table.values:
        table.needs("global_batch")
        return table.count("global_batch", 0)
    microbatches, micro_batch = table.count("microbatches", 0), table.count("micro_batch", 0)
    product = microbatches * micro_batch * dp
    if table.count("global_batch", product) != product:
        problem = (
            f"{table.count('global_batch', 0)}, but microbatches {microbatches} x micro_batch "
            f"{micro_batch} x dp {dp} = {product}"
        )
        raise table.error("global_batch", problem, "leave one of them out")
    return product


def _recompute(table: Table) -> tuple[Recompute, int]:
    """What is recomputed, and of "every-4" the 4."""
    stated = table.text("recompute", "none")
    number = stated.removeprefix(_EVERY)
    if stated.startswith(_EVERY) and number.isdecimal() and int(number) > 0:
        return "every", int(number)
    if stated not in RECOMPUTES:
        mend = f"write {', '.join(RECOMPUTES)} or every-4"
        raise table.error("recompute", f"{stated!r} is unknown", mend)
    return table.one_of("recompute", RECOMPUTES, "none"), 1


def _offload(table: Table) -> tuple[frozenset[str], Target]:
    """The states that leave the device and where to; "cpu" alone means the optimizer's."""
    if isinstance(table.values.get("offload"), str):
        return frozenset({"optimizer"}), table.one_of("offload", TARGETS, "cpu")
    states = table.some_of("offload", STATES, ())
    return frozenset(states), table.one_of("offload_to", TARGETS, "cpu")
