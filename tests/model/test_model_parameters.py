"""Parameters: the published counts, and what each rank holds of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.work_builders import LITE, MPT, TINY, gpt, gpt_of, job, llama, published

from stepsplit.analyzer.model.config import Experts, LatentAttention, ModelConfig, ParallelConfig
from stepsplit.analyzer.model.parameters import (
    LayerParameters,
    StageParameters,
    count_active_parameters,
    count_dense_layer,
    count_expert_layer,
    count_parameters,
    count_stage_parameters,
)

MIXTRAL = replace(llama(32, 4096, 32, 8, 14336, 32000), experts=Experts(8, 2, 14336))
DEEPSEEK_V3 = ModelConfig(
    layers=61, hidden=7168, heads=128, kv_heads=128, head_size=128, ffn=18432, vocab=129280,
    gated=True, tied=False, norm="rms", biases=False,
    experts=Experts(256, 8, 2048, 2048, dense_layers=3),
    latent=LatentAttention(query_rank=1536, kv_rank=512, nope=128, rope=64, value=128),
)  # fmt: skip
SMALL_GPT = gpt(layers=2, hidden=4, heads=2, vocab=256, seq=8)
MIXED = replace(
    TINY, layers=2, experts=Experts(count=4, top_k=2, ffn=16, shared_ffn=8, dense_layers=1)
)


def test_every_part_of_a_small_gpt_is_counted() -> None:
    """Attention 4 h² + 4 h, MLP 8 h² + 5 h, norms 4 h with h = 4; then words, positions, norm."""
    assert count_dense_layer(SMALL_GPT) == LayerParameters(80, 148, 16, 0, 0, 16 + 8)
    assert count_parameters(SMALL_GPT) == 2 * (80 + 148 + 16) + 256 * 4 + 8 * 4 + 8


def test_a_mixture_has_all_experts_and_top_k_active_ones() -> None:
    expert = 2 * 8 * 16
    layer = LayerParameters(256, 2 * 8 * 8, 16, 8 * 4, 4 * expert, 16 + 32)
    assert count_expert_layer(MIXED) == layer
    ends = 2 * 512 * 8 + 8
    assert count_parameters(MIXED) == ends + 784 + layer.dense + 4 * expert
    assert count_active_parameters(MIXED) == ends + 784 + layer.dense + 2 * expert


def test_biases_of_queries_keys_and_values_alone_can_be_counted() -> None:
    """Qwen2: h + 2 k d a layer."""
    plain = llama(2, 16, 4, 2, 64, 100)
    with_biases = replace(plain, qkv_biases=True)
    assert count_parameters(with_biases) - count_parameters(plain) == 2 * (16 + 2 * 8)


def test_norms_of_queries_and_keys_are_shared_by_all_heads() -> None:
    """Two scales of a head's size in each of two layers, on every tp rank."""
    plain = replace(SMALL_GPT, norm="rms")
    normed = replace(plain, qk_norm=True)
    assert count_parameters(normed) - count_parameters(plain) == 2 * 2 * plain.head_size
    split = [
        count_stage_parameters(job(model, ParallelConfig(tp=2)))[0].replicated
        for model in (plain, normed)
    ]
    assert split[1] - split[0] == 2 * 2 * plain.head_size


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (llama(32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
        (llama(32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
        (llama(126, 16384, 128, 8, 53248, 128256), 405_853_388_800),
        (MIXTRAL, 46_702_792_704),
        (LITE, 15_706_484_224),
        (DEEPSEEK_V3, 671_026_404_352),
    ],
    ids=["llama-2-7b", "llama-3.1-8b", "llama-3.1-405b", "mixtral", "v2-lite", "deepseek-v3"],
)
def test_published_checkpoints_have_exactly_so_many_parameters(
    model: ModelConfig, count: int
) -> None:
    assert count_parameters(model) == count


def test_active_parameters_of_mixtures_are_those_published() -> None:
    assert count_active_parameters(MIXTRAL) == 12_879_925_248
    assert count_active_parameters(DEEPSEEK_V3) == pytest.approx(37e9, rel=0.02)


def test_megatron_table_1_follows_from_equation_2_and_a_final_norm() -> None:
    for row in published("megatron_sc21_table1"):
        model = gpt_of(row)
        layers, h, seq, vocab = model.layers, model.hidden, model.positions, model.vocab
        equation_2 = 12 * layers * h * h + 13 * layers * h + (vocab + seq) * h
        assert count_parameters(model) == equation_2 + 2 * h
        assert round(count_parameters(model) / 1e9, 1) == float(row["params_B"])


def test_mpt_has_biases_and_learned_positions_and_every_count_is_exact() -> None:
    for row in published("llm_foundry_mpt_throughput"):
        model = gpt(*MPT[row["model"]], 50368, int(row["seq"]))
        assert count_parameters(model) == int(row["num_params"])


def test_tensor_parallel_ranks_copy_norms_and_output_biases() -> None:
    """h = 4: queries, keys and values 4 h²/2 + 3 h/2 + h, MLP 8 h²/2 + 4 h/2 + h."""
    assert count_dense_layer(SMALL_GPT, tp=2) == LayerParameters(42, 76, 16, 0, 0, 24)


def test_key_value_heads_are_copied_where_ranks_outnumber_them() -> None:
    model = llama(1, 16, 4, 2, 64, 100)
    assert count_dense_layer(model, tp=4).attention == 16 * 4 * (2 * 1 + 2 * 1)


def test_compressed_projections_are_whole_on_every_rank() -> None:
    """512 + 64 wide from 2048, with a norm of 512; queries, keys, values and output are halved."""
    down, divided = 2048 * 576 + 512, 16 * (2048 * 192 + 512 * 256 + 128 * 2048)
    assert count_dense_layer(LITE, tp=2).attention == down + divided // 2
    assert count_dense_layer(LITE, tp=2).replicated == 2 * 2048 + down


def test_experts_are_divided_by_expert_ranks_alone() -> None:
    assert count_expert_layer(MIXED, tp=2, ep=2, expert_tp=2).experts == 2 * 2 * 8 * 8
    assert count_expert_layer(MIXED, tp=2, ep=2).experts == 2 * 2 * 8 * 16


def test_the_first_stage_holds_the_embedding_and_the_last_the_head() -> None:
    layer = LayerParameters(128, 256, 16, 0, 0, 16)
    assert count_stage_parameters(job(layout=ParallelConfig(tp=2, pp=2))) == (
        StageParameters(0, 800 + 2048, 0, 2048, 0, 0, layer, None, 2, 0),
        StageParameters(1, 800 + 2048 + 8, 0, 0, 2048, 8, layer, None, 2, 0),
    )


def test_the_vocabulary_is_padded_as_megatron_does() -> None:
    """500 words fill 512 on two ranks, 256 each; other frameworks give each rank 250."""
    odd = replace(TINY, vocab=500)
    megatron, fsdp = (
        job(odd, ParallelConfig(tp=2)),
        job(odd, ParallelConfig(tp=2), framework="fsdp2"),
    )
    assert [count_stage_parameters(each)[0].head for each in (megatron, fsdp)] == [2048, 2000]


def test_a_tied_head_on_another_rank_is_a_copy() -> None:
    tied = replace(TINY, tied=True)
    assert [stage.head for stage in count_stage_parameters(job(tied, ParallelConfig(pp=2)))] == [
        0,
        4096,
    ]
    assert [stage.head for stage in count_stage_parameters(job(tied))] == [0]
    folded = ParallelConfig(pp=2, schedule="zb-v")
    assert [stage.head for stage in count_stage_parameters(job(tied, folded))] == [0, 0]


def test_dualpipe_holds_everything_twice() -> None:
    one = count_stage_parameters(job(layout=ParallelConfig(pp=2)))
    both = count_stage_parameters(job(layout=ParallelConfig(pp=2, schedule="dualpipe")))
    assert [stage.total for stage in both] == [sum(stage.total for stage in one)] * 2


def test_stages_of_a_mixture_add_up_to_the_model() -> None:
    held = count_stage_parameters(job(MIXED, ParallelConfig(pp=2)))
    assert [(each.dense_layers, each.expert_layers) for each in held] == [(1, 0), (0, 1)]
    assert sum(each.total for each in held) == count_parameters(MIXED)
    assert [each.largest_layer for each in held] == [784, 432 + 1024]
