"""Replays of a few events: each node comes after its dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import Noise
from simulator.scenarios import SCENARIOS
from simulator.style import Style
from support.builders import COMM_STREAM, CpuTrace, GpuTrace
from support.ground_truth import SEED
from support.replay_builders import scene, steps_us
from support.samples import SAMPLES
from support.splitting import RunSplit, recording_of, split_of

from stepsplit.analyzer.diagnose.graph.dependency_graph import Levels, Needs, build_dependency_graph
from stepsplit.analyzer.diagnose.graph.replay import (
    HoistedCalls,
    compute_times,
    hoist_collectives,
    limit_work,
    remove_calls,
    replay,
    scale_transfers,
    scale_work,
)

PAIR = [("0", "mesh_dp", [0, 1])]
QUICK = ("tp_slow_rank", "fsdp", "pp_zb_v", "ep_two_streams")
NEAR_NS = 10_000
"""How far off a step of a simulated job may be: clocks of several hosts are only known so well, and
a call that ends by chance as another begins may be taken for what a rank waited for."""


def slow_and_fast() -> tuple[GpuTrace, GpuTrace]:
    """Rank 0 computes for 60, rank 1 for 40 and waits; the sum takes 10."""
    slow = GpuTrace(0, 2, groups=PAIR).step(1, 0, 100)
    slow.kernel("gemm", 0, 60).all_reduce(60, 70).kernel("adam", 70, 100)
    fast = GpuTrace(1, 2, groups=PAIR).step(1, 0, 100)
    fast.kernel("gemm", 0, 40).all_reduce(40, 70).kernel("adam", 70, 100)
    return slow, fast


def test_with_nothing_changed_a_replay_is_what_was_measured(tmp_path: Path) -> None:
    assert steps_us(scene(tmp_path, *slow_and_fast()).graph) == [100, 100]


def test_a_wait_that_no_compute_follows_in_its_step_is_replayed_as_long(tmp_path: Path) -> None:
    """A recording that was cut off: it has the calls of both steps, but no compute after 30 ms."""
    trace = CpuTrace(0, 2, groups=PAIR).step(1, 0, 100_000).step(2, 100_000, 200_000)
    trace.op("aten::mm", 0, 30_000)
    for number, start, end in ((1, 40_000, 60_000), (2, 120_000, 150_000), (3, 220_000, 250_000)):
        trace.all_reduce(start - 1, start, end, group="0", seq=number, tid=8)
    assert steps_us(scene(tmp_path, trace).graph) == [100_000, 100_000]


def test_a_rank_that_computes_faster_lets_the_other_go_on_earlier(tmp_path: Path) -> None:
    """Rank 0 at two thirds arrives at 40, as rank 1 does: both end 20 earlier, rank 0 30."""
    graph = scene(tmp_path, *slow_and_fast()).graph
    assert steps_us(scale_work(graph, "compute", np.array([2 / 3, 1.0]))) == [70, 80]


def test_speeding_up_a_rank_that_no_rank_waits_for_gains_nothing(tmp_path: Path) -> None:
    """Except for its compute after the all_reduce."""
    graph = scene(tmp_path, *slow_and_fast()).graph
    assert steps_us(scale_work(graph, "compute", np.array([1.0, 0.5]))) == [100, 85]


def test_a_link_twice_as_fast_halves_the_moving_and_not_the_waiting(tmp_path: Path) -> None:
    graph = scene(tmp_path, *slow_and_fast()).graph
    assert steps_us(scale_transfers(graph, np.array([0, 1]), np.array([0.5, 0.5]))) == [95, 95]


def test_without_the_call_no_rank_waits(tmp_path: Path) -> None:
    graph = scene(tmp_path, *slow_and_fast()).graph
    assert steps_us(remove_calls(graph, np.array([0, 1]))) == [90, 70]


def test_idling_is_cut_where_it_is_longest(tmp_path: Path) -> None:
    """Of 2 and 18 idle, 5 in all leave 2 and 3."""
    trace = GpuTrace(0, 1).step(1, 0, 100)
    trace.kernel("a", 0, 30).kernel("b", 32, 50).kernel("c", 68, 100)
    graph = scene(tmp_path, trace).graph
    idle = graph.work_ns[:, 2]
    assert idle.sum() == 20_000
    assert steps_us(limit_work(graph, "idle", np.array([5_000.0]))) == [85]


def test_a_call_queued_behind_another_on_its_stream_follows_it_despite_rounding(
    tmp_path: Path,
) -> None:
    """Two buckets on one stream: rank 1 reaches the first at 40 and both at 20 if it computes twice
    as fast; then they end at 40 instead of 60. The kernels of rank 0 overlap by 1 ns of rounding.
    """
    fast, slow = (GpuTrace(rank, 2, groups=PAIR).step(1, 0, 70) for rank in (0, 1))
    fast.kernel("a", 0, 20).all_reduce(20, 50.001, launched=20).kernel("b", 20, 30)
    fast.all_reduce(50, 60, launched=30).kernel("adam", 60, 70)
    slow.kernel("a", 0, 40).all_reduce(40, 50, launched=40).kernel("b", 40, 48)
    slow.all_reduce(50, 60, launched=48).kernel("adam", 60, 70)
    graph = scene(tmp_path, fast, slow).graph
    assert steps_us(graph) == [70, 70]
    assert steps_us(scale_work(graph, "compute", np.array([1.0, 0.5]))) == [50, 45]


@pytest.mark.parametrize("identified", [True, False])
def test_a_message_that_compute_hid_is_still_waited_for(identified: bool, tmp_path: Path) -> None:
    """Rank 1 receives until 50 behind a kernel that ends at 60; the next one waits for the message.
    Twice as fast that kernel ends at 30, and the next takes 20 from 50 on."""
    groups = [("0", "mesh_pp", [0, 1])]
    sender, receiver = (GpuTrace(rank, 2, groups=groups).step(1, 0, 100) for rank in (0, 1))
    sender.kernel("a", 0, 40).message("send", 1, 40, 50).kernel("b", 50, 100)
    receiver.kernel("c", 0, 60, launched=0).message("recv", 0, 1, 50, launched=1)
    if identified:
        receiver.wait_for_event(3, receiver.record_event(2), on_stream=COMM_STREAM)
    else:
        receiver.call("cudaStreamWaitEvent", 3, 3)
    receiver.kernel("d", 60, 100, launched=4)
    graph = scene(tmp_path, sender, receiver).graph
    assert steps_us(graph) == [100, 100]
    assert steps_us(scale_work(graph, "compute", np.array([1.0, 0.5]))) == [100, 70]


def test_what_ends_by_chance_while_a_rank_waits_is_not_what_it_waits_for(tmp_path: Path) -> None:
    """A bucket's sum ends in the gap in which both wait for the next call, launched before it."""
    traces = []
    for rank, busy in ((0, 60), (1, 30)):
        trace = GpuTrace(rank, 2, groups=[*PAIR, ("1", "mesh_tp", [0, 1])]).step(1, 0, 100)
        trace.kernel("a", 0, 10).all_reduce(10, 50, launched=9)
        trace.kernel("b", 10, busy, launched=10)
        described = trace._described("allreduce", "1", 1000)
        trace.kernel("ncclDevKernel_AllReduce", busy, 70, stream=24, **described)
        trace.kernel("c", 70, 100, launched=11)
        traces.append(trace)
    found = scene(tmp_path, *traces)
    kernels = found.graph.kernels
    waited = [bool(resume >= 0) for resume in kernels.resume]
    assert steps_us(found.graph) == [100, 100]
    assert sum(waited) == 2, "each rank waits for the second call alone"


