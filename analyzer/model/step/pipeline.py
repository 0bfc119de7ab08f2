"""The pipeline's window, holes and transfers, from the times of its stages."""

from __future__ import annotations

from stepsplit.analyzer.model.prediction import Communication
from stepsplit.analyzer.model.schedule.engine import Costs
from stepsplit.analyzer.model.schedule.steady import PipelineTime, pipeline_ns
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import chunk_count, chunks_of_rank
from stepsplit.analyzer.model.step.exposed import Timed
from stepsplit.analyzer.model.step.split import Pipelined
from stepsplit.analyzer.model.step.stage_time import StageTime

OWN = "pp"
"""The strategy of the messages between neighbors."""


def pipelined(
    job: Job, stages: tuple[StageTime, ...], timed: dict[int, tuple[Timed, ...]]
) -> Pipelined:
    """The schedule run on the stages' times, with its messages and without."""
    layout, costs = job.layout, costs_of(job, stages)
    if layout.pp == 1:
        alone = PipelineTime(job.microbatches * sum(map(sum, costs)), (0.0,))
        return Pipelined(alone, 0.0, (0.0,))
    shape = (layout.schedule, layout.pp, job.microbatches, layout.chunks)
    free = pipeline_ns(*shape, costs)
    real = pipeline_ns(*shape, costs, transfer_ns(timed))
    moving = tuple(sum(e.time.ns for e in timed[s] if _own(e)) for s in range(layout.pp))
    return Pipelined(real, real.makespan_ns - free.makespan_ns, moving)


def costs_of(job: Job, stages: tuple[StageTime, ...]) -> Costs:
    """One entry a model stage: forward, input gradient and weight gradient of a microbatch."""
    found: dict[int, tuple[float, float, float]] = {}
    for stage in stages:
        for chunk, place in enumerate(chunks_of_rank(job, stage.stage.index)):
            cost = stage.cost(chunk)
            found[place] = (cost.forward_ns, cost.input_ns, cost.weight_ns)
    return tuple(found[place] for place in range(chunk_count(job)))


def transfer_ns(timed: dict[int, tuple[Timed, ...]]) -> float:
    """The time of one message between neighbors."""
    return max(
        (each.each.ns for stage in timed.values() for each in stage if _own(each)), default=0.0
    )


def between_stages(timed: tuple[Timed, ...], exposed_ns: int) -> tuple[Communication, ...]:
    """A stage's messages to its neighbors; what they add to it is shared out by their times."""
    own = [each for each in timed if _own(each)]
    total_ns = sum(each.time.ns for each in own)
    return tuple(
        Communication(each.message, each.time, round(exposed_ns * each.time.ns / total_ns))
        for each in own
        if total_ns
    )


def _own(each: Timed) -> bool:
    return each.message.strategy == OWN
