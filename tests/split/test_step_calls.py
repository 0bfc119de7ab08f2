"""How often a kind of call is made in a step: as most steps have it."""

from __future__ import annotations

from pathlib import Path

from support.builders import GpuTrace

from stepsplit.analyzer import StepCallsRow, analyze

WORLD = [("0", "default_pg", (0, 1))]


def rank(number: int, late_in: int | None = None) -> GpuTrace:
    """Five steps of 100 us with two large calls and a small one; in one step the second large call
    begins after the end of its step."""
    trace = GpuTrace(rank=number, world_size=2, groups=WORLD)
    for step in range(5):
        at = 100 * step
        trace.step(step, at, at + 82).kernel("gemm", at + 1, at + 80, launched=at + 1)
        second = at + 85 if step == late_in else at + 60
        trace.all_reduce(at + 20, at + 25).all_reduce(at + 40, at + 42, nelems=2)
        trace.all_reduce(second, second + 5, launched=at + 50)
    return trace


def step_calls(folder: Path) -> dict[int | None, tuple[int, int, int]]:
    rows = analyze(folder).step_calls
    assert all(isinstance(row, StepCallsRow) and row.op == "all_reduce" for row in rows)
    return {row.message_bytes: (row.calls, row.least, row.most) for row in rows}


def test_the_calls_of_a_step_at_all_ranks_together(tmp_path: Path) -> None:
    for number in (0, 1):
        rank(number).write(tmp_path)
    assert step_calls(tmp_path) == {4_000: (4, 4, 4), 8: (2, 2, 2)}


def test_a_call_that_slips_over_the_edge_of_a_step_changes_no_count(tmp_path: Path) -> None:
    for number in (0, 1):
        rank(number, late_in=2).write(tmp_path)
    assert step_calls(tmp_path) == {4_000: (4, 2, 6), 8: (2, 2, 2)}


def test_calls_of_steps_that_are_cut_off_are_not_counted(tmp_path: Path) -> None:
    trace = rank(0)
    trace.world_size = 1
    trace.groups = [("0", "default_pg", (0,))]
    trace.all_reduce(520, 525).write(tmp_path)
    assert step_calls(tmp_path) == {4_000: (2, 2, 2), 8: (1, 1, 1)}
