"""Step time variation: median, tail, and causes of slow steps; times in us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import Report, SlowStep, StepDurations, analyze


def computing(rank: int, lengths: Mapping[int, float]) -> GpuTrace:
    """A rank that computes for so long in each step of these numbers, and nothing else."""
    trace, at = GpuTrace(rank, 3), 0.0
    for step, took in lengths.items():
        trace.step(step, at, at + took).kernel("gemm", at, at + took)
        at += took
    return trace


def analyzed(folder: Path, *traces: GpuTrace) -> Report:
    return analyze(*(trace.write(folder) for trace in traces))


def test_each_rank_and_the_run_have_a_median_a_tail_and_the_slow_steps(tmp_path: Path) -> None:
    lengths = {1: 100, 2: 102, 3: 101, 4: 150, 5: 100, 6: 101}
    found = analyzed(tmp_path, computing(0, lengths))
    assert found.step_times == (
        StepDurations(None, 6, 101_000, 150_000, 150_000, (4,)),
        StepDurations(0, 6, 101_000, 150_000, 150_000, (4,)),
    )
    assert found.slow_steps == (SlowStep(4, 150_000, 49_000, 0, "compute", 49_000),)


def test_p99_of_many_steps_is_the_time_that_99_percent_do_not_exceed(tmp_path: Path) -> None:
    found = analyzed(tmp_path, computing(0, {n: n for n in range(1, 201)}))
    _, row = found.step_times
    assert (row.median_ns, row.p99_ns, row.longest_ns) == (100_500, 198_000, 200_000)


def test_a_slow_step_is_attributed_to_the_busy_rank_not_to_waiting_ones(
    tmp_path: Path,
) -> None:
    """Rank 1 is always last, by 10 us; in step 5 it loads data for 60 us, and both others wait."""
    traces = [GpuTrace(rank, 3, groups=[("0", "mesh_tp", [0, 1, 2])]) for rank in range(3)]
    at = 0
    for step in range(7):
        came = at + (160 if step == 5 else 100)
        for rank, trace in enumerate(traces):
            computed = at + (100 if rank == 1 else 90)
            trace.step(step, at, came + 5).kernel("gemm", at, computed)
            trace.all_reduce(came if rank == 1 else computed, came + 1)
            trace.kernel("adam", came + 1, came + 5)
        at = came + 5
    found = analyzed(tmp_path, *traces)
    assert found.slow_steps == (SlowStep(5, 165_000, 60_000, 1, "idle", 60_000),)
    assert [(row.rank, row.slow_steps) for row in found.step_times] == [
        (None, (5,)),
        (0, (5,)),
        (1, (5,)),
        (2, (5,)),
    ]


def test_a_wait_is_the_cause_if_no_other_bucket_explains_the_step(tmp_path: Path) -> None:
    """The rank that was waited for is not in the recording."""
    trace = GpuTrace(0, 2, groups=[("0", "mesh_tp", [0, 1])])
    for step in range(7):
        at, computed, took = 115 * step, 105 if step == 6 else 100, 55 if step == 6 else 10
        done = at + computed + took
        trace.step(step, at, done + 5).kernel("gemm", at, at + computed)
        trace.all_reduce(at + computed, done).kernel("adam", done, done + 5)
    found = analyzed(tmp_path, trace)
    assert found.slow_steps == (SlowStep(6, 165_000, 50_000, 0, "skew", 45_000),)


@pytest.mark.parametrize(
    ("what", "lengths"),
    [
        ("a few nanoseconds in even steps", [1.02 if n == 3 else 1.0 for n in range(8)]),
        ("a long one of uneven steps", [100, 130, 160, 110, 170, 140, 120, 190]),
        ("one of too few steps", [400 if n == 2 else 100 for n in range(5)]),
    ],
)
def test_no_step_is_slow_for(what: str, lengths: Sequence[float], tmp_path: Path) -> None:
    found = analyzed(tmp_path, computing(0, dict(enumerate(lengths))))
    assert (len(found.steps), found.slow_steps) == (len(lengths), ())


def test_partial_other_and_missing_steps_do_not_count_for_the_run(
    tmp_path: Path,
) -> None:
    """On rank 0 step 0 began before the recording, and step 8 makes a call that none else does."""
    groups = [("0", "mesh_tp", [0, 1])]
    one, other = (GpuTrace(rank, 2, groups=groups) for rank in (0, 1))
    one.kernel("gemm", 0, 10).step(0, 5, 100).kernel("gemm", 90, 100)
    for step in range(1, 8):
        for trace in (one, other):
            trace.step(step, 100 * step, 100 * step + 100)
            trace.kernel("gemm", 100 * step, 100 * step + 100)
    one.step(8, 800, 1800).all_reduce(900, 910).kernel("gemm", 1700, 1800)
    other.step(9, 1800, 1900).kernel("gemm", 1800, 1900)
    found = analyzed(tmp_path, one, other)
    assert [(row.rank, row.step, row.kind) for row in found.steps if row.kind != "full"] == [
        (0, 0, "partial"),
        (0, 8, "other"),
    ]
    assert [(row.rank, row.steps, row.median_ns) for row in found.step_times] == [
        (None, 7, 100_000),
        (0, 7, 100_000),
        (1, 8, 100_000),
    ]
    assert found.slow_steps == ()


def test_without_a_full_step_on_every_rank_there_are_no_run_statistics(tmp_path: Path) -> None:
    found = analyzed(tmp_path, computing(0, {1: 100}), computing(1, {2: 100}))
    assert [row.rank for row in found.step_times] == [0, 1]
    assert found.slow_steps == ()


def test_a_recording_without_steps_has_no_step_statistics(tmp_path: Path) -> None:
    """The one step that is marked launched only what runs after it."""
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 20, 30, launched=15)
    found = analyzed(tmp_path, trace)
    assert (found.steps, found.step_times, found.slow_steps) == ((), (), ())
