"""Overlapped and exposed communication on identical ranks; times in us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import Overlap, analyze
from stepsplit.analyzer.split.overlap import sum_overlaps

Does = Callable[[GpuTrace], object]


def overlaps(folder: Path, both: Does) -> tuple[Overlap, ...]:
    """The rows of rank 0 in a step in which two ranks, on tp and on dp, do the same."""
    groups = [("tp", "mesh_tp", [0, 1]), ("dp", "mesh_fsdp", [0, 1]), ("odd", "odd", [0, 1])]
    traces = [GpuTrace(rank, 2, groups=groups) for rank in (0, 1)]
    for trace in traces:
        both(trace)
    rows = analyze(*(trace.write(folder) for trace in traces)).overlap
    return tuple(row for row in rows if row.rank == 0)


def computing(trace: GpuTrace) -> GpuTrace:
    """From 0 to 40 and from 60 to 100."""
    return trace.step(1, 0, 100).kernel("gemm", 0, 40).kernel("gemm", 60, 100)


def test_transfers_under_compute_are_overlapped_and_the_rest_exposed(tmp_path: Path) -> None:
    def both(trace: GpuTrace) -> None:
        computing(trace).all_reduce(30, 60, group="tp", launched=1)
        trace.collective("AllGather", "all_gather", 70, 80, group="dp")

    found = overlaps(tmp_path, both)
    assert found == (
        Overlap(0, "tp", "all_reduce", moved_ns=30_000, hidden_ns=10_000, exposed_ns=20_000),
        Overlap(0, "dp_shard", "all_gather", moved_ns=10_000, hidden_ns=10_000, exposed_ns=0),
    )
    assert [round(row.efficiency, 3) for row in found] == [0.333, 1.0]


def test_waiting_is_not_transfer_time(tmp_path: Path) -> None:
    """Rank 0 waits from 40 until rank 1 comes at 59."""
    found = overlaps(
        tmp_path,
        lambda trace: computing(trace).all_reduce(59 if trace.rank else 40, 60, group="tp"),
    )
    assert found == (Overlap(0, "tp", "all_reduce", moved_ns=1_000, hidden_ns=0, exposed_ns=1_000),)


def test_communication_still_open_when_compute_resumes_was_not_exposed(tmp_path: Path) -> None:
    found = overlaps(tmp_path, lambda trace: computing(trace).all_reduce(30, 85, group="tp"))
    assert found == (
        Overlap(0, "tp", "all_reduce", moved_ns=55_000, hidden_ns=35_000, exposed_ns=0),
    )


def test_calls_that_move_at_once_are_counted_once(tmp_path: Path) -> None:
    def both(trace: GpuTrace) -> None:
        op, peer = ("recv", 0) if trace.rank else ("send", 1)
        computing(trace).message(op, peer, 40, 55, group="tp")
        trace.message(op, peer, 45, 60, group="tp")

    assert overlaps(tmp_path, both) == (
        Overlap(0, "tp", "send", moved_ns=20_000, hidden_ns=0, exposed_ns=20_000),
    )


def test_what_moves_outside_of_the_steps_is_left_out(tmp_path: Path) -> None:
    """On gloo the step ends where the host says so, in the middle of the call."""
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, [("0", "mesh_tp", [0, 1])]).step(1, 0, 100)
        trace.op("aten::mm", 0, 80).all_reduce(89.5, 90, 120, group="0", seq=1, tid=300)
        trace.write(tmp_path)
    assert analyze(tmp_path).overlap == tuple(
        Overlap(rank, "tp", "all_reduce", moved_ns=10_000, hidden_ns=0, exposed_ns=10_000)
        for rank in (0, 1)
    )


def test_a_call_of_unknown_axis_has_the_description_of_its_group(tmp_path: Path) -> None:
    def both(trace: GpuTrace) -> None:
        trace.step(1, 0, 100).kernel("gemm", 0, 100).all_reduce(40, 60, group="odd")

    assert overlaps(tmp_path, both) == (
        Overlap(0, "odd", "all_reduce", moved_ns=20_000, hidden_ns=20_000, exposed_ns=0),
    )


def test_the_sums_over_ranks_are_sorted_by_exposed_time() -> None:
    rows = [
        Overlap(0, "tp", "all_reduce", 30, 20, 10),
        Overlap(0, "dp_shard", "all_gather", 50, 10, 40),
        Overlap(1, "tp", "all_reduce", 30, 30, 0),
    ]
    assert sum_overlaps(rows) == (
        Overlap(None, "dp_shard", "all_gather", 50, 10, 40),
        Overlap(None, "tp", "all_reduce", 60, 50, 10),
    )
