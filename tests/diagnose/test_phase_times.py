"""The RL steps by phase, and the long tail of generation, of traces by hand."""

from __future__ import annotations

from collections import defaultdict
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec import UNSET, structs
from rich.console import Console
from support.builders import GpuTrace

from stepsplit.analyzer import Report, analyze
from stepsplit.analyzer.analysis import RoleAnalysis, examine_roles_or_run
from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.diagnose.long_tail import find_generations
from stepsplit.analyzer.report.io import from_json, to_json
from stepsplit.analyzer.report.rl_step import RlStep
from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.analyzer.split.rl_phases import MOST_MARKS, OTHER_MARKS, DecodeSteps
from stepsplit.collectors.formats.run_spec import RunSpec, write_run_json
from stepsplit.dashboard.reporters.rl_step import build_phases_table
from stepsplit.dashboard.reporters.roles import build_roles_screen
from stepsplit.dashboard.reporters.terminal import build_report_screen

STEPS = (1, 2, 3)


def add_rollout(trace: GpuTrace, begin: int, batches: list[tuple[int, int]]) -> None:
    """Decode steps of so many µs for so many sequences, in a generation, from begin on."""
    at = begin
    for sequences, took in batches:
        trace.annotation(f"execute_context_0(0)_generation_{sequences}({sequences})", at, at + took)
        trace.kernel("decode", at, at + took)
        at += took
    trace.annotation("generate_sequences", begin, at)


def write_role(folder: Path, role: str, traces: list[GpuTrace]) -> None:
    (folder / role).mkdir(parents=True)
    write_run_json(folder / role, RunSpec("exp1", traces[0].world_size, "nccl", role=role))
    for trace in traces:
        trace.write(folder / role)


@pytest.fixture
def job(tmp_path: Path) -> RoleJob:
    """Two rollouts, of which the second decodes 40 µs for its last of four, and a trainer that
    works from 10 µs before the end of that on."""
    short, long = GpuTrace(0, 2), GpuTrace(1, 2)
    trainer = GpuTrace(0, 1)
    for step in STEPS:
        at = 100 * step
        for trace in (short, long):
            trace.step(step, at, at + 100).kernel("end", at + 99, at + 100)
            trace.annotation("update_weights", at + 90, at + 100)
        add_rollout(short, at, [(4, 10), (2, 10)])
        add_rollout(long, at, [(4, 10), (2, 10), (1, 40)])
        trainer.step(step, at, at + 100).kernel("gemm", at + 50, at + 90)
        trainer.kernel("end", at + 99, at + 100)
        trainer.annotation("update_actor", at + 45, at + 90)
        trainer.annotation("Optimizer.step#Adam.step", at + 88, at + 89)
        trainer.annotation("my logger", at + 92, at + 96)
    write_role(tmp_path, "rollout", [short, long])
    write_role(tmp_path, "trainer", [trainer])
    analysis = examine_roles_or_run([tmp_path])
    assert isinstance(analysis, RoleAnalysis)
    return analysis.job


def list_phases(job: RoleJob | RlStep) -> dict[tuple[str, str], tuple[float, ...]]:
    """The µs of window, compute, transfer, wait, copy, idle and what is not recorded."""
    return {
        (row.role, row.phase): tuple(ns / 1000 for ns in structs.astuple(row.time))
        for row in job.phases
    }


def test_each_role_has_its_phases(job: RoleJob) -> None:
    assert list_phases(job) == {
        ("rollout", "generation"): (40, 40, 0, 0, 0, 0, 0),
        ("rollout", "weight_sync"): (10, 1, 0, 0, 0, 9, 0),
        ("rollout", ""): (50, 0, 0, 0, 0, 50, 0),
        ("trainer", "training"): (45, 40, 0, 0, 0, 5, 0),
        ("trainer", "my logger"): (4, 0, 0, 0, 0, 4, 0),
        ("trainer", ""): (51, 1, 0, 0, 0, 50, 0),
    }
    assert [row.phase for row in job.phases if row.is_known] == [
        "generation", "weight_sync", "training",
    ]  # fmt: skip


def test_phases_add_up_to_the_time_of_each_rank_and_role(job: RoleJob) -> None:
    sums: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0] * 7)
    for row in job.phase_rows:
        own = sums[row.role, row.rank, row.step]
        own[:] = [a + b for a, b in zip(own, structs.astuple(row.time), strict=True)]
    assert sums == {(r.role, r.rank, r.step): list(structs.astuple(r.time)) for r in job.rows}
    for role in job.roles:
        columns = [structs.astuple(row.time) for row in job.phases if row.role == role.name]
        assert [sum(one) for one in zip(*columns, strict=True)] == list(structs.astuple(role.time))


