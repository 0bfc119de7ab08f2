"""End-to-end splits of a few GPU kernels: files in, split out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.builders import BASE_NS, COMM_STREAM, GpuTrace

from stepsplit.analyzer import BlameRow, ExposedRow, Report, Split, analyze, collective_time
from stepsplit.analyzer.readers.kineto import schema
from stepsplit.collectors.formats.run_spec import RankInfo, RunSpec, to_json

PAIR = [("0", "default_pg", [0, 1])]
STAGES = [("3", "mesh_pp", [0, 1])]
AUTOGRAD = 101


def us(**buckets: float) -> Split:
    return Split(**{f"{name}_ns": int(value * 1000) for name, value in buckets.items()})


def splits(report: Report) -> dict[tuple[int, int], Split]:
    return {(row.rank, row.step): row.split for row in report.steps}


def straggler(host_of_rank_1: str = "host0", ahead_ns: int = 0) -> list[GpuTrace]:
    """Rank 0 computes 40 us longer than rank 1 before an all-reduce of 20 us."""
    late = GpuTrace(0, 2, groups=PAIR).step(1, 0, 100)
    late.kernel("gemm", 0, 50).all_reduce(50, 70).kernel("gemm", 70, 100)
    early = GpuTrace(1, 2, groups=PAIR, host=host_of_rank_1, base_ns=BASE_NS + ahead_ns)
    early.step(1, 0, 100).kernel("gemm", 0, 10).all_reduce(10, 70).kernel("gemm", 70, 100)
    return [late, early]


def test_waiting_for_a_late_rank_is_skew_and_the_rest_is_transfer(tmp_path: Path) -> None:
    report = analyze(*[trace.write(tmp_path) for trace in straggler()])
    assert splits(report) == {
        (0, 1): us(compute=80, collective=20),
        (1, 1): us(compute=40, skew=40, collective=20),
    }
    assert report.blame == (BlameRow(0, "compute", 40_000, 0, 40_000, "default_pg", (1,)),)


def test_the_order_of_files_changes_nothing(tmp_path: Path) -> None:
    paths = [trace.write(tmp_path) for trace in straggler()]
    assert analyze(*paths) == analyze(*reversed(paths))


def test_another_hosts_clock_changes_no_bucket(tmp_path: Path) -> None:
    for name, ahead_ns in (("same", 0), ("ahead", 50_000_000)):
        (tmp_path / name).mkdir()
        for trace in straggler("host1", ahead_ns):
            trace.write(tmp_path / name)
    same, ahead = analyze(tmp_path / "same"), analyze(tmp_path / "ahead")
    assert splits(ahead) == splits(same)
    assert ahead.clocks[1].offset_ns - same.clocks[1].offset_ns == 50_000_000
    assert [row.start_ns for row in ahead.steps] == [row.start_ns for row in same.steps]


def test_a_host_whose_ranks_disagree_about_time_is_two_clocks(tmp_path: Path) -> None:
    report = analyze(*[trace.write(tmp_path) for trace in straggler(ahead_ns=50_000_000)])
    assert splits(report)[1, 1] == us(compute=40, skew=40, collective=20)


def test_a_receive_that_waits_for_another_stage_is_bubble(tmp_path: Path) -> None:
    first = GpuTrace(0, 2, groups=STAGES).step(1, 0, 100)
    first.kernel("F0", 0, 40).message("send", 1, 40, 50, group="3").kernel("F1", 50, 100)
    last = GpuTrace(1, 2, groups=STAGES).step(1, 0, 100)
    last.message("recv", 0, 5, 50, group="3").kernel("F0", 50, 100)
    report = analyze(first.write(tmp_path), last.write(tmp_path))
    assert splits(report) == {
        (0, 1): us(compute=90, p2p=10),
        (1, 1): us(compute=50, p2p=10, bubble=35, idle=5),
    }
    assert report.exposed[1] == ExposedRow(1, 1, "pp", "forward", 0, 10_000, 0, 35_000)


def test_without_a_mesh_a_chain_of_messages_is_a_pipeline(tmp_path: Path) -> None:
    plain = [("3", "", [0, 1])]
    first = GpuTrace(0, 2, groups=plain).step(1, 0, 100)
    first.kernel("F0", 0, 40).message("send", 1, 40, 50, group="3").kernel("F1", 50, 100)
    last = GpuTrace(1, 2, groups=plain).step(1, 0, 100)
    last.message("recv", 0, 5, 50, group="3").kernel("F0", 50, 100)
    report = analyze(first.write(tmp_path), last.write(tmp_path))
    assert splits(report)[1, 1] == us(compute=50, p2p=10, bubble=35, idle=5)
    assert (report.run.mesh_source, report.warnings[0].code) == ("messages", "mesh_inferred")


def test_a_step_ends_with_the_last_kernel_that_it_launched(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 20).step(2, 20, 40)
    trace.kernel("gemm", 5, 50, launched=1).kernel("adam", 50, 60, launched=15)
    trace.kernel("gemm", 70, 90, launched=21).memcpy(95, 99)
    report = analyze(trace.write(tmp_path))
    assert splits(report) == {(0, 1): us(compute=55, idle=5), (0, 2): us(compute=20, idle=10)}
    assert [(row.start_ns, row.kind) for row in report.steps] == [(0, "full"), (60_000, "full")]


def test_a_step_into_which_earlier_work_runs_is_partial(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 10, 20).kernel("before", 5, 30, launched=2)
    trace.kernel("gemm", 40, 50, launched=11)
    report = analyze(trace.write(tmp_path))
    assert splits(report) == {(0, 1): us(compute=10, idle=10)}
    assert report.steps[0].kind == "partial"


def test_one_rank_alone_is_estimated_by_its_fastest_call(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=PAIR).step(1, 0, 100)
    trace.all_reduce(0, 30).kernel("gemm", 30, 40).all_reduce(40, 50).kernel("gemm", 50, 100)
    report = analyze(trace.write(tmp_path))
    assert splits(report) == {(0, 1): us(compute=60, skew=20, collective=20)}
    assert report.steps[0].estimated
    assert "unmatched" in {row.code for row in report.warnings}


H100 = "NVIDIA H100 80GB HBM3"


def waiting(rank: int, world_size: int, group: list[int], *, gpus: int, **more: Any) -> GpuTrace:
    """One rank of a group on H100, whose only calls take 5 and 4 ms."""
    groups = [("0", "default_pg", group)]
    trace = GpuTrace(rank, world_size, groups=groups, gpu=H100, gpus=gpus).step(1, 0, 9_200)
    trace.all_reduce(0, 5_000, **more).kernel("gemm", 5_000, 5_100)
    return trace.all_reduce(5_100, 9_100, **more).kernel("gemm", 9_100, 9_200)


def test_one_rank_alone_has_waited_for_longer_than_its_message_can_take(tmp_path: Path) -> None:
    """Its fastest call waited as well: both take the model's time."""
    report = analyze(waiting(0, 2, [0, 1], gpus=2).write(tmp_path))
    [step] = report.steps
    transfer_ns = int(collective_time("all_reduce", 4_000, 2, "h100-sxm").ns)
    assert step.split.collective_ns == pytest.approx(2 * transfer_ns, abs=2)
    assert step.split.skew_ns == 9_000_000 - step.split.collective_ns
    assert step.estimated


