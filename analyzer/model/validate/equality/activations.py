"""Activation formulas of Korthikanti et al., item by item, against the closed forms they print."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.memory.activations import input_bytes, layer_activations
from stepsplit.analyzer.model.memory.in_flight import chunks_in_flight
from stepsplit.analyzer.model.memory.states import parameter_bytes
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout, Schedule
from stepsplit.analyzer.model.spec.presets import hardware
from stepsplit.analyzer.model.spec.recipe import Recipe, Recompute
from stepsplit.analyzer.model.validate.arithmetic import evaluate
from stepsplit.analyzer.model.validate.gather import equality
from stepsplit.analyzer.model.validate.jobs.case import gpt
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row
from stepsplit.analyzer.model.work.weights import attention_weights, mlp_weights

SEQ_LEN, VOCAB, TP = 2048, 51200, 8
SIZES = {"22B": (48, 6144, 64, 1, 1, 4), "175B": (96, 12288, 96, 8, 3, 1),
         "530B": (105, 20480, 128, 35, 3, 1), "1T": (128, 25600, 160, 64, 1, 1)}  # fmt: skip
"""Table 3 of the paper: layers, hidden, heads, pp, chunks, micro_batch."""
ALONE, TENSOR = Layout(), Layout(tp=TP)
SEQUENCE = Layout(tp=TP, sequence_parallel=True)
CONFIGURATIONS: dict[str, tuple[Layout, Recompute]] = {
    "no parallelism": (ALONE, "none"),
    "tensor parallel (baseline)": (TENSOR, "none"),
    "tensor + sequence parallel": (SEQUENCE, "none"),
    "tensor parallel + selective recompute": (TENSOR, "selective"),
    "tensor + sequence parallel + selective recompute": (SEQUENCE, "selective"),
    "full recompute": (TENSOR, "full"),
}


def activation_checks(published: Published) -> tuple[Check, ...]:
    table2 = published.records("korthikanti_table2_activation_formulas")
    figure = published.records("korthikanti_fig1_memory_formula_values")
    return (
        equality("Korthikanti table 2, layer activations", table2, _layers),
        equality("Korthikanti figure 1, memory of a GPU", figure, _figure1),
    )


def _layers(row: Record) -> tuple[Row, ...]:
    """The formulas of the table that give one layer's bytes, each for four models."""
    known = row.text("configuration") in CONFIGURATIONS
    return tuple(_layer(row, name) for name in SIZES) if known else ()


def _layer(row: Record, name: str) -> Row:
    layout, recompute = CONFIGURATIONS[row.text("configuration")]
    job = _job(name, layout)
    job = replace(job, recipe=replace(job.recipe, recompute=recompute))
    found = input_bytes(job) if recompute == "full" else layer_activations(job).total_bytes
    symbols = {
        "s": SEQ_LEN, "b": job.recipe.micro_batch, "h": job.model.hidden, "a": job.model.heads,
        "t": layout.tp,
    }  # fmt: skip
    said = evaluate(row.text("bytes_per_layer"), symbols)
    return Row(
        row.table, f"{row.id} {name}", "bytes of a layer", said, float(found), "bytes",
        tolerance=1e-6 * said,
    )  # fmt: skip


def _figure1(row: Record) -> tuple[Row, ...]:
    """The figure counts weight matrices of layers alone, and the first stage's microbatches."""
    row.choice("model", SIZES)
    name = row.text("model")
    plain, sequence = _job(name, _pipeline(name)), _job(name, _pipeline(name, sequence=True))
    sequence = replace(sequence, recipe=replace(sequence.recipe, recompute="selective"))
    values = (
        ("params_opt_GiB", _states_bytes(plain)),
        ("act_GiB_no_recompute_TP8", _held_bytes(plain)),
        ("act_GiB_selective_SP", _held_bytes(sequence)),
    )
    return tuple(
        Row(
            row.table, row.id, column, row.number(column), found / 2**30, "GiB",
            tolerance=1e-6 * row.number(column),
        )
        for column, found in values
    )  # fmt: skip


def _states_bytes(job: Job) -> float:
    model, each = job.model, parameter_bytes(job.recipe)
    weights = attention_weights(model).total + mlp_weights(model, model.ffn).total
    whole = each.weights + each.gradients + each.optimizer
    return whole * weights * model.layers / (job.layout.tp * job.layout.pp)


def _held_bytes(job: Job) -> float:
    layers = job.model.layers / (job.layout.pp * job.layout.chunks)
    return chunks_in_flight(job, 0) * layers * layer_activations(job).total_bytes


def _pipeline(name: str, sequence: bool = False) -> Layout:
    pp, chunks = SIZES[name][3:5]
    schedule: Schedule = "interleaved" if chunks > 1 else "1f1b"
    return Layout(tp=TP, pp=pp, schedule=schedule, chunks=chunks, sequence_parallel=sequence)


def _job(name: str, layout: Layout) -> Job:
    layers, hidden, heads, _, _, micro_batch = SIZES[name]
    recipe = Recipe(
        SEQ_LEN, micro_batch, 512 * micro_batch, dtype="fp16", activation_dtype="fp16",
        flash_attention=False, dropout=True,
    )  # fmt: skip
    return Job(
        gpt(layers, hidden, heads, VOCAB, SEQ_LEN), layout, recipe, hardware("a100-sxm-80gb")
    )
