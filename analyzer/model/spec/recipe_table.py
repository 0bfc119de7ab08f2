"""A [training] table -> Recipe."""

from __future__ import annotations

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
_SUMS_IN_FP32: tuple[Framework, ...] = ("megatron", "fsdp2", "nanotron", "huggingface")
"""Frameworks that sum gradients in fp32 unless told; the others in the weights' dtype.
Megatron-LM does so for bf16 alone (accumulate_allreduce_grads_in_fp32)."""
_BEFORE_FLASH: tuple[Framework, ...] = ("megatron", "deepspeed", "zero-paper")
"""What trained in fp16 before bf16 and flash attention came, and does on GPUs that lack both."""


def recipe_of(table: Table, layout: Layout, framework: Framework) -> Recipe:
    """The recipe that the table states. Raises DataError.

    fp16 of Megatron-LM and DeepSpeed means, unless stated, what their published fp16 runs did:
    attention that stores its matrix of scores, dropout, and a loss that is not fused.
    """
    table.knows(*_KEYS)
    table.needs("seq_len", "micro_batch")
    dtype = table.one_of("dtype", DTYPES, _USUAL)
    stored = dtype == "fp16" and framework in _BEFORE_FLASH
    recompute, every = _recompute(table)
    offload, offload_to = _offload(table)
    return Recipe(
        seq_len=table.count("seq_len", 0),
        micro_batch=table.count("micro_batch", 0),
        global_batch=_global_batch(table, layout.dp),
        dtype=dtype,
        optimizer=table.one_of("optimizer", OPTIMIZERS, "adam"),
        recompute=recompute,
        recompute_every=every,
        framework=framework,
        gradient_dtype=table.one_of("gradient_dtype", DTYPES, _gradient_dtype(dtype, framework)),
        activation_dtype=table.one_of("activation_dtype", DTYPES, _weight_dtype(dtype)),
        flash_attention=table.flag("flash_attention", not stored),
        dropout=table.flag("dropout", stored),
        fused_loss=table.flag("fused_loss", not stored),
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


def _weight_dtype(dtype: Dtype) -> Dtype:
    """What weights and activations are in: those of fp8 training stay in bf16."""
    return "bf16" if dtype == "fp8" else dtype


def _gradient_dtype(dtype: Dtype, framework: Framework) -> Dtype:
    plain = framework == "megatron" and dtype == "fp16"
    return "fp32" if framework in _SUMS_IN_FP32 and not plain else _weight_dtype(dtype)