@pytest.mark.parametrize(
    ("group", "gpus", "nelems"),
    [
        ([0, 1], 1, 1_000),  # the other rank may be anywhere
        ([0, 4], 4, 1_000),  # on the second of two nodes of four
        ([0, 1], 2, 1_000_000_000),  # 4 GB may take that long
    ],
)
def test_a_call_may_take_long_between_nodes_or_if_it_is_large(
    group: list[int], gpus: int, nelems: int, tmp_path: Path
) -> None:
    report = analyze(waiting(0, 8, group, gpus=gpus, nelems=nelems).write(tmp_path))
    [step] = report.steps
    assert step.split.collective_ns == 8_000_000, "twice the faster call"


def test_ranks_of_different_hosts_share_no_node(tmp_path: Path) -> None:
    """Whatever GPUs they see: run.json says where the other one is."""
    waiting(0, 2, [0, 1], gpus=2).write(tmp_path)
    ranks = tuple(RankInfo(rank, 0, f"host{rank}", 1, f"cuda:0 {H100}") for rank in (0, 1))
    (tmp_path / "run.json").write_text(to_json(RunSpec("run", 2, "nccl", ranks=ranks)))
    [step] = analyze(tmp_path).steps
    assert step.split.collective_ns == 8_000_000


@pytest.mark.parametrize("linked", [True, False])
def test_a_file_without_a_time_base_begins_with_the_others(linked: bool, tmp_path: Path) -> None:
    """As files have that another tool saved again; on a clock from 0 it would be 50 years away."""
    traces = [GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100) for rank in (0, 1)]
    for trace, at in zip(traces, (40, 10), strict=True):
        trace.kernel("gemm", 0, at)
        if linked:
            trace.all_reduce(at, 60).kernel("gemm", 60, 100)
    traces[1].base_ns = 0
    report = analyze(*(trace.write(tmp_path) for trace in traces))
    assert [row.start_ns for row in report.steps] == [0, 0]
    waits = [(row.collective_ns, row.skew_ns) for row in report.steps]
    assert waits == ([(20_000, 0), (20_000, 30_000)] if linked else [(0, 0), (0, 0)])
    assert ("no_clock", 1) in {(row.code, row.rank) for row in report.warnings}