def test_a_tail_is_what_one_rank_decodes_for_its_last_sequences(job: RoleJob) -> None:
    found = [
        (row.rank, row.step, row.sequences, row.last, row.decode_ns, row.tail_ns)
        for row in job.tail_rows
    ]
    assert found == [
        *((0, step, 4, 1, 20_000, 0) for step in STEPS),
        *((1, step, 4, 1, 60_000, 40_000) for step in STEPS),
    ]
    # Of 3.75 µs each.
    assert job.tail_rows[-1].batch == (4, 4, 3.33, 2, 2, 1.33, *[1] * 10)
    (tail,) = job.tails
    assert (tail.decode_ns, tail.tail_ns, tail.longest_rank, tail.longest_ns) == (
        40_000, 20_000, 1, 40_000,
    )  # fmt: skip
    # 40 + 20 + 40 + 20 + 40 of 80 places and of 240 are taken.
    assert tail.empty == pytest.approx(1 - 160 / 320)
    # The generation would end at 20 instead of 60; from 50 on the trainer works meanwhile.
    assert tail.saved_ns == 30_000


def test_the_screen_shows_phases_and_tail(job: RoleJob) -> None:
    text = render(build_roles_screen(job))
    assert "PHASES OF THE RL STEP" in text
    assert "weight sync" in text and "my logger" in text and "without a mark" in text
    (line,) = (one for one in text.splitlines() if one.strip().startswith("training"))
    assert line.split() == ["training", "45.0", "%", "40.0", "%", "5.0", "%"]
    assert "longest on rollout/1: 0.04 ms for its last one of 4 sequences." in " ".join(
        text.split()
    )
    assert "without the tail the RL step is about 0.03 ms (30.0 %) shorter" in text


def render(screen: object) -> str:
    out = StringIO()
    Console(file=out, width=100).print(screen)
    return out.getvalue()


def make_colocated(folder: Path) -> Report:
    """Two ranks of one program that do everything in turn, with a step that logs."""
    world = ("0", "default_pg", (0, 1))
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=[world])
        for step in STEPS:
            at = 100 * step
            trace.step(step, at, at + 100).kernel("decode", at, at + 40)
            trace.annotation("GRPOTrainer.transformers.generate", at, at + 40)
            trace.annotation("GRPOTrainer.compute_loss", at + 50, at + 70)
            trace.kernel("gemm", at + 50, at + 80).all_reduce(at + 85, at + 95)
            trace.annotation("Optimizer.step#Adam.step", at + 96, at + 100)
            if step == 2:
                trace.all_reduce(at + 96, at + 98)
        trace.write(folder)
    return analyze(folder)


def test_a_program_that_does_all_has_phases_in_its_report(tmp_path: Path) -> None:
    report = make_colocated(tmp_path)
    step = report.rl_step
    assert step is not UNSET
    phases = list_phases(step)
    assert phases["", "generation"] == (40, 40, 0, 0, 0, 0, 0)
    assert phases["", "training"] == pytest.approx((24, 20, 0, 0, 0, 4, 0), abs=0.8)
    assert sum(row[0] for row in phases.values()) == 100
    assert "how long ranks decode for the last sequences" in step.lacks[0]
    assert from_json(to_json(report)) == report
    text = render(build_report_screen(report))
    assert "PHASES OF THE RL STEP (0.10 ms, the mean of 3 steps and all ranks)" in text
    assert "not known: how long ranks decode" in text


def test_no_step_of_rl_is_dropped_for_what_it_logs(tmp_path: Path) -> None:
    report = make_colocated(tmp_path)
    assert {row.kind for row in report.steps} == {"full"}
    assert not report.step_kinds


def test_a_training_without_rl_has_no_phases_in_its_report(tmp_path: Path) -> None:
    trace = GpuTrace()
    for step in STEPS:
        trace.step(step, 100 * step, 100 * step + 100).kernel("gemm", 100 * step, 100 * step + 90)
        trace.annotation("train", 100 * step, 100 * step + 50)
    trace.write(tmp_path)
    report = analyze(tmp_path)
    assert report.rl_step is UNSET
    assert b"rl_step" not in to_json(report)


@pytest.mark.parametrize("mark", ["", "values", "gen"])
def test_an_ordinary_word_leaves_an_evaluation_out_of_the_means(mark: str, tmp_path: Path) -> None:
    trace = GpuTrace()
    for step in range(1, 7):
        at = 10_000 * step
        trace.step(step, at, at + 9000)
        if mark:
            trace.annotation(mark, at, at + 400)
        for i in range(90 if step == 3 else 30):
            trace.kernel("gemm", at + 10 + 90 * i, at + 90 + 90 * i)
    trace.write(tmp_path)
    report = analyze(tmp_path)
    assert [row.step for row in report.steps if row.kind == "other"] == [3]
    assert report.rl_step is UNSET


