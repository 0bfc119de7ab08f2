"""GEMMs in fp32 or with unaligned rows: built by hand, and in recordings of an H200."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import GpuTrace
from support.required import shared_repro

from stepsplit.analyzer import Finding, analyze

STEPS = (1, 2, 3)
FP32 = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)"
TURING = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(Params)"
FAST = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"


def find_slow(folder: Path) -> list[Finding]:
    codes = ("fp32_gemms", "unaligned_gemms")
    return [one for one in analyze(folder).findings if one.code in codes]


def write(
    folder: Path, names: tuple[str, ...], ops: tuple[str, ...] = (), gpu: str = "Test GPU"
) -> None:
    """Two ranks with a GEMM of 80 us in each step and another of 40; names: the first of each."""
    for rank, name in enumerate(names):
        trace = GpuTrace(rank, len(names), groups=[("0", "dp", list(range(len(names))))], gpu=gpu)
        for step in STEPS:
            at = 200 * step
            trace.step(step, at, at + 200)
            for op in ops:
                trace.op(op, at, at + 5)
            trace.kernel(name, at, at + 80)
            trace.kernel(FAST, at + 80, at + 120)
            trace.all_reduce(at + 120, at + 200)
        trace.write(folder)


def test_gemms_in_fp32_would_take_an_eighth(tmp_path: Path) -> None:
    write(tmp_path, (FP32, FP32))
    (found,) = find_slow(tmp_path)
    assert (found.code, found.bucket, found.ranks) == ("fp32_gemms", "compute", ())
    assert (found.measured_ns, found.predicted_ns, found.gain_ns) == (80_000, 10_000, 70_000)
    assert found.message == (
        "GEMMs run in fp32, outside of the tensor cores: 0.08 ms of a step"
        " (cutlass_80_simt_sgemm_256x128_8x4_nn_align1); bf16 has 16 times the FLOP/s, TF32"
        " (torch.set_float32_matmul_precision) 8 times"
    )


@pytest.mark.parametrize(
    ("gpu", "saved_ns", "remedy"),
    [
        ("Tesla V100-SXM2-16GB", 70_000, "fp16 (autocast with a GradScaler) has 8 times"),
        ("Tesla T4", 70_000, "these tensor cores have neither bf16 nor TF32"),
        ("NVIDIA GeForce RTX 2080 Ti", 60_000, "fp16 (autocast with a GradScaler) has 4 times"),
        ("NVIDIA A40", 40_000, "bf16 has 4 times the FLOP/s, TF32 (torch.set_float32_matmul"),
        ("NVIDIA RTX 5000 Ada Generation", 40_000, "bf16 has 4 times the FLOP/s, TF32 (torch"),
        ("NVIDIA GeForce RTX 4090", 40_000, "bf16 has 2 times the FLOP/s, TF32 no more than fp32"),
        ("NVIDIA L40", 40_000, "bf16 has 2 times the FLOP/s, TF32 no more than fp32"),
        ("NVIDIA H20", 32_000, "bf16 has 3.4 times the FLOP/s, TF32"),
        ("NVIDIA A100-SXM4-80GB", 70_000, "bf16 has 16 times the FLOP/s, TF32"),
        ("NVIDIA H100 80GB HBM3", 70_000, "bf16 has 16 times the FLOP/s, TF32"),
    ],
)
def test_what_helps_depends_on_the_generation(
    tmp_path: Path, gpu: str, saved_ns: int, remedy: str
) -> None:
    write(tmp_path, ("volta_sgemm_128x64_nt",) * 2, gpu=gpu)
    (found,) = find_slow(tmp_path)
    assert (found.code, found.gain_ns) == ("fp32_gemms", saved_ns)
    assert remedy in found.message


@pytest.mark.parametrize(
    "gpu", ["Tesla P100-PCIE-16GB", "Tesla K80", "NVIDIA GeForce GTX 1660 Ti", "Quadro P4000"]
)
def test_without_tensor_cores_nothing_is_faster(tmp_path: Path, gpu: str) -> None:
    write(tmp_path, ("maxwell_sgemm_128x64_nt",) * 2, gpu=gpu)
    assert find_slow(tmp_path) == []


def test_a_v100_has_tensor_cores_for_fp16_alone() -> None:
    (found,) = find_slow(shared_repro("wild2") / "tensor_core_advice_on_old_gpus" / "v100")
    assert found.message.endswith(
        "(volta_sgemm_128x64_nt); fp16 (autocast with a GradScaler) has 8 times the FLOP/s; these"
        " tensor cores have neither bf16 nor TF32"
    )


def test_rows_that_are_not_aligned_would_take_half(tmp_path: Path) -> None:
    write(tmp_path, (TURING, TURING))
    (found,) = find_slow(tmp_path)
    assert (found.code, found.measured_ns, found.gain_ns) == ("unaligned_gemms", 80_000, 40_000)
    assert "pad that size to a multiple of 8" in found.message


def test_experts_under_autocast_are_named(tmp_path: Path) -> None:
    write(tmp_path, (FP32, FP32), ops=("aten::_grouped_mm",))
    (found,) = find_slow(tmp_path)
    assert found.message.endswith("grouped_mm, which experts call: load the model in bf16")


@pytest.mark.parametrize(
    "name", [FAST, "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", "cutlass_80_tensorop_f16_align8"]
)
def test_fast_kernels_are_not_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, (name, name))
    assert find_slow(tmp_path) == []