def test_sequence_numbers_match_windows_that_begin_on_different_calls(tmp_path: Path) -> None:
    one = GpuTrace(0, 2, groups=PAIR).step(1, 0, 100).kernel("gemm", 0, 40)
    one.all_reduce(40, 60, Seq=7).kernel("gemm", 60, 100)
    other = GpuTrace(1, 2, groups=PAIR).step(1, 0, 100).all_reduce(0, 5, Seq=6)
    other.kernel("gemm", 5, 10).all_reduce(10, 60, Seq=7).kernel("gemm", 60, 100)
    report = analyze(one.write(tmp_path), other.write(tmp_path))
    assert splits(report)[1, 1] == us(compute=45, skew=30, collective=25)


def test_a_step_with_other_communication_enters_no_median(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=PAIR)
    for number in range(4):
        at = 100 * number
        trace.step(number, at, at + 100).kernel("gemm", at, at + 90)
        if number != 2:
            trace.all_reduce(at + 20, at + 40)
    report = analyze(trace.write(tmp_path))
    assert [row.kind for row in report.steps] == ["full", "full", "other", "full"]


def test_a_fused_kernel_counts_as_compute_and_its_time_is_reported(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 50).kernel("fused_all_gather_matmul", 0, 30)
    trace.kernel("gemm", 30, 50)
    assert splits(analyze(trace.write(tmp_path))) == {(0, 1): us(compute=50, fused=30)}


def test_communication_without_nccl_in_its_name_is_communication(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 50).kernel("gemm", 0, 20)
    trace.kernel("void deep_ep::internode::dispatch<8>()", 20, 40, stream=COMM_STREAM)
    trace.kernel("gemm", 40, 50)
    assert splits(analyze(trace.write(tmp_path))) == {(0, 1): us(compute=30, collective=20)}


def test_a_trace_without_steps_is_one_step_with_a_note(tmp_path: Path) -> None:
    trace = GpuTrace().kernel("gemm", 10, 20).kernel("gemm", 25, 30)
    report = analyze(trace.write(tmp_path))
    assert splits(report) == {(0, 0): us(compute=15, idle=5)}
    assert [row.code for row in report.warnings] == ["no_steps"]


def test_steps_are_the_same_by_their_collectives_never_by_number(tmp_path: Path) -> None:
    late, early = straggler()
    renamed = [
        dict(event, name=event["name"].replace("Step#1", "Step#5")) for event in early.events
    ]
    report = analyze(late.write(tmp_path), replace(early, events=renamed).write(tmp_path))
    assert sorted(splits(report)) == [(0, 1), (1, 1)]
    assert [row.code for row in report.warnings if row.rank == 1] == ["steps_renumbered"]


def test_an_eager_send_that_ends_before_the_receive_did_not_wait(tmp_path: Path) -> None:
    first = GpuTrace(0, 2, groups=STAGES).step(1, 0, 100)
    first.kernel("F0", 0, 10).message("send", 1, 10, 20, group="3").kernel("F1", 20, 100)
    last = GpuTrace(1, 2, groups=STAGES).step(1, 0, 100).kernel("F0", 0, 60)
    last.message("recv", 0, 60, 70, group="3").kernel("F1", 70, 100)
    report = analyze(first.write(tmp_path), last.write(tmp_path))
    assert splits(report) == {(0, 1): us(compute=90, p2p=10), (1, 1): us(compute=90, p2p=10)}
    assert {row.wait_ns_median for row in report.collectives} == {0}


def test_a_copy_between_devices_is_communication_that_never_waits(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 100)
    for start, end in ((0, 10), (20, 70)):
        trace.kernel("Memcpy PtoP (Device -> Device)", start, end, category="gpu_memcpy", stream=9)
    trace.kernel("gemm", 70, 100)
    assert splits(analyze(trace.write(tmp_path))) == {
        (0, 1): us(compute=30, collective=60, idle=10)
    }