def test_a_call_that_ends_by_chance_between_two_kernels_is_not_waited_for(tmp_path: Path) -> None:
    """The gather of a later layer ends in the usual 1 us between two kernels, while the host waits
    for the end of the step. With compute twice as fast the rank does not wait for it either."""
    traces = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100)
        trace.kernel("a", 0, 49, launched=0).kernel("b", 50, 74, launched=2)
        trace.all_reduce(10, 50.5, launched=1).kernel("c", 75, 100, launched=3)
        trace.call("cudaStreamSynchronize", 5, 100)
        traces.append(trace)
    graph = scene(tmp_path, *traces).graph
    assert graph.kernels.resume.tolist() == [-1, -1]
    assert steps_us(scale_work(graph, "compute", np.array([0.5, 0.5]))) == [51, 51]


def test_sums_that_begin_during_the_backward_are_waited_for_together(tmp_path: Path) -> None:
    """Two sums of 20 behind a backward of 60; the first is ready at its half."""
    traces = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 110)
        trace.kernel("backward", 0, 60).all_reduce(60, 80).all_reduce(80, 100)
        trace.kernel("adam", 100, 110)
        traces.append(trace)
    graph = scene(tmp_path, *traces).graph
    ready = np.array([30_000, 60_000])
    moves = [HoistedCalls(np.array([2 * rank, 2 * rank + 1]), ready) for rank in (0, 1)]
    assert steps_us(hoist_collectives(graph, moves)) == [90, 90]


