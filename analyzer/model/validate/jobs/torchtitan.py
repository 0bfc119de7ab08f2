"""Throughput and memory that torchtitan publishes -> the jobs behind them."""

from __future__ import annotations

import re

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.presets import hardware, transformer
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.validate.jobs.case import Case
from stepsplit.analyzer.model.validate.records import Published, Record

TABLE = "torchtitan_throughput_memory"


def torchtitan_cases(published: Published) -> tuple[Case, ...]:
    """Every row."""
    return tuple(torchtitan(row) for row in published.records(TABLE))


def torchtitan(row: Record) -> Case:
    """FSDP2 with the sizes that the row's config names; no constant is fitted on these rows.

    The GPUs were H100 of 500 W with 94 or 96 GB of HBM2e, slower than the preset, and A100. A local
    batch is one microbatch, in a pipeline it is cut into single sequences. The loss is not fused.
    """
    job = torchtitan_job(row)
    tokens = job.recipe.global_batch * job.recipe.seq_len
    seconds = tokens / (row.number("tokens_per_s_per_gpu") * row.count("gpus"))
    return Case(row.table, row.id, "torchtitan", job, seconds * 1e9)


def torchtitan_job(row: Record) -> Job:
    name = "a100-sxm-80gb" if row.text("gpu").startswith("A100") else "h100-sxm"
    layout = _layout(row)
    return Job(transformer(_preset(row)), layout, _recipe(row, layout), hardware(name))


def _preset(row: Record) -> str:
    """llama3.1-8B -> llama-3.1-8b."""
    return row.text("model").lower().replace("llama3", "llama-3")


def _layout(row: Record) -> Layout:
    tp, pp, cp = (_size(row, axis) for axis in ("TP", "PP", "CP"))
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp_shard=row.count("gpus") // (tp * pp * cp),
        zero=3,
        sequence_parallel=tp > 1,
        overlap=frozenset({"dp", "tp"} if "asyncTP" in row.text("config") else {"dp"}),
    )


def _size(row: Record, axis: str) -> int:
    """The number behind the axis in the config, "FSDP32 TP8 compile"; 1 where it is not named."""
    found = re.search(rf"\b{axis}(\d+)", row.text("config"))
    return int(found[1]) if found else 1


def _recipe(row: Record, layout: Layout) -> Recipe:
    local = row.count("local_batch")
    return Recipe(
        seq_len=row.count("seq"),
        micro_batch=1 if layout.pp > 1 else local,
        global_batch=local * layout.dp,
        dtype="fp8" if "float8" in row.text("config") else "bf16",
        recompute="full" if row.text("activation_ckpt") == "full" else "selective",
        framework="fsdp2",
        fused_loss=False,
    )
