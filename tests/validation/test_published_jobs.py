"""Published rows as jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import ParallelConfig, TrainingConfig
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.validation.published_runs import (
    build_ccl_bench,
    build_gpt,
    build_korthikanti,
    build_llm_foundry,
    build_megascale,
    build_sc21_table1,
    build_sc21_table2,
    build_simumax,
    build_torchtitan,
    build_zero_bubble,
)
from stepsplit.analyzer.validation.tables import Published, PublishedRow, build_recipe


def published(table: str, name: str) -> PublishedRow:
    (found,) = [row for row in Published().read_records(table) if row.id == name]
    return found


def test_sc21_recomputes_all_layers_of_a_gpt_on_eight_gpus_a_node() -> None:
    (case,) = build_sc21_table1(published("megatron_sc21_table1", "sc21-t1/145.6B"))
    assert case.job.model == build_gpt(80, 12288, 96, 51200, 2048)
    assert case.job.parallel == ParallelConfig(
        tp=8, pp=8, dp_replicate=24, schedule="interleaved", chunks=2, scatter_gather=True
    )
    assert case.job.training == TrainingConfig(
        seq_len=2048, micro_batch=2, global_batch=2304, dtype="fp16", recompute="full",
        gradient_dtype="fp16", activation_dtype="fp16", flash_attention=False, dropout=True,
        fused_loss=False,
    )  # fmt: skip
    hardware = case.job.hardware
    assert (hardware.name, hardware.inter.name, hardware.gpus_per_node) == (
        "a100-sxm-80gb", "ib-hdr-200", 8,
    )  # fmt: skip
    assert round(case.step_ns / 1e6) == 24_817


def test_zero_3_shards_over_all_gpus_and_its_time_is_in_doubt() -> None:
    table = "megatron_sc21_table2_zero3_vs_ptd"
    (case,) = build_sc21_table2(published(table, "sc21-t2/ZeRO-3_174.6B_384"))
    assert (case.family, case.job.parallel.shard_size) == ("A100 ZeRO-3", 384)
    found = predict(case.job)
    assert (found.confidence, found.notes) == (
        "low",
        (
            "ZeRO-3 over 384 ranks: known up to 128",
            "DeepSpeed of 2021 is timed as deepspeed, whose runs set the efficiencies",
        ),
    )


def changed(table: str, name: str, **values: str) -> PublishedRow:
    """A published row with other values."""
    row = published(table, name)
    return replace(row, values={**row.values, **values})


def test_a_row_says_on_which_gpu_it_ran() -> None:
    table, name = "megatron_sc21_table1", "sc21-t1/1.7B"
    (case,) = build_sc21_table1(changed(table, name, gpu="V100-SXM-32GB"))
    assert case.job.hardware.name == "v100-sxm-32gb"
    with pytest.raises(DataError, match=r"gpu of sc21-t1/1\.7B is 'MI250X'"):
        build_sc21_table1(changed(table, name, gpu="MI250X"))
    table, name = (
        "torchtitan_throughput_memory",
        "torchtitan/llama3.1-8B_8192_8_FSDP_ckpt-selective",
    )
    assert build_torchtitan(published(table, name)).job.hardware.clock < 0.9
    h200 = build_torchtitan(changed(table, name, gpu="H200-SXM", model="llama2-13B"))
    assert (h200.job.hardware.name, h200.job.model.name) == ("h200-sxm", "llama-2-13b")


RECIPE = (
    "recipe/NeMo / Megatron-Core, DGX Cloud recipe v25.02.02_pretraining_Nemotron-4 340B"
    "_H100-SXM 80GB_128_fp8 per-tensor_32_1"
)


def test_a_recipe_overlaps_interleaves_and_shards_optimizer_states() -> None:
    """Nemotron-4 340B: 96 layers over 8 stages of 12 chunks."""
    case = build_recipe(published("training_runs", RECIPE))
    assert (case.family, case.source) == ("H100 recipes, fp8", "dgx-cloud")
    assert case.job.parallel == ParallelConfig(
        tp=8, pp=8, dp_replicate=2, sequence_parallel=True, zero=1, chunks=12,
        schedule="interleaved", overlap=frozenset({"dp", "tp"}),
    )  # fmt: skip
    assert (case.job.training.dtype, case.job.training.attention_kernel) == ("fp8", "")


def test_the_ends_of_a_recipe_have_a_layer_less() -> None:
    """Llama 3.1 405B: 126 layers over 64 chunks of 2, but for the first and the last."""
    (row,) = [
        one
        for one in Published().read_records("training_runs")
        if one.id.endswith("405B_H100-SXM 80GB_512_bf16_256_1") and "v25.05" in one.id
    ]
    assert build_recipe(row).job.parallel.layers_per_stage == (1, *[2] * 62, 1)


@pytest.mark.parametrize(
    ("release", "gpu", "ran"),
    [
        ("26.06 NeMo", "DGX-GB200", ("hybridep", "step", "cudnn-fp8", True)),
        ("26.02.01 NeMo", "DGX-B200", ("hybridep", "layers", "", False)),
        ("26.02 NeMo", "DGX-B200", ("all-to-all", "layers", "", False)),
        ("26.04 NeMo", "DGX-H100", ("hybridep", "none", "", False)),
    ],
)
def test_each_release_runs_experts_with_its_own_settings(
    release: str, gpu: str, ran: tuple[object, ...]
) -> None:
    """Qwen3-30B in Megatron-Bridge: dispatcher, CUDA graphs, attention and overlap."""
    rows = Published().read_records("megatron_bridge_performance")
    row = next(
        one
        for one in rows
        if (one.read_text("release"), one.read_text("system")) == (f"{release} Container", gpu)
        and one.read_text("model").startswith("Qwen3_30B")
    )
    job = build_recipe(row).job
    layout, training = job.parallel, job.training
    assert ran == (
        layout.dispatcher, training.cuda_graph, training.attention_kernel, "ep" in layout.overlap,
    )  # fmt: skip
    assert training.gradient_dtype == "bf16"


def test_grok_splits_its_experts_as_the_scripts_of_the_release_say() -> None:
    """v25.02 over all tp ranks; v25.05 on GB200 as well, on H100 not. SFT packs documents."""
    found = {}
    for row in Published().read_records("training_runs"):
        if row.read_text("model").startswith("Grok-1"):
            release = row.read_text("framework").rpartition(" ")[2]
            found[release, row.read_text("gpu")[:5]] = build_recipe(row).job.parallel.expert_tp
    assert found == {
        ("v25.02.02", "H100-"): 4,
        ("v25.05.05", "H100-"): 1,
        ("v25.05.05", "GB200"): 4,
    }
    (sft,) = [
        row
        for row in Published().read_records("training_runs")
        if row.read_text("model") == "Llama 3 8B SFT" and "_8_bf16" in row.id
    ]
    assert build_recipe(sft).job.training.document_tokens == 200


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model": "Mamba 3"}, "no preset of Mamba 3"),
        ({"gpu": "TPU v7"}, "no preset of TPU v7"),
        ({"gpus": "100"}, "does not divide 100 GPUs"),
        ({"precision": "MXFP6"}, "mxfp6 is not modelled"),
        ({"recompute": "mlp, gate"}, "recomputation of mlp, gate is not modelled"),
        ({"global_batch": ""}, "no global_batch"),
        ({"framework": "NeMo AutoModel main"}, "which kernels NeMo AutoModel ran"),
    ],
)
def test_a_recipe_that_has_no_model_is_refused(values: dict[str, str], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        build_recipe(changed("training_runs", RECIPE, **values))


@pytest.mark.parametrize(
    ("printed", "preset"),
    [
        ("LLAMA3.1-405B", "llama-3.1-405b"),
        ("Llama 3 8B long context", "llama-3-8b"),
        ("Qwen3_235B_a22B", "qwen3-235b-a22b"),
        ("DeepSeekV3", "deepseek-v3"),
        ("Nemotron-4 15B", "nemotron-4-15b"),
    ],
)
def test_publishers_spell_the_name_of_a_preset_in_many_ways(printed: str, preset: str) -> None:
    recipe = changed("training_runs", RECIPE, model=printed)
    assert build_recipe(recipe).job.model.name == preset


def test_korthikanti_ran_each_model_twice() -> None:
    full, selective = build_korthikanti(
        published("korthikanti_table5_end_to_end", "korthikanti-t5/530B")
    )
    assert [case.id for case in (full, selective)] == [
        "korthikanti-t5/530B_full",
        "korthikanti-t5/530B_selective",
    ]
    assert (full.step_ns, selective.step_ns) == (49.05e9, 37.83e9)
    assert (full.job.training.recompute, selective.job.training.recompute) == ("full", "selective")
    assert (full.job.parallel.sequence_parallel, selective.job.parallel.sequence_parallel) == (
        False,
        True,
    )


def test_a_missing_time_is_computed_from_the_utilization() -> None:
    (case,) = build_megascale(published("megascale_table2", "megascale/530B_Megatron-LM_2240_2240"))
    assert case.job.parallel.world_size == 2240
    assert round(case.step_ns / 1e9, 1) == 43.1


def test_b200_runs_keep_the_shape_of_the_table() -> None:
    name = "simumax/llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef"
    case = build_simumax(published("simumax_b200_measured", name))
    assert case.job.parallel == ParallelConfig(
        tp=2, cp=4, sequence_parallel=True, zero=1, context_kind="ulysses"
    )
    assert case.job.training == TrainingConfig(seq_len=32768, micro_batch=1, global_batch=4)
    assert (case.family, case.job.microbatches, case.step_ns) == ("B200 dense", 4, 1758.0e6)


def test_mixtures_keep_their_first_layer_dense() -> None:
    name = "simumax/deepseekv2_tp1_ep8_pp1_dp8_l4_mbc4_cef"
    case = build_simumax(published("simumax_b200_measured", name))
    assert case.family == "B200 experts"
    assert (case.job.model.layers, case.job.model.expert_layers) == (4, 3)


def test_llm_foundry_shards_over_all_gpus_and_learns_a_position_a_token() -> None:
    name = "llm-foundry/1b_2048_512xh100_80gb_amp_bf16_12x1_SHARD_GRAD_OP_ckpt-False"
    case = build_llm_foundry(published("llm_foundry_mpt_throughput", name))
    assert case.job.model.positions == 2048
    assert case.job.parallel == ParallelConfig(
        dp_shard=512, zero=3, overlap=frozenset({"dp"}), reshard_after_forward="never"
    )
    assert case.job.training == TrainingConfig(
        seq_len=2048, micro_batch=12, global_batch=6144, framework="fsdp2",
        attention_kernel="triton-2023",
    )  # fmt: skip
    assert round(case.step_ns / 1e6) == 617


def test_the_ends_of_a_zero_bubble_pipeline_have_a_layer_fewer() -> None:
    table = "zero_bubble_table4_throughput_memory"
    job = build_zero_bubble(published(table, "zb-t4/1.5B_m24_ZB-2p"))
    assert job.parallel == ParallelConfig(
        pp=8, schedule="zb-h2", layers_per_stage=(2, 3, 3, 3, 3, 3, 3, 2)
    )
    assert (job.microbatches, job.parallel.world_size) == (24, 8)


def test_a_short_trace_names_the_batch_of_a_rank() -> None:
    job = build_ccl_bench(
        published(
            "ccl_bench_training_traces",
            "ccl-bench/llama3-torchtitan-nccl-4gpu-fsdp_2-tp_2-b_4-s_512",
        )
    )
    assert (job.training.global_batch, job.training.micro_batch, job.microbatches) == (8, 4, 1)
    assert (job.parallel.zero, job.parallel.reshard_after_forward) == (3, "always")


def test_torchtitan_names_its_sizes_in_the_config() -> None:
    name = (
        "torchtitan/llama3.1-405B_65536_512_FSDP4 CP2 TP8 PP8 1F1B compile float8 asyncTP_ckpt-full"
    )
    case = build_torchtitan(published("torchtitan_throughput_memory", name))
    assert case.job.parallel == ParallelConfig(
        tp=8, pp=8, cp=2, dp_shard=4, zero=3, sequence_parallel=True,
        overlap=frozenset({"dp", "tp"}),
    )  # fmt: skip
    assert case.job.training == TrainingConfig(
        seq_len=65536, micro_batch=1, global_batch=32, dtype="fp8", recompute="full",
        framework="fsdp2", fused_loss=False, compile=True, attention_kernel="flash-2",
        early_stop=True,
    )  # fmt: skip
    assert round(case.step_ns / 1e9, 1) == 87.1
