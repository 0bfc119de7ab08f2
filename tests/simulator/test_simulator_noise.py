"""Noise, shared links, contention and what recordings lack, in stories of a few kernels."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.changes import loaded, slowed, stalled
from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import EXACT, Noise
from simulator.program import (
    COMM,
    Begin,
    Collective,
    Compute,
    End,
    Instruction,
    Job,
    Message,
    Messages,
    ProcessGroup,
    Record,
    Scenario,
    StepBegin,
    StepEnd,
    Synchronize,
    WaitFor,
)
from simulator.ran import Moved, Run
from simulator.recorded import recorded, whole_steps
from simulator.scenarios import SCENARIOS
from simulator.style import WHOLE, Missing, Nccl, Style
from simulator.truth import truth_of

LARGE, SMALL = 1 << 20, 1 << 10
WORLD = Collective("0", "all_reduce", LARGE, 1_000_000)


def job(*programs: tuple[Instruction, ...], hosts: Sequence[str] = ()) -> Job:
    """Ranks in the groups "0" (all), "even" and "odd"; a launch takes 1 ns."""
    ranks = tuple(range(len(programs)))
    groups = (
        ProcessGroup("0", ranks, "default_pg"),
        ProcessGroup("even", ranks[::2]),
        ProcessGroup("odd", ranks[1::2]),
    )
    return Job("story", programs, groups, (("dp_replicate", len(ranks)),),
               tuple(hosts or ["host0"] * len(ranks)), (0,) * len(ranks), launch_ns=1)  # fmt: skip


def stepped(calls: int, steps: int = 3) -> tuple[Instruction, ...]:
    """Steps of computing and so many calls; the host runs ahead of none."""
    call = (Compute(400_000), Record("a"), WaitFor("a", COMM), WORLD, Record("b", COMM),
            WaitFor("b"), Compute(300_000, "relu"))  # fmt: skip
    body = (*(call * calls), Begin("Optimizer.step#AdamW.step"), Compute(90_000), End(),
            Synchronize())  # fmt: skip
    marked = [(StepBegin(step), *body) for step in range(1, steps + 1)]
    return (Synchronize(), *(one for part in marked for one in part), StepEnd())


def spans(run: Run, rank: int) -> list[tuple[int, int]]:
    """Start and end of the rank's device events."""
    return [(ran.start_ns, ran.end_ns) for ran in run.ranks[rank].device]


def bodies(
    folder: Path, scenario: Scenario, style: Style = WHOLE, noise: Noise = EXACT
) -> list[dict[str, Any]]:
    """The JSON of each rank's trace."""
    return read_bodies(write_recording(scenario, simulate(scenario.job, noise), folder, style))


def read_bodies(paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(gzip.decompress(path.read_bytes())) for path in paths]


def pair(calls: int = 2) -> Scenario:
    return Scenario(job(stepped(calls), stepped(calls)), seed=7)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    scenario = SCENARIOS["tp_pp_dp"](5)
    twice = [simulate(scenario.job, Noise.of(5), slow=0.1) for _ in range(2)]
    for folder, run in zip("ab", twice, strict=True):
        (tmp_path / folder).mkdir()
        write_recording(scenario, run, tmp_path / folder)
    written = [sorted((tmp_path / folder).iterdir()) for folder in "ab"]
    assert [p.read_bytes() for p in written[0]] == [p.read_bytes() for p in written[1]]
    assert simulate(scenario.job, Noise.of(6)) != twice[0]


def test_a_kernel_starts_a_while_after_its_launch_and_after_the_one_before() -> None:
    run = simulate(
        job((Compute(100_000), Compute(100_000), Synchronize(), Compute(1))), Noise.of(3)
    )
    calls, kernels = run.ranks[0].host, run.ranks[0].device
    latencies = [kernels[0].start_ns - calls[0].end_ns, kernels[2].start_ns - calls[3].end_ns]
    gap_ns = kernels[1].start_ns - kernels[0].end_ns
    assert [1_000 <= ns <= 3_000 for ns in latencies] == [True, True]
    assert 500 <= gap_ns <= 1_500


def test_a_launch_costs_a_little_more_or_less() -> None:
    program = tuple(Compute(dur_ns) for dur_ns in range(100))
    slow_launches = replace(job(program), launch_ns=4_000)
    calls = simulate(slow_launches, Noise.of(3)).ranks[0].host
    took_ns = [call.end_ns - call.start_ns for call in calls]
    assert 3_850 <= min(took_ns) < 3_900 < 4_100 < max(took_ns) <= 4_150


