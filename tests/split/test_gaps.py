"""Which communication held up a gap of compute: a story for each clause of the rule; times in us.

In most of them two ranks do the same in a step of 100 us: they compute until 40 and from 60 on, and
reduce on another stream from 40.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.builders import COMM_STREAM, COMPUTE_STREAM, CpuTrace, GpuTrace
from support.required import SHARED_TRACES, absent

from stepsplit.analyzer import Report, Split, analyze

GROUPS = [("tp", "mesh_tp", [0, 1]), ("dp", "mesh_dp_shard", [0, 1])]
PAIR = [("0", "default_pg", [0, 1])]
WORKER_A, WORKER_B = 201, 202
OTHER_STREAM = 21
Does = Callable[[GpuTrace], object]


def us(**buckets: float) -> Split:
    return Split(**{f"{name}_ns": round(1000 * took) for name, took in buckets.items()})


def split_of_both(folder: Path, does: Does) -> Split:
    """The split of rank 0 if both ranks do this."""
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=GROUPS).step(1, 0, 100)
        does(trace)
        trace.write(folder)
    found = analyze(folder).steps
    assert found[0].split == found[1].split
    return found[0].split


def reducing_until(end: float) -> Does:
    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40).all_reduce(40, end, group="tp").kernel("gemm", 60, 100)

    return does


# Without evidence: by how long after the start of the next kernel the communication ends.


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (58, us(compute=80, collective=18, idle=2)),
        (60, us(compute=80, collective=20)),
        (62, us(compute=80, collective=20, overlapped=2)),
        (64, us(compute=80, collective=20, overlapped=4)),
        (65, us(compute=80, collective=20, overlapped=5, ambiguous=20)),
        (70, us(compute=80, collective=20, overlapped=10, ambiguous=20)),
        (71, us(compute=80, idle=20, overlapped=11, ambiguous=20)),
        (80, us(compute=80, idle=20, overlapped=20, ambiguous=20)),
        (81, us(compute=80, idle=20, overlapped=21)),
    ],
)
def test_communication_held_up_the_gap_if_it_ends_10_us_into_the_next_kernel(
    tmp_path: Path, end: float, expected: Split
) -> None:
    assert split_of_both(tmp_path, reducing_until(end)) == expected


def test_waiting_for_a_rank_held_up_the_gap_if_compute_begins_before_the_call_ends(
    tmp_path: Path,
) -> None:
    """Rank 1 comes at 58; rank 0 resumes at 60, when the call still runs for 2 us."""
    early, late = (GpuTrace(rank, 2, groups=GROUPS).step(1, 0, 100) for rank in (0, 1))
    early.kernel("gemm", 0, 40).all_reduce(40, 62, group="tp").kernel("gemm", 60, 100)
    late.kernel("gemm", 0, 58).all_reduce(58, 62, group="tp").kernel("gemm", 60, 100)
    report = analyze(early.write(tmp_path), late.write(tmp_path))
    assert [row.split for row in report.steps] == [
        us(compute=80, skew=18, collective=2, overlapped=2),
        us(compute=98, collective=2, overlapped=2),
    ]
    assert (report.blame[0].rank, report.blame[0].cause) == (1, "compute")


def test_a_call_launched_behind_a_short_kernel_did_not_hold_that_up(tmp_path: Path) -> None:
    """The kernel from 46 to 50 precedes the call, which ends 8 us after that kernel's start."""

    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40).kernel("gemm", 46, 50)
        trace.all_reduce(50, 54, group="tp").kernel("gemm", 60, 100)

    assert split_of_both(tmp_path, does) == us(compute=84, collective=4, idle=12)


def test_a_short_kernel_before_the_end_of_a_call_changes_only_its_own_time(tmp_path: Path) -> None:
    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40).all_reduce(40, 59, group="tp")
        trace.kernel("gemm", 56, 57).kernel("gemm", 60, 100)

    assert split_of_both(tmp_path, does) == us(compute=81, collective=18, idle=1, overlapped=1)


def test_a_call_open_in_several_gaps_held_up_the_last(tmp_path: Path) -> None:
    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 20).all_reduce(20, 59, group="tp")
        trace.kernel("gemm", 30, 45).kernel("gemm", 60, 100)

    assert split_of_both(tmp_path, does) == us(
        compute=75, collective=14, idle=11, overlapped=15, ambiguous=0
    )


