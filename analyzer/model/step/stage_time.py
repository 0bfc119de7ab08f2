"""The time of one microbatch on one rank of a stage, and what comes once a step."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.prediction import Communication
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Chunk, Stage
from stepsplit.analyzer.model.step.chunk import chunk_passes
from stepsplit.analyzer.model.step.exposed import BACKWARD, Beside, Timed, exposed
from stepsplit.analyzer.model.step.layer import Pass
from stepsplit.analyzer.model.step.optimizer import offload_ns, optimizer_ns
from stepsplit.analyzer.model.step.speed import Speed
from stepsplit.analyzer.model.step.traffic import traffic_of
from stepsplit.analyzer.model.work.parameters import StageParameters

ONCE = ("grad_sync", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class StageTime:
    """One rank of a pipeline stage. passes holds the compute of each of its chunks.

    forward_ns and backward_ns are exposed communication of one microbatch on the whole rank,
    once_ns that of the step's end. communication lists every message but the pipeline's own.
    """

    stage: Stage
    passes: tuple[Pass, ...]
    communication: tuple[Communication, ...]
    forward_ns: float
    backward_ns: float
    once_ns: float
    optimizer_ns: float
    offload_ns: float

    @property
    def compute_ns(self) -> float:
        """Compute of one microbatch on the whole rank."""
        return sum(each.forward_ns + each.input_ns + each.weight_ns for each in self.passes)

    def cost(self, chunk: int) -> Pass:
        """Compute and exposed communication of one microbatch on one of the chunks."""
        layers = self.stage.layers
        share = self.stage.chunks[chunk].layers / layers if layers else 1 / len(self.passes)
        return self.passes[chunk] + Pass(self.forward_ns * share, self.backward_ns * share, 0.0)


def stage_time(
    job: Job, speed: Speed, stage: Stage, held: StageParameters, timed: tuple[Timed, ...]
) -> StageTime:
    """The stage's times; timed are its messages."""
    passes = tuple(
        one + _copies(job, speed, held, chunk)
        for one, chunk in zip(chunk_passes(job, speed, stage.chunks), stage.chunks, strict=True)
    )
    inside = tuple(each for each in timed if each.message.strategy != "pp")
    found = exposed(job, inside, _beside(job, passes))
    m = job.microbatches
    return StageTime(
        stage=stage,
        passes=passes,
        communication=found,
        forward_ns=_sum(found, ("forward",)) / m,
        backward_ns=_sum(found, BACKWARD) / m,
        once_ns=_sum(found, ONCE),
        optimizer_ns=optimizer_ns(job, speed, held),
        offload_ns=offload_ns(job, held),
    )


def _sum(found: tuple[Communication, ...], phases: tuple[str, ...]) -> float:
    return sum(float(each.exposed_ns) for each in found if each.message.phase in phases)


def _beside(job: Job, passes: tuple[Pass, ...]) -> Beside:
    m = job.microbatches
    return Beside(
        forward_ns=m * sum(each.forward_ns for each in passes),
        backward_ns=m * sum(each.input_ns + each.weight_ns for each in passes),
        core_ns=m * sum(each.core_ns for each in passes),
        microbatches=m,
    )


def _copies(job: Job, speed: Speed, held: StageParameters, chunk: Chunk) -> Pass:
    """What sharded parameters cost beside their collectives: a quarter of it in the forward."""
    each = traffic_of(job).unit_bytes if job.layout.zero == 3 or _gathers(job) else 0.0
    whole = speed.moved_ns(each * held.total * chunk.layers / max(1, _layers(held)))
    return Pass(whole / 4, 0.0, whole * 3 / 4)


def _gathers(job: Job) -> bool:
    return job.layout.zero == 2 and job.recipe.framework == "fsdp2"


def _layers(held: StageParameters) -> int:
    return held.dense_layers + held.expert_layers
