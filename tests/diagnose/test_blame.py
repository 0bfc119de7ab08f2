"""Causes of waits in complete traces, each instant blamed once."""

from __future__ import annotations

from pathlib import Path

from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import Report, analyze

CHAIN = [("a", "", [0, 1]), ("b", "", [1, 2])]
STAGES = [("0", "mesh_pp", [0, 1])]


def causes(report: Report) -> list[tuple[int | None, str, int]]:
    return [(row.rank, row.cause, row.caused_ns) for row in report.blame]


def test_blame_passes_on_to_the_rank_with_a_cause(tmp_path: Path) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0, which computes.

    Rank 1 comes 40 us after rank 2: rank 0 computes 30 us longer than rank 2, then 10 are a
    transfer.
    """
    slow = GpuTrace(0, 3, groups=CHAIN).step(1, 0, 100)
    slow.kernel("gemm", 0, 50).all_reduce(50, 60, group="a").kernel("gemm", 60, 100)
    middle = GpuTrace(1, 3, groups=CHAIN).step(1, 0, 100)
    middle.kernel("gemm", 0, 10).all_reduce(10, 60, group="a").all_reduce(60, 70, group="b")
    middle.kernel("gemm", 70, 100)
    last = GpuTrace(2, 3, groups=CHAIN).step(1, 0, 100)
    last.kernel("gemm", 0, 20).all_reduce(20, 70, group="b").kernel("gemm", 70, 100)
    report = analyze(*(trace.write(tmp_path) for trace in (slow, middle, last)))
    assert causes(report) == [(0, "compute", 40_000 + 30_000), (1, "transfer", 10_000)]
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


def test_a_rank_whose_steps_no_other_has_is_not_an_outlier(tmp_path: Path) -> None:
    """Rank 2 is in steps 10 to 13 and makes no calls; rank 0 waits for rank 1 in steps 0 to 3."""
    pair = [("1", "", [0, 1])]
    for rank, first, busy in ((0, 0, 70), (1, 0, 170), (2, 10, 70)):
        trace = GpuTrace(rank, 3, groups=pair)
        for step, start in enumerate(range(0, 4000, 1000)):
            trace.step(first + step, start, start + 900).kernel("gemm", start, start + busy)
            if rank < 2:
                trace.all_reduce(start + busy, start + 200, group="1")
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert {row.step for row in report.steps if row.rank == 2} == {10, 11, 12, 13}
    assert causes(report) == [(1, "compute", sum(row.skew_ns for row in report.steps))]


def test_a_rank_without_some_of_the_steps_is_blamed_in_those_it_has(tmp_path: Path) -> None:
    """Rank 1 computes 70 us longer in each of ten steps, of which it recorded the first five."""
    traces = [GpuTrace(rank, 2, groups=[("0", "", [0, 1])]) for rank in (0, 1)]
    for step in range(10):
        at = 110 * step
        for rank, trace in enumerate(traces):
            if rank == 1 and step >= 5:
                continue
            late = at + (90 if rank else 20)
            trace.step(step, at, at + 110).kernel("gemm", at, late)
            trace.all_reduce(late, at + 100, Seq=step).kernel("adam", at + 100, at + 110)
    report = analyze(*(trace.write(tmp_path) for trace in traces))
    assert causes(report) == [(1, "compute", 5 * 70_000), (None, "unknown", 5 * 70_000)]


def test_of_two_ranks_the_one_that_is_late_in_both_steps_is_blamed(tmp_path: Path) -> None:
    """Its host stalls for 35 and 47 us before the kernels, that of the other rank for 8."""
    traces = [GpuTrace(rank, 2, groups=[("0", "", [0, 1])]) for rank in (0, 1)]
    for step, stalls in enumerate([(8, 35), (8, 47)]):
        at, end = 110 * step, 110 * step + max(stalls) + 30
        for trace, stall in zip(traces, stalls, strict=True):
            trace.step(step, at, at + 110).kernel("gemm", at + stall, at + stall + 20)
            trace.all_reduce(at + stall + 20, end).kernel("adam", end, at + 110)
    report = analyze(*(trace.write(tmp_path) for trace in traces))
    assert causes(report) == [(1, "host", 27_000 + 39_000)]


def test_waits_in_a_step_that_is_left_out_are_not_in_the_report(tmp_path: Path) -> None:
    """Rank 1 comes 60 us late to the third of four steps, which has a call more."""
    traces = [GpuTrace(rank, 2, groups=[("0", "", [0, 1])]) for rank in (0, 1)]
    for step in range(4):
        for rank, trace in enumerate(traces):
            at, late = 110 * step, 70 if rank and step == 2 else 10
            trace.step(step, at, at + 110).kernel("gemm", at, at + late)
            trace.all_reduce(at + late, at + 80)
            if step == 2:
                trace.all_reduce(at + 80, at + 90)
            trace.kernel("adam", at + 90, at + 110)
    report = analyze(*(trace.write(tmp_path) for trace in traces))
    assert [row.kind for row in report.steps] == 2 * ["full", "full", "other", "full"]
    assert [row.skew_ns for row in report.steps] == [0, 0, 60_000, 0, 0, 0, 0, 0]
    assert causes(report) == []


def test_with_several_missing_ranks_the_cause_is_unknown(tmp_path: Path) -> None:
    trio = [("0", "", [0, 1, 2])]
    trace = GpuTrace(0, 3, groups=trio).step(1, 0, 100)
    trace.all_reduce(0, 30).kernel("gemm", 30, 40).all_reduce(40, 50).kernel("gemm", 50, 100)
    assert causes(analyze(trace.write(tmp_path))) == [(None, "unknown", 20_000)]


def test_what_starts_late_for_no_recorded_reason_is_unexplained(tmp_path: Path) -> None:
    """Rank 0's all_reduce was launched at 10 and follows a kernel that ends at 20: it begins at
    70, and rank 1 waits 50 for it. A launch may take 20; the rest has no cause."""
    pair = [("0", "", [0, 1])]
    late = GpuTrace(0, 2, groups=pair).step(1, 0, 140).kernel("gemm", 0, 20)
    late.all_reduce(70, 80, launched=10).kernel("copied", 20, 75, launched=12)
    early = GpuTrace(1, 2, groups=pair).step(1, 0, 140).kernel("gemm", 0, 20)
    early.all_reduce(20, 80, launched=10).kernel("copied", 80, 135)
    report = analyze(*(trace.write(tmp_path) for trace in (late, early)))
    assert causes(report) == [(None, "unexplained", 40_000), (0, "host", 10_000)]
    [warning] = [row.message for row in report.warnings if row.code == "unexplained_waits"]
    assert warning.startswith("80.0 % of the waiting")


def test_delays_that_change_ranks_are_variation(tmp_path: Path) -> None:
    """In each step another rank computes longest; in step 4 rank 1 stalls for 40 in addition."""
    trio = [("0", "", [0, 1, 2])]
    work = [(40, 43, 41), (44, 40, 42), (41, 42, 45), (43, 41, 40), (41, 42, 43), (42, 44, 41)]
    traces = [GpuTrace(rank, 3, groups=trio) for rank in range(3)]
    varying = 0
    for step, computes in enumerate(work):
        stalls = (0, 40, 0) if step == 4 else (0, 0, 0)
        ready = [stall + busy for stall, busy in zip(stalls, computes, strict=True)]
        begin, last = 200 * step, max(ready)
        for trace, stall, at in zip(traces, stalls, ready, strict=True):
            trace.step(step, begin, begin + 200).kernel("gemm", begin + stall, begin + at)
            trace.all_reduce(begin + at, begin + last + 10)
            trace.kernel("adam", begin + last + 10, begin + 200)
        varying += sum(last - at for at in ready) if step != 4 else 1
    report = analyze(*(trace.write(tmp_path) for trace in traces))
    assert causes(report) == [(1, "host", 79_000), (None, "variation", 1000 * varying)]