def test_hosts_that_share_nothing_with_the_first_are_still_aligned_with_each_other(
    tmp_path: Path,
) -> None:
    """Two data-parallel pairs; the clock of rank 3 is 50 ms ahead."""
    groups = [("a", "", [0, 1]), ("b", "", [2, 3])]
    for rank, ahead_ns in ((0, 0), (1, 0), (2, 0), (3, 50_000_000)):
        trace = GpuTrace(rank, 4, f"host{rank}", BASE_NS + ahead_ns, groups).step(1, 0, 100)
        trace.kernel("gemm", 0, 50).all_reduce(50, 70, group="ab"[rank // 2])
        trace.kernel("gemm", 70, 100).write(tmp_path)
    report = analyze(tmp_path)
    assert set(splits(report).values()) == {us(compute=80, collective=20)}
    assert [row.rank for row in report.warnings if row.code == "clock_unaligned"] == [2, 3]


def test_a_copy_does_not_end_a_step(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 20).step(2, 20, 40).kernel("gemm", 0, 30, launched=1)
    trace.kernel("Memcpy HtoD", 30, 60, launched=10, category="gpu_memcpy")
    trace.kernel("gemm", 60, 90, launched=21)
    assert splits(analyze(trace.write(tmp_path))) == {
        (0, 1): us(compute=30),
        (0, 2): us(compute=30, copy=30),
    }


def test_a_call_belongs_to_the_step_that_made_it_wherever_it_runs(tmp_path: Path) -> None:
    """In step 2 the all-reduce starts after the window's end: no other kind of step for that."""
    trace = GpuTrace(0, 2, groups=PAIR)
    for number in range(4):
        at, late = 100 * number, 20 if number == 2 else 0
        trace.step(number, at, at + 100).kernel("gemm", at, at + 90, launched=at)
        start = at + 85 + late
        trace.all_reduce(start, start + 3, launched=at + 5)
    assert {row.kind for row in analyze(trace.write(tmp_path)).steps} == {"full"}


def test_the_grid_on_gpus_is_where_the_kernels_of_marks_ran(tmp_path: Path) -> None:
    """The host is 50 us ahead of the device: its ranges are not the grid.

    Autograd's thread launches the backward: the profiler's device range of its mark lacks it.
    """
    first = GpuTrace(0, 2, groups=STAGES).step(1, 0, 100)
    first.annotation("PP:0F0", 0, 5).annotation("PP:0B0", 7, 12)
    first.kernel("F0", 50, 70, launched=1).gpu_annotation("PP:0F0", 50, 70)
    first.message("recv", 1, 72, 110, group="3", launched=6)
    first.kernel("B0", 110, 130, launched=8, thread=AUTOGRAD)
    last = GpuTrace(1, 2, groups=STAGES).step(1, 0, 100)
    last.annotation("PP:1F0", 0, 2).annotation("PP:1B0", 3, 9)
    last.kernel("F0", 70, 90, launched=1).gpu_annotation("PP:1F0", 70, 90)
    last.kernel("loss", 90, 91, launched=4).gpu_annotation("PP:1B0", 90, 91)
    last.kernel("B0", 91, 108, launched=5, thread=AUTOGRAD)
    last.message("send", 0, 108, 110, group="3", launched=10)
    found = analyze(first.write(tmp_path), last.write(tmp_path)).pipeline
    assert found is not None
    assert [stage.bubble_ns for stage in found.stages] == [40_000, 42_000]


def test_the_grid_without_marks_of_the_host_is_where_the_profiler_puts_them(tmp_path: Path) -> None:
    first = GpuTrace(0, 2, groups=STAGES).step(1, 0, 100)
    first.kernel("F0", 50, 70, launched=1).gpu_annotation("PP:0F0", 50, 70)
    first.message("recv", 1, 72, 110, group="3", launched=6)
    first.kernel("B0", 110, 130, launched=7).gpu_annotation("PP:0B0", 110, 130)
    last = GpuTrace(1, 2, groups=STAGES).step(1, 0, 100)
    last.kernel("F0", 70, 90, launched=1).gpu_annotation("PP:1F0", 70, 90)
    last.kernel("B0", 90, 108, launched=2).gpu_annotation("PP:1B0", 90, 108)
    last.message("send", 0, 108, 110, group="3", launched=3)
    found = analyze(first.write(tmp_path), last.write(tmp_path)).pipeline
    assert found is not None
    assert [stage.bubble_ns for stage in found.stages] == [40_000, 42_000]


def test_kernels_without_arguments_are_the_worlds_where_all_ranks_ran_the_same(
    tmp_path: Path,
) -> None:
    for rank, computed in ((0, 50), (1, 10)):
        trace = GpuTrace(rank, 2).step(1, 0, 100).kernel("gemm", 0, computed)
        trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", computed, 70, stream=COMM_STREAM)
        trace.kernel("ncclKernel_SendRecv_RING_SIMPLE", 75, 85, stream=COMM_STREAM)
        trace.kernel("gemm", 85, 100).write(tmp_path)
    report = analyze(tmp_path)
    assert splits(report) == {
        (0, 1): us(compute=65, collective=30, idle=5),
        (1, 1): us(compute=25, skew=40, collective=30, idle=5),
    }
    assert "groups_inferred" in {row.code for row in report.warnings}


def test_replayed_graphs_of_two_groups_are_not_a_collective_of_all_ranks(tmp_path: Path) -> None:
    """Two tensor-parallel pairs replay an all_reduce at the same time; its kernel has no group."""
    pairs = [("0", "default_pg", range(4)), ("1", "tp", [0, 1]), ("2", "tp", [2, 3])]
    for rank, computed in enumerate((50, 10, 30, 20)):
        own = [group for group in pairs if rank in group[2]]
        trace = GpuTrace(rank, 4, groups=own).step(1, 0, 100).kernel("gemm", 0, computed)
        trace.launch("ncclDevKernel_AllReduce", (1, 2), (computed, 70), call="cudaGraphLaunch")
        trace.kernel("gemm", 70, 100).write(tmp_path)
    report = analyze(tmp_path)
    assert splits(report)[0, 1] == us(compute=80, collective=20)
    assert splits(report)[1, 1] == us(compute=40, collective=60)
    warnings = {row.code: row.message for row in report.warnings}
    assert "groups_inferred" not in warnings
    assert warnings["groups_unknown"].startswith(
        "up to 1 collectives per rank (1 of them replayed in CUDA graphs) carry no process group"
    )


def test_replayed_graphs_are_of_all_ranks_where_no_smaller_group_is_known(tmp_path: Path) -> None:
    for rank, computed in ((0, 50), (1, 10)):
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100).kernel("gemm", 0, computed)
        trace.launch("ncclDevKernel_AllReduce", (1, 2), (computed, 70), call="cudaGraphLaunch")
        trace.kernel("gemm", 70, 100).write(tmp_path)
    assert splits(analyze(tmp_path))[1, 1] == us(compute=40, skew=40, collective=20)


def test_a_generic_kernel_of_rccl_runs_the_messages_posted_before_it(tmp_path: Path) -> None:
    """A batch of a send and a receive; the kernel's name says nothing, its launch has no op."""
    for rank, computed in ((0, 50), (1, 10)):
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100).kernel("gemm", 0, computed)
        trace.post("send", 1 - rank, 1, 2).post("recv", 1 - rank, 3, 4)
        trace.kernel("ncclDevKernel_Generic_4", computed, 70, launched=5, stream=COMM_STREAM)
        trace.kernel("gemm", 70, 100).write(tmp_path)
    report = analyze(tmp_path)
    assert {row.op for row in report.collectives} == {"send", "recv"}
    assert splits(report)[1, 1] == us(compute=40, skew=40, p2p=20)
    assert "groups_inferred" not in {row.code for row in report.warnings}


