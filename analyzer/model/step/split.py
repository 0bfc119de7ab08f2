"""The predicted Split of each pipeline stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.comm.calls import rounds
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.schedule.steady import PipelineTime
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.step.stage_time import StageTime

STRAGGLERS = Formula(
    "step.skew",
    "skew = s sqrt(2 ln n) of the step: the slowest of n nodes whose times vary by s",
    "expected maximum of n normal variables: Boucheron et al., Concentration Inequalities, 2013,"
    " section 2.5; s fitted",
)


@dataclass(frozen=True, slots=True)
class Pipelined:
    """The pipeline's time, and what its own messages take of it.

    transfers_ns is how much shorter it would be with free messages, moving_ns how long each rank's
    own messages take.
    """

    time: PipelineTime
    transfers_ns: float
    moving_ns: tuple[float, ...]

    def exposed_ns(self, rank: int) -> int:
        """What a rank's own messages add to its holes: the rest of those is waiting."""
        return round(min(self.transfers_ns, self.moving_ns[rank], self.time.holes_ns[rank]))


def splits_of(job: Job, stages: tuple[StageTime, ...], pipeline: Pipelined) -> tuple[Split, ...]:
    """One Split a stage; all stages end the step together, so that the early ones wait."""
    whole = tuple(
        _split(job, stage, pipeline.exposed_ns(stage.stage.index), holes)
        for stage, holes in zip(stages, pipeline.time.holes_ns, strict=True)
    )
    step_ns = max(split.step_ns for split in whole)
    skew_ns = round(straggling(job) * step_ns)
    return tuple(_until(replace(split, skew_ns=skew_ns), step_ns + skew_ns) for split in whole)


def straggling(job: Job) -> float:
    """What waiting for the slowest node adds to a step, a ratio of it.

    CPU ranks vary one by one, and those of another pp coordinate are waited for in the bubble.
    """
    nodes = max(1.0, job.layout.world_size / job.hardware.gpus_per_node)
    if job.hardware.family == "cpu":
        nodes = job.layout.world_size / job.layout.pp
    return job.hardware.efficiency.jitter * math.sqrt(2 * math.log(nodes))


def _split(job: Job, stage: StageTime, between_ns: int, holes_ns: float) -> Split:
    m, found = rounds(job), stage.communication
    sent_ns = sum(each.exposed_ns for each in found if each.message.op == "send")
    return Split(
        compute_ns=round(m * stage.compute_ns + stage.optimizer_ns),
        collective_ns=sum(each.exposed_ns for each in found) - sent_ns,
        p2p_ns=between_ns + sent_ns,
        bubble_ns=round(holes_ns) - between_ns,
        copy_ns=round(stage.offload_ns),
        idle_ns=round(m * stage.idle_ns),
        overlapped_ns=sum(round(each.time.ns) - each.exposed_ns for each in found),
    )


def _until(split: Split, step_ns: int) -> Split:
    """The same, waiting for the slowest stage at the step's end."""
    return replace(split, bubble_ns=split.bubble_ns + step_ns - split.step_ns)
