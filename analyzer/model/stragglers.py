"""The wait for the slowest node at the end of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.profile import load_device

STRAGGLERS = Formula(
    "step.skew",
    "skew = s sqrt(2 ln n) of the step: the slowest of n nodes whose times vary by s",
    "expected maximum of n normal variables: Boucheron et al., Concentration Inequalities, 2013,"
    " section 2.5; s fitted",
)


@dataclass(frozen=True, slots=True)
class Skew:
    """Wait for the slowest node as a share of the step, and its formula."""

    share: float
    formulas: tuple[Formula, ...]


def compute_skew(job: JobConfig) -> Skew:
    """Wait for the slowest node as a share of the step.

    On CPU each rank varies on its own; waits for other pp coordinates count as bubble.
    """
    nodes = max(1.0, job.parallel.world_size / job.hardware.gpus_per_node)
    formulas = (STRAGGLERS,) if nodes > 1 else ()
    if load_device(job.hardware.family).processor:
        nodes = job.parallel.world_size / job.parallel.pp
    efficiency = job.hardware.efficiency
    jitter = efficiency.jitter
    if job.is_fsdp and efficiency.jitter_per_layer is not None:
        jitter = efficiency.jitter_per_layer
    return Skew(jitter * math.sqrt(2 * math.log(nodes)), formulas)