def test_a_step_ends_with_the_last_of_its_streams_and_devices(tmp_path: Path) -> None:
    """The second half of the model runs on another device of the process, launched in time."""
    trace = GpuTrace(0, 1).step(1, 0, 40).step(2, 40, 80)
    for start in (0, 100):
        trace.kernel("first_half", start, start + 50, launched=start * 0.4)
        trace.kernel("second_half", start + 50, start + 95, launched=start * 0.4 + 1, stream=8)
        trace.events[-1]["pid"] = 2
        trace.events[-1]["args"]["device"] = 1
    report = analyze(trace.write(tmp_path))
    assert splits(report) == {(0, 1): us(compute=95), (0, 2): us(compute=95, idle=5)}
    warnings = {row.code: row.message for row in report.warnings}
    assert warnings["several_devices"].startswith("the process computes on devices 0, 1: ")


def test_kernels_without_arguments_that_cannot_be_one_collective_stay_apart(
    tmp_path: Path,
) -> None:
    """On rank 1 the first kernel ends long before rank 0 begins its own."""
    for rank, at in ((0, 1_000), (1, 0)):
        trace = GpuTrace(rank, 2).step(1, 0, 4_000).kernel("gemm", 3_000, 4_000)
        trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", at, at + 50, stream=COMM_STREAM)
        for start in (2_000, 2_500):
            trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", start, start + 50)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert {"unmatched"} <= {row.code for row in report.warnings}
    assert {row.skew_ns for row in report.steps} == {0}


