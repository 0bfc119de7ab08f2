"""How long the optimizer's update takes, and what offloading adds to it."""

from __future__ import annotations

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory.states import MASTER_BYTES, MOMENTS_BYTES
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.step.speed import Speed
from stepsplit.analyzer.model.work.parameters import StageParameters

UPDATE = Formula(
    "step.optimizer",
    "bytes of gradient, master weight and moments read, master and moments written, weight"
    " written, over memory bandwidth: 30 bytes a parameter for Adam",
    "arithmetic over Kingma and Ba, arXiv:1412.6980",
)


def updated_parameters(job: Job, stage: StageParameters) -> float:
    """Parameters that one rank updates: its share where ZeRO spreads the states."""
    return stage.dense / job.layout.shard_size + stage.experts / job.layout.expert_shards


def optimizer_ns(job: Job, speed: Speed, stage: StageParameters) -> float:
    """The update of one rank, on the device; nothing where the host does it."""
    if "optimizer" in job.recipe.offload:
        return 0.0
    count = updated_parameters(job, stage)
    states = MASTER_BYTES + MOMENTS_BYTES[job.recipe.optimizer]
    written = 0 if job.recipe.dtype == "fp32" else job.recipe.weight_bytes
    return speed.moved_ns(count * (2 * states + job.recipe.gradient_bytes + written), 10)


def offload_ns(job: Job, stage: StageParameters) -> float:
    """Gradients to the host and weights back, over the host's link, once a step.

    Ren et al., ZeRO-Offload, arXiv:2101.06840, section 4.1: both in 16 bit. The host's own update
    is taken to hide behind them.
    """
    if "optimizer" not in job.recipe.offload:
        return 0.0
    link = job.hardware.host
    moved = updated_parameters(job, stage) * 2 * job.recipe.weight_bytes
    return moved / (link.bytes_per_s * link.ring) * 1e9
