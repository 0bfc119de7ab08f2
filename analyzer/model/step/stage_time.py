"""The time of one microbatch on one rank of a stage, and what comes once a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepsplit.analyzer.model.comm.calls import rounds
from stepsplit.analyzer.model.comm.sharded import stays_gathered
from stepsplit.analyzer.model.prediction import Communication
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Chunk, Stage
from stepsplit.analyzer.model.step.chunk import chunk_passes
from stepsplit.analyzer.model.step.exposed import (
    BACKWARD,
    Beside,
    Timed,
    exposed,
    family,
)
from stepsplit.analyzer.model.step.host import launches, waits
from stepsplit.analyzer.model.step.layer import Pass
from stepsplit.analyzer.model.step.optimizer import offload_ns, optimizer_ns
from stepsplit.analyzer.model.step.speed import Speed
from stepsplit.analyzer.model.step.traffic import traffic_of
from stepsplit.analyzer.model.work.parameters import StageParameters


@dataclass(frozen=True, slots=True)
class StageTime:
    """One rank of a pipeline stage, chunk by chunk: passes compute, comm is the exposed
    communication and idle the waiting for the host of one microbatch.

    communication lists every message but the pipeline's own.
    """

    stage: Stage
    passes: tuple[Pass, ...]
    comm: tuple[Pass, ...]
    idle: tuple[Pass, ...]
    communication: tuple[Communication, ...]
    optimizer_ns: float
    offload_ns: float

    def on(self, stage: Stage) -> StageTime:
        """The same on a stage that holds and sends the same."""
        if stage == self.stage:
            return self
        moved = tuple(
            replace(each, message=replace(each.message, stage=stage.index))
            for each in self.communication
        )
        return replace(self, stage=stage, communication=moved)

    @property
    def compute_ns(self) -> float:
        """Compute of one microbatch on the whole rank."""
        return _sum_ns(self.passes)

    @property
    def idle_ns(self) -> float:
        """What one microbatch waits for the host on the whole rank."""
        return _sum_ns(self.idle)

    def cost(self, chunk: int) -> Pass:
        """All that one microbatch takes on one of the chunks."""
        return self.passes[chunk] + self.comm[chunk] + self.idle[chunk]


def stage_time(
    job: Job, speed: Speed, stage: Stage, held: StageParameters, timed: tuple[Timed, ...]
) -> StageTime:
    """The stage's times; timed are its messages."""
    passes = tuple(
        one + _copies(job, speed, held, chunk)
        for one, chunk in zip(chunk_passes(job, speed, stage.chunks), stage.chunks, strict=True)
    )
    host = tuple(launches(job, chunk.layers) for chunk in stage.chunks)
    alone = job.hardware.family == "cpu"
    inside = tuple(each for each in timed if each.message.strategy != "pp")
    found = exposed(job, inside, _beside(job, passes))
    comm = _spread(job, stage, found)
    return StageTime(
        stage=stage,
        passes=passes,
        comm=comm,
        idle=tuple(waits(a + b, c, alone) for a, b, c in zip(passes, comm, host, strict=True)),
        communication=found,
        optimizer_ns=optimizer_ns(job, speed, held),
        offload_ns=offload_ns(job, held),
    )


def _sum_ns(passes: tuple[Pass, ...]) -> float:
    return sum(each.forward_ns + each.input_ns + each.weight_ns for each in passes)


def _exposed_ns(job: Job, found: tuple[Communication, ...], phases: tuple[str, ...]) -> float:
    return sum(float(each.exposed_ns) for each in found if family(job, each.message)[1] in phases)


def _spread(job: Job, stage: Stage, found: tuple[Communication, ...]) -> tuple[Pass, ...]:
    """The exposed communication of one microbatch, shared out over the chunks by their layers."""
    m, chunks = rounds(job), stage.chunks
    forward = _exposed_ns(job, found, ("forward",)) / m
    backward = _exposed_ns(job, found, BACKWARD) / m
    whole = Pass(forward, backward, 0.0)
    if not stage.layers:
        return tuple(whole * (1 / len(chunks)) for _ in chunks)
    return tuple(whole * (chunk.layers / stage.layers) for chunk in chunks)


def _beside(job: Job, passes: tuple[Pass, ...]) -> Beside:
    m = rounds(job)
    return Beside(
        forward_ns=m * sum(each.forward_ns for each in passes),
        backward_ns=m * sum(each.input_ns + each.weight_ns for each in passes),
        core_ns=m * sum(each.core_ns for each in passes),
        microbatches=m,
    )


def _copies(job: Job, speed: Speed, held: StageParameters, chunk: Chunk) -> Pass:
    """What sharded parameters cost beside their collectives: a quarter of it in the forward.

    In a pipeline, which gathers once a step, a microbatch bears its share.
    """
    if job.layout.zero != 3:
        return Pass(0.0, 0.0, 0.0)
    times = 1 / rounds(job) if stays_gathered(job) else 1.0
    layers = held.dense_layers + held.expert_layers
    share = chunk.layers / layers if layers else 0.0
    whole = speed.moved_ns(traffic_of(job).unit_bytes * held.total * share * times)
    return Pass(whole / 4, 0.0, whole * 3 / 4)