# Evidence: what the next kernel waited for.


@pytest.mark.parametrize("call", ["cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent"])
def test_an_event_wait_before_the_launch_of_the_next_kernel_is_evidence(
    tmp_path: Path, call: str
) -> None:
    """The call ends 15 us after the kernel's start: without the wait it would be ignored."""

    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40, launched=0).all_reduce(40, 75, group="tp", launched=1)
        trace.call(call, 2, 3).kernel("gemm", 60, 100, launched=4)

    assert split_of_both(tmp_path, does) == us(
        compute=80, collective=20, overlapped=15, ambiguous=20
    )


def test_an_event_wait_before_the_launch_of_the_call_itself_is_no_evidence(tmp_path: Path) -> None:
    """The call's own stream waits, as NCCL's does for its input; the kernel does not."""

    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40, launched=0).call("cudaStreamWaitEvent", 1, 2)
        trace.all_reduce(40, 58, group="tp", launched=3).kernel("gemm", 60, 100, launched=4)

    assert split_of_both(tmp_path, does) == us(compute=80, idle=20)


def test_a_synchronizing_host_may_have_waited_for_the_call(tmp_path: Path) -> None:
    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40, launched=0).call("cudaStreamWaitEvent", 1, 2)
        trace.all_reduce(40, 58, group="tp", launched=3).call("cudaEventSynchronize", 4, 58)
        trace.kernel("gemm", 60, 100, launched=59)

    assert split_of_both(tmp_path, does) == us(compute=80, collective=18, idle=2)


def test_the_order_on_a_stream_is_evidence(tmp_path: Path) -> None:
    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40)
        trace.all_reduce(40, 68, group="tp", stream=COMPUTE_STREAM).kernel("gemm", 60, 100)

    assert split_of_both(tmp_path, does) == us(
        compute=80, collective=20, overlapped=8, ambiguous=20
    )


def test_an_identified_event_wait_names_the_call_that_held_up_the_gap(tmp_path: Path) -> None:
    """The kernel waits for the all_reduce until 50, not for the gather of another stream."""

    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40, launched=0).all_reduce(40, 50, group="tp", launched=1)
        reduced = trace.record_event(2)
        trace.collective(
            "AllGather", "all_gather", 40, 59, group="dp", stream=OTHER_STREAM, launched=3
        )
        trace.wait_for_event(4, reduced, on_stream=COMM_STREAM)
        trace.kernel("gemm", 60, 100, launched=5)

    assert split_of_both(tmp_path, does) == us(compute=80, collective=10, idle=10)


def test_a_stream_waits_for_what_the_awaited_stream_waited_for(tmp_path: Path) -> None:
    """The gather's stream waited for the all_reduce, and the kernel for the gather."""

    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40, launched=0).all_reduce(40, 50, group="tp", launched=1)
        trace.wait_for_event(
            3, trace.record_event(2), stream=OTHER_STREAM, on_stream=COMM_STREAM
        ).collective("AllGather", "all_gather", 50, 75, group="dp", stream=OTHER_STREAM, launched=4)
        trace.wait_for_event(6, trace.record_event(5), on_stream=OTHER_STREAM)
        trace.kernel("gemm", 60, 100, launched=7)

    assert split_of_both(tmp_path, does) == us(
        compute=80, collective=20, overlapped=15, ambiguous=20
    )


def test_after_the_host_has_synchronized_every_kernel_has_waited(tmp_path: Path) -> None:
    """The gather's event wait alone would not have held up the kernel."""

    def does(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 40, launched=0)
        trace.wait_for_event(
            2, trace.record_event(1), stream=COMM_STREAM, on_stream=COMPUTE_STREAM
        ).all_reduce(40, 58, group="tp", launched=3)
        trace.synchronize_device(4, 59).kernel("gemm", 60, 100, launched=59)

    assert split_of_both(tmp_path, does) == us(compute=80, collective=18, idle=2)


def test_the_waits_of_a_cuda_graph_are_unknown(tmp_path: Path) -> None:
    def does(trace: GpuTrace) -> None:
        trace.call("cudaStreamWaitEvent", 0, 1).kernel("gemm", 0, 40, launched=0)
        trace.all_reduce(40, 58, group="tp", launched=2)
        trace.launch("gemm", (3, 4), (60, 100), call="cudaGraphLaunch")

    assert split_of_both(tmp_path, does) == us(compute=80, collective=18, idle=2)


