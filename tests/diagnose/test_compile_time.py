"""torch.compile that compiles within the recorded steps: neither compute nor load imbalance."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace
from support.required import shared_repro

from stepsplit.analyzer import analyze
from stepsplit.analyzer.redact import redact_recording

DP = [("0", "mesh_dp_replicate", [0, 1])]
COMPILES = "_compile.compile_inner (dynamo_timed)"


def compiling_pair(folder: Path, compiling: str, category: str = "cpu_op") -> None:
    """Two ranks, three steps of 1000 us with 200 of compute. Rank 1 compiles for 600 first, and
    traces ops meanwhile; rank 0 waits for it."""
    for rank, begin in ((0, 100), (1, 700)):
        trace = CpuTrace(rank, 2, groups=DP)
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 1000).op("aten::mm", at, at + 100)
            if rank:
                (trace.op if category == "cpu_op" else trace.annotation)(
                    compiling, at + 100, at + 700
                )
                trace.op("aten::addmm", at + 200, at + 600)
            trace.op("aten::mm", at + begin, at + begin + 200)
            trace.all_reduce(at + begin + 200, at + begin + 200, at + 950, group="0", seq=step,
                             tid=7)  # fmt: skip
            trace.annotation("wait", at + begin + 201, at + 950)
            trace.op("aten::mm", at + 950, at + 1000)
        trace.write(folder)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        (COMPILES, "cpu_op"),
        (COMPILES, "user_annotation"),
        ("GraphLowering.run (dynamo_timed)", "cpu_op"),
        ("dynamo", "cpu_op"),
    ],
)
def test_compilation_is_idle_time_with_a_cause_of_its_own(
    tmp_path: Path, name: str, category: str
) -> None:
    compiling_pair(tmp_path, name, category)
    report = analyze(tmp_path)
    (found,) = report.findings
    assert (found.code, found.ranks, found.bucket) == ("compile_time", (1,), "idle")
    assert (found.gain_ns, found.measured_ns, found.steps) == (600_000, 600_000, (0, 1, 2))
    assert found.message == (
        "rank 1 compiles code 60.0 % of the step, in 3 of 3 steps (torch.compile: "
        "TORCH_LOGS=recompiles says why; shapes that change need dynamic=True or mark_dynamic)"
    )
    of_rank = [step.split for step in report.steps if step.rank == 1]
    assert {(one.compute_ns, one.idle_ns, one.step_ns) for one in of_rank} == {
        (350_000, 600_000, 1_000_000)
    }


@pytest.mark.parametrize("name", ["TorchDynamo Cache Lookup", "## Call CompiledFxGraph f42 ##"])
def test_the_lookup_and_the_call_of_compiled_code_are_compute(tmp_path: Path, name: str) -> None:
    compiling_pair(tmp_path, name)
    report = analyze(tmp_path)
    assert "compile_time" not in [one.code for one in report.findings]
    assert {s.split.compute_ns for s in report.steps if s.rank == 1} == {950_000}


def test_an_op_around_a_compilation_is_not_compute_but_the_ops_in_it_are(tmp_path: Path) -> None:
    """A graph break, or a backward that is compiled when it runs first."""
    trace = CpuTrace(0, 1).step(1, 0, 100).op("CompiledFunctionBackward", 0, 100)
    trace.op("aten::mm", 0, 20).op("backward._backward_impl (dynamo_timed)", 20, 90)
    trace.op("aten::empty", 30, 40).op("aten::mm", 90, 100)
    (row,) = analyze(trace.write(tmp_path)).steps
    assert (row.split.compute_ns, row.split.idle_ns) == (30_000, 70_000)


def test_passes_that_a_compiler_traces_are_none_of_the_step(tmp_path: Path) -> None:
    """AOTAutograd runs a forward and a backward of its own: no second microbatch."""
    engine = "autograd::engine::evaluate_function: MmBackward0"
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, groups=DP)
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 1000).op("dynamo", at + 10, at + 500)
            trace.op("aten::linear", at + 20, at + 30).op(engine, at + 100, at + 200)
            trace.op("aten::linear", at + 500, at + 600).op(engine, at + 600, at + 700)
            trace.all_reduce(at + 650, at + 651, at + 800, group="0", seq=step, tid=7)
            trace.annotation("Optimizer.step#AdamW.step", at + 800, at + 1000)
            trace.op("aten::add_", at + 800, at + 1000)
        trace.write(tmp_path)
    assert [one.in_words for one in analyze(tmp_path).run.strategies] == ["ddp 2 on dp_replicate"]


def test_a_device_idles_while_its_host_compiles(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace, late = GpuTrace(rank, 2, groups=DP).step(1, 0, 1000), 600 * rank
        trace.kernel("gemm", 0, 100)
        if rank:
            trace.op(COMPILES, 50, 695).op("aten::addmm", 100, 400)
        trace.kernel("gemm", 100 + late, 300 + late).all_reduce(300 + late, 950)
        trace.kernel("adam", 950, 1000).write(tmp_path)
    found = analyze(tmp_path).findings[0]
    assert (found.code, found.ranks, found.gain_ns) == ("compile_time", (1,), 595_000)


def test_compilation_is_found_without_names(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    compiling_pair(tmp_path / "run", "my_pass (dynamo_timed)")
    redact_recording([tmp_path / "run"], tmp_path / "copy")
    (found,) = analyze(tmp_path / "copy").findings
    assert (found.code, found.gain_ns) == ("compile_time", 600_000)


def test_a_recorded_job_that_recompiles_on_one_rank() -> None:
    """Its own timers say 269 ms (median 262)."""
    report = analyze(shared_repro("users3/recompile") / "red")
    first = report.findings[0]
    assert (first.code, first.ranks) == ("compile_time", (1,))
    assert 255e6 < first.gain_ns < 290e6
    assert "uneven_ranks" not in [one.code for one in report.findings]
