"""Launches counted against device events: what was not recorded is not split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import DataError, Report, analyze

STEP_US = 1000


def launch_without_work(trace: GpuTrace, at: float, call: str = "cudaLaunchKernel") -> GpuTrace:
    """A launch whose kernel the profiler has lost."""
    trace.launch("lost", (at, at + 1), (at, at + 1), call=call)
    trace.events.pop()
    return trace


def train(rank: int = 0, world_size: int = 1, *, steps: int = 3, kernels: int = 20) -> GpuTrace:
    """Steps of one millisecond in which kernels of 10 us follow each other, 40 us apart."""
    trace = GpuTrace(rank, world_size)
    for step in range(steps):
        begin = step * STEP_US
        trace.step(step, begin, begin + STEP_US)
        for i in range(kernels):
            at = begin + 40 * i
            trace.op("aten::mm", at, at + 5).kernel("gemm", at + 10, at + 20, launched=at + 2)
    return trace


def lose(trace: GpuTrace, since: float, until: float = 1e9) -> GpuTrace:
    """The trace without the kernels that start in this time; their launches are kept."""
    trace.events = [e for e in trace.events if e["cat"] != "kernel" or not since <= e["ts"] < until]
    return trace


def warned(report: Report, code: str) -> list[str]:
    return [row.message for row in report.warnings if row.code == code]


CALLS = [
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaGraphLaunch",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "urEnqueueKernelLaunch",
]


@pytest.mark.parametrize("call", CALLS)
def test_launches_without_any_device_event_are_refused(tmp_path: Path, call: str) -> None:
    trace = GpuTrace().step(1, 0, 100).op("aten::mm", 10, 90)
    file = launch_without_work(launch_without_work(trace, 20, call), 40, call).write(tmp_path)
    with pytest.raises(DataError) as error:
        analyze(file)
    assert (error.value.where, error.value.rank) == (str(file), 0)
    assert error.value.problem == (
        "device activity was not recorded: none of 2 launches led to a kernel"
    )


@pytest.mark.parametrize(
    "call", ["cudaDeviceSynchronize", "cudaGetDeviceCount", "cudaLaunchHostFunc"]
)
def test_a_cpu_run_on_a_machine_with_a_device_stays_one(tmp_path: Path, call: str) -> None:
    trace = GpuTrace().step(1, 0, 100).op("aten::mm", 10, 90).call(call, 95, 96)
    body = trace.body() | {"distributedInfo": {}}
    (tmp_path / "rank0_trace.json").write_text(json.dumps(body))
    report = analyze(tmp_path)
    assert [row.compute_ns for row in report.steps] == [80_000]
    assert report.run.device == "cpu"
    assert warned(report, "device_unused") == [
        "the machine has Test GPU, but nothing was launched on it: analyzed as a CPU run"
    ]


def test_ops_of_a_job_with_nccl_are_no_cpu_run(tmp_path: Path) -> None:
    file = GpuTrace().step(1, 0, 100).op("aten::mm", 10, 90).write(tmp_path)
    with pytest.raises(DataError, match=r"no launch and no device event \(backend nccl\)"):
        analyze(file)


def test_ranks_without_device_data_are_named_and_the_others_split(tmp_path: Path) -> None:
    for rank in range(3):
        lose(train(rank, 3), 0 if rank == 1 else 1e9).write(tmp_path)
    report = analyze(tmp_path)
    assert report.run.ranks == (0, 2)
    assert {row.rank for row in report.steps} == {0, 2}
    [row] = [row for row in report.warnings if row.code == "no_device_data"]
    assert (row.rank, row.message) == (
        1,
        "device activity was not recorded: none of 60 launches led to a kernel: left out",
    )
    assert warned(report, "ranks_missing") == []


def test_a_rank_of_steps_alone_is_left_out(tmp_path: Path) -> None:
    train(0, 2).write(tmp_path)
    GpuTrace(1, 2).step(0, 0, STEP_US).write(tmp_path)
    assert analyze(tmp_path).run.ranks == (0,)


def test_a_few_device_events_are_not_the_activity_of_the_device(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only 1 of 60 launches led to a kernel"):
        analyze(lose(train(), 20).write(tmp_path))


def test_work_lost_at_the_end_makes_the_step_partial(tmp_path: Path) -> None:
    """The profiler's buffers are full in the middle of the last but one of four steps."""
    report = analyze(lose(train(steps=4), 2 * STEP_US + 500).write(tmp_path))
    assert [(row.step, row.kind) for row in report.steps] == [
        (0, "full"),
        (1, "full"),
        (2, "partial"),
    ]
    assert warned(report, "device_work_lost") == [
        "27 of 80 launches (33.8 %) have no device event: the profiler lost them, "
        "and their time counts as idle"
    ]
    assert warned(report, "device_work_cut") == ["the profiler lost device work of step 2: partial"]


