from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import (
    Experts,
    HardwareConfig,
    JobConfig,
    LatentAttention,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_checks import check, find_violation
from stepsplit.analyzer.model.hardware_config import load_efficiency, load_link

GPT = ModelConfig(
    layers=8, hidden=512, heads=8, kv_heads=4, head_size=64, ffn=2048, vocab=1000, positions=1024
)
MOE = replace(GPT, experts=Experts(count=8, top_k=2, ffn=256))
RECIPE = TrainingConfig(seq_len=1024, micro_batch=1, global_batch=16)
PEAKS = (("fp32", 1e12), ("bf16", 2e12))
DEVICE = HardwareConfig(
    name="device",
    family="ampere",
    peaks_flops_per_s=PEAKS,
    memory_bytes=1 << 30,
    memory_bytes_per_s=1e9,
    gpus_per_node=8,
    intra=load_link("nvlink-3"),
    inter=load_link("ib-hdr-200"),
    host=load_link("host-pcie-4"),
    efficiency=load_efficiency("ampere"),
)
ZEROS: dict[str, Any] = {"dp_shard": 2, "zero": 3}


def job(model: ModelConfig = GPT, recipe: TrainingConfig = RECIPE, **axes: Any) -> JobConfig:
    return JobConfig(model, ParallelConfig(**axes), recipe, DEVICE)


def message(impossible: JobConfig) -> str:
    with pytest.raises(UsageError) as error:
        check(impossible)
    return str(error.value)


@pytest.mark.parametrize(
    "possible",
    [
        job(),
        job(tp=4, sequence_parallel=True),
        job(tp=8),  # two ranks hold a copy of each key head
        job(tp=2, pp=4, dp_replicate=2),
        job(pp=2, schedule="interleaved", chunks=4),
        job(pp=3, layers_per_stage=(2, 3, 3)),
        job(pp=3, recipe=replace(RECIPE, framework="fsdp2")),
        job(pp=4, schedule="zb-v"),
        job(pp=4, schedule="zb-v", chunks=2),
        job(pp=4, schedule="dualpipe"),
        job(pp=3, model=replace(GPT, layers=9), schedule="1f1b"),
        job(cp=4, context_kind="ulysses"),
        job(cp=3, recipe=replace(RECIPE, seq_len=768), tp=4, sequence_parallel=True),
        job(cp=2, zero=3, dp_replicate=4),
        job(MOE, ep=4, dp_replicate=4),
        job(MOE, ep=4, expert_tp=2, tp=2, dp_replicate=4),
        job(dp_replicate=2, **ZEROS),
    ],
)
def test_valid_jobs_pass(possible: JobConfig) -> None:
    check(possible)
    assert find_violation(possible) is None


@pytest.mark.parametrize(
    ("impossible", "expected"),
    [
        (job(tp=0), "tp (0) must be >= 1; fix tp"),
        (job(replace(GPT, layers=0)), "layers (0) must be >= 1; fix layers"),
        (job(tp=3), "heads (8) must be divisible by tp (3); fix heads or tp"),
        (
            job(replace(GPT, kv_heads=3)),
            "heads (8) must be divisible by kv_heads (3); fix heads or kv_heads",
        ),
        (
            job(replace(GPT, heads=12, kv_heads=6), tp=4),
            "kv_heads (6) must be divisible by tp (4); fix kv_heads or tp",
        ),
        (
            job(replace(GPT, heads=12, kv_heads=4), tp=6),
            "tp (6) must be divisible by kv_heads (4); fix tp or kv_heads",
        ),
        (
            job(replace(GPT, ffn=2050), tp=4),
            "ffn (2050) must be divisible by tp (4); fix ffn or tp",
        ),
        (job(ep=2, dp_replicate=2), "ep (2) needs a model with experts; remove ep"),
        (job(expert_tp=2, tp=2), "expert_tp (2) needs a model with experts; remove expert_tp"),
        (
            job(replace(GPT, experts=Experts(count=4, top_k=6, ffn=256))),
            "top_k (6) exceeds experts (4); fix one of them",
        ),
        (
            job(replace(GPT, experts=Experts(count=4, top_k=2, ffn=256, dense_layers=9))),
            "dense_layers (9) exceeds layers (8); fix one of them",
        ),
        (
            job(MOE, ep=3, dp_replicate=3),
            "experts (8) must be divisible by ep (3); fix experts or ep",
        ),
        (
            job(replace(MOE, experts=Experts(8, 2, 255)), tp=2, expert_tp=2),
            "expert ffn (255) must be divisible by expert_tp (2); fix expert ffn or expert_tp",
        ),
        (
            job(MOE, ep=8, dp_replicate=4),
            "tp (1) x cp (1) x dp (4) must be divisible by ep (8) x expert_tp (1); "
            "fix ep or the axes",
        ),
        (job(cp=3), "seq_len (1024) must be divisible by cp (3); fix seq_len or cp"),
        (
            job(tp=4, sequence_parallel=True, recipe=replace(RECIPE, seq_len=1022)),
            "seq_len (1022) must be divisible by cp (1) x tp (4); "
            "fix seq_len or the axes, or remove sequence_parallel",
        ),
        (
            job(cp=8, tp=2, context_kind="ulysses"),
            'heads (8) must be divisible by cp (8) x tp (2); set context = "ring"',
        ),
        (
            job(dp_replicate=3),
            "global_batch (16) must be divisible by micro_batch (1) x dp (3); "
            "make global_batch a multiple of 3",
        ),
        (
            job(recipe=replace(RECIPE, micro_batch=0)),
            "micro_batch (0) must be >= 1; fix micro_batch",
        ),
        (
            job(recipe=replace(RECIPE, seq_len=2048)),
            "seq_len (2048) exceeds learned_positions (1024); raise learned_positions",
        ),
        (
            job(recipe=replace(RECIPE, dtype="fp8")),
            "device has no fp8 peak (available: fp32, bf16); choose another dtype",
        ),
        (
            job(dp_shard=2),
            "dp_shard (2) needs ZeRO-3, but zero = 0; use dp instead, or set zero = 3",
        ),
        (
            job(dp_shard=2, zero=1, recipe=replace(RECIPE, framework="deepspeed")),
            "dp_shard (2) needs ZeRO-3, but zero = 1; use dp instead, or set zero = 3",
        ),
        (
            job(dp_replicate=2, zero=3),
            "ZeRO-3 needs more than one rank to shard over, but dp_shard x cp = 1; "
            "set dp_shard or zero = 0",
        ),
        (
            job(recipe=replace(RECIPE, framework="ddp"), **ZEROS),
            'DDP shards neither gradients nor weights, but zero = 3; set framework = "fsdp2"',
        ),
        (job(chunks=2), "chunks (2) needs pp > 1; remove chunks"),
        (
            job(pp=2, chunks=2),
            'chunks (2) needs schedule interleaved, not 1f1b; set schedule = "interleaved"',
        ),
        (
            job(pp=2, schedule="interleaved"),
            "chunks (1) must be >= 2 with schedule interleaved; raise chunks",
        ),
        (
            job(pp=2, schedule="zb-v", chunks=3),
            "chunks (3) must be <= 2 with schedule zb-v; remove chunks",
        ),
        (job(pp=3), "layers (8) must be divisible by pp (3); set layers_per_stage"),
        (
            job(replace(GPT, layers=30), pp=4, chunks=2, schedule="interleaved"),
            "layers (30) must be divisible by pp (4) x chunks (2); set layers_per_stage",
        ),
        (
            job(replace(GPT, layers=2), pp=2, chunks=2, schedule="interleaved"),
            "layers (2) must be >= pp (2) x chunks (2); fix one of them",
        ),
        (
            job(pp=2, layers_per_stage=(2, 3, 3)),
            "entries of layers_per_stage (3) must match the stages (2); fix layers_per_stage or pp",
        ),
        (
            job(pp=2, layers_per_stage=(3, 4)),
            "sum of layers_per_stage (7) must equal layers (8); fix one of them",
        ),
        (
            job(replace(GPT, layers=6), pp=3, chunks=2, schedule="interleaved"),
            "microbatches (16) must be divisible by pp (3); "
            "make the microbatches per rank a multiple of pp",
        ),
        (
            job(replace(GPT, layers=9), pp=3, schedule="dualpipe"),
            "pp (3) must be even with schedule dualpipe; make pp even",
        ),
        (
            job(pp=4, schedule="dualpipe", recipe=replace(RECIPE, global_batch=9)),
            "microbatches (9) must be even with schedule dualpipe; make microbatches even",
        ),
        (
            job(pp=4, schedule="dualpipe-v", recipe=replace(RECIPE, global_batch=7)),
            "microbatches (7) must be >= 2 x pp (8) with schedule dualpipe-v; raise global_batch",
        ),
    ],
)
def test_a_violated_constraint_is_reported_with_its_numbers(
    impossible: JobConfig, expected: str
) -> None:
    assert message(impossible) == expected


def test_latent_attention_has_no_key_value_heads_to_split() -> None:
    latent = LatentAttention(query_rank=0, kv_rank=64, nope=32, rope=16, value=32)
    model = replace(GPT, heads=12, kv_heads=6)
    assert find_violation(job(model, tp=4)) is not None
    assert find_violation(job(replace(model, latent=latent), tp=4)) is None
