"""The critical path of an RL step across roles: an unbroken chain that is as long as the step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.builders import BASE_NS, GpuTrace
from support.role_builders import STEPS, Job, make_one_group, make_rollouts, make_trainer

from stepsplit.analyzer.report.roles import RoleJob, roles_from_json, roles_to_json


def list_links(job: RoleJob, step: int = 2) -> list[tuple[str, int, str, int, int]]:
    """Role, rank, phase, start and µs of each link of a step, from its start."""
    links = [one for one in job.path_links if one.step == step]
    begin_ns = next(one.start_ns for one in job.steps if one.step == step)
    return [
        (one.role, one.rank, one.phase, (one.start_ns - begin_ns) // 1000,
         one.time.window_ns // 1000)
        for one in links
    ]  # fmt: skip


def check_chains(job: RoleJob) -> None:
    for step in job.steps:
        links = [one for one in job.path_links if one.step == step.step]
        assert links[0].start_ns == step.start_ns
        assert sum(one.time.window_ns for one in links) == step.step_ns
        for before, after in pairwise(links):
            assert before.start_ns + before.time.window_ns == after.start_ns
        for one in links:
            time = one.time
            parts = time.compute_ns + time.transfer_ns + time.wait_ns + time.copy_ns
            assert parts + time.idle_ns + time.unrecorded_ns == time.window_ns > 0
    assert sum(row.time.window_ns for row in job.path) == job.step_ns
    assert roles_from_json(roles_to_json(job)) == job


def make_chain(folder: Path, later_us: int = 0) -> Job:
    """A rollout generates for 40 µs and sends, a reference scores for 20 and sends, a trainer
    trains for 25 and sends the weights to the rollout; each message takes 5 µs."""
    job = Job(folder / "exp1")
    groups = [("0", "default_pg", range(3))]
    names = ("rollout", "reference", "trainer")
    marks = (("generate", 0, 40), ("reward", 45, 65), ("train", 70, 95))
    for rank, (role, (mark, begin, end)) in enumerate(zip(names, marks, strict=True)):
        base_ns = BASE_NS + 1000 * later_us * rank
        trace = GpuTrace(rank, 3, groups=groups, base_ns=base_ns)
        for step in STEPS:
            at = 100 * step
            trace.step(step, at, at + 100).annotation(mark, at + begin, at + end)
            trace.kernel(f"gemm_{mark}", at + begin, at + end)
            if rank == 0:
                trace.message("send", 1, at + 40, at + 45).message("recv", 2, at + 46, at + 100)
            elif rank == 1:
                trace.message("recv", 0, at, at + 45).message("send", 2, at + 65, at + 70)
            else:
                trace.message("recv", 1, at, at + 70).message("send", 0, at + 95, at + 100)
                trace.annotation("Optimizer.step#Adam.step", at + 94, at + 95)
        job.add(role, 3, trace)
    return job


def test_the_path_goes_to_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    job = make_chain(tmp_path).examine().job
    assert {role.program for role in job.roles} == {0}
    assert list_links(job) == [
        ("rollout", 0, "generation", 0, 40),
        ("reference", 1, "", 40, 5),
        ("reference", 1, "reward", 45, 20),
        ("trainer", 2, "", 65, 5),
        ("trainer", 2, "training", 70, 25),
        ("trainer", 2, "", 95, 5),
    ]
    assert [(row.role, row.phase, row.time.window_ns // 1000) for row in job.path] == [
        ("rollout", "generation", 40),
        ("trainer", "training", 25),
        ("reference", "reward", 20),
        ("trainer", "", 10),
        ("reference", "", 5),
    ]
    check_chains(job)


def test_in_collectives_it_is_that_of_the_last_rank(tmp_path: Path) -> None:
    job = make_one_group(tmp_path).examine().job
    assert list_links(job) == [
        ("trainer", 2, "", 0, 88),
        ("trainer", 2, "training", 88, 1),
        ("trainer", 2, "", 89, 11),
    ]
    check_chains(job)


def test_programs_without_a_call_in_common_are_not_left_but_named(tmp_path: Path) -> None:
    job = Job(tmp_path / "exp1")
    rollouts = make_rollouts()
    for rollout, end in zip(rollouts, (30, 78), strict=True):
        for step in STEPS:
            rollout.annotation("generate", 100 * step, 100 * step + end)
    job.add("rollout", 2, *rollouts)
    job.add("trainer", 1, make_trainer())
    found = job.examine().job
    assert {one.role for one in found.path_links} == {"trainer"}
    first = next(one for one in found.path_links if one.step == 2)
    assert first.meanwhile == "rollout/1: generation"
    assert first.time.idle_ns == first.time.window_ns - first.time.compute_ns
    assert any("no call joins them" in lack for lack in found.lacks)
    check_chains(found)


def test_a_rank_that_is_not_recorded_ends_no_chain(tmp_path: Path) -> None:
    job = make_chain(tmp_path)
    next((job.folder / "reference").glob("rank1_trace*")).unlink()
    found = job.examine().job
    assert any(lack.startswith("what reference did") for lack in found.lacks)
    check_chains(found)


@pytest.mark.slow
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_chain_is_unbroken_and_as_long_as_its_step(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever each rank does, however the hosts' clocks differ, and whoever is not recorded."""
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=3))
    world = sum(sizes)
    has_clocks = data.draw(st.booleans())
    job = Job(tmp_path_factory.mktemp("path") / "exp1")
    groups = [("0", "default_pg", range(world))]
    rank = 0
    for number, size in enumerate(sizes):
        traces = []
        for _ in range(size):
            base_ns = BASE_NS + 1000 * (data.draw(st.integers(0, 30)) if has_clocks else 0)
            host = f"host{rank if has_clocks else 0}"
            trace = GpuTrace(rank, world, groups=groups, base_ns=base_ns, host=host)
            for step in STEPS:
                at = 100 * step
                busy = data.draw(st.integers(1, 40))
                second = data.draw(st.integers(60, 90))
                trace.step(step, at, at + 100).kernel("gemm", at, at + busy)
                trace.all_reduce(at + busy, at + 50, Seq=2 * step)
                trace.kernel("gemm_2", at + 50, at + second)
                trace.all_reduce(at + second, at + 98, Seq=2 * step + 1)
                for name in ("generate", "reward", "train", "mine"):
                    if data.draw(st.booleans()):
                        begin = data.draw(st.integers(0, 90))
                        trace.annotation(name, at + begin, at + begin + 8)
                if number == len(sizes) - 1:
                    trace.annotation("Optimizer.step#Adam.step", at + 95, at + 97)
            if data.draw(st.integers(0, 5)) or not traces:
                traces.append(trace)
            rank += 1
        job.add(("rollout", "reference", "trainer")[number], world, *traces)
    check_chains(job.examine().job)
