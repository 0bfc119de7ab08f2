"""Kernel families, slow ranks, and slowdown by communication."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.builders import CpuTrace, GpuTrace
from support.required import shared_trace
from support.splitting import recording_of, split_of

from stepsplit.analyzer import (
    Category,
    ContentionRow,
    Events,
    KernelFamily,
    Lane,
    RankTrace,
    Report,
    analyze,
)
from stepsplit.analyzer.diagnose.slow_kernels import SlowRank, compare_kernel_times, sum_slow_ranks
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, EventClassifier
from stepsplit.analyzer.split.kernel_shapes import find_dtype
from stepsplit.analyzer.split.kernels import KernelSums, KernelWork
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import build_calls

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
TRIMMED = (
    "cpu_only__rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "cupti_profiler__benchmark_result_924719_1679055439_trace.json.gz",
    "distributed_info_unavailable__distributed_info_not_found.json.gz",
    "rank_unavailable__rank_not_found.json.gz",
)
"""Traces without kernels: of their ops record_param_comms has no family."""
PAIR = [("0", "", [0, 1])]
FAMILIES = ("analyzer/parts", "analyzer/readers/kernel_rules.py", "analyzer/readers/rules.toml")
"""What gives kernels their families."""


def analyzed(folder: Path, *traces: GpuTrace | CpuTrace) -> Report:
    return analyze(*(trace.write(folder) for trace in traces))


def test_kernels_of_full_steps_are_counted_by_family_without_communication(
    tmp_path: Path,
) -> None:
    trace = GpuTrace(0, 2, groups=PAIR).kernel("early_gemm", 0, 12).step(1, 10, 20)
    trace.kernel("ampere_sgemm_128x64_nn", 12, 20).step(2, 20, 60)
    trace.kernel("ampere_sgemm_128x64_nn", 20, 30).kernel(ADD, 30, 34)
    trace.all_reduce(34, 40).kernel("nvjet_tst_128x64", 40, 60)
    assert analyzed(tmp_path, trace).kernels == (
        KernelFamily(0, "gemm", 2, 30_000, 30 / 34),
        KernelFamily(0, "elementwise", 1, 4_000, 4 / 34),
    )


def test_an_op_of_a_cpu_run_counts_without_its_nested_ops(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100)
    trace.op("aten::linear", 0, 50).op("aten::t", 5, 10).op("aten::addmm", 10, 40)
    trace.op("aten::copy_", 12, 14).op("aten::add_", 60, 70)
    assert analyzed(tmp_path, trace).kernels == (
        KernelFamily(0, "gemm", 2, 43_000, 43 / 60),
        KernelFamily(0, "elementwise", 1, 10_000, 10 / 60),
        KernelFamily(0, "memory", 2, 7_000, 7 / 60),
    )


def test_a_kernel_without_a_rule_is_other(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 10).kernel("frobnicate_v2", 0, 10)
    assert analyzed(tmp_path, trace).kernels == (KernelFamily(0, "other", 1, 10_000, 1.0),)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gemm", ["Cijk_Alik_Bljk_BBS_BH_MT256x192x64", "nvjet_hsh_128x64", "gemvNSP_kernel<float>",
                  "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "aten::addmm",
                  "void cublasLt::splitKreduce_kernel<32, 16, int, float>", "triton_tem_fused_mm_3",
                  "deep_gemm::sm90_fp8_gemm_1d2d_impl", "MmBackward0"]),
        ("attention", ["void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "attn_fwd",
                       "cutlass::device_kernel<flash::FlashAttnFwdSm90>", "fmha_cutlassF_f16",
                       "ck_tile::kentry<ck_tile::FmhaFwdKernel>", "triton_tem_fused_flex_attention",
                       "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "rotary_kernel"]),
        ("normalization", ["void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", "cuApplyLayerNorm",
                           "void vllm::rms_norm_kernel<c10::Half>", "aten::native_layer_norm",
                           "transformer_engine::normalization::ln_fwd_tuned_kernel"]),
        ("convolution", ["igemm_fwd_gtcx3_nhwc_bf16", "volta_scudnn_winograd_128x128_ldg1",
                         "void wgrad_alg0_engine<float, 128>", "aten::cudnn_convolution"]),
        ("optimizer", ["void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
                       "aten::_fused_adamw_", "aten::_foreach_add_"]),
        ("embedding", ["void at::native::(anonymous namespace)::indexSelectLargeIndex<float>",
                       "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel"]),
        ("memory", ["void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>",
                    "void at::native::elementwise_kernel<128, 2, direct_copy_kernel_cuda>",
                    "batched_transpose_32x32_half", "aten::as_strided"]),
        ("moe", ["fused_moe_kernel", "vllm::moe::topkGatingSoftmax", "_permute_kernel"]),
        ("quantize", ["void vllm::scaled_fp8_quant_kernel", "cast_transpose_fused_kernel"]),
        ("softmax", ["void cunn_SoftMaxForward<4>", "nll_loss_forward_reduce_cuda_kernel_2d"]),
        ("random", ["void at::native::fused_dropout_kernel_vec<float>", "aten::bernoulli_"]),
        ("sort", ["void cub::DeviceRadixSortOnesweepKernel", "at::native::sbtopk::gatherTopK"]),
        ("reduce", ["void at::native::reduce_kernel<512, 1, sum_functor>", "aten::sum",
                    "void cub::DeviceReduceKernel<Policy>"]),
        ("elementwise", [ADD, "aten::mul_", "void at::native::masked_fill_kernel", "MulBackward0",
                         "void at::native::vectorized_elementwise_kernel<4, launch_clamp_scalar"
                         "(at::TensorIteratorBase&)::{lambda()#1}>"]),
        ("fused", ["triton_red_fused_native_layer_norm_2", "triton_poi_fused_add_cos_sin_0"]),
        ("pooling", ["void at::native::max_pool_forward_nchw<float, float>"]),
    ],
)  # fmt: skip
def test_kernel_names_map_to_the_intended_family(
    family: str, names: list[str], tmp_path: Path
) -> None:
    trace = GpuTrace().step(1, 0, 10 * len(names))
    for i, name in enumerate(names):
        trace.kernel(name, 10 * i, 10 * i + 10)
    found = analyzed(tmp_path, trace).kernels
    assert [(row.family, row.count) for row in found] == [(family, len(names))]


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("kineto_hta", marks=(pytest.mark.slow, pytest.mark.in_turn(*FAMILIES))),
        "kineto_tracelens",
        "kineto_pytorch_samples",
        "kineto_megatron_tp2_v100",
    ],
)
def test_nearly_all_compute_of_real_traces_has_a_family(folder: str) -> None:
    for file in sorted(shared_trace(folder).glob("*.json.gz")):
        if file.name in TRIMMED:
            continue
        other = sum(row.share for row in analyze(file).kernels if row.family == "other")
        assert other < 0.03, f"{file.name}: {other:.1%}"


def ran(rank: int, took: Sequence[Sequence[int]], kernel: str = "gemm") -> GpuTrace:
    """A rank whose steps consist of runs of one kernel, of so many microseconds each."""
    trace, at = GpuTrace(rank, 8), 0.0
    for number, durations in enumerate(took):
        begin = at
        for us in durations:
            trace.kernel(kernel, at, at + us)
            at += us
        trace.step(number, begin, at)
    return trace


def test_a_rank_with_slow_kernels_is_reported_with_its_loss_per_step(
    tmp_path: Path,
) -> None:
    usual, slower = [[100, 200] * 6] * 2, [[120, 240] * 6] * 2
    traces = [ran(rank, slower if rank == 2 else usual) for rank in range(4)]
    [row] = found = analyzed(tmp_path, *traces).slow_kernels
    assert (row.rank, row.kernel, row.family, row.count) == (2, "gemm", "gemm", 24)
    assert row.ratio == pytest.approx(1.2)
    assert row.lost_ns == pytest.approx(0.2 * 6 * 300_000)
    [summed] = sum_slow_ranks(found)
    assert summed == SlowRank(2, "gemm", pytest.approx(1.2), row.lost_ns, 1, "gemm", "")


def test_of_two_ranks_the_faster_is_the_reference(tmp_path: Path) -> None:
    found = analyzed(tmp_path, ran(0, [[100] * 12] * 2), ran(1, [[150] * 12] * 2))
    assert [(row.rank, round(row.ratio, 3)) for row in found.slow_kernels] == [(1, 1.5)]


def test_ranks_that_ran_a_kernel_unequally_often_are_not_compared(tmp_path: Path) -> None:
    found = analyzed(tmp_path, ran(0, [[100] * 12] * 2), ran(1, [[150] * 12, [150] * 13]))
    assert found.slow_kernels == ()


@pytest.mark.parametrize("more_on", [0, 1])
def test_a_step_in_which_one_rank_ran_a_kernel_more_often_is_left_out(
    tmp_path: Path, more_on: int
) -> None:
    steps = [[100] * 12] * 3
    more = [[100] * 12, [100] * 12, [100] * 13]
    fast, slow = (more, steps) if more_on == 0 else (steps, more)
    traces = ran(0, fast), ran(1, [[3 * us // 2 for us in step] for step in slow])
    [row] = analyzed(tmp_path, *traces).slow_kernels
    assert (row.rank, row.ratio) == (1, pytest.approx(1.5))


def test_two_stages_may_run_a_kernel_unequally_often_in_a_step(tmp_path: Path) -> None:
    steps, more = [[100] * 12] * 3, [[100] * 12, [100] * 12, [100] * 13]
    traces = [ran(rank, steps if rank < 3 else more) for rank in range(5)]
    traces.append(ran(5, [[150] * len(step) for step in more]))
    ranks = split_of(recording_of(*(trace.write(tmp_path) for trace in traces))).ranks
    [row] = compare_kernel_times([one.kernels for one in ranks], [0, 0, 0, 1, 1, 1])
    assert (row.rank, row.count, row.ratio) == (5, 37, pytest.approx(1.5))


def test_too_few_runs_give_no_result(tmp_path: Path) -> None:
    found = analyzed(tmp_path, ran(0, [[100] * 5] * 2), ran(1, [[150] * 5] * 2))
    assert found.slow_kernels == ()


def noisy(rank: int, seed: int, factor: float = 1.0, larger: int = 0, slow: int = 7) -> RankTrace:
    """40 kernels that run 40 times each, with 2 % of noise; one takes factor times as long.
    Every second run, beginning with the run `larger`, has three times the work."""
    rng = np.random.default_rng([seed, rank])
    name = np.tile(np.repeat(np.arange(40, dtype=np.int32), 10), 4)
    work = np.where(np.arange(len(name)) % 2 == larger, 3, 1)
    took = work * (50_000 + 7_000 * name) * np.exp(rng.normal(0, 0.02, len(name)))
    took = (np.where(name == slow, factor, 1.0) * took).astype(np.int64)
    events = Events(
        start_ns=np.cumsum(took) - took,
        dur_ns=took,
        category=np.full(len(name), Category.KERNEL, dtype=np.uint8),
        name_id=name,
        lane=np.zeros(len(name), dtype=np.int32),
        correlation=np.full(len(name), -1, dtype=np.int64),
        names=tuple(f"kernel_{i}" for i in range(40)),
        lanes=(Lane("1", "7", 0, 7),),
    )
    kinds = EventClassifier(BUILT_IN).classify(events, calls := build_calls([]))
    return RankTrace(Path("x"), rank, 8, "", "", "", 0, events, calls, (), kinds)


def slow_of_noisy(
    traces: Sequence[RankTrace], stages: Sequence[int] | None = None, late_ns: Sequence[int] = ()
) -> list[tuple[int, str]]:
    """The slow kernels of these ranks; late_ns: how much later the steps of each rank begin and
    end than a kernel."""
    sums = []
    for trace, late in zip(traces, late_ns or [0] * len(traces), strict=True):
        edges = [*trace.events.start_ns[::400].tolist(), int(trace.events.end_ns[-1])]
        edges = [edge + late for edge in edges]
        windows = [StepWindow(i, "full", *edge) for i, edge in enumerate(pairwise(edges))]
        sums.append(KernelSums.collect(trace, Steps(tuple(windows), ())))
    found = compare_kernel_times(sums, stages or [0] * len(traces))
    return [(row.rank, row.kernel) for row in found]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_balanced_ranks_with_noisy_kernels_give_no_false_positives(ranks: int) -> None:
    for seed in range(10):
        assert slow_of_noisy([noisy(rank, seed) for rank in range(ranks)]) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_kernel_slower_by_a_fifth_exceeds_the_noise(ranks: int) -> None:
    for seed in range(10):
        traces = [noisy(rank, seed, 1.2 if rank == 1 else 1.0) for rank in range(ranks)]
        assert slow_of_noisy(traces) == [(1, "kernel_7")]


def test_a_step_that_begins_a_nanosecond_after_its_first_kernel_still_has_it() -> None:
    traces = [noisy(rank, 0, 1.2 if rank == 1 else 1.0, slow=0) for rank in range(4)]
    assert slow_of_noisy(traces, late_ns=[0, 1, -1, 1]) == [(1, "kernel_0")]


def test_ranks_are_compared_within_their_stage() -> None:
    """The first run of stage 0 is as large as the second one of stage 1, as in 1F1B."""
    for seed in range(5):
        traces = [noisy(rank, seed, 1.2 if rank == 4 else 1.0, rank // 3) for rank in range(6)]
        assert slow_of_noisy(traces, [0, 0, 0, 1, 1, 1]) == [(4, "kernel_7")]


def slowed(folder: Path, steps: Sequence[Sequence[int]], came: float = 0) -> list[ContentionRow]:
    """What rank 0 loses under communication. Its steps are gemms of so many microseconds each.

    A sum that moves data for 5 us runs before the gemms, in the second step for as long as they do.
    With came, rank 1 joins that one only so many microseconds after rank 0 began it."""
    one, other = (GpuTrace(rank, 2, groups=PAIR) for rank in (0, 1))
    at = 0.0
    for number, durations in enumerate(steps):
        begin, end = at + 10, at + 10 + sum(durations)
        sums = (begin, end) if number == 1 else (at, at + 5)
        joined = sums[0] + came if number == 1 else sums[0]
        one.step(number, at, end).all_reduce(*sums, launched=at)
        other.step(number, at, end).all_reduce(joined, sums[1], launched=at)
        at = begin
        for us in durations:
            one.kernel("gemm", at, at + us)
            at += us
        other.kernel("gemm", at - 1, at)
    return [row for row in analyzed(folder, one, other).contention if row.rank == 0]


def test_a_kernel_under_a_transfer_is_compared_with_itself_in_other_steps(
    tmp_path: Path,
) -> None:
    """Ten kernels; in the second step data moves during all of them and they take 30 % longer."""
    alone, under = [*range(100, 200, 10)], [*range(130, 260, 13)]
    assert slowed(tmp_path, [alone, under, alone]) == [
        ContentionRow(0, ratio=1.3, kernels=10, lost_ns=435_000)
    ]


def test_kernels_of_one_name_and_different_shapes_are_not_compared(
    tmp_path: Path,
) -> None:
    """The large ones always run under communication, the small ones never."""
    trace, at = GpuTrace(0, 1, groups=[("0", "", [0])]), 0.0
    for number in range(2):
        trace.step(number, at, at + 4000).all_reduce(at + 1000, at + 4000, launched=at)
        for us in [100] * 10 + [300] * 10:
            trace.kernel("gemm", at, at + us)
            at += us
    assert analyzed(tmp_path, trace).contention == ()


def test_steps_that_run_a_kernel_more_often_are_not_compared(tmp_path: Path) -> None:
    assert slowed(tmp_path, [[100] * 10, [130] * 11, [100] * 10]) == []


def test_waiting_communication_slows_no_kernel(tmp_path: Path) -> None:
    steps = [[100] * 10, [130] * 10, [100] * 10]
    assert len(slowed(tmp_path, steps)) == 1
    assert slowed(tmp_path, steps, came=1299) == []


def test_too_few_comparable_kernels_give_no_result(tmp_path: Path) -> None:
    assert slowed(tmp_path, [[100] * 9, [130] * 9, [100] * 9]) == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "bf16"),
        ("nvjet_hsh_192x192_64x3_1x2_h_bz_coopB_NNT", "fp16"),
        ("nvjet_qqtst_128x128_128x6_2x1_v_bz_TNN", "fp8"),
        ("nvjet_sm100_tst_mma_128x256x64_2_64x64x64_cga1x2x1_2x1_bz_TNN", "bf16"),
        ("nvjet_sss_64x64_32x8_v_bz_TNN", "tf32"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "bf16"),
        ("ampere_sgemm_128x64_tn", "fp32"),
    ],
)
def test_the_name_of_a_gemm_has_its_dtype(name: str, dtype: str) -> None:
    assert find_dtype(KernelWork(name, None)) == dtype
