"""How long the host takes to launch a model stage, and how long the device waits for it."""

from __future__ import annotations

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.step.layer import Pass
from stepsplit.analyzer.model.step.traffic import traffic_of

HOST = Formula(
    "step.host",
    "idle = max(0, launches of a pass - its compute and exposed communication); the backward"
    " launches as much as the forward, and what is recomputed again; a CPU that computes launches"
    " nothing meanwhile: all of them are idle",
    "own; constants of the framework, or calibrated",
)
NEAR = 0.7
"""From this share of the device's time on, the host is close enough to hold it up at times."""


def launches(job: Job, layers: int) -> Pass:
    """What the host needs to launch one microbatch of so many layers."""
    each = (job.hardware.efficiency.host_ns or traffic_of(job).host_ns) * layers
    again = 0.0 if job.recipe.recompute in ("none", "selective") else each
    return Pass(each, each + again, 0.0)


def waits(device: Pass, host: Pass, alone: bool = False) -> Pass:
    """How long the device idles in a pass, because its host launches more slowly.

    alone: one processor is both, and launches while it computes nothing.
    """
    if alone:
        return host
    backward_ns = device.input_ns + device.weight_ns
    return Pass(
        max(0.0, host.forward_ns - device.forward_ns), max(0.0, host.input_ns - backward_ns), 0.0
    )


def host_bound(device: Pass, host: Pass) -> bool:
    """Whether launching takes nearly as long as computing."""
    computes = device.forward_ns + device.input_ns + device.weight_ns
    return host.forward_ns + host.input_ns > NEAR * computes
