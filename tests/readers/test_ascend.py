"""Ascend's trace_view.json: the device is known by the names of its tracks, not by categories."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from stepsplit.analyzer import DataError, Report, analyze
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.trace import OPS

T0_US = 1_704_161_511_420_000
PYTHON, CANN, HARDWARE, CALLS, OVERLAP = 43_767, 4_376_750, 800, 4_376_751, 437_675_110


@dataclass
class AscendTrace:
    """A trace_view.json of torch_npu; times in microseconds, which the file has as text."""

    calls_process: str = "Communication"
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = ("Python", "CANN", "Ascend Hardware", self.calls_process, "Overlap Analysis")
        for pid, name in zip((PYTHON, CANN, HARDWARE, CALLS, OVERLAP), names, strict=True):
            self.name(pid, 0, name, "process_name")
        self.name(CALLS, 0, "Group 0 Communication").name(CALLS, 1, "Plane 0")

    def name(self, pid: int, tid: int, name: str, kind: str = "thread_name") -> Self:
        args = {"name": name}
        self.events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})
        return self

    def add(self, name: str, pid: int, tid: int, start: float, end: float, **more: Any) -> Self:
        at: dict[str, Any] = {"ts": f"{T0_US + start:.3f}", "dur": round(end - start, 3)}
        self.events.append(
            {"ph": "X", "name": name, "pid": pid, "tid": tid, "args": {}} | at | more
        )
        return self

    def op(self, name: str, start: float, end: float) -> Self:
        return self.add(name, PYTHON, 1, start, end, cat="cpu_op")

    def task(self, name: str, start: float, end: float, *, stream: int = 3) -> Self:
        return self.add(name, HARDWARE, stream, start, end)

    def call(self, name: str, start: float, end: float) -> Self:
        """A call, the tasks that carry it out, and the kernel on the stream."""
        self.add(name, CALLS, 0, start, end).add("Notify_Wait", CALLS, 1, start, end)
        return self.task(name, start, end, stream=9)

    def overlap(self, name: str, start: float, end: float) -> Self:
        return self.add(name, OVERLAP, 0, start, end)

    def write(self, folder: Path) -> Path:
        path = folder / "trace_view.json"
        path.write_text(json.dumps(self.events))
        return path


def step() -> AscendTrace:
    """A step of 10 ms on the host, 70 us of kernels, a copy and an all-reduce half hidden."""
    trace = AscendTrace().op("ProfilerStep#1", 0, 10_000).op("aten::mm", 100, 9_000)
    trace.task("EVENT_WAIT", 0, 1_000).task("aclnnMatMul_MatMulV2", 1_000, 1_040)
    trace.task("MEMCPY_ASYNC", 1_100, 1_110).task("aclnnAdd_Add", 1_200, 1_220)
    return trace.call("hcom_allReduce__305_0_1", 1_210, 1_250).task("aclnnMul_Mul", 1_250, 1_260)


def with_overlap(trace: AscendTrace, computing: float = 20) -> AscendTrace:
    """With the profiler's own analysis; computing is how much of it the last kernel adds."""
    trace.overlap("Computing", 1_000, 1_040).overlap("Computing", 1_200, 1_200 + computing)
    trace.overlap("Communication", 1_210, 1_250).overlap("Computing", 1_250, 1_260)
    return trace.overlap("Communication(Not Overlapped)", 1_220, 1_250)


def warned(report: Report) -> set[str]:
    return {row.code for row in report.warnings}


@pytest.mark.parametrize("process", ["Communication", "HCCL"])
def test_kernels_copies_and_calls_are_known_by_their_tracks(tmp_path: Path, process: str) -> None:
    trace = with_overlap(step())
    for event in trace.events:
        if event["args"].get("name") == "Communication":
            event["args"]["name"] = process
    report = analyze(trace.write(tmp_path))
    assert report.run.device == "Ascend NPU"
    [row] = report.steps
    assert (row.step, row.step_ns, row.compute_ns, row.copy_ns) == (1, 10_000_000, 70_000, 10_000)
    assert row.step_ns - row.compute_ns - row.copy_ns - row.idle_ns == 30_000
    assert {"ascend", "ascend_calls"} <= warned(report)


def test_the_calls_are_what_their_names_say(tmp_path: Path) -> None:
    trace = step().call("hcom_receive__822_0_1", 1_300, 1_310)
    trace.call("hcom_alltoallv__12_3_1", 1_320, 1_330).call(
        "hcom_batchSendRecv__1_2_1", 1_340, 1_350
    )
    [found] = read_recording([trace.write(tmp_path)]).traces
    ops = [OPS[code] for code in found.calls.op.tolist()]
    assert ops == ["all_reduce", "recv", "all_to_all", "send_recv"]


def test_tracks_that_disagree_with_the_overlap_analysis_are_refused(tmp_path: Path) -> None:
    file = with_overlap(step(), computing=40).write(tmp_path)
    with pytest.raises(DataError) as error:
        analyze(file)
    assert error.value.problem == (
        "an Ascend trace that cannot be read: Computing is 0.09 ms in its overlap analysis, "
        "but 0.07 ms in its device tracks"
    )


def test_host_ops_without_the_device_are_refused(tmp_path: Path) -> None:
    trace = AscendTrace()
    trace.events = [e for e in trace.events if e["pid"] in (PYTHON, CANN)]
    trace.op("ProfilerStep#1", 0, 10_000).op("aten::mm", 100, 9_000)
    with pytest.raises(DataError, match="an Ascend trace without device activity"):
        analyze(trace.write(tmp_path))


def test_a_file_of_the_device_alone_is_one_step(tmp_path: Path) -> None:
    """As msprof writes it: no ops, no marks."""
    trace = AscendTrace().task("MatMulV2", 0, 30).task("Add", 50, 60)
    report = analyze(trace.write(tmp_path))
    assert [(row.step_ns, row.compute_ns) for row in report.steps] == [(60_000, 40_000)]
    assert "unknown_categories" not in warned(report)


def test_names_of_odd_types_name_no_track(tmp_path: Path) -> None:
    trace = with_overlap(step())
    odd = {"ph": "M", "name": "process_name", "pid": [1], "args": {"name": 7}}
    trace.events += [odd, {"ph": "M"}, {"ph": "M", "name": None, "args": None}]
    [row] = analyze(trace.write(tmp_path)).steps
    assert row.compute_ns == 70_000
