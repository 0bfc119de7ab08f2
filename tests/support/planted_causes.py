"""Findings for a job with one planted problem, compared with its true cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import Noise
from simulator.planted import gain_ns, planted, scenario_of, step_ns
from simulator.style import Style

from stepsplit.analyzer import analyze
from stepsplit.analyzer.report.report import Finding

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class PlantedResult:
    """One planted job: the findings, the true gain of fixing it, and the step; times in ns.

    ranks are those to blame, none where no rank is.
    """

    name: str
    findings: tuple[Finding, ...]
    ranks: tuple[int, ...]
    gain_ns: float
    step_ns: float

    @property
    def first(self) -> bool:
        """Whether the right finding is the first; of nothing planted, whether there is none."""
        code = self.name.split()[0]
        if code == NOTHING:
            return not self.findings
        found = self.findings[0] if self.findings else None
        return found is not None and found.code == code and self.ranks in ((), found.ranks)

    @property
    def off(self) -> float:
        """By how much the first finding's size is off, a ratio of the true one."""
        return self.findings[0].gain_ns / self.gain_ns - 1


def examine_planted(name: str, seed: int, folder: Path) -> PlantedResult:
    """The findings for the job of that name and seed, written into the folder."""
    pair = planted(name, seed)
    scenario = scenario_of(pair, seed)
    run = simulate(scenario.job, Noise.of(seed))
    write_recording(scenario, run, folder, Style())
    gain = 0.0 if name.startswith(NOTHING) else gain_ns(pair, run, seed)
    return PlantedResult(name, analyze(folder).findings, pair.ranks, gain, step_ns(run))
