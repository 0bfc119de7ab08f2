"""Repeats of a fault in a framework: how much it costs, and whether the analysis says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from injected_faults.jobs import CLEAN, FRAMEWORKS, Fault, is_complete, list_jobs, read_turn_times_s

from stepsplit.analyzer import examine
from stepsplit.analyzer.report.report import Finding

NEAR = 0.3
"""A saving is right if it is off by at most this fraction of the truth."""
FALSE_SHARE = 0.05
"""Another finding above this fraction of the step, which no run without the fault has, is false."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """One run of a job: its step in each turn without a profiler, and the analysis of others."""

    turns_s: tuple[float, ...]
    step_ns: float
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """The repeats of a fault in a framework; clean are those without it."""

    framework: str
    name: str
    clean: tuple[Repeat, ...]
    faulty: tuple[Repeat, ...]

    @property
    def fault(self) -> Fault:
        return FRAMEWORKS[self.framework][self.name]

    @property
    def truth_s(self) -> float:
        return mean(self._differences_s)

    @property
    def error_s(self) -> float:
        """The standard error of the truth."""
        differences = self._differences_s
        return stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0

    @property
    def _differences_s(self) -> list[float]:
        return [
            with_s - without_s
            for one, without in zip(self.faulty, self.clean, strict=True)
            for with_s, without_s in zip(one.turns_s, without.turns_s, strict=True)
        ]

    def find_said(self, one: Repeat) -> Finding | None:
        """The finding that names the fault, at its rank."""
        return next((f for f in one.findings if self._names_fault(f)), None)

    def is_named(self, one: Repeat) -> bool:
        """Whether it is the first one."""
        return bool(one.findings) and self._names_fault(one.findings[0])

    def is_near(self, one: Repeat) -> bool:
        """Whether its saving is near the truth."""
        said = self.find_said(one)
        return said is not None and abs(said.gain_ns / 1e9 / self.truth_s - 1) <= NEAR

    def list_false(self, one: Repeat) -> list[Finding]:
        """Large findings that are neither the fault nor in any run without it."""
        usual = {(f.code, f.ranks) for without in self.clean for f in without.findings}
        return [
            f for f in one.findings
            if f.gain_ns > FALSE_SHARE * one.step_ns and (f.code, f.ranks) not in usual
            and not self._names_fault(f)
        ]  # fmt: skip

    def _names_fault(self, finding: Finding) -> bool:
        return finding.code in self.fault.codes and finding.ranks == self.fault.ranks


def read_trials(work: Path) -> Iterator[Trial]:
    """What the folder's recordings say today."""
    for framework, faults in FRAMEWORKS.items():
        places = sorted(work.glob(f"{framework}/[0-9]*"))
        places = [place for place in places if all(map(is_complete, list_jobs(place)))]
        read = {place: _read_repeat(place / CLEAN) for place in places}
        for name in faults:
            there = [place for place in places if (place / name).exists()]
            if there:
                faulty = tuple(_read_repeat(place / name) for place in there)
                yield Trial(framework, name, tuple(read[place] for place in there), faulty)


def _read_repeat(job: Path) -> Repeat:
    report = examine([job / "recording"]).report
    steps = [row.step_ns for row in report.steps if row.kind == "full"]
    return Repeat(tuple(read_turn_times_s(job)), mean(steps), tuple(report.findings))
