"""Scenarios of the simulator: plans of pipelines, what befalls a job, jobs drawn from a seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.changes import copied, graphed, launch_bound, loaded, loading, slowed, stalled
from simulator.engine import simulate
from simulator.layers import LOADER
from simulator.losses import losses_of
from simulator.meshes import Fleet
from simulator.noise import Noise
from simulator.plans import Exchange, Pipeline, plans_of
from simulator.program import (
    MAIN,
    Begin,
    Compute,
    Copy,
    End,
    Graph,
    Host,
    Instruction,
    Job,
    ProcessGroup,
    Scenario,
    StepBegin,
    StepEnd,
    Synchronize,
)
from simulator.ran import Run
from simulator.scenarios import SCENARIOS
from simulator.schedules import Action
from simulator.truth import truth_of

FIRST, SECOND = Compute(100, "first"), Compute(200, "second")
LOADS, BATCH = Host(10, LOADER), Copy(5)
READS = Synchronize(MAIN, "cudaStreamSynchronize", "aten::item")
PLAIN = (StepBegin(1), LOADS, BATCH, FIRST, Begin("B"), SECOND, End(), StepEnd())
QUICK = ("tp_graphs", "fsdp", "pp_zb_v", "ddp_slow_rank", "ddp_host_stall", "cp_slow_rank")
SLOW_IN_TURN = (pytest.mark.slow, pytest.mark.in_turn("tests/simulator"))
SIMULATED = [pytest.param(n, marks=() if n in QUICK else SLOW_IN_TURN) for n in SCENARIOS]


def two_ranks() -> Job:
    return Job(
        "pair", (PLAIN, PLAIN), (ProcessGroup("0", (0, 1)),), (("tp", 2),), ("a", "a"), (0, 0)
    )


def of_first(job: Job) -> tuple[Instruction, ...]:
    """What rank 0 does; rank 1 must be left as it was."""
    assert job.programs[1] == PLAIN
    return job.programs[0]


def written(how: Pipeline, stages: int) -> list[str]:
    """The plan of each rank in words: 0F1, >1:0F1 (to rank 1), <1:1B0 (from it); [ ] is a batch."""

    def word(item: Action | Exchange) -> str:
        if isinstance(item, Action):
            return f"{item.stage}{item.kind}{item.microbatch}"
        ends = [f"{'>' if h.op == 'send' else '<'}{h.peer}:{word(h.action)}" for h in item.hands]
        return f"[{' '.join(ends)}]" if len(ends) > 1 else ends[0]

    return [" ".join(map(word, plan)) for plan in plans_of(how, stages)]


def test_1f1b_batches_what_goes_to_a_neighbor_with_what_comes_from_it() -> None:
    assert written(Pipeline("1f1b", 3), 2) == [
        "0F0 >1:0F0 0F1 [>1:0F1 <1:1B0] 0B0 0F2 [>1:0F2 <1:1B1] 0B1 <1:1B2 0B2",
        "<0:0F0 1F0 1B0 [>0:1B0 <0:0F1] 1F1 1B1 [>0:1B1 <0:0F2] 1F2 1B2 >0:1B2",
    ]


def test_gpipe_sends_each_activation_and_each_gradient_alone() -> None:
    assert written(Pipeline("gpipe", 2), 2) == [
        "0F0 >1:0F0 0F1 >1:0F1 <1:1B0 0B0 <1:1B1 0B1",
        "<0:0F0 1F0 <0:0F1 1F1 1B0 >0:1B0 1B1 >0:1B1",
    ]


def test_a_rank_that_holds_both_sides_of_the_turn_sends_itself_nothing() -> None:
    assert written(Pipeline("zb-v", 1), 1) == ["0F0 1F0 1I0 1W0 0I0 0W0"]


def test_the_groups_of_a_mesh_lie_along_its_axes() -> None:
    fleet = Fleet((("pp", 2), ("tp", 2)), beside=("mp",), nodes=2)
    assert fleet.groups == (
        ProcessGroup("0", (0, 1, 2, 3), "default_pg"),
        ProcessGroup("1", (0, 2), "PIPELINE_MODEL_PARALLEL_GROUP"),
        ProcessGroup("2", (1, 3), "PIPELINE_MODEL_PARALLEL_GROUP"),
        ProcessGroup("3", (0, 1), "TENSOR_MODEL_PARALLEL_GROUP"),
        ProcessGroup("4", (2, 3), "TENSOR_MODEL_PARALLEL_GROUP"),
        ProcessGroup("5", (0, 1, 2, 3), "MODEL_PARALLEL_GROUP"),
    )
    assert (fleet.hosts, fleet.stage_of) == (("node0", "node0", "node1", "node1"), (0, 0, 1, 1))
    meshes = [group.description for group in replace(fleet, naming="mesh").groups]
    assert meshes == ["default_pg", *["mesh_pp"] * 2, *["mesh_tp"] * 2, "mesh_pp_tp"]


def test_a_slow_rank_computes_longer() -> None:
    slow = (Compute(150, "first"), Begin("B"), Compute(300, "second"))
    assert of_first(slowed(two_ranks(), 0, 1.5)) == (*PLAIN[:3], *slow, End(), StepEnd())


def test_a_loaded_rank_runs_some_kernels_twice() -> None:
    twice = (FIRST, Begin("B"), SECOND, SECOND, End(), StepEnd())
    assert of_first(loaded(two_ranks(), 0, every=2)) == (*PLAIN[:3], *twice)
    assert of_first(loaded(two_ranks(), 0, every=1, named="sec")) == (*PLAIN[:3], *twice)


def test_a_slow_copy_or_loader_takes_as_long_as_planted() -> None:
    assert of_first(copied(two_ranks(), 0, 77)) == (*PLAIN[:2], Copy(77), *PLAIN[3:])
    assert of_first(loading(two_ranks(), 0, 77)) == (PLAIN[0], Host(77, LOADER), *PLAIN[2:])


def test_a_launch_bound_rank_reads_a_value_back_after_every_kernel() -> None:
    read = (READS, Host(9, "aten::_local_scalar_dense"))
    later = (FIRST, *read, Begin("B"), SECOND, *read, End(), StepEnd())
    assert of_first(launch_bound(two_ranks(), 0, 9)) == (*PLAIN[:3], *later)


def test_a_stall_comes_behind_a_share_of_the_kernels_of_its_steps_only() -> None:
    late = (FIRST, Begin("B"), SECOND, READS, Host(9, "cudaMalloc"), End(), StepEnd())
    assert of_first(stalled(two_ranks(), 0, 9, steps=(1,), share=0.5)) == (*PLAIN[:3], *late)
    assert of_first(stalled(two_ranks(), 0, 9, steps=(2,), share=0.5)) == PLAIN


def test_graphs_hold_what_can_be_captured_and_leave_short_runs() -> None:
    captured = (StepBegin(1), LOADS, Graph((BATCH, FIRST)), Begin("B"), SECOND, End(), StepEnd())
    assert graphed(two_ranks(), at_least=2).programs == (captured, captured)


@pytest.mark.parametrize("name", SIMULATED)
def test_a_seed_says_all_of_a_scenario_and_another_seed_makes_another_job(name: str) -> None:
    assert SCENARIOS[name](1) == SCENARIOS[name](1)
    assert SCENARIOS[name](1).job.programs != SCENARIOS[name](2).job.programs


@pytest.mark.parametrize("name", SIMULATED)
def test_every_scenario_runs_as_planned_and_with_noise(name: str) -> None:
    """A planted cause changes its rank alone and costs every rank time; only a cause of the host
    leaves a device idle; noise changes what a job takes by little and what it runs by nothing."""
    scenario = SCENARIOS[name](1)
    exact = simulate(scenario.job)
    _check_truth(scenario, exact)
    _check_noise(scenario, exact)
    if scenario.cause is not None:
        _check_planted_cause(scenario)


def _check_truth(scenario: Scenario, exact: Run) -> None:
    cause = scenario.cause
    splits = truth_of(exact).splits
    assert len(splits) == 4 * len(scenario.job.programs)
    assert all(30e6 < split.end_ns - split.start_ns < 150e6 for split in splits)
    idle = {s.rank for s in splits if s.idle_ns > 0.01 * (s.end_ns - s.start_ns)}
    assert idle == ({cause.rank} if cause and cause.cause == "host" else set())


def _check_noise(scenario: Scenario, exact: Run) -> None:
    noisy = simulate(scenario.job, Noise.of(11), slow=0.1)
    assert [len(rank.device) for rank in noisy.ranks] == [len(r.device) for r in exact.ranks]
    ends_ns = [run.ranks[0].host[-1].end_ns for run in (noisy, exact)]
    assert 0.98 < ends_ns[0] / ends_ns[1] < 1.12


def _check_planted_cause(scenario: Scenario) -> None:
    assert scenario.without is not None and scenario.cause is not None
    pairs = zip(scenario.job.programs, scenario.without.programs, strict=True)
    changed = [rank for rank, (with_it, without) in enumerate(pairs) if with_it != without]
    assert changed == [scenario.cause.rank]
    assert min(loss.step_ns for loss in losses_of(scenario)) > 4_000_000
