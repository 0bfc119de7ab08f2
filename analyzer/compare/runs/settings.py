"""How two runs were set up differently, in words."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.compare.runs.comparison import Setting
from stepsplit.analyzer.report.report import Report

NONE = "none seen"


@dataclass(frozen=True, slots=True)
class _Fact:
    """A setting of one run in words; None is unknown."""

    name: str
    told: str | None


def settings_that_differ(baseline: Report, candidate: Report) -> tuple[Setting, ...]:
    """One row for each setting that is not the same."""
    both = zip(_facts(baseline), _facts(candidate), strict=True)
    rows = (Setting(one.name, one.told, other.told) for one, other in both)
    return tuple(row for row in rows if row.baseline != row.candidate)


def _facts(report: Report) -> tuple[_Fact, ...]:
    """What is known of one run, in the order in which it is told."""
    run, pipeline = report.run, report.pipeline
    mesh = None if run.mesh is None else " ".join(f"{a.axis} {a.size}" for a in run.mesh)
    facts = (
        ("world size", f"{run.world_size:,}"),
        ("ranks recorded", f"{len(run.ranks):,}"),
        ("hosts", f"{len(run.hosts):,}"),
        ("device", run.device),
        ("mesh", mesh),
        ("backend", run.backend),
        ("torch", run.torch),
        ("NCCL", run.nccl),
        ("driver", run.driver),
        ("schedule", NONE if pipeline is None else pipeline.schedule),
        ("microbatches", NONE if pipeline is None else f"{pipeline.microbatches:,}"),
        ("strategies", ", ".join(one.in_words for one in run.strategies) or NONE),
    )
    return tuple(_Fact(*fact) for fact in facts)