# CPU runs: a worker's range may end long after its call.


def recorded(folder: Path, *traces: CpuTrace) -> Report:
    for trace in traces:
        trace.write(folder)
    return analyze(folder)


def splits(report: Report) -> dict[int, tuple[Split, bool]]:
    return {row.rank: (row.split, row.estimated) for row in report.steps}


def reduces(rank: int, *, called: float, ends: float, ops: Sequence[tuple[int, int]]) -> CpuTrace:
    """A rank in a step of 400 us that reduces once: when it called, and when its range ends."""
    trace = CpuTrace(rank, 2, PAIR).step(2, 0, 400)
    for start, end in ops:
        trace.op("aten::mm", start, end)
    return trace.all_reduce(called, called + 1, ends, group="0", seq=1, tid=WORKER_A)


def test_the_call_whose_last_member_arrives_in_the_gap_held_it_up(tmp_path: Path) -> None:
    """Rank 1 comes at 150.5, both resume at 200, and the range of rank 0 ends 100 us later."""
    early = reduces(0, called=50, ends=300, ops=[(0, 50), (200, 400)])
    late = reduces(1, called=150, ends=200, ops=[(0, 150), (200, 400)])
    report = recorded(tmp_path, early, late)
    assert splits(report) == {
        0: (us(compute=250, skew=100, collective=49.5, idle=0.5), True),
        1: (us(compute=350, collective=49.5, idle=0.5), False),
    }
    assert (report.blame[0].rank, report.blame[0].cause) == (1, "compute")


def test_a_call_whose_last_member_arrives_after_compute_resumed_held_up_nothing(
    tmp_path: Path,
) -> None:
    early = reduces(0, called=50, ends=300, ops=[(0, 50), (200, 400)])
    late = reduces(1, called=250, ends=300, ops=[(0, 250), (300, 400)])
    assert splits(recorded(tmp_path, early, late))[0] == (
        us(compute=250, idle=150, overlapped=49.5),
        False,
    )


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        (205, us(compute=248, skew=150, idle=2, ambiguous=150)),
        (215, us(compute=248, idle=152, overlapped=85, ambiguous=150)),
        (45, us(compute=248, collective=150, idle=2, overlapped=5, ambiguous=150)),
        (35, us(compute=248, idle=152, overlapped=115, ambiguous=152)),
    ],
)
def test_an_arrival_close_to_the_gap_counts_up_to_10_us(
    tmp_path: Path, came: float, expected: Split
) -> None:
    """The other rank comes shortly after the gap from 50 to 200, or shortly before it."""
    own = CpuTrace(0, 2, PAIR).step(2, 0, 400).op("aten::mm", 0, 19).op("aten::mm", 21, 50)
    own.all_reduce(19.5, 20, 300, group="0", seq=1, tid=WORKER_A).op("aten::mm", 200, 400)
    other = reduces(1, called=came - 0.5, ends=300, ops=[(0, came - 1), (300, 400)])
    found, _ = splits(recorded(tmp_path, own, other))[0]
    assert found == expected


def test_the_last_member_transfers_from_its_own_arrival(tmp_path: Path) -> None:
    early = reduces(0, called=50, ends=200, ops=[(0, 50), (200, 400)])
    late = reduces(1, called=150, ends=300, ops=[(0, 150), (200, 400)])
    assert splits(recorded(tmp_path, early, late)) == {
        0: (us(compute=250, skew=100, collective=49.5, idle=0.5), False),
        1: (us(compute=350, collective=49.5, idle=0.5), True),
    }


def test_a_range_that_ends_in_a_later_short_gap_does_not_hide_the_wait(tmp_path: Path) -> None:
    early = reduces(0, called=50, ends=255, ops=[(0, 50), (200, 250), (260, 400)])
    late = reduces(1, called=150, ends=200, ops=[(0, 150), (200, 400)])
    assert splits(recorded(tmp_path, early, late))[0] == (
        us(compute=240, skew=100, collective=49.5, idle=10.5),
        True,
    )