def test_a_step_without_marks_is_not_usual_because_others_have_none(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=[("0", "default_pg", (0, 1))])
    for step in range(1, 7):
        at = 100 * step
        trace.step(step, at, at + 100).kernel("gemm", at, at + 80).all_reduce(at + 82, at + 90)
        if step == 2:
            trace.all_reduce(at + 92, at + 96)
        if step == 6:
            trace.annotation("generate", at, at + 20).annotation("reward", at + 30, at + 40)
    trace.write(tmp_path)
    assert [row.step for row in analyze(tmp_path).steps if row.kind == "other"] == [2]


def test_thousands_of_marks_have_one_row_and_time_is_conserved(tmp_path: Path) -> None:
    trace = GpuTrace()
    letters = "abcdefghijklmnop"
    names = [f"request {one}{two}" for one in letters for two in letters]
    for step in STEPS:
        at = 1000 * step
        trace.step(step, at, at + 1000).kernel("gemm", at, at + 1000)
        trace.annotation("generate", at, at + 100).annotation("reward", at + 100, at + 110)
        for i, name in enumerate(names):
            # Each is a little longer than the one before.
            trace.annotation(name, at + 120 + 3 * i, at + 121 + 3 * i + i / 1000)
    trace.write(tmp_path)
    step_of = analyze(tmp_path).rl_step
    assert step_of is not UNSET
    phases = [row.phase for row in step_of.phases]
    assert phases == ["generation", "reward", *names[: -MOST_MARKS - 1 : -1], OTHER_MARKS, ""]
    assert sum(row.time.window_ns for row in step_of.phases) == step_of.step_ns == 1_000_000
    lines = render(build_phases_table(step_of.phases)).splitlines()
    # The screen has fewer lines; how many are in the last one is not known to it.
    assert [line.split("  ")[0] for line in lines if "marks" in line] == [OTHER_MARKS]


# Generations of decode steps alone.


def make_steps(batches: list[tuple[int, int]], begin: int = 0) -> DecodeSteps:
    took = np.array([one for _, one in batches], dtype=np.int64)
    end = begin + np.cumsum(took)
    return DecodeSteps(end - took, end, np.array([one for one, _ in batches], dtype=np.int64))


NO_MARKS = Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
EDGES = np.array([0, 1_000_000], dtype=np.int64)


@pytest.mark.parametrize(
    ("batches", "tail"),
    [
        ([(8, 10), (4, 10), (1, 10), (1, 10)], 20),
        # A queue fills the batch again: only the end is a tail.
        ([(8, 10), (1, 10), (8, 10), (1, 5)], 5),
        # A prefill prepares sequences.
        ([(8, 10), (1, 10), (0, 10), (1, 5)], 5),
        # The last eighth of 64 are eight.
        ([(64, 10), (9, 10), (8, 10), (3, 10)], 20),
        # All at once, or one alone from the beginning: there is no tail.
        ([(8, 10), (8, 10)], 0),
        ([(1, 10), (1, 10)], 0),
    ],
)
def test_the_tail_begins_after_the_last_full_step(
    batches: list[tuple[int, int]], tail: int
) -> None:
    (found,) = find_generations(make_steps(batches), NO_MARKS, EDGES)
    assert found.end_ns - found.tail_start_ns == tail
    assert found.filled == sum(one * took for one, took in batches)


def test_steps_in_one_mark_are_one_generation() -> None:
    steps = make_steps([(4, 10), (1, 10), (6, 10), (1, 30)])
    marks = Intervals(np.array([0, 20]), np.array([20, 60]))
    found = find_generations(steps, marks, EDGES)
    assert [(one.start_ns, one.tail_start_ns, one.end_ns) for one in found] == [
        (0, 10, 20), (20, 30, 60),
    ]  # fmt: skip
    # A mark around each step, as of an engine's loop, says nothing of the whole.
    each = Intervals(steps.start_ns, steps.end_ns)
    (whole,) = find_generations(steps, each, EDGES)
    assert (whole.start_ns, whole.tail_start_ns, whole.end_ns) == (0, 30, 60)


def test_the_sequences_that_a_name_says_may_be_many() -> None:
    many, took = 999_999_999, 20_000_000_000
    (found,) = find_generations(make_steps([(many, took), (1, took)]), NO_MARKS, EDGES[:1])
    assert found.filled == many * took + took
    assert found.batch == (*[float(many)] * 8, *[1.0] * 8)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 10_000)), min_size=1, max_size=60))
def test_the_batch_over_time_keeps_what_was_decoded(batches: list[tuple[int, int]]) -> None:
    found = find_generations(make_steps(batches), NO_MARKS, EDGES)
    if not any(one for one, _ in batches):
        assert found == []
        return
    (one,) = found
    whole = one.end_ns - one.start_ns
    assert one.start_ns <= one.tail_start_ns <= one.end_ns
    assert sum(one.batch) / len(one.batch) * whole == pytest.approx(one.filled, abs=0.01 * whole)
    assert max(one.batch) <= one.sequences
