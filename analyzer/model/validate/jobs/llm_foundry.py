"""Throughputs of llm-foundry's training benchmarks (FSDP) -> the jobs behind them."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.presets import hardware, transformer
from stepsplit.analyzer.model.spec.recipe import Dtype, Recipe
from stepsplit.analyzer.model.spec.transformer import Transformer
from stepsplit.analyzer.model.validate.jobs.case import Case
from stepsplit.analyzer.model.validate.records import Record

TABLE = "llm_foundry_mpt_throughput"
GPUS = {
    "h100_80gb": ("h100-sxm", "roce-400"),
    "a100_80gb": ("a100-sxm-80gb", "roce-200"),
    "a100_40gb": ("a100-sxm-40gb", "roce-200"),
}
"""Nodes of 8 with 1,600 Gb/s (A100) or 3,200 Gb/s (H100) of RoCE."""
DTYPES: dict[str, Dtype] = {"bf16": "bf16", "amp_bf16": "bf16", "amp_fp8": "fp8"}


def llm_foundry(row: Record) -> Case:
    """MPT with flash attention and a fused loss, no dropout, sharded over all GPUs.

    Composer's mixed precision DEFAULT reduces gradients in fp32, PURE in bf16.
    """
    seconds = row.number("global_batch_tokens") / row.number("tokens_per_s")
    job = Job(mpt(row), _layout(row), _recipe(row), gpu(row))
    return Case(row.table, row.id, "llm-foundry", job, seconds * 1e9)


def mpt(row: Record) -> Transformer:
    """The benchmark gives each model as many learned positions as its sequence has tokens."""
    return replace(transformer(f"mpt-{row.text('model')}"), positions=row.count("seq"))


def gpu(row: Record) -> Hardware:
    name, link = row.choice("gpu", GPUS)
    return hardware(name, link, 8)


def _layout(row: Record) -> Layout:
    keeps = row.text("fsdp_strategy") == "SHARD_GRAD_OP"
    return Layout(
        dp_shard=row.count("gpus"),
        zero=3,
        overlap=frozenset({"dp"}),
        reshard_after_forward="never" if keeps else "default",
    )


def _recipe(row: Record) -> Recipe:
    offload = row.text("act_cpu_offload") == "True"
    return Recipe(
        seq_len=row.count("seq"),
        micro_batch=row.count("micro_batch"),
        global_batch=row.count("micro_batch") * row.count("grad_accum") * row.count("gpus"),
        dtype=row.choice("precision", DTYPES),
        recompute="full" if row.text("activation_ckpt") == "True" else "none",
        framework="fsdp2",
        gradient_dtype="bf16" if row.text("mp_mode") == "PURE" else "fp32",
        offload=frozenset({"activations"}) if offload else frozenset(),
    )
