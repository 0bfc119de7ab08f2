"""Kernels that were exported without a time: Kineto writes start 0 and duration 0 under load."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import GpuTrace
from support.reading import list_messages
from support.required import shared_repro

from stepsplit.analyzer import DataError, analyze

STEP_US, BEGIN_US = 1000, 1.7e15


def train(begin: float = BEGIN_US) -> GpuTrace:
    """Three steps of 20 kernels of 30 us."""
    trace = GpuTrace(base_ns=0)
    for step in range(3):
        at = begin + step * STEP_US
        trace.step(step, at, at + STEP_US)
        for i in range(20):
            trace.kernel("gemm", at + 40 * i + 20, at + 40 * i + 50, launched=at + 40 * i + 10)
    return trace


def forget(trace: GpuTrace, first: int, last: int, ts: float = 0) -> GpuTrace:
    """The trace whose kernels with these numbers have no time."""
    kernels = [event for event in trace.events if event["cat"] == "kernel"]
    for event in kernels[first:last]:
        event |= {"ts": ts, "dur": 0}
    return trace


@pytest.mark.parametrize("ts", [0, -1.7e15, 2.2e15])
def test_kernels_without_a_time_are_lost_and_their_step_is_partial(
    tmp_path: Path, ts: float
) -> None:
    report = analyze(forget(train(), 24, 26, ts).write(tmp_path))
    assert [(row.kind, row.compute_ns) for row in report.steps] == [
        ("full", 600_000),
        ("partial", 540_000),
        ("full", 600_000),
    ]
    assert list_messages(report, "device_times_missing") == [
        "2 of 60 kernels and copies have no time (such as start and duration 0): they count as "
        "lost by the profiler"
    ]
    assert list_messages(report, "device_work_lost") == [
        "2 of 60 launches (3.3 %) have no device event: the profiler lost them, and their time "
        "counts as idle"
    ]
    assert list_messages(report, "device_work_cut") == [
        "the profiler lost device work of step 1: partial"
    ]


def test_one_of_many_is_counted_and_its_step_stays(tmp_path: Path) -> None:
    report = analyze(forget(train(), 24, 25).write(tmp_path))
    assert [row.kind for row in report.steps] == ["full"] * 3
    assert list_messages(report, "device_work_lost")[0].startswith("1 of 60 launches (1.7 %)")


def test_times_that_count_from_zero_are_times(tmp_path: Path) -> None:
    trace = train(begin=0).kernel("memset", 0, 0, category="gpu_memset")
    report = analyze(trace.write(tmp_path))
    assert [row.kind for row in report.steps] == ["full"] * 3
    assert list_messages(report, "device_times_missing") == []


def test_a_trace_without_any_time_of_the_device_says_so(tmp_path: Path) -> None:
    """As many launches as before, and no kernel: refused like a trace without them."""
    with pytest.raises(DataError, match="only 1 of 60 launches led to a kernel"):
        analyze(forget(train(), 0, 59).write(tmp_path))


def test_ten_kernels_of_a_step_at_time_zero() -> None:
    report = analyze(shared_repro("wild2") / "kernels_at_time_zero")
    assert [row.kind for row in report.steps] == ["full", "full", "partial", "full"]
    assert [row.compute_ns for row in report.steps if row.kind == "full"] == [8_000_000] * 3
    assert list_messages(report, "device_work_lost") == [
        "10 of 80 launches (12.5 %) have no device event: the profiler lost them, and their time "
        "counts as idle"
    ]
