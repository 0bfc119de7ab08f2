"""End-to-end splits of gloo runs on CPUs: ops, worker threads and the Flight Recorder."""

from __future__ import annotations

from pathlib import Path

from support.builders import CpuTrace
from support.splitting import recording_of

from stepsplit.analyzer import Report, Split, analyze, examine

PAIR = [("0", "default_pg", [0, 1])]
STAGES = [("0", "mesh_pp", [0, 1])]
WORKER_A, WORKER_B, WORKER_C = 201, 202, 203


def us(**buckets: float) -> Split:
    return Split(**{f"{name}_ns": int(value * 1000) for name, value in buckets.items()})


def recorded(folder: Path, *traces: CpuTrace) -> Report:
    for trace in traces:
        trace.write(folder)
    return analyze(folder)


def splits(report: Report) -> dict[tuple[int, int], Split]:
    return {(row.rank, row.step): row.split for row in report.steps}


def test_ops_compute_and_a_rank_arrives_when_it_calls(tmp_path: Path) -> None:
    """The worker of rank 1 picks up its call late, but the rank arrived at 10.5."""
    late = CpuTrace(0, 2, PAIR).step(2, 0, 100).op("aten::mm", 0, 50)
    late.all_reduce(50, 52, 70, group="0", seq=9, tid=WORKER_A).op("aten::mm", 75, 100)
    early = CpuTrace(1, 2, PAIR).step(2, 0, 100).op("aten::mm", 0, 10)
    early.all_reduce(10, 40, 72, group="0", seq=9, tid=WORKER_A).op("aten::mm", 75, 100)
    report = recorded(tmp_path, late, early)
    assert splits(report) == {
        (0, 2): us(compute=75, collective=19.5, idle=5.5),
        (1, 2): us(compute=35, skew=40, collective=21.5, idle=3.5),
    }
    assert [(row.rank, row.cause) for row in report.blame] == [(0, "compute")]


def test_an_op_around_a_collective_is_not_compute(tmp_path: Path) -> None:
    trace = CpuTrace().step(2, 0, 100).op("aten::add", 0, 60).op("aten::mm", 5, 15)
    trace.op("_c10d_functional::wait_tensor", 20, 58).op("aten::mm", 60, 100)
    assert splits(recorded(tmp_path, trace)) == {(0, 2): us(compute=50, idle=50)}


def test_ops_of_other_threads_are_not_compute(tmp_path: Path) -> None:
    trace = CpuTrace().step(2, 0, 100).op("aten::mm", 0, 30).op("aten::copy_", 30, 90, tid=300)
    assert splits(recorded(tmp_path, trace)) == {(0, 2): us(compute=30, idle=70)}


def test_each_group_is_found_by_when_its_workers_start(tmp_path: Path) -> None:
    """Two groups, one with both workers busy: only one assignment explains every start."""
    groups = [("0", "mesh_dp", [0, 1]), ("1", "mesh_tp", [0, 2])]
    trace = CpuTrace(0, 4, groups).step(2, 0, 100).op("aten::mm", 1, 5)
    trace.all_reduce(10, 11, 30, group="0", seq=1, tid=WORKER_A)
    trace.all_reduce(12, 13, 40, group="0", seq=2, tid=WORKER_B)
    trace.all_reduce(14, 31, 50, group="0", seq=3, tid=WORKER_A)
    trace.all_reduce(60, 61, 70, group="1", seq=1, tid=WORKER_C)
    report = recorded(tmp_path, trace)
    axis = {group.id: group.axis for group in report.groups}
    counts = {axis[row.group]: row.count for row in report.collectives}
    assert counts == {"dp_replicate": 3, "tp": 1}


def test_groups_are_found_when_thread_numbers_began_anew_between_them(tmp_path: Path) -> None:
    """The system numbers threads up to 32,768, then from 300 on: the later group has the smaller
    numbers."""
    groups = [("0", "mesh_dp", [0, 1]), ("1", "mesh_tp", [0, 2])]
    trace = CpuTrace(0, 4, groups).step(2, 0, 100).op("aten::mm", 1, 5)
    trace.all_reduce(10, 11, 30, group="0", seq=1, tid=32_766)
    trace.all_reduce(12, 13, 40, group="0", seq=2, tid=32_767)
    trace.all_reduce(14, 31, 50, group="0", seq=3, tid=32_766)
    trace.all_reduce(60, 61, 70, group="1", seq=1, tid=301)
    report = recorded(tmp_path, trace)
    axis = {group.id: group.axis for group in report.groups}
    counts = {axis[row.group]: row.count for row in report.collectives}
    assert counts == {"dp_replicate": 3, "tp": 1}
    assert [row.code for row in report.warnings if row.code.startswith(("gloo", "flight"))] == []


