"""The kernel table: work by shapes, and how far a kernel is from its device's limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import analyze
from stepsplit.analyzer.parts.kernel_table import KernelRow
from stepsplit.analyzer.parts.kernel_work import CallWork, estimate_work
from stepsplit.analyzer.split.kernels import KernelWork

H100 = "NVIDIA H100 80GB HBM3"


def launch_op(
    trace: GpuTrace,
    op: str,
    kernel: str,
    at: float,
    ran: tuple[float, float],
    dims: list[list[int]],
) -> None:
    shapes = {"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)}
    trace.op(op, at, at + 3, **shapes)
    trace.launch(kernel, (at + 1, at + 2), ran)


def test_a_kernel_is_compared_with_the_limit_of_its_device(tmp_path: Path) -> None:
    trace = GpuTrace(gpu=H100).step(1, 0, 400).step(2, 400, 800)
    for start in (0, 400):
        # 2 x 4096^3 FLOPs in 278 us are half of 989.4 TFLOP/s.
        mm = [[4096, 4096], [4096, 4096]]
        launch_op(trace, "aten::mm", "nvjet_tst_gemm", start, (start + 5, start + 283), mm)
        # 3 x 67 MB in 117 us: 1.72 TB/s of 3.35.
        add = [[8192, 4096], [8192, 4096]]
        kernel = "at::native::vectorized_elementwise_kernel"
        launch_op(trace, "aten::add", kernel, start + 10, (start + 283, start + 400), add)
    trace.write(tmp_path)
    report = analyze(tmp_path)
    gemm, add_row = report.kernel_table
    assert (gemm.family, gemm.dtype, gemm.shapes) == (
        "gemm",
        "bf16",
        "[[4096, 4096], [4096, 4096]] bf16",
    )
    assert (gemm.calls, gemm.step_ns, gemm.flops) == (2, 278_000, 2 * 4096**3)
    assert gemm.peak_share == pytest.approx(0.4997, abs=1e-4)
    assert gemm.reachable_ns is not None and gemm.saves_ns is not None
    assert gemm.saves_ns == 278_000 - gemm.reachable_ns
    assert (add_row.limit, add_row.bytes) == ("memory", 3 * 8192 * 4096 * 2)
    assert add_row.peak_share == pytest.approx(0.5136, abs=1e-4)
    assert gemm.share + add_row.share == pytest.approx(1)


def test_a_rate_above_what_the_device_can_do_is_no_rate(tmp_path: Path) -> None:
    """Of views a part is read: 3 x 67 MB in 50 us would be 4.0 TB/s of 3.35."""
    trace = GpuTrace(gpu=H100).step(1, 0, 100)
    views = [[8192, 4096], [8192, 4096]]
    launch_op(trace, "aten::add", "at::native::vectorized_elementwise_kernel", 0, (5, 55), views)
    trace.write(tmp_path)
    (row,) = analyze(tmp_path).kernel_table
    assert (row.step_ns, row.limit, row.bytes, row.peak_share) == (50_000, "", None, None)


def test_a_kernel_without_shapes_has_a_time_and_no_rate(tmp_path: Path) -> None:
    GpuTrace(gpu=H100).step(1, 0, 100).kernel("my_kernel", 0, 100).write(tmp_path)
    (row,) = analyze(tmp_path).kernel_table
    assert (row.step_ns, row.share, row.limit) == (100_000, 1.0, "")
    assert (row.flops, row.peak_share, row.saves_ns) == (None, None, None)


def test_the_rows_add_up_to_the_kernels_of_all_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = GpuTrace(rank=rank, world_size=2, groups=[("0", "", (0, 1))]).step(1, 0, 100)
        trace.kernel("gemm", 0, 40 + 10 * rank).kernel("add", 60, 70).all_reduce(70, 100).write(
            tmp_path
        )
    report = analyze(tmp_path)
    rows = {row.name: row for row in report.kernel_table}
    assert sum(row.total_ns for row in rows.values()) == sum(row.total_ns for row in report.kernels)
    gemm: KernelRow = rows["gemm"]
    assert (gemm.ranks, gemm.slowest_rank, gemm.calls, gemm.step_ns) == (2, 1, 2, 45_000)


def test_an_op_on_tensors_of_all_ranks_leaves_the_product_to_the_one_that_it_runs(
    tmp_path: Path,
) -> None:
    trace = CpuTrace().step(1, 0, 100)
    trace.op("aten::mm", 0, 100, **{"Input Dims": [[8, 4], [4, 16]]})
    trace.op("aten::mm", 20, 90, **{"Input Dims": [[8, 4], [4, 8]]})
    trace.write(tmp_path)
    rows = {row.shapes: (row.flops, row.total_ns) for row in analyze(tmp_path).kernel_table}
    assert rows == {None: (None, 30_000), "[[8, 4], [4, 8]]": (2 * 8 * 4 * 8, 70_000)}


@pytest.mark.parametrize(
    ("name", "family", "shapes", "work"),
    [
        # Causal attention of 2 x 4 heads of 64: 2 b h t^2 d FLOPs.
        ("flash_fwd", "attention", "[[2, 4, 128, 64], [2, 4, 128, 64], [2, 4, 128, 64]] bf16",
         CallWork(2 * 2 * 4 * 128 * 128 * 64, 2 * 4 * 2 * 4 * 128 * 64, "compute")),
        # The backward has five products for two.
        ("flash_bwd", "attention", "[[2, 4, 128, 64], [2, 4, 128, 64], [2, 4, 128, 64]] bf16",
         CallWork(5 * 2 * 4 * 128 * 128 * 64, 2 * 8 * 2 * 4 * 128 * 64, "compute")),
        # 1,000 tokens by the matrices of 8 experts.
        ("grouped_gemm", "moe", "[[1000, 64], [8, 64, 32]] bf16",
         CallWork(2 * 1000 * 64 * 32, 2 * (1000 * 64 + 8 * 64 * 32 + 1000 * 32), "compute")),
        ("norm", "normalization", "[[10, 20], [20]]", CallWork(0, 4 * (200 + 20 + 200), "memory")),
        ("splitKreduce_kernel", "gemm", "[[10, 20], [20, 30]]", None),
        ("multi_tensor_apply_kernel", "optimizer", "[[[10, 20], [30]]]", None),
        ("gemm", "gemm", "[[10, 20], [30]]", None),
        ("gemm", "gemm", "[[-1, 20], [20, 30]]", None),
        ("norm", "normalization", "[]", None),
        ("norm", "normalization", "[[[[[[", None),
        ("gemm", "gemm", None, None),
    ],
)  # fmt: skip
def test_work_by_shapes(name: str, family: str, shapes: str | None, work: CallWork | None) -> None:
    assert estimate_work(KernelWork(name, shapes), family, on_device=True) == work


def test_a_kernel_far_below_its_limit_is_a_finding(tmp_path: Path) -> None:
    trace = GpuTrace(gpu=H100)
    for step in range(3):
        start = 1000 * step
        trace.step(step, start, start + 1000)
        # 3 x 67 MB would take 68 us at the peak bandwidth; 600 us are a ninth of it.
        norm = [[8192, 4096], [8192, 4096]]
        kernel = "at::native::vectorized_elementwise_kernel"
        launch_op(trace, "aten::add", kernel, start, (start + 100, start + 700), norm)
        mm = [[4096, 4096], [4096, 4096]]
        launch_op(trace, "aten::mm", "nvjet_tst_gemm", start + 10, (start + 700, start + 920), mm)
        trace.kernel("other", start + 920, start + 1000)
    trace.write(tmp_path)
    report = analyze(tmp_path)
    (finding,) = [one for one in report.findings if one.code == "below_limit"]
    row = next(row for row in report.kernel_table if row.family == "elementwise")
    assert row.saves_ns is not None and row.reachable_ns is not None
    assert finding.gain_ns == pytest.approx(row.saves_ns, rel=0.02)
    assert finding.predicted_ns == pytest.approx(row.reachable_ns, rel=0.01)
    assert finding.basis is not None and finding.basis.kind == "inferred"
    assert "of the peak of the memory bandwidth" in finding.message
