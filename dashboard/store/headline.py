"""The few numbers of a run that a list of runs shows."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.report.report import Report, bucket_medians, full_steps, step_median_ns


@dataclass(frozen=True, slots=True)
class Middle:
    """The middle of a run: the median step, each bucket's own median, and its share of all time.

    shares are in the order of BUCKETS and add up to one; medians need not add up.
    """

    step_ns: int
    medians: Split
    shares: tuple[float, ...]

    def share(self, *buckets: str) -> float:
        """The buckets' share of all time, 0..1."""
        named = zip(BUCKETS, self.shares, strict=True)
        return sum(share for bucket, share in named if bucket in buckets)


@dataclass(frozen=True, slots=True)
class Headline:
    """A run in one line; steps counts those that the middle is of, which is None without any.

    bubble_fraction (of the schedule) and mfu are ratios, None where the report has none.
    """

    world_size: int
    mesh: str | None
    backend: str | None
    middle: Middle | None
    steps: int
    warnings: int
    bubble_fraction: float | None = None
    mfu: float | None = None


def headline(report: Report) -> Headline:
    """What the list of runs says of the report."""
    return Headline(
        world_size=report.run.world_size,
        mesh=_mesh(report),
        backend=report.run.backend,
        middle=_middle(report) if report.steps else None,
        steps=len({row.step for row in full_steps(report.steps)}),
        warnings=len(report.warnings),
        bubble_fraction=report.pipeline.bubble_fraction if report.pipeline else None,
        mfu=report.mfu,
    )


def _middle(report: Report) -> Middle:
    rows = bucket_medians(report.steps)
    medians = Split(*(row.median_ns for row in rows))
    return Middle(step_median_ns(report.steps), medians, tuple(row.share for row in rows))


def _mesh(report: Report) -> str | None:
    if report.run.mesh is None:
        return None
    return " ".join(f"{part.axis}{part.size}" for part in report.run.mesh)