def test_a_batch_of_messages_without_arguments_is_the_pipelines(tmp_path: Path) -> None:
    """Sizes are unknown but equal in a pipeline: the fastest gives the transfer time."""
    groups = [*STAGES, ("4", "mesh_tp", [0, 2])]
    trace = GpuTrace(0, 4, groups=groups).step(1, 0, 100)
    trace.kernel("gemm", 0, 10).all_reduce(10, 20, group="4").kernel("gemm", 20, 30)
    trace.kernel("ncclDevKernel_SendRecv", 30, 60, stream=COMM_STREAM).kernel("gemm", 60, 80)
    trace.kernel("ncclDevKernel_SendRecv", 80, 90, stream=COMM_STREAM).kernel("gemm", 90, 100)
    (tmp_path / "run.json").write_text(
        '{"schema": "stepsplit.run/1", "name": "r", "world_size": 4, "backend": "nccl",'
        ' "mesh": [{"axis": "tp", "size": 2}, {"axis": "pp", "size": 2}]}'
    )
    trace.write(tmp_path)
    report = analyze(tmp_path)
    assert splits(report) == {(0, 1): us(compute=50, collective=10, p2p=20, bubble=20)}
    assert report.steps[0].estimated


def repeated(rank: int, host: str, steps: range) -> GpuTrace:
    """The same 100 us step again and again, without sequence numbers; rank 0 is 20 us late."""
    trace = GpuTrace(rank, 2, host, groups=PAIR)
    for number in steps:
        at, arrives = 100 * number, 100 * number + (50 if rank == 0 else 30)
        trace.step(number, at, at + 100).kernel("gemm", at, arrives)
        trace.all_reduce(arrives, at + 70).kernel("gemm", at + 70, at + 100)
    return trace


def test_a_shared_clock_matches_identical_calls(tmp_path: Path) -> None:
    """Rank 1 lacks step 0: its first all-reduce is the second of rank 0."""
    repeated(0, "host0", range(5)).write(tmp_path)
    repeated(1, "host0", range(1, 5)).write(tmp_path)
    report = analyze(tmp_path)
    late = us(compute=80, collective=20)
    assert [splits(report)[0, step] for step in range(1, 5)] == [late] * 4
    early = us(compute=60, skew=20, collective=20)
    assert [splits(report)[1, step] for step in range(1, 5)] == [early] * 4
    assert not {row.code for row in report.warnings} & {"order_ambiguous", "steps_renumbered"}


def test_without_a_shared_clock_identical_calls_are_ambiguous_with_a_note(tmp_path: Path) -> None:
    repeated(0, "host0", range(5)).write(tmp_path)
    repeated(1, "host1", range(1, 5)).write(tmp_path)
    assert "order_ambiguous" in {row.code for row in analyze(tmp_path).warnings}


def test_ranks_share_the_clock_of_a_host_that_only_run_json_names(tmp_path: Path) -> None:
    """As traces of torch before 2.12, which name none."""
    for rank, steps in ((0, range(5)), (1, range(1, 5))):
        repeated(rank, "", steps).write(tmp_path)
    ranks = [RankInfo(rank, rank, "host0", 7, "cuda:0") for rank in (0, 1)]
    (tmp_path / "run.json").write_text(to_json(RunSpec("run", 2, "nccl", ranks=tuple(ranks))))
    assert "order_ambiguous" not in {row.code for row in analyze(tmp_path).warnings}


def write_flight_dump(folder: Path, trace: GpuTrace, numbers: range) -> None:
    """The Flight Recorder's dump for the all_reduces of the trace, which have these numbers."""
    launched = [
        event["ts"] for event in trace.events
        if event["cat"] == "kernel" and event["name"].startswith("nccl")
    ]  # fmt: skip
    entries = [
        {"process_group": ["0", "default_pg"], "collective_seq_id": number, "is_p2p": False,
         "profiling_name": "nccl:all_reduce",
         "time_created_ns": trace.base_ns + int(1000 * at) - 500,
         "input_sizes": [[1000]], "input_dtypes": ["Float"], "state": "completed"}
        for number, at in zip(numbers, launched, strict=True)
    ]  # fmt: skip
    dump = {"version": "2.10", "entries": entries}
    (folder / f"rank{trace.rank}_flight.json").write_text(json.dumps(dump))


