"""Small jobs laid down by hand, and the rows of published tables beside the project."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import Any

from stepsplit.analyzer import (
    Efficiency,
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config import Experts, LatentAttention, Link
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.validation.tables import PUBLISHED
from support.required import SHARED_TRACES, absent

WIRE = Link("wire", 100e9, 1.0, 0.0)
DEVICE = HardwareConfig(
    "device", "none", (("bf16", 1e12),), 2**30, 1e12, 8, WIRE, WIRE, WIRE,
    Efficiency(gemm=1.0, attention=1.0, unfused_attention=1.0, memory=1.0, launch_ns=0.0),
)  # fmt: skip

UNIT = DeviceSpeed(
    linear_flops_per_ns=1.0, head_flops_per_ns=1.0, attention_flops_per_ns=1.0,
    attention_backward_flops_per_ns=1.0, bytes_per_ns=1.0, launch_ns=0.0,
)  # fmt: skip
"""A byte takes a ns."""

TINY = ModelConfig(
    layers=4, hidden=8, heads=4, kv_heads=4, head_size=2, ffn=32, vocab=512,
    tied=False, norm="rms", biases=False,
)  # fmt: skip
"""A layer holds 256 in attention, 512 in its MLP and 16 in norms: 784. Embedding and head 4096."""

RECIPE = TrainingConfig(seq_len=16, micro_batch=1, global_batch=1)
"""16 tokens of 8 numbers in bf16: 256 bytes from layer to layer."""

LITE = ModelConfig(
    layers=27, hidden=2048, heads=16, kv_heads=16, head_size=128, ffn=10944, vocab=102400,
    gated=True, tied=False, norm="rms", biases=False,
    experts=Experts(64, 6, 1408, 2816, dense_layers=1),
    latent=LatentAttention(query_rank=0, kv_rank=512, nope=128, rope=64, value=128),
)  # fmt: skip
"""DeepSeek-V2-Lite, 16B: its config.json at Hugging Face."""
LLAMA_ON_H100 = """
[model]
preset = "llama-3.1-8b"
[parallel]
tp = 8
[training]
seq_len = 8192
micro_batch = 1
global_batch = 4
framework = "megatron"
[hardware]
preset = "h100-sxm"
"""
"""A job.toml that ends in [hardware], for keys of a test."""

MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "7b": (32, 4096, 32),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""layers, hidden, heads of mosaicml/llm-foundry's family."""


def job(
    model: ModelConfig = TINY, layout: ParallelConfig | None = None, **recipe: Any
) -> JobConfig:
    """A job on the device; recipe replaces what RECIPE says."""
    return JobConfig(model, layout or ParallelConfig(), replace(RECIPE, **recipe), DEVICE)


def gpt(layers: int, hidden: int, heads: int, vocab: int, seq: int) -> ModelConfig:
    """As GPT-2 and GPT-3 are: learned positions, biases, layer norms, tied."""
    return ModelConfig(
        layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, positions=seq
    )


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelConfig:
    """As Llama and Mistral are: gated, RMS norms, no biases, head of its own."""
    return ModelConfig(
        layers, hidden, heads, kv_heads, hidden // heads, ffn, vocab,
        gated=True, tied=False, norm="rms", biases=False,
    )  # fmt: skip


def published(table: str) -> list[dict[str, str]]:
    """The rows of a published table, of those that come with stepsplit or lie beside the project;
    the test is skipped where it is neither."""
    path = PUBLISHED / f"{table}.csv"
    if not path.exists():
        path = SHARED_TRACES.parent / "anchors" / path.name
    if not path.exists():
        absent("anchors", f"{path.name} is not beside the project")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def gpt_of(row: dict[str, str]) -> ModelConfig:
    """The GPT of a row that names its sizes."""
    layers, hidden, heads, vocab, seq = (
        int(row[name]) for name in ("layers", "hidden", "heads", "vocab", "seq")
    )
    return gpt(layers, hidden, heads, vocab, seq)
