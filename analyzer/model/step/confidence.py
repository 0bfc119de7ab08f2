"""Where the model is known to fail, and says so."""

from __future__ import annotations

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.prediction import Confidence
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.span import span_of
from stepsplit.analyzer.model.step.host import host_bound, launches
from stepsplit.analyzer.model.step.stage_time import StageTime

MOSTLY = 0.4
"""A step of which communication takes more rests on link constants, not on measured kernels."""
UNSURE = 0.25
"""What each reason to doubt adds to the error, a ratio: the published runs of a framework that was
not fitted (nanotron's on H100) are off by as much on average."""


def doubts(job: Job, stages: tuple[StageTime, ...], split: Split) -> tuple[str, ...]:
    """Why the step time may be far off; empty where nothing says so."""
    found = []
    if any(_host_bound(job, stage) for stage in stages):
        found.append("host-bound: launching a layer takes about as long as computing it")
    found += [
        f"{axis} crosses nodes: a group of {span_of(job, axis).ranks} over"
        f" {span_of(job, axis).nodes} nodes waits for the network inside every layer"
        for axis in ("tp", "cp", "ep")
        if span_of(job, axis).nodes > 1
    ]
    if job.recipe.offload & {"parameters", "activations"}:
        found.append("moving offloaded parameters and activations is not timed")
    if split.exposed_comm_ns > MOSTLY * split.step_ns:
        found.append("communication takes most of the step: it rests on the links' constants")
    return (*found, *_unfitted(job))


def _host_bound(job: Job, stage: StageTime) -> bool:
    """A host whose launches were calibrated holds the device up as predicted."""
    return not job.hardware.efficiency.host_ns and any(
        host_bound(one, launches(job, chunk.layers))
        for one, chunk in zip(stage.passes, stage.stage.chunks, strict=True)
    )


def _unfitted(job: Job) -> tuple[str, ...]:
    """What the fitted runs were, where the job is something else."""
    known, hardware = job.hardware.efficiency, job.hardware
    if not known.rows:
        return (f"{hardware.name}: efficiencies are guesses, no published run was fitted",)
    return tuple(
        f"{hardware.family} efficiencies come from runs of {' and '.join(fitted)}, not {this}"
        for fitted, this in (
            (known.frameworks, job.recipe.framework),
            (known.devices, hardware.name),
            (known.dtypes, job.recipe.dtype),
        )
        if fitted and this not in fitted
    )


def confidence_of(job: Job, reasons: tuple[str, ...]) -> Confidence:
    """low with any reason to doubt; calibrated where the user's own runs set the constants."""
    if reasons:
        return "low"
    calibrated = any(row.startswith("run:") for row in job.hardware.efficiency.rows)
    return "calibrated" if calibrated else "high"


def band_of(job: Job, split: Split, reasons: tuple[str, ...]) -> tuple[int, int]:
    """What the step may well take instead, in ns: 9 of 10 published runs lie that near."""
    off = job.hardware.efficiency.error + UNSURE * len(reasons)
    return round(split.step_ns / (1 + off)), round(split.step_ns * (1 + off))
