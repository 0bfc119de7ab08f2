"""Whether the host launches kernels as fast as the device runs them."""

from __future__ import annotations

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.step.stage_time import StageTime
from stepsplit.analyzer.model.step.traffic import traffic_of

HOST = Formula(
    "step.host",
    "idle = max(0, launches of a microbatch - its compute) m; the backward launches as much again",
    "own; constants of the framework",
)
NEAR = 0.7
"""From this share of the device's time on, the host is close enough to hold it up at times."""


def launches_ns(job: Job, stage: StageTime) -> float:
    """What the host needs to launch one microbatch of a stage: forward, backward, recompute."""
    passes = 2 if job.recipe.recompute in ("none", "selective") else 3
    return traffic_of(job).host_ns * stage.stage.layers * passes


def idle_ns(job: Job, stage: StageTime) -> float:
    """Time of the step in which the device waits for its host."""
    return max(0.0, launches_ns(job, stage) - stage.compute_ns) * job.microbatches


def host_bound(job: Job, stage: StageTime) -> bool:
    """Whether launching takes nearly as long as computing."""
    return launches_ns(job, stage) > NEAR * stage.compute_ns