def test_the_flight_recorder_numbers_identical_calls(tmp_path: Path) -> None:
    """As without a shared clock, but torch before 2.13 has the numbers in the dumps alone."""
    ahead_ns = 20_000_000
    first = repeated(0, "host0", range(5))
    second = replace(repeated(1, "host1", range(1, 5)), base_ns=BASE_NS + ahead_ns)
    for trace, numbers in ((first, range(5)), (second, range(1, 5))):
        trace.write(tmp_path)
        write_flight_dump(tmp_path, trace, numbers)
    report = analyze(tmp_path)
    early = us(compute=60, skew=20, collective=20)
    assert [splits(report)[1, step] for step in range(1, 5)] == [early] * 4
    assert not {row.code for row in report.warnings} & {"order_ambiguous", "steps_renumbered"}


def test_calls_that_contradict_the_flight_recorder_stay_without_numbers(tmp_path: Path) -> None:
    """The dump of rank 1 is of another part of the job: one entry less than its calls."""
    first, second = repeated(0, "host0", range(5)), repeated(1, "host1", range(1, 5))
    for trace in (first, second):
        trace.write(tmp_path)
    write_flight_dump(tmp_path, first, range(5))
    write_flight_dump(tmp_path, repeated(1, "host1", range(2, 5)), range(2, 5))
    assert "order_ambiguous" in {row.code for row in analyze(tmp_path).warnings}


def test_work_that_was_launched_before_the_recording_is_of_no_step_in_it(tmp_path: Path) -> None:
    """The host runs ahead: the kernels of the step before are still running."""
    for rank, computed in ((0, 40), (1, 30)):
        trace = GpuTrace(rank, 2, groups=PAIR)
        trace.unlaunched("gemm", 0, 20)
        trace.unlaunched("ncclDevKernel_AllReduce_Sum", 20, 25, stream=COMM_STREAM)
        trace.unlaunched("ncclDevKernel_SendRecv", 25, 30, stream=COMM_STREAM)
        for number in range(3):
            at = 100 * number
            trace.step(number, at - 1, at + 99)
            trace.kernel("gemm", at + 30, at + 30 + computed, launched=at)
            trace.all_reduce(at + 30 + computed, at + 100, launched=at + 1)
            trace.kernel("gemm", at + 100, at + 130, launched=at + 2)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert [(row.step, row.kind) for row in report.steps if row.rank == 0] == [
        (0, "partial"), (1, "full"), (2, "full"),
    ]  # fmt: skip
    assert splits(report)[0, 0] == splits(report)[0, 2] == us(compute=70, collective=30)
    assert splits(report)[1, 1] == us(compute=60, skew=10, collective=30)
    assert {row.op for row in report.collectives} == {"all_reduce"}
    assert {row.code for row in report.warnings} == {"mesh_unknown"}


def test_a_window_that_lacks_a_message_pairs_the_others_by_a_shared_clock(tmp_path: Path) -> None:
    first = GpuTrace(0, 2, groups=STAGES).step(1, 0, 300)
    last = GpuTrace(1, 2, groups=STAGES).step(1, 0, 300)
    for n in range(3):
        at = 100 * n
        first.kernel("F", at, at + 40).message("send", 1, at + 40, at + 50, group="3")
        if n:
            last.message("recv", 0, at + 5, at + 50, group="3")
        last.kernel("F", at + 50, at + 100)
    first.kernel("F", 290, 300)
    report = analyze(first.write(tmp_path), last.write(tmp_path))
    assert splits(report)[1, 1] == us(compute=150, p2p=20, bubble=70, idle=60)


def test_a_group_is_its_ranks_whatever_each_rank_calls_it(tmp_path: Path) -> None:
    for rank, computed, name in ((0, 50, "left"), (1, 10, "right")):
        trace = GpuTrace(rank, 2, groups=[(name, "", [0, 1])]).step(1, 0, 100)
        trace.kernel("gemm", 0, computed).all_reduce(computed, 70, group=name)
        trace.kernel("gemm", 70, 100).write(tmp_path)
    assert splits(analyze(tmp_path))[1, 1] == us(compute=40, skew=40, collective=20)


