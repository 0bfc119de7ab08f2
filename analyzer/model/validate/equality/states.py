"""Bytes of weights, gradients and optimizer, against the tables of those who defined them."""

from __future__ import annotations

from stepsplit.analyzer.model.memory.states import parameter_bytes, share
from stepsplit.analyzer.model.spec.recipe import Dtype, Recipe
from stepsplit.analyzer.model.validate.arithmetic import as_printed, evaluate, parameters
from stepsplit.analyzer.model.validate.gather import equality
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row

PAPER = Recipe(
    seq_len=1, micro_batch=1, global_batch=1, dtype="fp16", gradient_dtype="fp16",
    framework="zero-paper",
)  # fmt: skip
STAGES = {"baseline": 0, "zero1": 1, "zero2": 2, "zero3": 3}
DTYPES: dict[str, Dtype] = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}
MANY = 10**12
"""So many parameters that rounding to whole bytes does not show."""


def states_checks(published: Published) -> tuple[Check, ...]:
    states = published.records("zero_table1_model_states")
    largest = published.records("zero_table2_max_model")
    megatron = published.records("megatron_dist_optimizer_bytes")
    return (
        equality("ZeRO table 1, model states", states, _zero_table1),
        equality("ZeRO table 2, largest model", largest, _zero_table2),
        equality("Megatron-LM, bytes a parameter", megatron, _megatron),
    )


def _zero_table1(row: Record) -> tuple[Row, ...]:
    """Decimal GB on each of dp ranks."""
    count, ranks = row.count("params"), row.count("dp")
    zero = row.choice("stage", STAGES)
    found = share(count, ranks, parameter_bytes(PAPER), PAPER, zero).total_bytes / 1e9
    printed = row.text("GB_decimal")
    predicted = as_printed(found, printed)
    return (Row(row.table, row.id, "model states", float(printed), predicted, "GB"),)


def _zero_table2(row: Record) -> tuple[Row, ...]:
    return tuple(_largest(row, scheme) for scheme in STAGES)


def _largest(row: Record, scheme: str) -> Row:
    """The largest model whose states fill a GPU, spread over gpus / mp ranks, times mp.

    The paper multiplies what it has rounded to a tenth of a billion.
    """
    ranks, mp = row.count("gpus") // row.count("mp"), row.count("mp")
    held = share(MANY, ranks, parameter_bytes(PAPER), PAPER, STAGES[scheme]).total_bytes
    alone = round(row.number("gpu_mem_GB") / (held / MANY), 1) * 1e9
    printed = row.text(f"max_theory_{scheme}")
    unit = parameters(f"1{printed[-1]}")
    predicted = as_printed(alone * mp / unit, printed[:-1]) * unit
    return Row(row.table, row.id, scheme, parameters(printed), predicted, "parameters")


def _megatron(row: Record) -> tuple[Row, ...]:
    """Both columns, the distributed one over 2 and 64 ranks (d)."""
    recipe = Recipe(
        seq_len=1, micro_batch=1, global_batch=1, framework="megatron",
        dtype=row.choice("param_dtype", DTYPES), gradient_dtype=row.choice("grad_dtype", DTYPES),
    )  # fmt: skip
    each, cases = parameter_bytes(recipe), [("non_distributed", 1, 0)]
    cases += [("distributed", ranks, 1) for ranks in (2, 64)]
    return tuple(
        Row(
            row.table, f"{row.id}_d{ranks}", column, evaluate(row.text(column), {"d": ranks}),
            share(MANY, ranks, each, recipe, zero).total_bytes / MANY, "bytes a parameter",
        )
        for column, ranks, zero in cases
    )  # fmt: skip
