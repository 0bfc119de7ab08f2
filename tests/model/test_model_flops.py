"""FLOPs by every convention: closed forms, published utilizations, and one rank's share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.chunk_flops import ChunkFlops, count_chunk_flops
from support.work_builders import LITE, MPT, TINY, gpt, gpt_of, job, llama, published

from stepsplit.analyzer.model.config import Experts, ParallelConfig
from stepsplit.analyzer.model.parameters import (
    CONVENTIONS,
    compute_mfu,
    compute_sc21_flops,
    compute_training_days,
    count_active_parameters,
    count_hardware_flops,
    count_model_flops,
    count_parameters,
)
from stepsplit.analyzer.model.rank_layout import Chunk, list_stages

SMALL = gpt(layers=2, hidden=4, heads=2, vocab=128, seq=8)
STEP = {"seq_len": 8, "global_batch": 4}
"""32 tokens: a layer's products 2 · 12 h² = 384, its core 4 s h = 128, the head 2 h V = 1024."""
A100, H100 = 312e12, 989.5e12
MIXED = replace(TINY, layers=2, experts=Experts(4, 2, ffn=16, shared_ffn=8, dense_layers=1))


def test_the_conventions_of_a_small_gpt_worked_out_by_hand() -> None:
    layers, core, head, every = 2 * 384, 2 * 128, 1024, count_parameters(SMALL)
    small = job(SMALL, **STEP)
    assert {name: count_model_flops(small, name) for name in CONVENTIONS} == {
        "C1": 32 * 3 * (layers + core + head),
        "C2": 32 * (3 * layers + 6 * core + 3 * head),
        "C3": 32 * (4 * layers + 4 * core + 3 * head),
        "C4": 32 * (6 * every + 3 * core),
        "C5": 32 * 3 * (layers + core // 2 + head),
        "C6": 32 * (6 * every + 3 * core),
    }


@pytest.mark.parametrize(
    ("recompute", "layers", "core"),
    [("none", 3, 3), ("selective", 3, 6), ("full", 4, 4), ("every", 4, 4), ("sqrt", 4, 4)],
)
def test_recomputation_adds_forward_passes_of_layers_and_not_of_the_head(
    recompute: str, layers: int, core: int
) -> None:
    """Selective is counted as Korthikanti et al. print it: the core's three passes once more."""
    small = job(SMALL, **STEP, recompute=recompute, flash_attention=False)
    assert count_hardware_flops(small) == 32 * (layers * 768 + core * 256 + 3 * 1024)
    assert count_model_flops(small) == 32 * 3 * (768 + 256 + 1024)


def test_selective_repeats_no_fused_attention_and_every_second_gemm_in_torchtitan() -> None:
    fused = job(SMALL, **STEP, recompute="selective")
    assert count_hardware_flops(fused) == count_model_flops(fused)
    titan = job(SMALL, **STEP, recompute="selective", framework="fsdp2")
    keys_and_output = 2 * (4 * 4 + 4 * 4)
    assert count_hardware_flops(titan) - count_model_flops(titan) == 2 * 32 * keys_and_output


def test_other_conventions_count_one_more_pass_of_what_is_recomputed() -> None:
    every = count_parameters(SMALL)
    selective, full = (
        job(SMALL, **STEP, recompute=how, flash_attention=False) for how in ("selective", "full")
    )
    assert count_hardware_flops(selective, "C5") == 32 * (3 * 768 + 4 * 128 + 3 * 1024)
    assert count_hardware_flops(selective, "C4") == 32 * (6 * every + 4 * 256)
    assert count_hardware_flops(full, "C4") * 3 == 4 * count_model_flops(full, "C4")
    assert (
        count_hardware_flops(full, "C3")
        == count_model_flops(full, "C3")
        == count_hardware_flops(full)
    )


def test_for_gpt_the_count_product_by_product_equals_the_published_closed_forms() -> None:
    for row in published("megatron_sc21_table1"):
        model, batch = gpt_of(row), int(row["global_batch"])
        sizes = (model.layers, model.hidden, 2048, 51200, batch)
        # Korthikanti et al., eq. 7 (C1, no recomputation); eq. 8 (C2) has the core twice.
        products = 72 * model.layers * model.hidden**2 + 6 * model.hidden * 51200
        core = 12 * model.layers * model.hidden * 2048
        step = {"seq_len": 2048, "global_batch": batch}
        plain, selective, full = (
            job(
                model,
                ParallelConfig(tp=int(row["tp"])),
                **step,
                recompute=how,
                flash_attention=False,
            )
            for how in ("none", "selective", "full")
        )
        assert (
            count_model_flops(plain)
            == count_hardware_flops(plain)
            == batch * 2048 * (products + core)
        )
        assert count_hardware_flops(selective) == batch * 2048 * (products + 2 * core)
        assert count_hardware_flops(full) == compute_sc21_flops(*sizes)


def test_grouped_heads_and_gates_change_the_products_and_not_the_core() -> None:
    """h 16, queries and output 2 · 16², keys and values 2 · 16 · 8, gated MLP 3 · 16 · 64."""
    model = llama(1, 16, 4, 2, 64, 128)
    products, core, head = 2 * (512 + 256 + 3072), 4 * 16 * 16, 2 * 16 * 128
    assert count_model_flops(job(model)) == 16 * 3 * (products + core + head)


def test_a_token_pays_for_top_k_experts_the_shared_one_and_the_router() -> None:
    dense, mixed = 256 + 512, 256 + 2 * 256 + 128 + 32
    linear, core, head = 2 * (dense + mixed), 2 * 4 * 16 * 8, 2 * 8 * 512
    assert count_model_flops(job(MIXED)) == 16 * 3 * (linear + core + head)
    assert count_model_flops(job(MIXED), "C6") == 16 * (
        6 * count_active_parameters(MIXED) + 3 * core
    )
    assert count_model_flops(job(MIXED), "C4") == 16 * (6 * count_parameters(MIXED) + 3 * core)


def test_latent_attention_compares_wide_keys_and_adds_narrow_values() -> None:
    short, long = (count_model_flops(job(LITE, seq_len=seq)) for seq in (1, 2))
    per_layer = 2 * 16 * (128 + 64 + 128)
    assert long - 2 * short == 2 * 3 * 27 * per_layer


def test_one_rank_does_its_share_of_a_chunk() -> None:
    """A layer has 2 · (256 + 512) FLOPs of products a token, core 4 s h = 512, head 8192."""
    layout = ParallelConfig(tp=2, pp=2, cp=2)
    chunks = [stage.chunks[0] for stage in list_stages(job(layout=layout))]
    assert [count_chunk_flops(job(layout=layout), chunk) for chunk in chunks] == [
        ChunkFlops(8 * 2 * 1536 // 2, 8 * 2 * 512 // 2, 0),
        ChunkFlops(8 * 2 * 1536 // 2, 8 * 2 * 512 // 2, 8 * 8192 // 2),
    ]


def test_ranks_of_a_mixture_share_routed_tokens_whatever_their_experts() -> None:
    """The router (32 weights) runs on a rank's own tokens under sequence parallelism."""
    chunk = Chunk(dense_layers=0, expert_layers=1, embedding=False, head=False)
    spread = job(
        MIXED, ParallelConfig(tp=2, dp_shard=2, ep=4, sequence_parallel=True), global_batch=2
    )
    whole = job(MIXED, ParallelConfig(tp=2), global_batch=2)
    divided = 16 * 2 * (256 + 2 * 256 + 128) // 2
    assert count_chunk_flops(spread, chunk).linear == divided + 8 * 2 * 32
    assert count_chunk_flops(whole, chunk).linear == divided + 16 * 2 * 32


def test_ranks_together_do_what_the_model_needs() -> None:
    layout = ParallelConfig(tp=2, pp=2, dp_replicate=2, cp=2)
    split = job(layout=layout, global_batch=8)
    passes = [count_chunk_flops(split, stage.chunks[0]) for stage in list_stages(split)]
    forward = sum(each.linear + each.attention + each.head for each in passes)
    assert 3 * forward * split.microbatches * 2 * 2 * 2 == count_model_flops(split)


def test_utilization_is_flops_over_those_of_the_peak() -> None:
    assert compute_mfu(6e15, 2e9, 10, 1e15) == pytest.approx(0.3)
    assert compute_mfu(6e15, 2e9, 10, None) is None
    assert compute_mfu(6e15, 0, 10, 1e15) is None


def test_korthikanti_table_5_within_a_third_of_a_point() -> None:
    for row in published("korthikanti_table5_end_to_end"):
        batch, gpus = int(row["global_batch"]), int(row["gpus"])
        layout = ParallelConfig(tp=int(row["tp"]), pp=int(row["pp"]), sequence_parallel=True)
        step = {"seq_len": 2048, "global_batch": batch, "recompute": "selective"}
        step["flash_attention"] = False
        trained, took_ns = job(gpt_of(row), layout, **step), float(row["iter_s_selective_SP"]) * 1e9
        found = [
            compute_mfu(flops, took_ns, gpus, A100)
            for flops in (
                count_model_flops(trained),
                count_hardware_flops(trained),
                count_model_flops(trained, "C2"),
            )
        ]
        used, busy = float(row["mfu_pct_present"]) / 100, float(row["hfu_pct_present"]) / 100
        assert found == pytest.approx([used, busy, busy], abs=0.003)


def test_megatron_table_1_prints_the_share_and_the_sum_of_its_rates() -> None:
    for row in published("megatron_sc21_table1"):
        rate, gpus = float(row["tflops_per_gpu"]), int(row["gpus"])
        used = compute_mfu(rate * 1e12, 1e9, 1, A100)
        assert used == pytest.approx(float(row["pct_peak"]) / 100, abs=0.005)
        assert rate * gpus / 1e3 == pytest.approx(float(row["aggregate_pflops"]), rel=0.005)


def test_megatron_table_2_takes_the_days_of_equation_3() -> None:
    for row in published("megatron_sc21_table2_zero3_vs_ptd"):
        trained = job(gpt_of(row), ParallelConfig(tp=8), seq_len=2048, recompute="full")
        rate, gpus = float(row["tflops_per_gpu"]) * 1e12, int(row["gpus"])
        days = compute_training_days(300e9, count_hardware_flops(trained) / 2048, gpus, rate)
        assert days == pytest.approx(float(row["days_for_300B_tokens"]), abs=1)
        # Equation 4, 8 T P / (n X), leaves out attention.
        weights = count_parameters(trained.model)
        short = compute_training_days(300e9, 8 * weights, gpus, rate)
        assert 0.97 * days < short < 0.98 * days


def test_mt_nlg_rates_count_full_recomputation() -> None:
    for row in published("mtnlg_530b"):
        step = {"seq_len": 2048, "global_batch": 1920, "recompute": "full"}
        flops = count_hardware_flops(job(gpt_of(row), ParallelConfig(tp=8), **step))
        rate = flops / float(row["iter_s"]) / int(row["gpus"]) / 1e12
        assert round(rate) == float(row["tflops_per_gpu"])


def test_llm_foundry_utilizations_are_convention_c4() -> None:
    """Hundreds of thousands of tokens a second are printed whole: up to 0.3 % is rounding."""
    for row in published("llm_foundry_mpt_throughput"):
        layers, h, heads = MPT[row["model"]]
        model = gpt(layers, h, heads, 50368, int(row["seq"]))
        how = "full" if row["activation_ckpt"] == "True" else "none"
        one = job(model, seq_len=model.positions, framework="fsdp2", recompute=how)
        peak = H100 if row["gpu"].startswith("h100") else A100
        peak *= 2 if "fp8" in row["precision"] else 1
        step_ns = model.positions / float(row["tokens_per_s_per_gpu"]) * 1e9
        used = compute_mfu(count_model_flops(one, "C4"), step_ns, 1, peak)
        busy = compute_mfu(count_hardware_flops(one, "C4"), step_ns, 1, peak)
        assert used == pytest.approx(float(row["mfu_pct"]) / 100, rel=3e-3)
        assert busy == pytest.approx(float(row["hfu_pct"]) / 100, rel=3e-3)


def test_megatron_on_h100_prints_shares_of_989_tflops() -> None:
    for row in published("megatron_h100_weak_scaling"):
        rate = float(row["tflops_per_gpu"])
        used = compute_mfu(rate * 1e12, 1e9, 1, 989.4e12)
        assert used == pytest.approx(float(row["mfu_pct"]) / 100, abs=0.005)


def test_llama_3_405b_at_430_tflops_uses_43_percent() -> None:
    assert compute_mfu(430e12, 1e9, 1, H100) == pytest.approx(0.43, abs=0.005)
    trained = job(llama(126, 16384, 128, 8, 53248, 128256), seq_len=8192, global_batch=2048)
    in_products = count_parameters(trained.model) - 128256 * 16384 - 253 * 16384
    per_token = 6 * in_products + 12 * 126 * 16384 * 8192
    assert count_model_flops(trained) == 2048 * 8192 * per_token
