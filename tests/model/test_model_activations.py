"""Saved activations of a layer, item by item."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.work_builders import LITE, TINY, gpt, job, llama, published

from stepsplit.analyzer.model.config import ParallelConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import (
    EVERY,
    FULL,
    LAYER_ACTIVATIONS,
    LayerActivations,
    StageActivations,
    compute_layer_activations,
    compute_stage_activations,
    count_chunks_in_flight,
)
from stepsplit.analyzer.model.profile import list_frameworks, load_framework
from stepsplit.analyzer.model.rank_layout import list_stages

GPT: dict[str, Any] = {"dropout": True, "flash_attention": False}


def test_a_layer_with_flash_attention_item_by_item() -> None:
    """16 tokens of 8: norms 8 x 128, q k v 2 x 16 x 24, output 2 x 128 and 4 heads of log-sum-exp,
    MLP 2 x 16 x 64."""
    assert compute_layer_activations(job()) == LayerActivations(
        norms=1024, heads=768, attention=256 + 256, masks=0, mlp=2048, routed=0
    )


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "total"),
    [
        (1, False, "none", 128 * (34 + 40)),
        (2, False, "none", 128 * (10 + 24 // 2 + 40 // 2)),
        (2, True, "none", 128 // 2 * (34 + 40)),
        (2, False, "selective", 128 * (10 + 24 // 2)),
        (2, True, "selective", 34 * 128 // 2),
    ],
)
def test_gpt_with_dropout_is_table_2_of_korthikanti(
    tp: int, sequence_parallel: bool, recompute: Any, total: int
) -> None:
    """sbh = 128 and 5as/h = 40."""
    layout = ParallelConfig(tp=tp, sequence_parallel=sequence_parallel)
    assert (
        compute_layer_activations(job(layout=layout, recompute=recompute, **GPT)).total_bytes
        == total
    )


def test_gated_mlp_and_grouped_queries() -> None:
    """hidden 8, keys for two of four heads, three GEMMs of width 16."""
    model = llama(2, 8, 4, 2, 16, 512)
    found = compute_layer_activations(job(model))
    assert (found.heads, found.mlp) == (2 * 16 * (8 + 4 + 4), 2 * 16 * 3 * 16)


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    """16 tokens of 8 numbers of queries and 4 of keys: 2 bytes each, eagerly 4 more in fp32."""
    model = llama(2, 8, 4, 2, 16, 512)
    for framework, kept in (("megatron", 2), ("huggingface", 6)):
        plain, normed = (
            compute_layer_activations(job(each, framework=framework)).heads
            for each in (model, replace(model, qk_norm=True))
        )
        assert normed - plain == kept * 16 * (8 + 4)


def test_context_parallelism_divides_the_tokens_and_ulysses_keeps_its_output_twice() -> None:
    ring = compute_layer_activations(job(layout=ParallelConfig(cp=2)))
    ulysses = compute_layer_activations(job(layout=ParallelConfig(cp=2, context_kind="ulysses")))
    assert ring == LayerActivations(512, 384, 256, 0, 1024, 0)
    assert ulysses == replace(ring, attention=256 + 128)


def test_fp8_products_keep_half_of_their_inputs_in_transformer_engine() -> None:
    """Norm outputs and the last product's input shrink; attention's output gains an fp8 copy."""
    found = compute_layer_activations(job(dtype="fp8"))
    assert found == LayerActivations(
        norms=768, heads=768, attention=512 + 128, masks=0, mlp=2 * 512 + 512, routed=0
    )
    assert compute_layer_activations(
        job(dtype="fp8", framework="fsdp2")
    ) == compute_layer_activations(job(framework="fsdp2"))


def test_fp32_activations_take_twice_the_bytes_but_for_the_log_sum_exp() -> None:
    half, full = (
        compute_layer_activations(job()),
        compute_layer_activations(job(activation_dtype="fp32")),
    )
    assert full == LayerActivations(2 * half.norms, 2 * half.heads, 768, 0, 2 * half.mlp, 0)


def test_an_expert_layer_saves_its_routed_tokens_and_latents() -> None:
    """A token of DeepSeek-V2-Lite: 6 experts of 1408 (gated), shared 2816, 64 router logits; keys
    and queries 192 wide, values 128, latent 512 before and after its norm, rotary key 64."""
    found = compute_layer_activations(job(LITE), expert=True)
    assert found == LayerActivations(
        norms=16 * 8 * 2048,
        heads=16 * 2 * (16 * (192 + 192 + 128) + 2 * 512 + 64),
        attention=16 * 16 * (2 * 128 + 4),
        masks=0,
        mlp=16 * 2 * 3 * 2816,
        routed=16 * (6 * 2 * (2048 + 3 * 1408) + 4 * 64),
    )


@pytest.mark.parametrize(
    ("recompute", "every", "held", "rerun", "formula"),
    [
        ("none", 1, 4 * 4352, 0, LAYER_ACTIVATIONS),
        ("full", 1, 4 * 256, 4352, FULL),
        ("every", 2, 2 * 256, 2 * 4352, EVERY),
        ("every", 3, 2 * 256, 3 * 4352, EVERY),
        ("sqrt", 1, 4 * 256, 4352, EVERY),
    ],
)
def test_recomputation_trades_layers_for_inputs(
    recompute: Any, every: int, held: int, rerun: int, formula: Formula
) -> None:
    """Four layers of 4352 bytes, inputs of 256. sqrt(4 x 4352 / 256) is 8: all four inputs."""
    small = job(recompute=recompute, recompute_every=every)
    (stage,) = list_stages(small)
    assert compute_stage_activations(small, stage) == StageActivations(held, rerun, formula)


def test_the_best_number_of_inputs_is_the_root_of_the_ratio() -> None:
    """100 layers of 17 inputs each: sqrt(100 x 17) = 41, groups of 3."""
    deep = job(replace(TINY, layers=100), recompute="sqrt")
    (stage,) = list_stages(deep)
    assert compute_stage_activations(deep, stage) == StageActivations(41 * 256, 3 * 4352, EVERY)


@pytest.mark.parametrize(
    ("schedule", "chunks", "in_flight"),
    [
        ("naive", 1, [1, 1, 1, 1]),
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved", 2, [11, 9, 7, 5]),
    ],
)
def test_microbatches_in_flight_on_each_of_four_ranks(
    schedule: Any, chunks: int, in_flight: list[int]
) -> None:
    piped = job(layout=ParallelConfig(pp=4, schedule=schedule, chunks=chunks), global_batch=8)
    assert [count_chunks_in_flight(piped, rank) for rank in range(4)] == in_flight


def test_the_formulas_behind_figure_1_of_korthikanti() -> None:
    shapes = {"22B": (48, 6144, 64, 4, 1, 1), "175B": (96, 12288, 96, 1, 8, 3)}
    for row in published("korthikanti_fig1_memory_formula_values"):
        if row["model"] not in shapes:
            continue
        layers, hidden, heads, batch, pp, chunks = shapes[row["model"]]
        schedule: Any = "interleaved" if chunks > 1 else "1f1b"
        for parallel, recompute, name in (
            (False, "none", "act_GiB_no_recompute_TP8"),
            (True, "selective", "act_GiB_selective_SP"),
        ):
            layout = ParallelConfig(
                tp=8, pp=pp, schedule=schedule, chunks=chunks, sequence_parallel=parallel
            )
            model = gpt(layers, hidden, heads, 51200, 2048)
            recipe = {"seq_len": 2048, "micro_batch": batch, "global_batch": 64 * batch}
            big = job(model, layout, recompute=recompute, **recipe, **GPT)
            each = compute_stage_activations(big, list_stages(big)[0]).saved_bytes
            found = count_chunks_in_flight(big, 0) * each / 2**30
            assert found == pytest.approx(float(row[name]), rel=1e-4)


def test_every_framework_has_a_source_of_its_coefficients(subtests: pytest.Subtests) -> None:
    for framework in list_frameworks():
        with subtests.test(framework):
            found = load_framework(framework)
            assert found.name == framework
            assert found.source
            assert found.memory.low <= 1.0 <= found.memory.high
