"""A rank whose step ends late makes the others wait at the begin of their next one: that is one
delay, of one rank in one step."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import Report, analyze

STEPS, TAIL = 4, 60


def record(
    folder: Path, ranks: int, tails: set[int], *, marked: bool = True, on_host: bool = True
) -> Report:
    """Rank 0 ends these steps later by an optimizer on its host, or by a kernel; each step begins
    with a call in which the others wait for it."""
    traces = [GpuTrace(rank, ranks, groups=[("0", "", range(ranks))]) for rank in range(ranks)]
    begin = [0] * ranks
    for step in range(STEPS):
        ready = max(begin)
        for rank, trace in enumerate(traces):
            trace.all_reduce(begin[rank] + 1, ready + 6, nelems=500)
            trace.kernel("gemm", ready + 6, ready + 36).all_reduce(ready + 36, ready + 46)
            trace.kernel("adam", ready + 46, ready + 56)
            end = ready + 58
            if rank == 0 and step in tails:
                end += TAIL
                if on_host:
                    trace.op("DeepSpeedCPUAdam::adam_update", ready + 58, end)
                else:
                    trace.kernel("evaluate", ready + 56, end)
            if marked:
                trace.step(step, begin[rank], end)
            begin[rank] = end
    for trace in traces:
        trace.write(folder)
    return analyze(folder)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_wait_for_a_tail_is_of_the_step_that_has_the_tail(
    ranks: int, on_host: bool, tmp_path: Path
) -> None:
    report = record(tmp_path, ranks, {1}, on_host=on_host)
    waited_ns = sum(row.skew_ns for row in report.steps)
    assert waited_ns == (ranks - 1) * TAIL * 1000
    blamed = [row for row in report.blame if row.rank is not None]
    assert {(row.rank, row.steps) for row in blamed} == {(0, (1,))}
    assert sum(row.caused_ns for row in report.blame) == waited_ns
    # Compute is divided over the path in proportion, of which a part is that of any step.
    assert sum(row.caused_ns for row in blamed) > (0.95 if on_host else 0.8) * waited_ns
    # The tail is on the path of its own step alone, and each instant is on one path.
    lengths = {step.step: step.end_ns - step.start_ns for step in report.path_steps}
    assert max(lengths, key=lambda step: lengths[step]) == 1
    assert sorted(lengths.values())[-2] <= 58_000
    first, last = report.path_steps[0], report.path_steps[-1]
    assert sum(lengths.values()) == last.end_ns - first.start_ns
    # No finding names another rank, or another step of this one.
    assert {(one.ranks, one.steps) for one in report.findings if one.ranks} <= {((0,), (1,))}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tail_of_every_step_is_of_its_rank(ranks: int, tmp_path: Path) -> None:
    report = record(tmp_path, ranks, set(range(STEPS)))
    waited_ns = sum(row.skew_ns for row in report.steps)
    assert [(row.rank, row.cause, row.caused_ns) for row in report.blame] == [
        (0, "host", waited_ns)
    ]
    first = report.findings[0]
    assert (first.code, first.ranks) == ("host_stall", (0,))
    mean_ns = sum(row.step_ns for row in report.steps) / len(report.steps)
    assert first.gain_ns <= TAIL * 1000 < mean_ns


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_marks_a_tail_is_of_its_rank(ranks: int, tmp_path: Path) -> None:
    report = record(tmp_path, ranks, {1}, marked=False)
    waited_ns = sum(row.skew_ns for row in report.steps)
    assert [(row.rank, row.cause, row.caused_ns) for row in report.blame] == [
        (0, "host", waited_ns)
    ]