def test_members_of_a_collective_end_each_a_little_after_its_data() -> None:
    noise = replace(EXACT, seed=3, tail_ns=(3_000, 7_000), topology_ns=(0, 3_000))
    run = simulate(job(*[(WORLD,) * 50] * 4), noise)
    ends = [[ran.end_ns for ran in rank.device] for rank in run.ranks]
    starts = [max(at) for at in zip(*([ran.start_ns for ran in rank.device] for rank in run.ranks),
                                    strict=True)]  # fmt: skip
    tails = [[end - start - 1_000_000 for end, start in zip(of_rank, starts, strict=True)]
             for of_rank in ends]  # fmt: skip
    assert min(map(min, tails)) >= 3_000
    assert max(map(max, tails)) <= 10_000
    assert all(max(of_rank) - min(of_rank) <= 4_000 for of_rank in tails)
    assert run.ranks[0].device[0].moves == (Moved(starts[0], ends[0][0], 0),)


def test_members_of_an_all_to_all_end_far_apart() -> None:
    call = Collective("0", "all_to_all", LARGE, 1_000_000)
    run = simulate(job(*[(call,) * 50] * 4), Noise.of(3))
    apart = [max(ends) - min(ends) for ends in zip(
        *([ran.end_ns for ran in rank.device] for rank in run.ranks), strict=True)]  # fmt: skip
    assert 20_000 < max(apart) <= 30_000


def test_the_data_of_a_call_takes_as_long_for_all_members() -> None:
    noise = replace(EXACT, seed=3, transfer_ppm=(-20_000, 20_000))
    run = simulate(job((WORLD,) * 50, (WORLD,) * 50), noise)
    took_ns = [end - start for start, end in spans(run, 0)[1:]]
    assert spans(run, 0) == spans(run, 1)
    assert 980_000 <= min(took_ns) < 985_000 < 1_015_000 < max(took_ns) <= 1_020_000


def test_a_kernel_ends_a_little_after_its_last_message() -> None:
    send = (Messages("0", (Message("send", 1, LARGE, 50_000),)),)
    recv = (Messages("0", (Message("recv", 0, LARGE, 50_000),)),)
    noise = replace(EXACT, seed=3, message_ns=(1_000, 3_000))
    ends = [spans(simulate(job(send, recv), noise), rank)[0][1] for rank in (0, 1)]
    assert [51_001 <= end <= 53_001 for end in ends] == [True, True]


@pytest.mark.parametrize(
    "plant",
    [
        lambda job: slowed(job, 0, 1.5),
        lambda job: loaded(job, 0, 3),
        lambda job: stalled(job, 0, 50_000, (1, 2), 0.5),
    ],
    ids=["slow", "more_work", "host_stall"],
)
def test_removing_a_cause_leaves_all_other_draws(plant: Callable[[Job], Job]) -> None:
    even = replace(job(stepped(4), stepped(4)), launch_ns=4_000)
    slow, fast = (simulate(one, Noise.of(9)) for one in (plant(even), even))
    for rank in (0, 1):
        assert moving_ns(slow, rank) == moving_ns(fast, rank)
        assert launches_ns(slow, rank) == launches_ns(fast, rank)


def moving_ns(run: Run, rank: int) -> list[int]:
    """How long each call moved data: noise of the call and of the member's end."""
    device = run.ranks[rank].device
    return [moved.end_ns - moved.start_ns for ran in device for moved in ran.moves]


def launches_ns(run: Run, rank: int) -> list[int]:
    """The cost of each launch, without those that repeat the one before."""
    calls = [call for call in run.ranks[rank].host if isinstance(call.work, Compute | Collective)]
    return [
        call.end_ns - call.start_ns
        for before, call in zip([None, *calls], calls, strict=False)
        if before is None or before.work != call.work
    ]


def test_a_message_waits_for_the_link_and_that_is_moving() -> None:
    two = [Messages("0", (Message("send", 1, LARGE, 50),), stream) for stream in ("x", "y")]
    into = [Messages("0", (Message("recv", 0, LARGE, 50),), stream) for stream in ("x", "y")]
    run = simulate(job((*two,), (*into,)))
    assert spans(run, 1) == [(1, 51), (2, 101)]
    assert run.ranks[1].device[1].moves == (Moved(2, 101, 1),)