def test_of_two_open_calls_the_one_that_ends_nearest_held_up_the_gap(tmp_path: Path) -> None:
    """The host waits for the first bucket until 200, then for the second until 300. The last
    members of both arrive in the first wait."""
    early = CpuTrace(0, 2, PAIR).step(2, 0, 400).op("aten::mm", 0, 50)
    early.all_reduce(50, 51, 200, group="0", seq=1, tid=WORKER_A)
    early.all_reduce(52, 53, 300, group="0", seq=2, tid=WORKER_B)
    early.op("aten::mm", 200, 220).op("aten::mm", 300, 400)
    late = CpuTrace(1, 2, PAIR).step(2, 0, 400).op("aten::mm", 0, 150)
    late.all_reduce(150, 151, 200, group="0", seq=1, tid=WORKER_A)
    late.all_reduce(160, 161, 300, group="0", seq=2, tid=WORKER_B)
    late.op("aten::mm", 200, 220).op("aten::mm", 300, 400)
    assert splits(recorded(tmp_path, early, late))[0] == (
        us(compute=170, skew=100, collective=129.5, idle=0.5, overlapped=20),
        False,
    )


def test_a_wait_that_returned_says_when_the_call_was_over(tmp_path: Path) -> None:
    """wait_tensor returns at 190, compute resumes at 200, the range ends at 300."""
    early = reduces(0, called=50, ends=300, ops=[(0, 50), (200, 400)])
    early.op("_c10d_functional::all_reduce", 50, 52)
    early.op("_c10d_functional::wait_tensor", 53, 190)
    late = reduces(1, called=150, ends=200, ops=[(0, 150), (200, 400)])
    assert splits(recorded(tmp_path, early, late))[0] == (
        us(compute=250, skew=100, collective=39.5, idle=10.5),
        False,
    )


def test_a_host_inside_the_op_of_its_call_was_held_up_by_it(tmp_path: Path) -> None:
    """The op returns at 200 and the call goes on under compute."""
    early = CpuTrace(0, 2, PAIR).step(2, 0, 400).op("aten::mm", 0, 50).op("aten::mm", 200, 400)
    early.all_reduce(50, 51, 300, group="0", seq=1, tid=WORKER_A)
    early.op("c10d::allreduce_", 50, 199)
    late = reduces(1, called=150, ends=300, ops=[(0, 150), (200, 400)])
    assert splits(recorded(tmp_path, early, late))[0] == (
        us(compute=250, skew=100, collective=49.5, idle=0.5, overlapped=100),
        False,
    )


def test_the_range_of_a_message_ends_with_its_wait(tmp_path: Path) -> None:
    """The send stays open while its sender computes; the receiver comes in a pause at 60."""
    sender = CpuTrace(0, 2, [("0", "mesh_pp", [0, 1])]).step(2, 0, 400).op("aten::mm", 0, 50)
    sender.message("send", 1, 50, 350).op("aten::mm", 70, 340).op("aten::mm", 350, 400)
    receiver = CpuTrace(1, 2, [("0", "mesh_pp", [0, 1])]).step(2, 0, 400).op("aten::mm", 0, 60)
    receiver.message("recv", 0, 60, 70).op("aten::mm", 70, 400)
    found, estimated = splits(recorded(tmp_path, sender, receiver))[0]
    assert (found.compute_ns, found.bubble_ns, estimated) == (370_000, 10_000, False)
    assert found.idle_ns + found.p2p_ns == 20_000


# Two recorded runs whose ranges end up to 15 ms after the main thread has resumed.


@pytest.mark.parametrize(("run", "planted", "other"), [("f_slowfwd", 1, 0), ("f_loader", 0, 1)])
def test_a_recorded_wait_for_a_sleeping_rank_is_skew(run: str, planted: int, other: int) -> None:
    """The rank sleeps 150 ms in the forward, or 200 ms in the loader: the other waits for it, but
    for what its own computing covers."""
    folder = SHARED_TRACES.parent / "repro" / "recorded" / run
    if not folder.exists():
        absent("traces", f"{run} is not next to the project")
    report = analyze(folder)
    waits = [row for row in report.steps if row.rank == other]
    assert min(row.skew_ns for row in waits) >= 80_000_000
    assert max(row.idle_ns for row in waits) <= 60_000_000
    assert report.findings[0].ranks == (planted,)
    assert (report.blame[0].rank, report.blame[0].cause) == (planted, "host")
