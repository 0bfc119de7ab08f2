from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import for_each

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
from stepsplit.analyzer.model.config_checks import check, first_fault
from stepsplit.analyzer.model.hardware_config import efficiency, link

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
    intra=link("nvlink-3"),
    inter=link("ib-hdr-200"),
    host=link("host-pcie-4"),
    efficiency=efficiency("ampere"),
)
ZEROS: dict[str, Any] = {"dp_shard": 2, "zero": 3}


def job(model: ModelConfig = GPT, recipe: TrainingConfig = RECIPE, **axes: Any) -> JobConfig:
    return JobConfig(model, ParallelConfig(**axes), recipe, DEVICE)


def message(impossible: JobConfig) -> str:
    with pytest.raises(UsageError) as error:
        check(impossible)
    return str(error.value)


@for_each(
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
def test_what_can_be_is_let_through(possible: JobConfig) -> None:
    check(possible)
    assert first_fault(possible) is None


@for_each(
    ("impossible", "told"),
    [
        (job(tp=0), "tp 0 < 1; fix tp"),
        (job(replace(GPT, layers=0)), "layers 0 < 1; fix layers"),
        (job(tp=3), "heads 8 / tp 3 = 2.66667; fix heads or tp"),
        (job(replace(GPT, kv_heads=3)), "heads 8 / kv_heads 3 = 2.66667; fix heads or kv_heads"),
        (
            job(replace(GPT, heads=12, kv_heads=6), tp=4),
            "kv_heads 6 / tp 4 = 1.5; fix kv_heads or tp",
        ),
        (
            job(replace(GPT, heads=12, kv_heads=4), tp=6),
            "tp 6 / kv_heads 4 = 1.5; fix tp or kv_heads",
        ),
        (job(replace(GPT, ffn=2050), tp=4), "ffn 2050 / tp 4 = 512.5; fix ffn or tp"),
        (job(ep=2, dp_replicate=2), "ep 2 of a model without experts; leave ep out"),
        (job(expert_tp=2, tp=2), "expert_tp 2 of a model without experts; leave expert_tp out"),
        (
            job(replace(GPT, experts=Experts(count=4, top_k=6, ffn=256))),
            "top_k 6 > experts 4; fix one of them",
        ),
        (
            job(replace(GPT, experts=Experts(count=4, top_k=2, ffn=256, dense_layers=9))),
            "dense_layers 9 > layers 8; fix one of them",
        ),
        (job(MOE, ep=3, dp_replicate=3), "experts 8 / ep 3 = 2.66667; fix experts or ep"),
        (
            job(replace(MOE, experts=Experts(8, 2, 255)), tp=2, expert_tp=2),
            "expert ffn 255 / expert_tp 2 = 127.5; fix expert ffn or expert_tp",
        ),
        (
            job(MOE, ep=8, dp_replicate=4),
            "tp 1 x cp 1 x dp 4 = 4 ranks / (ep 8 x expert_tp 1) = 0.5; fix ep or the axes",
        ),
        (job(cp=3), "seq_len 1024 / cp 3 = 341.333; fix seq_len or cp"),
        (
            job(tp=4, sequence_parallel=True, recipe=replace(RECIPE, seq_len=1022)),
            "seq_len 1022 / (cp 1 x tp 4) = 255.5; "
            "fix seq_len or the axes, or leave sequence_parallel out",
        ),
        (
            job(cp=8, tp=2, context_kind="ulysses"),
            'heads 8 / (cp 8 x tp 2) = 0.5; write context = "ring"',
        ),
        (
            job(dp_replicate=3),
            "global_batch 16 / (micro_batch 1 x dp 3) = 5.33333 microbatches; "
            "make global_batch a multiple of 3",
        ),
        (job(recipe=replace(RECIPE, micro_batch=0)), "micro_batch 0 < 1; fix micro_batch"),
        (
            job(recipe=replace(RECIPE, seq_len=2048)),
            "seq_len 2048 > learned_positions 1024; raise learned_positions",
        ),
        (
            job(recipe=replace(RECIPE, dtype="fp8")),
            "device has no fp8 peak, only fp32, bf16; choose another dtype",
        ),
        (job(dp_shard=2), "dp_shard 2 with zero = 0; write dp instead, or zero = 3"),
        (
            job(dp_replicate=2, zero=3),
            "zero = 3 shards over dp_shard 1 x cp 1 = 1 rank; write dp_shard or zero = 0",
        ),
        (
            job(recipe=replace(RECIPE, framework="ddp"), **ZEROS),
            'ddp shards no gradient and no weight, but zero = 3; write framework = "fsdp2"',
        ),
        (job(chunks=2), "chunks 2 with pp 1; leave chunks out"),
        (
            job(pp=2, chunks=2),
            'chunks 2 with schedule 1f1b; write schedule = "interleaved"',
        ),
        (
            job(pp=2, schedule="interleaved"),
            "interleaved needs several chunks on a rank, not chunks 1; write chunks = 2 or more",
        ),
        (
            job(pp=2, schedule="zb-v", chunks=3),
            "zb-v holds two stages on a rank, not chunks 3; leave chunks out",
        ),
        (job(pp=3), "layers 8 / pp 3 = 2.66667; give layers_per_stage"),
        (
            job(replace(GPT, layers=30), pp=4, chunks=2, schedule="interleaved"),
            "layers 30 / (pp 4 x chunks 2) = 3.75; give layers_per_stage",
        ),
        (
            job(replace(GPT, layers=2), pp=2, chunks=2, schedule="interleaved"),
            "layers 2 < (pp 2 x chunks 2) = 4 stages; fix one of them",
        ),
        (
            job(pp=2, layers_per_stage=(2, 3, 3)),
            "layers_per_stage has 3 entries, but pp 2 = 2; give one for each stage",
        ),
        (
            job(pp=2, layers_per_stage=(3, 4)),
            "layers_per_stage 3 + 4 = 7, but layers 8; fix one of them",
        ),
        (
            job(replace(GPT, layers=6), pp=3, chunks=2, schedule="interleaved"),
            "microbatches 16 / pp 3 = 5.33333; make the microbatches of a rank a multiple of pp",
        ),
        (
            job(replace(GPT, layers=9), pp=3, schedule="dualpipe"),
            "pp 3 / 2 directions = 1.5; dualpipe needs an even number",
        ),
        (
            job(pp=4, schedule="dualpipe", recipe=replace(RECIPE, global_batch=9)),
            "microbatches 9 / 2 directions = 4.5; dualpipe needs an even number",
        ),
        (
            job(pp=4, schedule="dualpipe-v", recipe=replace(RECIPE, global_batch=7)),
            "microbatches 7 < 2 x pp 4 of dualpipe-v; raise global_batch",
        ),
    ],
)
def test_an_impossible_product_is_refused_with_its_arithmetic(
    impossible: JobConfig, told: str
) -> None:
    assert message(impossible) == told


def test_latent_attention_has_no_key_heads_to_share_out() -> None:
    latent = LatentAttention(query_rank=0, kv_rank=64, nope=32, rope=16, value=32)
    model = replace(GPT, heads=12, kv_heads=6)
    assert first_fault(job(model, tp=4)) is not None
    assert first_fault(job(replace(model, latent=latent), tp=4)) is None