def test_messages_in_opposite_directions_do_not_wait_for_each_other() -> None:
    first = [Messages("0", (Message(op, 1, LARGE, 50),), op) for op in ("send", "recv")]
    second = [Messages("0", (Message(op, 0, LARGE, 50),), op) for op in ("send", "recv")]
    assert spans(simulate(job((*first,), (*second,))), 0) == [(1, 52), (2, 52)]


def test_a_link_goes_to_whoever_wants_it_first_whatever_rank_that_is() -> None:
    late = [(Compute(ns, stream=COMM), Collective(group, "all_reduce", LARGE, 50))
            for ns, group in ((40, "even"), (30, "odd"), (40, "even"), (30, "odd"))]  # fmt: skip
    run = simulate(job(*late, hosts=("a", "a", "b", "b")))
    assert [spans(run, rank)[1] for rank in (0, 1)] == [(41, 131), (31, 81)]


def test_groups_of_one_host_share_no_network() -> None:
    calls = [(Collective(group, "all_reduce", LARGE, 50),) for group in ("even", "odd") * 2]
    run = simulate(job(*calls))
    assert [spans(run, rank) for rank in (0, 1)] == [[(1, 51)], [(1, 51)]]


def test_what_was_sent_eagerly_cannot_be_read_before_it_came() -> None:
    large = Messages("0", (Message("send", 1, LARGE, 90),), "x")
    small = Messages("0", (Message("send", 1, SMALL, 10),), "y")
    recv = [Messages("0", (Message("recv", 0, size, took),), stream)
            for size, took, stream in ((LARGE, 90, "x"), (SMALL, 10, "y"))]  # fmt: skip
    run = simulate(job((large, small), (*recv,)))
    assert spans(run, 0) == [(1, 91), (2, 101)]
    assert spans(run, 1) == [(1, 91), (2, 101)]


def test_computing_is_slower_while_data_moves() -> None:
    call = Collective("0", "all_reduce", LARGE, 100)
    programs = ((call, Compute(200)), (Compute(60, stream=COMM), call))
    run = simulate(job(*programs), slow=0.25)
    assert spans(run, 0) == [(1, 161), (2, 222)]
    assert simulate(job((Compute(200),)), slow=0.25) == simulate(job((Compute(200),)))


def test_a_recording_of_nccl_2_17_tells_of_calls_at_their_launches_only(tmp_path: Path) -> None:
    body = bodies(tmp_path, pair(), Style(nccl="2.17"))[0]
    (kernel, *_) = [e for e in body["traceEvents"] if e["name"].startswith("nccl")]
    (comm, *_) = [e for e in body["traceEvents"] if e["name"] == "record_param_comms"]
    assert kernel["name"] == (
        "ncclKernel_AllReduce_RING_LL_Sum___nv_bfloat16(ncclDevComm*, unsigned long, ncclWork*)"
    )
    assert list(kernel["args"]) == ["device", "stream", "correlation"]
    assert (comm["args"]["Collective name"], comm["args"]["Process Group Ranks"]) == (
        "allreduce", "[0, 1]",
    )  # fmt: skip
    assert '"Seq"' not in json.dumps(body)


def test_a_recording_that_is_not_numbered_has_all_but_seq(tmp_path: Path) -> None:
    whole = bodies(tmp_path, pair())[0]
    for event in whole["traceEvents"]:
        event["args"].pop("Seq", None)
    assert bodies(tmp_path, pair(), Style(numbered=False))[0] == whole


def test_groups_without_description_are_undefined(tmp_path: Path) -> None:
    body = bodies(tmp_path, pair(), Style(descriptions="none"))[0]
    descriptions = [e["args"]["Process Group Description"] for e in body["traceEvents"]
            if "Process Group Description" in e["args"]]  # fmt: skip
    groups = [group["pg_desc"] for group in body["distributedInfo"]["pg_config"]]
    assert set(descriptions) == {"undefined"} and groups == ["undefined", "undefined"]


def test_only_the_wanted_ranks_are_written_and_run_json_only_if_wanted(tmp_path: Path) -> None:
    scenario = pair()
    write_recording(scenario, simulate(scenario.job), tmp_path, Style(run_json=False), ranks=[1])
    assert [path.name for path in tmp_path.iterdir()] == ["rank1_trace.json.gz"]
    write_recording(scenario, simulate(scenario.job), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank0_trace.json.gz", "rank1_trace.json.gz", "run.json",
    ]  # fmt: skip


