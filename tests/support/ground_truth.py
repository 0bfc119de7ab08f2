"""An analysis of a simulated job compared with what truly happened in it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from simulator.clocks import clock_of
from simulator.engine import simulate
from simulator.kineto import BASE_NS, START_NS, write_recording
from simulator.noise import Noise
from simulator.program import Scenario
from simulator.ran import Run
from simulator.style import Style
from simulator.truth import TrueSplit, truth_of

from stepsplit.analyzer import Report, analyze
from stepsplit.analyzer.buckets import BUCKETS

SEED = int(os.environ.get("STEPSPLIT_SEED") or 1)
"""The same in every run, unless STEPSPLIT_SEED names another."""
TOLERANCE = 0.005
"""How much of a step a bucket may be off."""
CLOCK_NS, SIGMAS = 5_000, 3
PLAIN = Style()


@dataclass(frozen=True, slots=True)
class Miss:
    """By how much a bucket of a step is off, as a part of the step."""

    rank: int
    step: int
    bucket: str
    share: float
    estimated: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """A scenario as it ran, and what the analyzer says of it."""

    scenario: Scenario
    run: Run
    report: Report


def trial(
    scenario: Scenario,
    folder: Path,
    style: Style = PLAIN,
    ranks: Collection[int] | None = None,
) -> Trial:
    """Runs the scenario, writes what a profiler would of those ranks, and analyzes it."""
    run = simulate(scenario.job, Noise.of(scenario.seed))
    write_recording(scenario, run, folder, style, ranks)
    return Trial(scenario, run, analyze(folder))


def misses(found: Trial, truth: Collection[TrueSplit] | None = None) -> list[Miss]:
    """Every bucket of every full step against its truth, the worst first."""
    true = {(s.rank, s.step): s for s in (truth or truth_of(found.run).splits) if not s.partial}
    full = [row for row in found.report.steps if row.kind == "full"]
    rows = [row for row in full if (row.rank, row.step) in true]
    assert rows, "no full step to compare"
    missed = []
    for row in rows:
        step = true[row.rank, row.step]
        for name in BUCKETS:
            off_ns = getattr(row, f"{name}_ns") - getattr(step, f"{name}_ns")
            share = off_ns / (step.end_ns - step.start_ns)
            missed.append(Miss(row.rank, row.step, name, share, row.estimated))
    return sorted(missed, key=lambda miss: -abs(miss.share))


def clock_misses(found: Trial) -> list[tuple[int, int, int]]:
    """(rank, by how much its offset is off, how much that may be) at the report's t0, in ns."""
    first = clock_of(found.scenario, found.report.clocks[0].rank)
    at = int(found.report.run.t0_unix_ns) - BASE_NS - START_NS - first.offset_ns
    missed = []
    for row in found.report.clocks:
        true = clock_of(found.scenario, row.rank).shows_ns(at) - first.shows_ns(at)
        allowed = max(CLOCK_NS, SIGMAS * (row.sigma_ns or 0))
        missed.append((row.rank, row.offset_ns - true, allowed))
    return missed


def first_blamed(report: Report) -> tuple[int | None, str]:
    """(rank, cause) of what caused most waiting, the schedule aside, over all axes.

    The bubble of a schedule that was not recognized is of unknown cause.
    """
    of_schedule = "unknown" if report.pipeline is None else "schedule"
    caused: dict[tuple[int | None, str], int] = defaultdict(int)
    for row in report.blame:
        bubble_ns = 0 if row.cause == of_schedule else row.caused_bubble_ns
        caused[row.rank, row.cause] += row.caused_skew_ns + bubble_ns
    return max(caused, key=lambda key: caused[key])


def check(found: Trial) -> None:
    """What must hold of every scenario: buckets, clocks, and the planted cause first in blame."""
    worst = misses(found)[0]
    assert abs(worst.share) <= TOLERANCE, f"seed {found.scenario.seed}: {worst}"
    for rank, off_ns, allowed in clock_misses(found):
        assert abs(off_ns) <= allowed, f"seed {found.scenario.seed}: clock of rank {rank}: {off_ns}"
    if (cause := found.scenario.cause) is not None:
        assert first_blamed(found.report) == (cause.rank, cause.cause), found.scenario.seed
