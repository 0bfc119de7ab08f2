"""The fleets of tests/benchmarks/fleet.py, and what the analyzer says of a small one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet import TP, Fleet, FleetRun, run_fleet, write_fleet
from stepsplit.analyzer import BUCKETS, analyze, examine

IN_TURN = pytest.mark.in_turn("analyzer/diagnose", "analyzer/split")
OF_THE_FLEET = {"few_microbatches", "no_overlap"}

SMALL = Fleet(pp=2, dp=2, microbatches=4, layers=1)


def compute_of(run: FleetRun, rank: int) -> list[int]:
    """The compute of the rank in each step."""
    place = np.unravel_index(rank, run.fleet.ranks.shape)
    total = [0] * run.fleet.steps
    for piece in run.stages[place[0]]:
        if not piece.call:
            total[piece.step] += int((piece.end_ns - piece.start_ns)[place[1:]])
    return total


@pytest.mark.parametrize(
    ("planted", "code", "ranks"),
    [
        ({"slow_ranks": {5: 1.3}}, "slow_rank", (5,)),
        ({"slow_links": {17: 6.0}}, "slow_link", tuple(range(16, 24))),
    ],
)
def test_what_a_fleet_was_given_is_found(
    tmp_path: Path, planted: dict[str, dict[int, float]], code: str, ranks: tuple[int, ...]
) -> None:
    run = run_fleet(replace(SMALL, **planted))
    write_fleet(run, tmp_path / "fleet")
    cost_ns = run.step_ns - run_fleet(SMALL).step_ns

    report = analyze(tmp_path / "fleet")

    # The fleet itself has few microbatches, and reduces gradients after its backwards.
    found = [one for one in report.findings if one.code not in OF_THE_FLEET]
    assert [(one.code, one.ranks) for one in found][:1] == [(code, ranks)]
    assert found[0].gain_ns == pytest.approx(cost_ns, rel=0.1)
    compute = BUCKETS.index("compute")
    for rank in (0, 5, 17, 31):
        rows = [row for row in report.steps if row.rank == rank]
        assert [row.split.buckets_ns[compute] for row in rows] == compute_of(run, rank)
        assert all(sum(row.split.buckets_ns) == row.step_ns for row in rows)
    mean_ns = np.mean([row.step_ns for row in report.steps])
    assert mean_ns == pytest.approx(run.step_ns, rel=0.005)


@pytest.mark.slow
@IN_TURN
def test_the_ranks_of_a_slow_host_are_one_finding_behind_a_slower_link(tmp_path: Path) -> None:
    """One rank of them alone gains nothing, and all of them hardly before the link is as fast as
    the others: it slows the stage that is slowest."""
    fleet = replace(SMALL, microbatches=8, slow_hosts={0: 1.2}, slow_links={17: 16.0})
    write_fleet(run_fleet(fleet), tmp_path / "fleet")
    fixed = replace(fleet, slow_links={})
    cost_ns = run_fleet(fixed).step_ns - run_fleet(replace(fixed, slow_hosts={})).step_ns

    findings = analyze(tmp_path / "fleet").findings
    link, host = [one for one in findings if one.code not in OF_THE_FLEET][:2]

    assert (link.code, link.ranks) == ("slow_link", tuple(range(16, 24)))
    assert (host.code, host.ranks) == ("slow_rank", tuple(range(8)))
    assert host.message.startswith(
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 (all of host node0000) are stragglers and mask each other"
    )
    assert "the rest once ranks 16, 17, 18, 19, 20, 21, 22, 23 are fixed" in host.message
    assert host.gain_ns == pytest.approx(cost_ns, rel=0.1)


def test_a_microbatch_is_passed_on_when_both_stages_are_ready() -> None:
    """2 microbatches on 2 stages without noise: the last one receives each as it becomes free."""
    fleet = replace(SMALL, dp=1, microbatches=2, noise=0.0, steps=1)
    run = run_fleet(fleet)
    forward = 2 * (320_000 + 60_000)
    backward = 2 * (640_000 + 60_000)
    chunk = 40_000 + forward + backward
    expected = 50_000 + forward + 2 * chunk + 5_000_000 + 1_000_000
    assert run.begins_ns[1][1].tolist() == [[expected] * 8]


@pytest.mark.parametrize(
    "microbatches", [2, *(pytest.param(n, marks=(pytest.mark.slow, IN_TURN)) for n in (1, 4))]
)
def test_without_autograds_ranges_the_last_backward_ends_before_the_gradients_are_reduced(
    tmp_path: Path, microbatches: int
) -> None:
    """Nothing of the host marks the optimizer either: only its kernels are named."""
    run = run_fleet(replace(SMALL, microbatches=microbatches))
    write_fleet(run, tmp_path / "fleet")
    step = 1  # of the steps 0 to 2; the profiler counts from 5
    stages = [[piece for piece in pieces if piece.step == step] for pieces in run.stages]
    passes = [
        [p for p in pieces if p.call == "tp" or (not p.call and "adam" not in p.op)]
        for pieces in stages
    ]

    examined = examine([tmp_path / "fleet"])

    boxes, pipeline = examined.tables.boxes, examined.report.pipeline
    assert pipeline is not None
    for stage, pieces in enumerate(passes):
        for place in np.ndindex(SMALL.dp, TP):
            rank = int(SMALL.ranks[stage, *place])
            own = (boxes.rank == rank) & (boxes.step == 5 + step)
            ends, starts = boxes.start_ns[own] + boxes.dur_ns[own], boxes.start_ns[own]
            length_ns = int(max(p.end_ns[place] for p in pieces) - pieces[0].start_ns[place])
            assert int(ends.max() - starts.min()) == length_ns, rank
            assert sorted(boxes.phase[own].tolist()) == [0] * microbatches + [1] * microbatches
    # The bubble is the rest of the window of a pipeline: the ranks of one place of all stages.
    bubbles = []
    for place in np.ndindex(SMALL.dp, TP):
        begin = min(int(p.start_ns[place]) for pieces in passes for p in pieces)
        window_ns = max(int(p.end_ns[place]) for pieces in passes for p in pieces) - begin
        for pieces in passes:
            busy_ns = sum(int((p.end_ns - p.start_ns)[place]) for p in pieces)
            bubbles.append(1 - busy_ns / window_ns)
    assert pipeline.bubble_fraction == pytest.approx(np.mean(bubbles), abs=0.005)


def test_the_reduction_over_a_single_replica_is_no_weight_gradient(tmp_path: Path) -> None:
    """It is a copy that each rank makes after its backward, and with one microbatch there is one
    for each backward."""
    write_fleet(run_fleet(replace(SMALL, pp=4, dp=1, microbatches=1)), tmp_path / "fleet")

    pipeline = analyze(tmp_path / "fleet").pipeline

    assert pipeline is not None
    assert (pipeline.schedule, pipeline.ideal_bubble_fraction) == ("1f1b", 0.75)
    assert pipeline.bubble_fraction == pytest.approx(0.75, abs=0.01)