def test_a_replayed_graph_repeats_its_sequence_numbers_and_each_replay_is_a_call(
    tmp_path: Path,
) -> None:
    for rank, late in ((0, 0), (1, 10)):
        trace = GpuTrace(rank, 2, groups=PAIR)
        for number in range(3):
            at = 100 * number
            trace.step(number, at, at + 100).kernel("gemm", at, at + 20 + late)
            trace.all_reduce(at + 20 + late, at + 40, Seq=7).kernel("gemm", at + 40, at + 60)
            trace.all_reduce(at + 60, at + 70, Seq=8).kernel("gemm", at + 70, at + 100)
        trace.write(tmp_path)
    early = us(compute=70, skew=10, collective=20)
    assert [splits(analyze(tmp_path))[0, step] for step in range(3)] == [early] * 3


def test_a_size_known_only_to_the_root_is_that_of_the_collective(tmp_path: Path) -> None:
    for rank, known in ((0, {}), (1, {"In msg nelems": -1, "Out msg nelems": -1, "dtype": ""})):
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100).kernel("gemm", 0, 50)
        trace.collective("Scatter", "scatter", 50, 70, **known)
        trace.kernel("gemm", 70, 100).write(tmp_path)
    rows = analyze(tmp_path).collectives
    assert [(r.op, r.dtype, r.message_bytes, r.count) for r in rows] == [
        ("scatter", "float32", 4000, 1)
    ]


def test_without_marks_steps_end_with_the_optimizer(tmp_path: Path) -> None:
    trace = GpuTrace()
    for number in range(4):
        at = 100 * number
        trace.kernel("gemm", at, at + 60).annotation("Optimizer.step#AdamW.step", at + 70, at + 80)
        trace.kernel("adam", at + 75, at + 90)
    report = analyze(trace.write(tmp_path))
    assert [(row.step, row.kind, row.split) for row in report.steps] == [
        (0, "partial", us(compute=75, idle=15)),
        (1, "full", us(compute=75, idle=25)),
        (2, "full", us(compute=75, idle=25)),
        (3, "full", us(compute=75, idle=25)),
    ]
    assert [row.code for row in report.warnings] == ["steps_inferred", "empty_step"]


def test_without_marks_steps_end_with_the_call_that_comes_once_in_each(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=[("tp", "", [0, 1]), ("dp", "", [0, 2])])
    for number in range(4):
        at = 100 * number
        for place in range(4):
            trace.kernel("gemm", at + 20 * place, at + 20 * place + 15)
            trace.all_reduce(at + 20 * place + 15, at + 20 * place + 20, group="tp", nelems=10)
        trace.all_reduce(at + 80, at + 95, group="dp", nelems=5000)
    report = analyze(trace.write(tmp_path))
    assert [(row.step, row.kind, row.start_ns) for row in report.steps][1:] == [
        (1, "full", 75_000),
        (2, "full", 175_000),
        (3, "full", 275_000),
    ]
    inferred = next(row for row in report.warnings if row.code == "steps_inferred")
    assert "the repeating sequence of collectives" in inferred.message


def test_a_kernel_of_any_name_with_collective_arguments_is_a_collective(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=PAIR).step(1, 0, 50).kernel("gemm", 0, 20)
    trace.kernel("my_exchange", 20, 40, **{"Collective name": "allreduce"}).kernel("gemm", 40, 50)
    assert splits(analyze(trace.write(tmp_path))) == {(0, 1): us(compute=30, collective=20)}


def test_collective_arguments_are_read_on_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(schema, "lenient")
    texts = [b'{"stream": 7, "Collective name": "allreduce"}', b'{"stream": 7}']
    found = schema.decode_device_args([msgspec.Raw(text) for text in texts])
    assert [(args.stream, args.communicates) for args in found] == [(7, True), (7, False)]


def test_a_truncated_rank_list_is_read_from_start_and_stride(tmp_path: Path) -> None:
    for rank, computed in ((0, 50), (4, 10)):
        trace = GpuTrace(rank, 8, groups=[("dp", "", [0, 4])]).step(1, 0, 100)
        trace.kernel("gemm", 0, computed).all_reduce(computed, 70, group="dp", Seq=1, **{
            "Process Group Ranks": "[0, 4, ...]", "Process Group Name": "9",
            "Global rank start": 0, "Global rank stride": 4,
        }).kernel("gemm", 70, 100).write(tmp_path)  # fmt: skip
    report = analyze(tmp_path)
    assert splits(report)[4, 1] == us(compute=40, skew=40, collective=20)
    assert (0, 4) in {row.ranks for row in report.groups}