def test_without_arguments_nothing_is_said_of_calls_and_groups(tmp_path: Path) -> None:
    body = bodies(tmp_path, pair(), Style(missing="no_args"))[0]
    kernels = [e for e in body["traceEvents"] if e["name"].startswith("nccl")]
    assert [list(e["args"]) for e in kernels] == [["device", "stream", "correlation"]] * 6
    assert "record_param_comms" not in {e["name"] for e in body["traceEvents"]}
    assert [group["pg_name"] for group in body["distributedInfo"]["pg_config"]] == ["0"]


def test_without_steps_the_optimizer_is_annotated_still(tmp_path: Path) -> None:
    body = bodies(tmp_path, pair(), Style(missing="no_steps"))[0]
    marks = [e["name"] for e in body["traceEvents"] if e["cat"] == "user_annotation"]
    assert marks == ["Optimizer.step#AdamW.step"] * 3


def names(body: dict[str, Any], category: str) -> list[str]:
    return [event["name"] for event in body["traceEvents"] if event["cat"] == category]


def test_each_rank_is_cut_at_calls_of_its_own(tmp_path: Path) -> None:
    scenario, style = Scenario(job(*[stepped(20)] * 4), seed=7), Style(missing="cut_windows")
    found = bodies(tmp_path, scenario, style, Noise.of(7))
    left = [sum(n.startswith("nccl") for n in names(body, "kernel")) for body in found]
    assert all(50 <= calls <= 58 for calls in left) and len(set(left)) > 1
    assert [names(body, "user_annotation")[:1] for body in found] == [
        ["Optimizer.step#AdamW.step"]
    ] * 4
    assert [n for n in names(found[0], "user_annotation") if n.startswith("Profiler")] == [
        "ProfilerStep#2"
    ]


def test_the_steps_that_no_cut_touches_are_whole() -> None:
    run = simulate(job(stepped(20), stepped(20)), Noise.of(7))
    assert whole_steps(run, Style(missing="cut_windows"), 7) == {(0, 2), (1, 2)}
    assert whole_steps(run, WHOLE, 7) == {(rank, step) for rank in (0, 1) for step in (1, 2, 3)}


def test_a_kernel_whose_launch_is_cut_away_has_a_correlation_of_its_own(tmp_path: Path) -> None:
    ahead: tuple[Instruction, ...] = (
        Synchronize(),
        *[WORLD] * 12,
        StepBegin(1),
        Compute(9),
        Synchronize(),
        StepEnd(),
    )
    scenario = Scenario(job(ahead, ahead), seed=7)
    body = bodies(tmp_path, scenario, Style(missing="cut_windows"))[0]
    launched = {e["args"]["correlation"] for e in body["traceEvents"] if e["cat"] == "cuda_runtime"}
    kernels = [e["args"]["correlation"] for e in body["traceEvents"] if e["cat"] == "kernel"]
    assert len(kernels) == len(set(kernels)) >= 6
    assert launched.isdisjoint(kernels)


def test_lost_events_are_gone_with_their_launches_and_their_time_is_idle() -> None:
    run, style = simulate(job(stepped(60), stepped(60))), Style(missing="lost_events")
    left = recorded(run, style, 7)
    lost = len(run.ranks[0].device) - len(left.ranks[0].device)
    assert 1 <= lost <= 20
    assert len(run.ranks[0].host) - len(left.ranks[0].host) == lost
    assert [left.ranks[0].host[ran.launch].work for ran in left.ranks[0].device] == [
        ran.work for ran in left.ranks[0].device
    ]
    before, after = truth_of(run).splits, truth_of(left).splits
    assert sum(s.compute_ns for s in after) < sum(s.compute_ns for s in before)
    assert sum(s.collective_ns for s in after) == sum(s.collective_ns for s in before)


@pytest.fixture(scope="module")
def large_run() -> tuple[Scenario, Run]:
    scenario = SCENARIOS["tp_pp_dp"](4)
    return scenario, simulate(scenario.job, Noise.of(4))


@pytest.mark.parametrize("missing", ["cut_windows", "no_args", "lost_events", "no_steps"])
@pytest.mark.parametrize("nccl", ["2.17", "2.27"])
def test_every_style_is_json_with_events_in_all_ranks(
    tmp_path: Path, large_run: tuple[Scenario, Run], missing: Missing, nccl: Nccl
) -> None:
    style = Style(nccl, descriptions="none", missing=missing)
    found = read_bodies(write_recording(*large_run, tmp_path, style))
    assert [body["distributedInfo"]["rank"] for body in found] == list(range(len(found)))
    assert min(len(names(body, "kernel")) for body in found) > 100