def test_ranges_that_start_long_after_all_calls_are_of_none_of_them(tmp_path: Path) -> None:
    trace = CpuTrace(0, 2, PAIR).step(2, 0, 900_000).op("aten::mm", 0, 50)
    trace.all_reduce(50, 400_000, 400_020, group="0", seq=9, tid=WORKER_A)
    assert "gloo_unpaired" in {row.code for row in recorded(tmp_path, trace).warnings}


def test_without_a_flight_recording_collectives_are_estimated_with_a_note(
    tmp_path: Path,
) -> None:
    trace = CpuTrace(0, 2, PAIR).step(2, 0, 100).op("aten::mm", 0, 50)
    trace.all_reduce(50, 52, 70, group="0", seq=9, tid=WORKER_A)
    trace.flight.clear()
    report = recorded(tmp_path, trace)
    assert splits(report) == {(0, 2): us(compute=50, collective=18, idle=32)}
    assert {"gloo_unpaired", "unmatched"} <= {row.code for row in report.warnings}


def test_a_step_whose_unpaired_collectives_ran_in_another_order_is_full(tmp_path: Path) -> None:
    trace = CpuTrace(0, 2, PAIR)
    for number, ops in enumerate(
        (("reduce", "gather"), ("gather", "reduce"), ("reduce", "gather"))
    ):
        start = 100 * number
        trace.step(2 + number, start, start + 100).op("aten::mm", start, start + 20)
        for at, op in zip((30, 60), ops, strict=True):
            name = {"reduce": "gloo:all_reduce", "gather": "gloo:all_gather"}[op]
            trace.annotation(name, start + at, start + at + 20, tid=WORKER_A)
    report = recorded(tmp_path, trace)
    assert [row.kind for row in report.steps] == ["full", "full", "full"]


def test_a_stage_that_waits_for_its_microbatch_is_in_the_bubble(tmp_path: Path) -> None:
    first = CpuTrace(0, 2, STAGES).step(2, 0, 100).op("aten::mm", 0, 40)
    first.message("send", 1, 40, 50).op("aten::mm", 50, 100)
    last = CpuTrace(1, 2, STAGES).step(2, 0, 100)
    last.message("recv", 0, 5, 50).op("aten::mm", 50, 100)
    report = recorded(tmp_path, first, last)
    assert splits(report) == {
        (0, 2): us(compute=90, p2p=10),
        (1, 2): us(compute=50, bubble=35, p2p=10, idle=5),
    }


def test_the_grid_of_two_stages_and_its_bubble(tmp_path: Path) -> None:
    """Stage 0 works 0-20 and 60-80, stage 1 20-60: half of 80 us is bubble on both."""
    first, last = CpuTrace(0, 2, STAGES).step(2, 0, 100), CpuTrace(1, 2, STAGES).step(2, 0, 100)
    first.op("aten::mm", 0, 20).annotation("stepsplit::F stage=0 mb=0", 0, 20)
    first.message("send", 1, 20, 21).message("recv", 1, 22, 60)
    first.op("aten::mm", 60, 80).annotation("stepsplit::B stage=0 mb=0", 60, 80)
    last.message("recv", 0, 1, 20)
    last.op("aten::mm", 20, 60).annotation("stepsplit::F stage=1 mb=0", 20, 40)
    last.annotation("stepsplit::B stage=1 mb=0", 40, 60).message("send", 0, 60, 61)
    found = recorded(tmp_path, first, last).pipeline
    assert found is not None
    assert [(s.stage, s.bubble_ns, s.bubble_fraction) for s in found.stages] == [
        (0, 40_000, 0.5),
        (1, 40_000, 0.5),
    ]
    assert (found.bubble_fraction, found.ideal_bubble_fraction, found.bubble_overhead) == (
        0.5,
        0.5,
        1,
    )
    assert (found.schedule, found.microbatches) == ("1f1b", 1)