@pytest.mark.seeded
@pytest.mark.parametrize("name", QUICK)
def test_simulated_jobs_replay_as_they_were(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name](SEED)
    write_recording(scenario, simulate(scenario.job, Noise.of(SEED)), tmp_path, Style())
    found = split_of(recording_of(tmp_path))
    measured = [step.split.step_ns for rank in found.ranks for step in rank.steps]
    off = np.abs(replay(build_dependency_graph(found)).step_ns - measured)
    assert off.max() <= NEAR_NS, SEED
    # On several hosts the alignment of their clocks leaves microseconds.
    if len({rank.trace.host for rank in found.ranks}) == 1:
        assert (off == 0).mean() >= 0.5, SEED


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/diagnose")
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in QUICK])
def test_other_simulated_jobs_replay(name: str, tmp_path: Path) -> None:
    test_simulated_jobs_replay_as_they_were(name, tmp_path)


@cache
def split_sample(name: str) -> RunSplit:
    return split_of(recording_of(SAMPLES / name))


@pytest.mark.parametrize("name", ["tp2_pp2_dp2", "fsdp4", "pp2_m8", "built_zero_bubble"])
def test_recorded_runs_replay_to_the_nanosecond(name: str) -> None:
    found = split_sample(name)
    measured = [step.split.step_ns for rank in found.ranks for step in rank.steps]
    assert np.abs(replay(build_dependency_graph(found)).step_ns - measured).max() == 0


@pytest.mark.parametrize("name", ["tp2_pp2_dp2", "fsdp4", "pp2_m8"])
def test_whole_levels_at_once_give_the_same_times(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for runs of many ranks; also with faster links and without every fifth call."""
    split = split_sample(name)
    graph = build_dependency_graph(split)
    calls = np.arange(len(graph.kernels))
    faster = scale_transfers(graph, calls, np.full(len(calls), 0.5))
    changed = [graph, faster, remove_calls(graph, calls[::5])]
    by_row = [compute_times(each) for each in changed]
    monkeypatch.setattr("stepsplit.analyzer.diagnose.graph.topological_order._WIDE", 0)
    at_once = build_dependency_graph(split)
    np.testing.assert_array_equal(at_once.levels.node, graph.levels.node)
    np.testing.assert_array_equal(at_once.rest_ns, graph.rest_ns)
    np.testing.assert_array_equal(at_once.binding, graph.binding)
    for expected, each in zip(by_row, changed, strict=True):
        np.testing.assert_array_equal(compute_times(each), expected)


def build_needs(needs: Sequence[Sequence[int]]) -> Needs:
    """From the nodes that each node needs."""
    first = np.cumsum([0, *map(len, needs)], dtype=np.int32)
    return Needs(first, np.array([one for own in needs for one in own], dtype=np.int32))


@given(st.data())
def test_an_order_names_each_node_after_all_that_it_needs(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    needs = tuple(
        tuple(data.draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else ()
        for node in range(count)
    )
    needed = build_needs(needs)
    order = Levels.build(np.full(count, -1), needed, np.arange(count)).node.tolist()
    place = {node: i for i, node in enumerate(order)}
    assert sorted(order) == list(range(count))
    assert all(place[needed] < place[node] for node in place for needed in needs[node])


@given(st.data())
def test_changed_needs_are_those_of_lists(data: st.DataObject) -> None:
    count, added = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 3))
    nodes = st.integers(0, count - 1)
    needs = data.draw(st.lists(st.lists(nodes, max_size=3), min_size=count, max_size=count))
    changed = data.draw(st.dictionaries(nodes, st.lists(nodes, max_size=4)))
    expected = build_needs([*(changed.get(i, own) for i, own in enumerate(needs)), *[[]] * added])
    made = build_needs(needs).with_changed(changed, added)
    assert made.first.tolist() == expected.first.tolist()
    assert made.source.tolist() == expected.source.tolist()
    assert [made.of_node(node) for node in range(count)] == [
        changed.get(i, own) for i, own in enumerate(needs)
    ]


def test_two_that_wait_for_each_other_go_in_the_order_in_which_they_were_measured() -> None:
    levels = Levels.build(np.full(3, -1), build_needs(((1,), (0,), (0, 1))), np.array([5, 3, 9]))
    assert levels.node.tolist() == [1, 0, 2]
