"""Causes of waits in complete traces, each instant blamed once."""

from __future__ import annotations

from pathlib import Path

from builders import CpuTrace, GpuTrace

from stepsplit.analyzer import Report, analyze

CHAIN = [("a", "", [0, 1]), ("b", "", [1, 2])]
STAGES = [("0", "mesh_pp", [0, 1])]


def causes(report: Report) -> list[tuple[int | None, str, int]]:
    return [(row.rank, row.cause, row.caused_ns) for row in report.blame]


def test_blame_passes_on_to_the_rank_with_a_cause(tmp_path: Path) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0, which computes.

    Of the 50 us that rank 1 has more than rank 2 until it comes, 40 are waiting and 10 a transfer.
    """
    slow = GpuTrace(0, 3, groups=CHAIN).step(1, 0, 100)
    slow.kernel("gemm", 0, 50).all_reduce(50, 60, group="a").kernel("gemm", 60, 100)
    middle = GpuTrace(1, 3, groups=CHAIN).step(1, 0, 100)
    middle.kernel("gemm", 0, 10).all_reduce(10, 60, group="a").all_reduce(60, 70, group="b")
    middle.kernel("gemm", 70, 100)
    last = GpuTrace(2, 3, groups=CHAIN).step(1, 0, 100)
    last.kernel("gemm", 0, 20).all_reduce(20, 70, group="b").kernel("gemm", 70, 100)
    report = analyze(*(trace.write(tmp_path) for trace in (slow, middle, last)))
    assert causes(report) == [(0, "compute", 40_000 + 32_000), (1, "transfer", 8_000)]
    assert sum(ns for *_, ns in causes(report)) == sum(row.skew_ns for row in report.steps)


def test_an_idle_rank_is_late_because_of_its_host(tmp_path: Path) -> None:
    pair = [("0", "", [0, 1])]
    late = GpuTrace(0, 2, groups=pair).step(1, 0, 100).kernel("gemm", 0, 10)
    late.memcpy(30, 35).all_reduce(50, 60).kernel("gemm", 60, 100)
    early = GpuTrace(1, 2, groups=pair).step(1, 0, 100).kernel("gemm", 0, 10)
    early.all_reduce(10, 60).kernel("gemm", 60, 100)
    report = analyze(*(trace.write(tmp_path) for trace in (late, early)))
    assert causes(report) == [(0, "host", 35_000), (0, "copy", 5_000)]


def test_the_ideal_bubble_is_attributed_to_the_schedule(tmp_path: Path) -> None:
    """One microbatch on two stages idles half of the window: all of it the schedule's."""
    first, last = CpuTrace(0, 2, STAGES).step(2, 0, 90), CpuTrace(1, 2, STAGES).step(2, 0, 90)
    first.op("aten::mm", 0, 20).annotation("stepsplit::F stage=0 mb=0", 0, 20)
    first.message("send", 1, 20, 21).message("recv", 1, 22, 60)
    first.op("aten::mm", 60, 80).annotation("stepsplit::B stage=0 mb=0", 60, 80)
    last.message("recv", 0, 1, 21).op("aten::mm", 21, 60)
    last.annotation("stepsplit::F stage=1 mb=0", 21, 40)
    last.annotation("stepsplit::B stage=1 mb=0", 40, 60).message("send", 0, 60, 60.9)
    for trace in (first, last):
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert causes(report) == [(None, "schedule", sum(row.bubble_ns for row in report.steps))]


def test_a_single_unrecorded_rank_is_blamed_as_missing(tmp_path: Path) -> None:
    pair = [("0", "", [0, 1])]
    trace = GpuTrace(0, 2, groups=pair).step(1, 0, 100)
    trace.all_reduce(0, 30).kernel("gemm", 30, 40).all_reduce(40, 50).kernel("gemm", 50, 100)
    report = analyze(trace.write(tmp_path))
    assert causes(report) == [(1, "missing", 20_000)]
    assert "ranks_missing" in {row.code for row in report.warnings}


def test_with_several_missing_ranks_the_cause_is_unknown(tmp_path: Path) -> None:
    trio = [("0", "", [0, 1, 2])]
    trace = GpuTrace(0, 3, groups=trio).step(1, 0, 100)
    trace.all_reduce(0, 30).kernel("gemm", 30, 40).all_reduce(40, 50).kernel("gemm", 50, 100)
    assert causes(analyze(trace.write(tmp_path))) == [(None, "unknown", 20_000)]