def test_torch_annotations_contain_the_receive_wait_which_is_not_work(tmp_path: Path) -> None:
    first, last = CpuTrace(0, 2, STAGES).step(2, 0, 100), CpuTrace(1, 2, STAGES).step(2, 0, 100)
    first.op("aten::mm", 0, 20).annotation("PP:0F0", 0, 20).message("send", 1, 20, 21)
    first.message("recv", 1, 22, 60).op("aten::mm", 60, 80).annotation("PP:0B0", 22, 80)
    last.annotation("PP:1F0", 1, 40).message("recv", 0, 1, 20).op("aten::mm", 20, 60)
    last.annotation("PP:1B0", 40, 60).message("send", 0, 60, 61)
    found = recorded(tmp_path, first, last).pipeline
    assert found is not None
    assert [stage.bubble_fraction for stage in found.stages] == [0.5, 0.5]


def test_the_phase_of_a_call_is_that_of_its_issue(tmp_path: Path) -> None:
    groups = [("0", "mesh_dp", [0, 1]), ("1", "mesh_tp", [0, 2])]
    trace = CpuTrace(0, 4, groups).step(2, 0, 100).op("aten::mm", 0, 1)
    trace.all_reduce(10, 11, 15, group="1", seq=1, tid=WORKER_C)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 20, 60)
    trace.all_reduce(30, 31, 35, group="1", seq=2, tid=WORKER_C)
    trace.all_reduce(50, 51, 65, group="0", seq=1, tid=WORKER_A)
    trace.annotation("Optimizer.step#AdamW.step", 70, 90)
    trace.all_reduce(75, 76, 80, group="1", seq=3, tid=WORKER_C)
    report = recorded(tmp_path, trace)
    assert {(row.axis, row.phase) for row in report.exposed} == {
        ("tp", "forward"), ("tp", "backward"), ("dp_replicate", "grad_sync"), ("tp", "optimizer"),
    }  # fmt: skip


def test_a_microbatch_is_one_box_if_torch_marks_the_schedule_too(tmp_path: Path) -> None:
    trace = CpuTrace(0, 1).step(2, 0, 100).op("aten::mm", 10, 40)
    trace.annotation("PP:0F0", 0, 40).annotation("stepsplit::F stage=0 mb=0", 10, 40)
    trace.write(tmp_path)
    boxes = examine([tmp_path]).tables.boxes
    assert (boxes.start_ns.tolist(), boxes.dur_ns.tolist()) == ([10_000], [30_000])


def test_a_wait_ends_when_its_thread_resumes_even_if_the_worker_lags(tmp_path: Path) -> None:
    """The worker's range ends 200 us after compute has resumed: the wait of 1 ms was real."""
    early = CpuTrace(0, 2, PAIR).step(2, 0, 3_000).op("aten::mm", 0, 500)
    early.all_reduce(500, 510, 1_700, group="0", seq=1, tid=WORKER_A)
    early.op("aten::mm", 1_500, 3_000)
    late = CpuTrace(1, 2, PAIR).step(2, 0, 3_000).op("aten::mm", 0, 1_400)
    late.all_reduce(1_400, 1_410, 1_500, group="0", seq=1, tid=WORKER_A)
    late.op("aten::mm", 1_500, 3_000)
    report = recorded(tmp_path, early, late)
    assert splits(report)[0, 2] == us(
        compute=2_000, skew=900, collective=99.5, idle=0.5, overlapped=0
    )


def test_communication_that_ends_under_compute_is_overlapped_on_gloo_too(tmp_path: Path) -> None:
    trace = CpuTrace(0, 2, PAIR).step(2, 0, 5_000).op("aten::mm", 0, 1_000)
    trace.all_reduce(1_000, 1_010, 4_000, group="0", seq=1, tid=WORKER_A)
    trace.op("aten::mm", 2_000, 5_000)
    found = splits(recorded(tmp_path, trace))[0, 2]
    assert (found.compute_ns, found.idle_ns) == (4_000_000, 1_000_000)


def test_a_recorder_that_dropped_its_oldest_still_names_the_latest(tmp_path: Path) -> None:
    trace = CpuTrace(0, 2, PAIR).step(2, 0, 100).op("aten::mm", 0, 10)
    for n, at in enumerate((10, 30, 50)):
        trace.all_reduce(at, at + 2, at + 10, group="0", seq=n, tid=WORKER_A)
    del trace.flight[0]
    report = recorded(tmp_path, trace)
    assert [row.count for row in report.collectives if row.group >= 0] == [2]
    assert "flight_incomplete" in {row.code for row in report.warnings}


