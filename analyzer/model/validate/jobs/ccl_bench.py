"""Traces of CCL-Bench -> the jobs that were recorded."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.presets import hardware, transformer
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.validate.records import Record

MODELS = {
    "llama-3.1-8b": "llama-3.1-8b",
    "deepseek_v3_16b": "deepseek-v2-lite",
    "deepseek-v3-16b": "deepseek-v2-lite",
}


def ccl_bench(row: Record) -> Job:
    """Short runs on four GPUs, and those of the mixtures, name the batch of a data-parallel rank
    and free all weights after the forward pass. Without FSDP torchtitan's activations stay fp32.
    """
    megatron = row.text("framework").startswith("megatron")
    ranks = row.count("dp_shard") * row.count("dp_replicate")
    batch = row.count("batch") * (ranks if short(row) else 1)
    rounds = row.count("pp_mb") if row.known("pp_mb") else 1
    recipe = Recipe(
        seq_len=row.count("seq"),
        micro_batch=1 if megatron else batch // ranks // rounds,
        global_batch=batch,
        recompute="full" if megatron else "none",
        framework="megatron" if megatron else "fsdp2",
        activation_dtype="bf16" if megatron or row.count("dp_shard") > 1 else "fp32",
    )
    model = transformer(row.choice("model", MODELS))
    return Job(model, _layout(row, megatron), recipe, hardware("a100-sxm-40gb", "slingshot-11", 4))


def dense(row: Record) -> bool:
    return row.text("model").startswith("llama")


def short(row: Record) -> bool:
    return "4gpu" in row.text("trace")


def _layout(row: Record, megatron: bool) -> Layout:
    sharded = 3 if row.count("dp_shard") > 1 else 0
    frees = short(row) or not dense(row)
    return Layout(
        tp=row.count("tp"),
        pp=row.count("pp"),
        dp_shard=row.count("dp_shard"),
        dp_replicate=row.count("dp_replicate"),
        ep=row.count("ep") if row.known("ep") else 1,
        zero=1 if megatron else sharded,
        sequence_parallel=not megatron,
        reshard_after_forward="always" if frees else "default",
    )
