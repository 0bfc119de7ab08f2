"""Kernels whose end was recorded too late: they run over later ones of their stream."""

from __future__ import annotations

from pathlib import Path

from support.builders import GpuTrace
from support.reading import list_messages
from support.required import shared_repro

from stepsplit.analyzer import analyze


def train(ends: dict[int, float], gap: float = 100, steps: int = 2) -> GpuTrace:
    """Steps of ten GEMMs of 50 us, one every `gap` us; ends are the durations of some of them."""
    trace = GpuTrace()
    for step in range(steps):
        begin = step * 11 * gap
        trace.step(step, begin, begin + 11 * gap)
        for i in range(10):
            at = begin + i * gap
            trace.kernel("gemm", at, at + ends.get(i, 50), launched=at - (at > begin))
    return trace


def test_a_kernel_that_runs_over_later_ones_ends_as_others_of_its_name(tmp_path: Path) -> None:
    report = analyze(train({2: 700}).write(tmp_path))
    assert [row.compute_ns for row in report.steps] == [500_000, 500_000]
    assert list_messages(report, "kernels_overlap") == [
        "2 of 20 kernels and copies run over later ones of their stream, which runs in order: "
        "their ends were recorded late, and they are taken to end as others of their name, or "
        "where the next begins; this removes 1.30 ms of recorded time"
    ]


def test_a_kernel_without_others_of_its_name_ends_where_the_next_begins(tmp_path: Path) -> None:
    trace = train({}, steps=1).kernel("softmax", 255, 900, launched=254)
    [row] = analyze(trace.write(tmp_path)).steps
    assert row.compute_ns == 545_000


def test_a_collective_ends_where_the_next_begins(tmp_path: Path) -> None:
    """Its time depends on the other ranks, so that of its other calls says nothing."""
    trace = GpuTrace(world_size=2, groups=[("0", "default_pg", (0, 1))]).step(0, 0, 1200)
    trace.kernel("gemm", 0, 1000).kernel("gemm", 1100, 1200)
    trace.all_reduce(1000, 1010).all_reduce(1020, 1090).all_reduce(1050, 1060)
    [row] = analyze(trace.write(tmp_path)).steps
    assert row.step_ns == row.compute_ns + row.collective_ns + row.skew_ns + row.idle_ns
    assert (row.collective_ns + row.skew_ns, row.idle_ns) == (50_000, 50_000)


def test_overlaps_of_dependent_launches_and_other_streams_stay(tmp_path: Path) -> None:
    trace = train({}, gap=45)
    for at in (3, 453):
        trace.kernel("other", at, at + 400, stream=13)
    report = analyze(trace.write(tmp_path))
    assert list_messages(report, "kernels_overlap") == []


def test_branches_of_a_graph_may_overlap(tmp_path: Path) -> None:
    trace = train({}, steps=1)
    events = [event for event in trace.events if event["cat"] == "kernel"]
    for event in events[:4]:
        event |= {"ts": 0, "dur": 350, "args": event["args"] | {"correlation": 2}}
    report = analyze(trace.write(tmp_path))
    assert [row.compute_ns for row in report.steps] == [650_000]
    assert list_messages(report, "kernels_overlap") == []


def test_a_queue_without_order_stays_as_recorded(tmp_path: Path) -> None:
    report = analyze(train(dict.fromkeys(range(10), 190)).write(tmp_path))
    assert [row.compute_ns for row in report.steps] == [1_090_000] * 2
    [message] = list_messages(report, "stream_unordered")
    assert message.startswith("18 kernels and copies of stream 7 run over later ones of it")


def test_a_kernel_that_ends_late_on_mi355(tmp_path: Path) -> None:
    """TraceLens issue 669: ten kernels of 0.5 ms in each step, one of them recorded as 15 ms."""
    report = analyze(shared_repro("wild2") / "kernels_overlap_on_a_stream")
    assert [row.compute_ns for row in report.steps] == [5_000_000] * 3
    [message] = list_messages(report, "kernels_overlap")
    assert message.startswith("3 of 30 kernels and copies run over later ones")