def joined(report: Report) -> int:
    """Collectives whose group and call are known, of all ranks."""
    return sum(row.count for row in report.collectives if row.group >= 0)


def test_a_call_that_outlives_the_recording_leaves_the_others_joined(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, PAIR).step(2, 0, 100).op("aten::mm", 0, 10)
        for n, at in enumerate((10, 30, 50)):
            trace.all_reduce(at, at + 2, at + 10, group="0", seq=n, tid=WORKER_A)
        trace.all_reduce_unended(90, group="0", seq=3).write(tmp_path)
    report = analyze(tmp_path)
    assert joined(report) == 3
    assert [row.code for row in report.warnings if "gloo" in row.code] == []


def test_with_a_call_that_outlives_the_recording_later_ones_of_the_other_worker_are_open(
    tmp_path: Path,
) -> None:
    """Three calls at once: the second worker ended the second or, while the first one is busy with
    that to the end, the third."""
    trace = CpuTrace(0, 2, PAIR).step(2, 0, 20_000).op("aten::mm", 0, 10)
    trace.all_reduce(10, 12, 100, group="0", seq=0, tid=WORKER_A)
    trace.all_reduce(1_000, 1_050, 1_200, group="0", seq=1, tid=WORKER_A)
    trace.all_reduce(1_002, 1_060, 9_000, group="0", seq=2, tid=WORKER_B)
    trace.all_reduce_unended(1_004, group="0", seq=3)
    report = recorded(tmp_path, trace)
    assert joined(report) == 2
    assert "gloo_order_unknown" in {row.code for row in report.warnings}


def test_the_calls_of_a_worker_that_was_late_are_open_if_they_are_unlike(tmp_path: Path) -> None:
    """Two calls for two idle workers: the first may have taken the second call, but started first.
    That matters only if their sizes or their ends are far apart."""
    counts = {}
    for name, end, nelems in (("alike", 90, 1500), ("late", 3_000, 1500), ("large", 90, 9000)):
        trace = CpuTrace(0, 2, PAIR).step(2, 0, 5_000).op("aten::mm", 0, 10)
        trace.all_reduce(10, 25, 80, group="0", seq=0, tid=WORKER_A)
        trace.all_reduce(12, 30, end, group="0", seq=1, tid=WORKER_B, nelems=nelems)
        trace.all_reduce(4_000, 4_010, 4_090, group="0", seq=2, tid=WORKER_A)
        (tmp_path / name).mkdir()
        counts[name] = joined(recorded(tmp_path / name, trace))
    assert counts == {"alike": 3, "late": 1, "large": 1}


def test_open_calls_of_two_ranks_are_not_matched_with_each_other(tmp_path: Path) -> None:
    """Rank 0 has two open calls in step 2, rank 1 in step 3; the other two match none of them."""
    for rank, is_late in ((0, (True, False)), (1, (False, True))):
        trace = CpuTrace(rank, 2, PAIR).step(2, 0, 10_000).step(3, 10_000, 20_000)
        for step, late in enumerate(is_late):
            at, next_ = 10_000 * step, 12 if late else 200
            trace.op("aten::mm", at, at + 10)
            trace.all_reduce(at + 10, at + 25, at + 4_000, group="0", seq=2 * step, tid=WORKER_A)
            trace.all_reduce(
                at + next_, at + next_ + 18, at + 900, group="0", seq=2 * step + 1, tid=WORKER_B
            )
        trace.write(tmp_path)
    report = analyze(tmp_path)
    warnings = {row.code: row.message for row in report.warnings}
    assert {"gloo_order_unknown", "groups_inferred"} & set(warnings) == {"gloo_order_unknown"}
    assert warnings["unmatched"].startswith("4 of 4 collectives and messages have no matching call")