def test_a_profiler_that_stops_recording_launches_too_makes_the_step_partial(
    tmp_path: Path,
) -> None:
    trace = train(steps=4)
    gone = [e for e in trace.events if e["cat"] == "cuda_runtime" and e["ts"] > 3 * STEP_US + 400]
    trace.events = [e for e in lose(trace, 3 * STEP_US + 400).events if e not in gone]
    report = analyze(trace.write(tmp_path))
    assert [row.kind for row in report.steps] == ["full", "full", "full", "partial"]
    assert warned(report, "device_work_cut") == ["the profiler lost device work of step 3: partial"]


def test_work_lost_anywhere_is_a_warning_with_the_number(tmp_path: Path) -> None:
    report = analyze(lose(train(), STEP_US + 100, STEP_US + 500).write(tmp_path))
    assert [row.kind for row in report.steps] == ["full", "full", "full"]
    [message] = warned(report, "device_work_lost")
    assert message.startswith("10 of 60 launches (16.7 %) have no device event")


def test_a_step_that_lost_most_of_its_work_is_partial(tmp_path: Path) -> None:
    report = analyze(lose(train(), STEP_US + 100, STEP_US + 700).write(tmp_path))
    assert [row.kind for row in report.steps] == ["full", "partial", "full"]


def test_launches_captured_into_a_graph_are_not_lost(tmp_path: Path) -> None:
    trace = train()
    trace.call("cudaStreamBeginCapture", 900, 901)
    for i in range(30):
        launch_without_work(trace, 910 + i)
    report = analyze(trace.call("cudaStreamEndCapture", 950, 951).write(tmp_path))
    assert [row.kind for row in report.steps] == ["full", "full", "full"]
    assert warned(report, "device_work_lost") == []


def test_a_launch_that_the_runtime_passes_to_the_driver_is_one(tmp_path: Path) -> None:
    trace = GpuTrace().step(0, 0, 2000)
    for i in range(30):
        at = 10 + 50 * i
        trace.launch("gemm", (at, at + 9), (at + 10, at + 20))
        launch_without_work(trace, at + 3, "cuLaunchKernel")
    report = analyze(trace.write(tmp_path))
    assert [row.kind for row in report.steps] == ["full"]
    assert warned(report, "device_work_lost") == []


@pytest.mark.parametrize("longer_us", [0, 1])
def test_launches_that_follow_each_other_are_several_even_if_they_overlap(
    tmp_path: Path, longer_us: int
) -> None:
    trace = GpuTrace()
    for step in range(4):
        begin, more = step * STEP_US, longer_us if step == 3 else 0
        trace.step(step, begin, begin + STEP_US)
        for i in range(100):
            at = begin + 5 * i
            trace.op("aten::mm", at, at + 4)
            trace.launch("gemm", (at, at + 5 + more), (at + 10, at + 15))
    report = analyze(trace.write(tmp_path))
    assert [row.kind for row in report.steps] == ["full"] * 4
    assert warned(report, "device_work_cut") == []


def test_kernels_under_other_correlations_are_not_lost(tmp_path: Path) -> None:
    trace = train()
    for event in trace.events:
        if event["cat"] == "kernel":
            event["args"]["correlation"] += 100_000
    report = analyze(trace.write(tmp_path))
    assert [row.kind for row in report.steps] == ["full", "full", "full"]
    assert warned(report, "device_work_lost") == []


def test_a_trace_without_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no op and no device event with a duration"):
        analyze(CpuTrace().step(0, 0, 1000).step(1, 1000, 2000).write(tmp_path))


def test_a_cpu_run_of_hardly_any_ops_may_be_a_fragment(tmp_path: Path) -> None:
    trace = CpuTrace().op("aten::mm", 0, 300).op("aten::mm", 77_000_000, 77_000_300)
    assert warned(analyze(trace.write(tmp_path)), "few_ops") == [
        "2 ops in 77,000 ms leave 100.0 % idle: the trace may be a fragment of the work"
    ]


def test_ops_on_other_threads_than_the_marked_one_are_work(tmp_path: Path) -> None:
    trace = CpuTrace().step(0, 0, 100)
    trace.op("aten::mm", 10, 70, tid=7)
    assert [row.compute_ns for row in analyze(trace.write(tmp_path)).steps] == [60_000]


def test_a_trace_of_another_tool_is_refused(tmp_path: Path) -> None:
    trace = CpuTrace().op("fusion.3", 0, 90).op("copy.1", 90, 95)
    for event in trace.events:
        del event["cat"]
    with pytest.raises(DataError, match=r"none of 2 events has a category of torch\.profiler"):
        analyze(trace.write(tmp_path))
