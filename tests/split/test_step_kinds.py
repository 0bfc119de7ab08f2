"""Kinds of steps by what they do: their calls, and how much work they run on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from cuda_simulator.jobs import Job, SlowKernel
from cuda_simulator.simulate import simulate
from support.builders import GpuTrace

from stepsplit.analyzer import Report, analyze

KERNELS = 20


def train(
    folder: Path,
    more: dict[int, int],
    *,
    steps: int = 8,
    gathers: int = 0,
    logs: Sequence[int] = (),
    log_calls: int = 1,
    only: int | None = None,
    kernels: int = KERNELS,
    slower: dict[int, float] | None = None,
    name: str = "gemm",
    extra_us: float = 5,
) -> Report:
    """Two ranks; a step has 20 kernels of 5 us and an all_reduce, and, as more says, further
    kernels and all_gathers in a range "evaluate"; on one rank only if there is an only. slower: how
    many times as long the kernels of a step take. logs: steps
    with so many all_gathers in any case. name, extra_us: the further kernels."""
    for rank in (0, 1):
        trace, at = GpuTrace(rank, 2, groups=[("0", "mesh_dp", [0, 1])]), 0.0
        for step in range(steps):
            begin, factor = at, (slower or {}).get(step, 1.0)
            for _ in range(kernels):
                trace.kernel("gemm", at, at + 5 * factor)
                at += 5 * factor
            trace.all_reduce(at, at + 10, nelems=200_000, Seq=100 * step)
            at += 10
            extra = more.get(step, 0)
            if extra and only in (None, rank):
                trace.annotation("evaluate", at, at + extra_us * factor * extra)
                for _ in range(extra):
                    trace.kernel(name, at, at + extra_us * factor)
                    at += extra_us * factor
            elif extra:
                at += extra_us * factor * extra
            for call in range((gathers if extra else 0) + log_calls * (step in logs)):
                seq = {"Seq": 100 * step + 1 + call}
                trace.collective("AllGather", "_allgather_base", at, at + 4, **seq)
                at += 4
            trace.step(step, begin, at)
        trace.write(folder)
    return analyze(folder)


def others(report: Report) -> list[tuple[int, ...]]:
    return [kind.steps for kind in report.step_kinds[1:]]


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("steps", [6, 8, 11])
@pytest.mark.parametrize("gathers", [0, 1])
def test_every_nth_step_evaluates(every: int, steps: int, gathers: int, tmp_path: Path) -> None:
    evaluating = tuple(range(1, steps, every))
    report = train(tmp_path, dict.fromkeys(evaluating, 20), steps=steps, gathers=gathers)
    kinds = report.step_kinds
    assert [kind.steps for kind in kinds[1:]] == [evaluating]
    assert kinds[0].mean_ns == 110_000
    assert kinds[1].mean_ns == 110_000 + 100_000 + 4_000 * gathers
    is_regular = len(evaluating) > 1
    assert kinds[1].period == (every if is_regular else None)
    assert sum(kind.share for kind in kinds) == pytest.approx(1)
    (found,) = [one for one in report.findings if one.code == "other_steps"]
    called = "1 all_gather on dp_replicate, " * gathers
    which = {2: "every 2nd step", 3: "every 3rd step", 5: "every 5th step"}[every]
    assert found.message == (
        f"{which if is_regular else 'step 1'} takes 0.10 ms more than the others, most of it"
        f" compute: {called}1 evaluate, 20 compute kernels more"
    )
    extra_ns = (100_000 + 4_000 * gathers) * len(evaluating)
    assert found.gain_ns == extra_ns // steps


def test_calls_of_other_steps_alone_are_no_small_collectives_of_each_step(tmp_path: Path) -> None:
    report = train(tmp_path, dict.fromkeys((1, 4, 7), 20), steps=9, gathers=40)
    assert {one.code for one in report.findings} == {"other_steps"}


def test_what_other_steps_take_within_the_spread_of_the_usual_ones_is_said_to_be_so(
    tmp_path: Path,
) -> None:
    """Every third step logs by an all_gather of 4 us. The six usual steps compute 100, 150, 100,
    130, 100 and 100 us, those that log 131 and 101: more by less than two standard errors."""
    slower = {0: 1.5, 3: 1.3, 2: 1.3}
    report = train(tmp_path, {2: 1, 5: 1}, gathers=1, extra_us=1, slower=slower, name="aten::log")
    (found,) = [one for one in report.findings if one.code == "other_steps"]
    assert "all_gather on dp_replicate" in found.message
    assert found.message.endswith(
        "; not distinguishable from the spread of the other steps (0.02 ms)"
    )
    assert found.basis is not None
    assert (found.basis.steps, found.basis.of_steps, found.basis.repeats) == (2, 8, 4)
    assert found.basis.would_settle == ("more_steps",)


def test_what_a_step_does_besides_something_else_is_of_its_period(tmp_path: Path) -> None:
    """Every third step evaluates, every fourth one logs: step 4 does both and is of a kind of its
    own, but one of every three, and one of every four."""
    report = train(tmp_path, dict.fromkeys((1, 4, 7), 20), steps=9, logs=(0, 4, 8))
    assert others(report) == [(0, 8), (1, 7), (4,)]
    assert [kind.period for kind in report.step_kinds] == [None, 4, 3, None]
    (found,) = [one for one in report.findings if one.code == "other_steps"]
    assert found.message.startswith("every 3rd step takes 0.10 ms more than the others")
    assert (found.steps, found.gain_ns) == ((1, 4, 7), 100_000 * 3 // 9)


def test_a_step_that_does_something_else_with_more_calls_is_not_of_a_period(tmp_path: Path) -> None:
    """Steps 1 and 5 call two all_gathers in a range "evaluate", steps 3 and 7 three, for something
    else, as of a checkpoint."""
    report = train(tmp_path, {1: 1, 5: 1}, gathers=2, extra_us=1, logs=(3, 7), log_calls=3)
    assert others(report) == [(1, 5), (3, 7)]
    assert [kind.period for kind in report.step_kinds] == [2, 4, 4]


def test_two_kinds_beyond_the_usual_step(tmp_path: Path) -> None:
    """An evaluation, and a longer one."""
    assert others(train(tmp_path, {2: 20, 4: 20, 6: 50})) == [(2, 4), (6,)]


@pytest.mark.parametrize(
    ("more", "only"),
    [
        ({3: 20}, 1),  # on one rank: what the others wait for has a cause there
        (dict.fromkeys(range(8), 20), None),
        ({1: 1, 4: 1}, None),  # below a tenth
        ({step: step for step in range(8)}, None),  # as the data goes
    ],
)
def test_more_work_that_is_no_kind(more: dict[int, int], only: int | None, tmp_path: Path) -> None:
    report = train(tmp_path, more, only=only)
    assert report.step_kinds == ()
    assert {row.kind for row in report.steps} == {"full"}


@pytest.mark.parametrize(
    ("more", "slower", "steps"),
    [
        ({3: 1}, {3: 1.3}, 8),  # throttled in a step that logs
        ({0: 1, 2: 1}, {0: 1.3, 2: 1.3}, 3),
        ({1: 1, 3: 1, 5: 1, 7: 2}, {1: 1.15, 3: 1.2, 5: 1.1, 7: 1.15}, 8),  # as the data goes
    ],
)
def test_longer_kernels_are_no_more_work(
    more: dict[int, int], slower: dict[int, float], steps: int, tmp_path: Path
) -> None:
    report = train(tmp_path, more, slower=slower, steps=steps, kernels=40)
    assert report.step_kinds == ()
    assert {row.kind for row in report.steps} == {"full"}
    assert not [row for row in report.warnings if row.code == "steps_mixed"]


def test_one_long_kernel_that_the_usual_steps_do_not_run_is_a_kind(tmp_path: Path) -> None:
    """It takes a fifth of what a usual step computes."""
    report = train(tmp_path, {3: 1}, kernels=40, name="evaluation", extra_us=40)
    assert others(report) == [(3,)]
    (found,) = [one for one in report.findings if one.code == "other_steps"]
    assert found.message.endswith(": 1 evaluate, 1 compute kernel more")


def test_a_mix_by_the_time_of_its_kernels_says_so(tmp_path: Path) -> None:
    more = {0: 1, 2: 1}
    report = train(tmp_path, more, kernels=40, steps=3, name="evaluation", extra_us=40)
    (message,) = {row.message for row in report.warnings if row.code == "steps_mixed"}
    assert message.startswith(
        "the steps do unequal work: of 3, 2 compute 1.2 times as long as the others, with kernels"
        " that those do not run, and no kind is usual"
    )


def test_a_mix_without_a_usual_step_is_said(tmp_path: Path) -> None:
    report = train(tmp_path, {0: 20, 2: 20}, steps=3)
    assert {row.kind for row in report.steps} == {"full"}
    (message,) = {row.message for row in report.warnings if row.code == "steps_mixed"}
    assert message.startswith(
        "the steps do unequal work: of 3, 2 run 2.0 times as many kernels as the others"
    )


def test_what_a_host_launched_before_the_recording_is_no_other_kind_of_step(tmp_path: Path) -> None:
    """The device is two steps behind: it runs steps of before while the host is in those recorded,
    and one slow kernel in a step is seen by comparing with the steps after the first."""
    slow = SlowKernel(1, 1_800_000, 3, "begin")
    job = Job("ahead", dp=2, ep=2, microbatches=2, end_of_step="none", steps=4, causes=(slow,))
    simulate(job).write(tmp_path)
    report = analyze(tmp_path)
    kinds = [(row.step, row.kind) for row in report.steps if row.rank == 0]
    assert kinds == [(2, "partial"), (3, "full"), (4, "full"), (5, "full")]
    assert report.step_kinds == ()
    (found,) = report.findings
    assert (found.code, found.ranks) == ("slow_rank", (1,))
    assert found.gain_ns == pytest.approx(1_800_000 / 3, rel=0.01)