def test_a_step_with_an_open_reduce_scatter_is_like_the_others(tmp_path: Path) -> None:
    """Gloo's ranges name a reduce_scatter an all_reduce. In step 2 of rank 0 and 3 of rank 1 either
    worker may have run either call."""
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, PAIR)
        for step in range(4):
            at, number = 10_000 * step, 3 * step
            next_ = 12 if step == rank else 1_200
            trace.step(2 + step, at, at + 10_000).op("aten::mm", at, at + 10)
            for n, (called, end, tid) in enumerate(
                ((10, 4_000, WORKER_A), (next_, 1_900, WORKER_B), (5_000, 5_500, WORKER_A))
            ):
                trace.all_reduce(
                    at + called, at + called + 15 + n, at + end, group="0", seq=number + n, tid=tid,
                    op="_reduce_scatter_base_" if n < 2 else "allreduce_", nelems=1000 + 8000 * n,
                )  # fmt: skip
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert "gloo_order_unknown" in {row.code for row in report.warnings}
    assert report.step_kinds == ()
    assert {row.kind for row in report.steps} == {"full"}


def read_numbers(folder: Path) -> list[int]:
    """The sequence number of each collective of the only rank, by start."""
    (rank,) = recording_of(folder).traces
    numbers: list[int] = rank.calls.seq.tolist()
    return numbers


def test_names_tell_the_calls_of_a_worker_that_was_late(tmp_path: Path) -> None:
    """The barrier was called second, and starts first."""
    trace = CpuTrace(0, 2, PAIR).step(2, 0, 9_000).op("aten::mm", 0, 10)
    trace.all_reduce(10, 40, 6_000, group="0", seq=0, tid=WORKER_A)
    trace.all_reduce(12, 30, 80, group="0", seq=1, tid=WORKER_B)
    trace.flight[-1]["profiling_name"] = trace.events[-2]["name"] = "gloo:barrier"
    trace.write(tmp_path)
    assert read_numbers(tmp_path) == [1, 0]


def test_recorded_shapes_tell_the_calls_of_a_worker_that_was_late(tmp_path: Path) -> None:
    """The second call starts first; of the last two, one has not ended."""
    trace = CpuTrace(0, 2, PAIR).step(2, 0, 9_000).op("aten::mm", 0, 10)
    at = ((10, 40, 6_000, WORKER_A), (12, 30, 80, WORKER_B), (8_005, 8_010, 8_500, WORKER_B))
    for seq, (called, start, end, tid) in zip((0, 1, 3), at, strict=True):
        if seq == 3:
            trace.all_reduce_unended(8_000, group="0", seq=2, nelems=3000)
        trace.all_reduce(
            called, start, end, group="0", seq=seq, tid=tid, nelems=1000 + 4000 * seq, shapes=True
        )
    assert joined(recorded(tmp_path, trace)) == 3
    assert read_numbers(tmp_path) == [1, 0, 3]


def test_gradients_over_all_data_parallel_axes_are_grad_sync(tmp_path: Path) -> None:
    groups = [("0", "default_pg", [0, 1, 2, 3]), ("1", "mesh_dp_replicate", [0, 2]),
              ("2", "mesh_dp_shard", [0, 1])]  # fmt: skip
    trace = CpuTrace(0, 4, groups).step(2, 0, 100).op("aten::mm", 0, 5)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 10, 60)
    trace.all_reduce(30, 31, 40, group="0", seq=1, tid=WORKER_A)
    exposed = recorded(tmp_path, trace).exposed
    assert {(r.axis, r.phase) for r in exposed} == {("dp_replicate x dp_shard", "grad_sync")}


def test_a_schedule_with_separate_weight_gradients_is_zero_bubble(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, STAGES).step(2, 0, 100)
        for letter, at in (("F", 0), ("B", 20), ("W", 40)):
            trace.annotation(f"stepsplit::{letter} stage={rank} mb=0", at, at + 20)
        trace.op("aten::mm", 0, 60).write(tmp_path)
    found = analyze(tmp_path).pipeline
    assert found is not None
    assert (found.schedule, found.ideal_bubble_fraction) == ("zerobubble", None)


def test_marks_of_steps_that_overlap_lose_no_time(tmp_path: Path) -> None:
    """As where a damaged or merged trace states the same start for several."""
    trace = CpuTrace().step(1, 0, 30).step(2, 0, 20).step(3, 0, 50).op("aten::mm", 5, 45)
    report = analyze(trace.write(tmp_path))
    assert [(row.step, row.step_ns, row.compute_ns) for row in report.steps] == [
        (1, 30_000, 25_000),
        (3, 20_000, 15_000),
    ]
