"""The simulator's own rules, on cases small enough to compute by hand, and its traces' layout."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from stepsplit.analyzer import analyze

from .jobs import HostStall, Job, SlowLink, SlowRank, build_programs
from .kineto import TraceStyle
from .machine import Deadlock, KernelRun, Latencies, RankTimeline, run_programs
from .planted import CLEAN, LAYOUTS, list_causes, plant
from .program import (
    Call,
    Group,
    HostWork,
    Instruction,
    Kernel,
    Message,
    RecordEvent,
    Synchronize,
    WaitEvent,
)
from .simulate import simulate

FREE = Latencies(
    launch_call_ns=0, launch_to_start_ns=0, same_stream_ns=0, event_ns=0, event_call_ns=0,
    synchronize_return_ns=0,
)  # fmt: skip
"""All that is left is what waits for what."""

PAIR = Group("1", "pair", "tp", (0, 1))


def compute(duration_ns: int, stream: int = 7, host_ns: int = 0) -> Kernel:
    return Kernel("gemm", "aten::mm", stream, duration_ns, host_ns=host_ns)


def collective(transfer_ns: int, stream: int = 20, group: Group = PAIR) -> Kernel:
    call = Call("allreduce", group, 1, 1, transfer_ns)
    return Kernel("nccl", "record_param_comms", stream, call=call, host_ns=0)


def message(src: int, dst: int, transfer_ns: int, sends: bool, stream: int = 24) -> Kernel:
    call = Call(
        "send" if sends else "recv", PAIR, 1, 1, messages=(Message(src, dst, "a", transfer_ns),)
    )
    return Kernel("nccl", "record_param_comms", stream, call=call, host_ns=0)


def run(*programs: list[Instruction], latencies: Latencies = FREE) -> list[RankTimeline]:
    return run_programs(programs, latencies)


def spans(timeline: RankTimeline) -> list[tuple[int, int]]:
    return [(each.start_ns, each.end_ns) for each in timeline.kernels]


def test_kernels_of_a_stream_run_in_order_and_streams_side_by_side() -> None:
    (rank,) = run([compute(100), compute(50, stream=8), compute(30)])
    assert spans(rank) == [(0, 100), (0, 50), (100, 130)]


def test_a_kernel_starts_no_earlier_than_its_launch() -> None:
    (rank,) = run([compute(10, host_ns=40), compute(10, host_ns=40)])
    assert spans(rank) == [(40, 50), (80, 90)]


def test_every_latency_counts_once() -> None:
    latencies = Latencies(
        launch_call_ns=4, launch_to_start_ns=3, same_stream_ns=1, event_ns=2, event_call_ns=1,
        synchronize_return_ns=8,
    )  # fmt: skip
    (rank,) = run(
        [
            compute(100, host_ns=10),  # op 0 to 10, its launch call from 6 to 10
            compute(100, host_ns=10),  # launched at 20, starts after its predecessor
            RecordEvent(1, 7),  # 20 to 21
            WaitEvent(1, 8),  # 21 to 22
            compute(5, stream=8, host_ns=10),
            Synchronize(),
            compute(5, host_ns=10),
        ],
        latencies=latencies,
    )
    assert spans(rank) == [(9, 109), (110, 210), (212, 217), (234, 239)]
    assert [(each.start_ns, each.end_ns) for each in rank.calls] == [(20, 21), (21, 22), (32, 225)]


def test_one_queue_starts_kernels_of_all_streams_in_the_order_of_their_launches() -> None:
    """The second kernel of stream 8 waits for the first, and holds up what is launched after it."""
    program: list[Instruction] = [compute(100), compute(150, stream=8), compute(20, stream=8)]
    program += [compute(30), compute(10)]
    (free,), (queued,) = (
        run(program, latencies=replace(FREE, one_queue=one_queue)) for one_queue in (False, True)
    )
    assert spans(free) == [(0, 100), (0, 150), (150, 170), (100, 130), (130, 140)]
    assert spans(queued) == [(0, 100), (0, 150), (150, 170), (150, 180), (180, 190)]


def test_an_event_holds_what_was_recorded_and_not_what_follows() -> None:
    (rank,) = run(
        [
            compute(100),
            RecordEvent(1, 7),
            compute(100),
            compute(10, stream=20),
            WaitEvent(1, 20),
            compute(10, stream=20),
        ]
    )
    assert spans(rank) == [(0, 100), (100, 200), (0, 10), (100, 110)]


def test_an_event_passes_on_the_waits_of_its_stream() -> None:
    """Recorded on a stream that only waits, it is as late as what that stream waits for."""
    (rank,) = run(
        [
            compute(100),
            RecordEvent(1, 7),
            WaitEvent(1, 20),
            RecordEvent(2, 20),
            WaitEvent(2, 32),
            compute(10, stream=32),
        ]
    )
    assert spans(rank) == [(0, 100), (100, 110)]


def test_a_synchronize_waits_for_its_stream_only() -> None:
    (rank,) = run([compute(100), compute(500, stream=8), Synchronize(7), compute(10)])
    assert spans(rank)[-1] == (100, 110)
    (rank,) = run([compute(100), compute(500, stream=8), Synchronize(), compute(10)])
    assert spans(rank)[-1] == (500, 510)


def test_the_host_runs_ahead_until_the_launch_queue_is_full() -> None:
    """With room for two, the third is launched when the first starts."""
    program: list[Instruction] = [HostWork(5), *(compute(100) for _ in range(4))]
    (rank,) = run(program, latencies=replace(FREE, launch_queue=2))
    assert spans(rank) == [(5, 105), (105, 205), (205, 305), (305, 405)]
    assert [each.launched_ns for each in rank.kernels] == [5, 5, 5, 105]


def test_a_collective_moves_data_once_all_members_run_it() -> None:
    first, second = run(
        [collective(20), compute(1, stream=20)],
        [compute(70), RecordEvent(1, 7), WaitEvent(1, 20), collective(20), compute(1, stream=20)],
    )
    assert spans(first) == [(0, 90), (90, 91)]
    assert spans(second) == [(0, 70), (70, 90), (90, 91)]


def test_a_queued_collective_starts_when_its_predecessor_ends() -> None:
    """The second bucket is launched at once, and waits for the slow rank through the first."""
    first, second = run(
        [collective(20), collective(30)],
        [HostWork(100), collective(20), collective(30)],
    )
    assert spans(first) == [(0, 120), (120, 150)]
    assert spans(second) == [(100, 120), (120, 150)]
    assert [each.launched_ns for each in first.kernels] == [0, 0]


def test_members_end_apart_by_their_own_jitter() -> None:
    late = replace(collective(20), end_jitter_ns=3)
    first, second = run([collective(20)], [late])
    assert (spans(first), spans(second)) == ([(0, 20)], [(0, 23)])


def test_messages_meet_in_order_and_last_from_the_later_end() -> None:
    sender, receiver = run(
        [message(0, 1, 10, True), compute(50), message(0, 1, 10, True)],
        [HostWork(30), message(0, 1, 10, False), HostWork(200), message(0, 1, 10, False)],
    )
    assert spans(sender) == [(0, 40), (0, 50), (40, 240)]
    assert spans(receiver) == [(30, 40), (230, 240)]


def test_messages_of_two_directions_do_not_meet() -> None:
    first, second = run(
        [message(0, 1, 10, True), message(1, 0, 10, False, stream=28)],
        [message(1, 0, 10, True, stream=28), message(0, 1, 10, False)],
    )
    assert spans(first) == spans(second) == [(0, 10), (0, 10)]


def test_a_kernel_with_two_messages_ends_with_the_later() -> None:
    both = Call("send", PAIR, 1, 1, messages=(Message(0, 1, "a", 10), Message(1, 0, "b", 10)))
    receive = Call("recv", PAIR, 1, 1, messages=(Message(0, 1, "a", 10),))
    send = Call("send", PAIR, 1, 1, messages=(Message(1, 0, "b", 10),))
    first, second = run(
        [Kernel("nccl", "op", 24, call=both, host_ns=0)],
        [
            Kernel("nccl", "op", 24, call=receive, host_ns=0),
            HostWork(40),
            Kernel("nccl", "op", 28, call=send, host_ns=0),
        ],
    )
    assert spans(first) == [(0, 50)]
    assert spans(second) == [(0, 10), (40, 50)]


def test_crossed_sends_on_one_stream_deadlock() -> None:
    with pytest.raises(Deadlock, match="rank 0"):
        run(
            [message(0, 1, 1, True), message(1, 0, 1, False), Synchronize()],
            [message(1, 0, 1, True), message(0, 1, 1, False), Synchronize()],
        )


def test_collectives_that_a_member_never_calls_deadlock() -> None:
    with pytest.raises(Deadlock):
        run([collective(1)], [compute(1)])


SMALL = Job("small", tp=2, pp=2, dp=2, microbatches=3, layers=2, noise=0.0, warmup=1, steps=2)


def test_a_pipeline_without_noise_takes_as_long_as_1f1b_says() -> None:
    """m + p - 1 microbatches on the critical path, p - 1 messages each way."""
    job = replace(
        SMALL, tp=1, dp=1, layer_ns=10_000_000, optimizer_ns=3_000_000, message_ns=100_000
    )
    microbatch_ns = job.layers * 3 * job.layer_ns
    expected_ns = (3 + 2 - 1) * microbatch_ns + 2 * job.message_ns + job.optimizer_ns
    assert simulate(job).step_ns == pytest.approx(expected_ns, rel=0.005)


def test_a_slow_rank_costs_its_share_of_the_critical_path() -> None:
    job = replace(SMALL, pp=1, layer_ns=10_000_000, causes=(SlowRank(1, 1.1),))
    gain_ns = simulate(job).step_ns - simulate(job.without(*job.causes)).step_ns
    compute_ns = 3 * job.layers * 3 * job.layer_ns + job.optimizer_ns
    assert gain_ns == pytest.approx(0.1 * compute_ns, rel=0.01)


def test_a_slow_link_costs_its_exposed_transfers() -> None:
    job = replace(SMALL, pp=1, bucket_ns=100_000, causes=(SlowLink("tp", 0, 3.0),))
    gain_ns = simulate(job).step_ns - simulate(job.without(*job.causes)).step_ns
    calls = 3 * job.layers * 4
    assert gain_ns == pytest.approx(2 * calls * job.tp_transfer_ns, rel=0.01)


def test_a_host_stall_is_hidden_unless_the_host_waits_for_its_device() -> None:
    job = replace(SMALL, pp=1, causes=(HostStall(3, 400_000),))

    def gain_ns(each: Job) -> float:
        return simulate(each).step_ns - simulate(each.without(*each.causes)).step_ns

    assert gain_ns(job) == pytest.approx(400_000, rel=0.05)
    waits = replace(job, synchronize_microbatches=True)
    assert gain_ns(waits) == pytest.approx(3 * 400_000, rel=0.05)


def test_equally_slow_replicas_mask_each_other() -> None:
    first, second = SlowRank(1, 1.3), SlowRank(3, 1.3)
    job = replace(SMALL, pp=1, causes=(first, second))
    with_both, without_first, clean = (
        simulate(each).step_ns for each in (job, job.without(first), job.without(first, second))
    )
    assert with_both - without_first < 0.01 * with_both
    assert with_both - clean > 0.15 * with_both


def test_programs_with_and_without_a_cause_share_their_noise() -> None:
    job = replace(SMALL, noise=0.02, causes=(SlowRank(0, 2.0),))
    slow, healthy = build_programs(job), build_programs(job.without(*job.causes))
    assert slow[1:] == healthy[1:]
    assert [each for each in slow[0] if not isinstance(each, Kernel) or each.call] == [
        each for each in healthy[0] if not isinstance(each, Kernel) or each.call
    ]


def test_ranks_of_a_step_start_it_without_a_barrier() -> None:
    job = replace(SMALL, end_of_step="none", tp=1, dp=1)
    timelines = simulate(job).timelines

    def first(rank: int, step: int) -> KernelRun:
        return next(each for each in timelines[rank].kernels if each.step == step)

    last_of_stage_0 = max(e.end_ns for e in timelines[0].kernels if e.step == 1)
    assert first(1, 1).start_ns < last_of_stage_0
    assert first(0, 2).launched_ns < last_of_stage_0


@pytest.mark.parametrize("events", ["none", "runtime", "cuda_sync"])
def test_a_trace_has_each_recorded_kernel_once(tmp_path: Path, events: str) -> None:
    simulation = simulate(SMALL)
    simulation.write(tmp_path, TraceStyle(events=events))
    for rank, timeline in enumerate(simulation.timelines):
        with gzip.open(tmp_path / f"rank{rank}.json.gz", "rt") as file:
            trace = json.load(file)
        kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
        launches = {
            e["args"]["correlation"]
            for e in trace["traceEvents"]
            if e["name"] in ("cudaLaunchKernelExC", "cudaMemcpyAsync")
        }
        recorded = [each for each in timeline.kernels if each.step >= SMALL.warmup]
        copies = [e for e in trace["traceEvents"] if e.get("cat") == "gpu_memcpy"]
        assert len(kernels) + len(copies) == len(recorded) == len(launches)
        calls = {e["name"] for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime"}
        assert ("cudaStreamWaitEvent" in calls) == (events != "none")
        waits = [e for e in trace["traceEvents"] if e.get("cat") == "cuda_sync"]
        assert bool(waits) == (events == "cuda_sync")


def test_the_analyzer_reads_the_traces_with_their_step_time(tmp_path: Path) -> None:
    """Durations only: what is a step, and that all ranks and groups are found."""
    simulation = simulate(SMALL)
    simulation.write(tmp_path)
    report = analyze(tmp_path)
    mean_ns = sum(row.split.step_ns for row in report.steps) / len(report.steps)
    assert mean_ns == pytest.approx(simulation.step_ns, rel=0.002)
    assert report.run.world_size == SMALL.world_size


def test_each_layout_has_programs_that_end() -> None:
    for layout in LAYOUTS:
        job = replace(plant(layout, CLEAN, 1).job, microbatches=1, layers=1, warmup=0, steps=1)
        if job.world_size <= 32:
            assert simulate(job).timelines
        assert CLEAN in list_causes(layout)


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/diagnose")
@pytest.mark.timeout(3_000)
def test_findings_agree_with_counterfactual_runs(tmp_path: Path) -> None:
    """One job for each layout up to 16 ranks and cause; docs/causes.md has more of both."""
    from benchmarks.counterfactuals import FAR, NEAR, Bench

    bench = Bench(tmp_path)
    trials = [
        bench.examine(plant(layout, cause, 1))
        for layout, job in LAYOUTS.items()
        if job.world_size <= 16
        for cause in list_causes(layout)
    ]
    costly = [each for each in trials if each.expected]
    clean = [each for each in trials if each.planted.cause == CLEAN]
    assert sum(each.right for each in trials) >= 0.95 * len(trials)
    assert sum(each.worst_error <= NEAR for each in costly) >= 0.90 * len(costly)
    assert [each.planted for each in costly if each.is_worth_much and each.worst_error > FAR] == []
    assert [each.planted for each in clean if each.largest_share > 0.01] == []
