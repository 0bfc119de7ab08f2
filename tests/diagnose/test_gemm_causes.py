"""GEMMs in fp32 or with unaligned rows: built by hand, and in recordings of an H200."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import Finding, analyze

STEPS = (1, 2, 3)
FP32 = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)"
TURING = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(Params)"
FAST = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"


def find_slow(folder: Path) -> list[Finding]:
    codes = ("fp32_gemms", "unaligned_gemms")
    return [one for one in analyze(folder).findings if one.code in codes]


def write(folder: Path, names: tuple[str, ...], ops: tuple[str, ...] = ()) -> None:
    """Two ranks with a GEMM of 80 us in each step and another of 40; names: the first of each."""
    for rank, name in enumerate(names):
        trace = GpuTrace(rank, len(names), groups=[("0", "dp", list(range(len(names))))])
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
