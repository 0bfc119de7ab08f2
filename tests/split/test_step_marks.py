"""Steps of traces without ProfilerStep, or whose marks have no end or no work."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace
from support.nsys_builders import Export
from support.required import shared_repro

from stepsplit.analyzer import Report, analyze
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.split.issue_steps import build_host_steps
from stepsplit.analyzer.split.steps import find_steps_of_ranks

Row = tuple[int, str, int, int]
"""(step, kind, start and duration in microseconds)"""


def steps(report: Report, rank: int = 0) -> list[Row]:
    rows = [row for row in report.steps if row.rank == rank]
    return [(row.step, row.kind, row.start_ns // 1000, row.step_ns // 1000) for row in rows]


def codes(report: Report) -> list[str]:
    return [row.code for row in report.warnings]


def two_ranges(first: str, second: str) -> GpuTrace:
    trace = GpuTrace().annotation(first, 0, 100).annotation(second, 100, 200)
    return trace.kernel("gemm", 10, 90).kernel("gemm", 120, 190)


@pytest.mark.parametrize(
    ("first", "second", "numbers"),
    [
        ("Step 7", "Step 8", [7, 8]),
        ("step_3", "step_4", [3, 4]),
        ("iteration 7", "iteration 8", [7, 8]),
        ("iteration7", "iteration8", [7, 8]),
        ("train_step 9/100", "train_step 10/100", [9, 10]),
        ("TrainStep #1", "TrainStep #2", [1, 2]),
        ("[iter: 0]", "[iter: 1]", [0, 1]),
        ("Batch 1 of 9", "Batch 2 of 9", [1, 2]),
        ("epoch 0 step 9", "epoch 1 step 0", [0, 1]),
        ("train_step", "train_step", [0, 1]),
    ],
)
def test_ranges_named_after_steps_are_steps(
    tmp_path: Path, first: str, second: str, numbers: list[int]
) -> None:
    report = analyze(two_ranges(first, second).write(tmp_path))
    assert steps(report) == [(numbers[0], "full", 0, 100), (numbers[1], "full", 100, 100)]
    [warning] = report.warnings
    assert warning.code == "steps_inferred"
    assert warning.message.endswith(f"steps were inferred from ranges such as {first!r}")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("microbatch 0", "microbatch 1"),
        ("micro batch 0", "micro batch 1"),
        ("Forward 0", "Forward 1"),
        ("layer_1", "layer_2"),
        ("Step 2", "Step 1"),
        ("stepping 1", "stepping 2"),
        ("optimizer", "optimizer"),
    ],
)
def test_other_ranges_are_not(tmp_path: Path, first: str, second: str) -> None:
    report = analyze(two_ranges(first, second).write(tmp_path))
    assert steps(report) == [(0, "full", 0, 200)]
    assert codes(report) == ["no_steps"]


def test_steps_within_a_step_do_not_count(tmp_path: Path) -> None:
    """A solver that numbers its steps from 0 in each iteration, and one that counts on."""
    trace = two_ranges("iteration 4", "iteration 5")
    for begin in (0, 100):
        trace.annotation("solver step 0", begin, begin + 40)
        trace.annotation("solver step 1", begin + 40, begin + 80)
        trace.annotation(f"inner step {begin}", begin, begin + 30)
        trace.annotation(f"inner step {begin + 1}", begin + 30, begin + 60)
    assert [row[0] for row in steps(analyze(trace.write(tmp_path)))] == [4, 5]


def test_profiler_steps_come_before_ranges(tmp_path: Path) -> None:
    trace = two_ranges("Step 7", "Step 8").step(1, 0, 100).step(2, 100, 200)
    report = analyze(trace.write(tmp_path))
    assert [row[0] for row in steps(report)] == [1, 2]
    assert codes(report) == []


def test_ranges_of_an_nsight_export_are_steps(tmp_path: Path) -> None:
    export = Export()
    for number, begin in ((3, 0), (4, 1000)):
        export.range(f"Step {number}", begin, begin + 1000)
        export.kernel("gemm", begin + 100, begin + 900)
    report = analyze(export.write(tmp_path / "report.sqlite"))
    assert [(row.step, row.step_ns) for row in report.steps] == [(3, 1000), (4, 1000)]
    assert "steps_inferred" in codes(report)


def test_ranges_of_a_cpu_run_are_steps(tmp_path: Path) -> None:
    trace = CpuTrace().annotation("step 1", 0, 100).annotation("step 2", 100, 200)
    report = analyze(trace.op("aten::mm", 0, 90).op("aten::mm", 100, 180).write(tmp_path))
    assert steps(report) == [(1, "full", 0, 100), (2, "full", 100, 100)]
    assert [row.compute_ns for row in report.steps] == [90_000, 80_000]


def test_a_mark_without_a_duration_ends_where_the_next_begins(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 0).step(2, 100, 100).step(3, 200, 200)
    for begin in (0, 100, 200):
        trace.kernel("gemm", begin + 10, begin + 60)
    report = analyze(trace.write(tmp_path))
    assert steps(report) == [(1, "full", 0, 60), (2, "full", 60, 100), (3, "partial", 160, 100)]
    assert codes(report) == ["steps_open"]


def test_a_trace_without_marks_is_a_step_from_its_first_event(tmp_path: Path) -> None:
    """The host works for 119 microseconds before its first kernel."""
    trace = GpuTrace().op("aten::randn", 0, 60).kernel("gemm", 119, 174, launched=100)
    report = analyze(trace.write(tmp_path))
    assert steps(report) == [(0, "full", 0, 174)]
    assert report.steps[0].split.buckets_ns == (55_000, 0, 0, 0, 0, 0, 119_000)
    assert codes(report) == ["no_steps"]


def pair(marked: GpuTrace, other: GpuTrace) -> list[GpuTrace]:
    """Both ranks with two steps of a gemm and an all-reduce."""
    for trace in (marked, other):
        for begin in (0, 100):
            trace.kernel("gemm", begin, begin + 50).all_reduce(begin + 60, begin + 80)
    return [marked.step(1, 0, 100).step(2, 100, 200), other]


def two_ranks() -> tuple[GpuTrace, GpuTrace]:
    groups = [("0", "", [0, 1])]
    return GpuTrace(0, 2, groups=groups), GpuTrace(1, 2, groups=groups)


def test_a_rank_whose_marks_lie_elsewhere_is_left_out(tmp_path: Path) -> None:
    for trace in pair(*two_ranks()):
        if trace.rank == 1:
            trace.step(1, 10**9, 10**9 + 100).step(2, 10**9 + 100, 10**9 + 200)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert (report.run.ranks, steps(report, 1)) == ((0,), [])
    [left_out] = [row for row in report.warnings if row.code == "no_steps_on_rank"]
    assert (left_out.rank, left_out.message) == (
        1,
        "no work of this rank lies in its marked steps: left out",
    )


def test_one_step_of_the_whole_trace_is_no_peer_of_marked_steps(tmp_path: Path) -> None:
    for trace in pair(*two_ranks()):
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert [kind for _, kind, _, _ in steps(report, 0)] == ["full", "full"]
    assert [kind for _, kind, _, _ in steps(report, 1)] == ["partial"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_marks_around_no_work_give_a_report_without_steps(tmp_path: Path, ranks: int) -> None:
    for rank in range(ranks):
        GpuTrace(rank, ranks).step(1, 0, 10).kernel("gemm", 20, 30, launched=15).write(tmp_path)
    report = analyze(tmp_path)
    assert (report.steps, report.findings) == ((), ())
    assert "empty_step" in codes(report)


def stepping(*optimizer_in: int, count: int = 4) -> CpuTrace:
    """Steps of 100 us that compute; those listed call an optimizer."""
    trace = CpuTrace()
    for step in range(count):
        trace.step(step, 100 * step, 100 * step + 90).op("aten::mm", 100 * step, 100 * step + 50)
        if step in optimizer_in:
            trace.annotation("Optimizer.step#AdamW.step", 100 * step + 60, 100 * step + 80)
    return trace


@pytest.mark.parametrize(
    ("optimizer_in", "last"),
    [
        ((0, 1, 2), "partial"),  # a crash before the optimizer of step 3
        ((0, 1, 2, 3), "full"),
        ((), "full"),  # the optimizer is not marked
        ((0, 2), "full"),  # or steps every second time
    ],
)
def test_a_last_step_without_its_optimizer_is_torn(
    optimizer_in: tuple[int, ...], last: str, tmp_path: Path
) -> None:
    stepping(*optimizer_in).write(tmp_path)
    report = analyze(tmp_path)
    assert [kind for _, kind, _, _ in steps(report)] == ["full", "full", "full", last]
    torn = [row.message for row in report.warnings if row.code == "step_torn"]
    text = "step 3 has no optimizer step, as where a rank ends in it: partial"
    assert torn == ([text] if last == "partial" else [])


def test_marks_of_microbatches_are_merged_to_optimizer_steps(tmp_path: Path) -> None:
    """Four marks to a step; the recording begins with the last two of one and ends with a first."""
    stepping(1, 5, 9, count=11).write(tmp_path)
    report = analyze(tmp_path)
    assert [(step, kind) for step, kind, *_ in steps(report)] == [
        (1, "partial"), (5, "full"), (9, "full"), (10, "partial"),
    ]  # fmt: skip
    assert steps(report)[1] == (5, "full", 190, 400)
    assert "steps_merged" in codes(report)


@pytest.mark.parametrize(
    ("optimizer_in", "count"),
    [
        ((1, 2, 4, 5), 6),  # one was skipped
        ((0, 2), 4),  # only one such group is complete
        ((3,), 8),
    ],
)
def test_marks_without_an_optimizer_step_now_and_then_are_steps(
    optimizer_in: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    stepping(*optimizer_in, count=count).write(tmp_path)
    report = analyze(tmp_path)
    assert [step for step, *_ in steps(report)] == list(range(count))
    assert "steps_merged" not in codes(report)


def reducing(trace: GpuTrace, at: float) -> None:
    trace.kernel("gemm", at, at + 50).all_reduce(at + 50, at + 60).kernel("gemm", at + 60, at + 90)


def test_what_runs_between_two_marks_makes_the_later_step_another(tmp_path: Path) -> None:
    """An evaluation after step 2 lies in the window of step 3."""
    trace = GpuTrace(0, 2, groups=[("0", "", [0, 1])])
    for step, at in enumerate((0, 100, 200, 500, 600)):
        trace.annotation(f"train_step {step}", at, at + 95)
        reducing(trace, at)
    reducing(trace, 300)
    report = analyze(trace.write(tmp_path))
    assert [(step, kind) for step, kind, *_ in steps(report)] == [
        (0, "full"), (1, "full"), (2, "full"), (3, "other"), (4, "full"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ((0, 1, 2, 0, 3), ["full", "other", "other", "full", "other"]),
        ((0, 1, 0, 1, 3), ["full", "other", "full", "other", "other"]),
        ((1, 0, 1, 0, 1), ["other", "full", "other", "full", "other"]),
        ((1, 0, 1), ["full", "other", "full"]),
        ((0, 1, 2, 4, 3), ["full"] * 5),
        ((1, 1, 2, 0, 3), ["full"] * 5),
    ],
    ids=[
        "same calls and more",
        "of two kinds the one with fewer calls",
        "every second step",
        "a single step is not the usual one",
        "no two alike",
        "fewer calls",
    ],
)
def test_without_a_majority_the_usual_step_is_in_all_others(
    more: tuple[int, ...], kinds: list[str], tmp_path: Path
) -> None:
    """Two of five steps are alike; the others log, evaluate and save, with more calls."""
    trace = GpuTrace(0, 2, groups=[("0", "", [0, 1])])
    for step, calls in enumerate(more):
        trace.step(step, 1000 * step, 1000 * step + 1000)
        for n in range(1 + calls):
            reducing(trace, 1000 * step + 100 * n)
    assert [kind for _, kind, *_ in steps(analyze(trace.write(tmp_path)))] == kinds


def test_a_step_whose_mark_was_lost_makes_the_next_one_another(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=[("0", "", [0, 1])])
    for step in range(6):
        if step != 3:
            trace.step(step, 100 * step, 100 * step + 100)
        reducing(trace, 100 * step)
    report = analyze(trace.write(tmp_path))
    assert [(step, kind) for step, kind, *_ in steps(report)] == [
        (0, "full"), (1, "full"), (2, "full"), (4, "other"), (5, "full"),
    ]  # fmt: skip


def test_a_trace_without_launches_says_so(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 50).step(2, 50, 100).kernel("gemm", 0, 40).kernel("gemm", 60, 90)
    trace.events = [event for event in trace.events if event["cat"] != "cuda_runtime"]
    report = analyze(trace.write(tmp_path))
    assert "no_launches" in codes(report)
    whole = GpuTrace().step(1, 0, 50).kernel("gemm", 0, 40).write(tmp_path)
    assert "no_launches" not in codes(analyze(whole))


def test_of_two_marks_of_one_step_the_longer_counts(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 100).kernel("gemm", 10, 90)
    trace.step(1, 95, 96).step(2, 100, 200).kernel("gemm", 110, 190)
    report = analyze(trace.write(tmp_path))
    assert steps(report) == [(1, "full", 0, 100), (2, "full", 100, 100)]


def test_the_step_in_which_a_rank_died_enters_no_median_of_any_rank() -> None:
    report = analyze(shared_repro("recorded/m_crash"))
    torn = {(row.rank, row.step) for row in report.steps if row.kind == "partial"}
    assert torn == {(0, 13), (1, 13)}
    assert max(row.step_ns for row in report.steps if row.kind == "full") < 13_000_000


def test_a_step_ends_with_its_mark_if_that_ends_after_its_last_kernel(tmp_path: Path) -> None:
    """The optimizer on the CPU belongs to the step that does it, also in the last one; a host that
    runs ahead ends its marks before its kernels."""
    trace = GpuTrace().step(1, 0, 100).kernel("gemm", 10, 40)
    trace.op("DeepSpeedCPUAdam::adam_update", 45, 95)
    trace.step(2, 100, 150).kernel("gemm", 110, 170).step(3, 150, 300).kernel("gemm", 180, 200)
    report = analyze(trace.write(tmp_path))
    assert steps(report) == [(1, "full", 0, 100), (2, "full", 100, 70), (3, "full", 170, 130)]
    assert [row.idle_ns for row in report.steps] == [70_000, 10_000, 110_000]


def test_an_optimizer_on_the_cpu_in_the_last_step_alone_is_no_end_of_the_device(
    tmp_path: Path,
) -> None:
    """Two accumulate, the third updates; a profiler that stops leaves out launches of known ops."""
    trace = GpuTrace()
    for step in range(3):
        at = 100 * step
        trace.step(step, at, at + 100).op("aten::mm", at + 1, at + 9)
        trace.kernel("gemm", at + 10, at + 40)
    trace.op("CPUAdam", 250, 270).op("CPUAdam", 270, 295)
    report = analyze(trace.write(tmp_path))
    assert steps(report) == [(n, "full", 100 * n, 100) for n in range(3)]
    assert "device_work_cut" not in codes(report)


def test_a_mark_in_which_nothing_was_launched_is_no_full_step(tmp_path: Path) -> None:
    """Between others it has the time of its host; the last one is the end of the recording."""
    trace = GpuTrace().step(1, 0, 100).kernel("gemm", 10, 90).step(2, 100, 140)
    trace.step(3, 140, 240).kernel("gemm", 150, 230).step(4, 240, 900)
    report = analyze(trace.write(tmp_path))
    assert steps(report) == [(1, "full", 0, 100), (2, "other", 100, 40), (3, "full", 140, 100)]
    assert codes(report) == ["empty_step"]


@pytest.mark.parametrize("name", ["one_step"])
def test_the_tail_of_an_only_step_is_idle(name: str) -> None:
    report = analyze(shared_repro(f"wild2/step_tail_lost/{name}"))
    [step] = report.steps
    assert (step.step_ns, step.compute_ns, step.idle_ns) == (10_000_000, 3_000_000, 7_000_000)


def train_loop(trace: GpuTrace, numbers: list[int], begin: float, busy: float) -> GpuTrace:
    """Steps of 100 us, each with a kernel that lasts for most of it."""
    for i, number in enumerate(numbers):
        at = begin + 100 * i
        trace.step(number, at, at + 100).kernel("gemm", at + 10, at + 10 + busy)
    return trace


def messages(report: Report, code: str) -> list[str]:
    return [row.message for row in report.warnings if row.code == code]


@pytest.mark.parametrize(
    ("first", "second", "numbers"),
    [
        ([0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4, 5]),
        ([5, 6], [5, 6, 7], [5, 6, 7, 8, 9]),
        ([3, 4], [0, 1], [3, 4, 5, 6]),
        ([0], [0], [0, 1]),
    ],
)
def test_the_steps_of_two_loops_are_numbered_in_order(
    tmp_path: Path, first: list[int], second: list[int], numbers: list[int]
) -> None:
    trace = train_loop(train_loop(GpuTrace(), first, 0, 80), second, 5000, 40)
    trace.kernel("evaluate", 2000, 3000)
    report = analyze(trace.write(tmp_path))
    assert [row.step for row in report.steps] == numbers
    busy = [80_000] * len(first) + [40_000] * len(second)
    assert [row.compute_ns for row in report.steps] == busy
    assert {row.kind for row in report.steps} == {"full"}
    assert max(row.step_ns for row in report.steps) <= 100_000
    count, distinct = len(numbers), len({*first, *second})
    assert messages(report, "step_numbers_repeat") == [
        f"the numbers of ProfilerStep repeat, as in 2 loops: {count} steps have {distinct} "
        f"numbers, and are numbered {numbers[0]} to {numbers[-1]} in order"
    ]
    # Both loops and what is between them add up to the recording.
    lost_ns = 1000 * (5000 - 100 * len(first))
    total_ns = lost_ns + sum(row.step_ns for row in report.steps)
    assert messages(report, "between_loops") == [
        f"what ran before step {numbers[len(first)]}, outside of the marks of a loop, is of no "
        f"step: {lost_ns / 1e6:.2f} ms, {100 * lost_ns / total_ns:.1f} % of the time from the "
        "first step to the last"
    ]


def test_calls_of_a_second_loop_were_issued_in_its_steps(tmp_path: Path) -> None:
    trace = train_loop(train_loop(GpuTrace(), [1, 2], 0, 80), [1, 2], 5000, 40)
    [found] = read_recording([trace.write(tmp_path)]).traces
    [windows] = find_steps_of_ranks([found])
    host = build_host_steps(found, windows)
    assert host.number == (1, 2, 3, 4)
    assert (host.start_ns // 1000).tolist() == [0, 100, 5000, 5100]
    assert (host.end_ns // 1000).tolist() == [100, 200, 5100, 5200]


def test_a_step_without_a_mark_is_said(tmp_path: Path) -> None:
    trace = train_loop(train_loop(GpuTrace(), [0, 1], 0, 80), [3, 4], 300, 80)
    report = analyze(trace.write(tmp_path))
    assert [row.step for row in report.steps] == [0, 1, 3, 4]
    assert [row.compute_ns for row in report.steps] == [80_000] * 4
    assert messages(report, "step_numbers_skip") == ["1 step number has no ProfilerStep: 2"]


def test_numbers_that_skip_without_a_break_leave_no_time_out(tmp_path: Path) -> None:
    report = analyze(train_loop(GpuTrace(), [0, 10, 20], 0, 80).write(tmp_path))
    assert [(row.step, row.step_ns) for row in report.steps][1:] == [(10, 100_000), (20, 100_000)]
    assert messages(report, "step_numbers_skip") == [
        "18 step numbers have no ProfilerStep: 1, 2, 3, 4, 5, 6, 7, 8, ..."
    ]
    assert messages(report, "between_loops") == []


def test_copies_of_a_mark_are_no_loop(tmp_path: Path) -> None:
    """On another thread at the same time, and one of no length behind it."""
    trace = train_loop(GpuTrace(), [0, 1, 2], 0, 80).op("ProfilerStep#1", 100, 190, tid=200)
    report = analyze(trace.step(1, 200, 200.5).write(tmp_path))
    assert [row.step for row in report.steps] == [0, 1, 2]
    assert [code for code in codes(report) if code.startswith("step_numbers")] == []


def test_two_loops_of_a_published_kind() -> None:
    report = analyze(shared_repro("wild2") / "step_numbers" / "repeated")
    assert [row.step for row in report.steps] == [0, 1, 2, 3, 4, 5]
    assert [row.compute_ns for row in report.steps] == [6_500_000] * 3 + [2_500_000] * 3
    assert len(messages(report, "step_numbers_repeat")) == 1
