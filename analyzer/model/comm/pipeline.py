"""What pipeline ranks hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.comm.calls import (
    Place,
    all_reduce,
    hidden_bytes,
    receive,
    rounds,
    send,
)
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage, chunk_count, chunks_of_rank
from stepsplit.analyzer.model.work.parameters import StageParameters

PIPELINE = Formula(
    "comm.pipeline",
    "m sends of T h each way over every boundary between model stages on different ranks"
    " (interleaved: v times as many), T h/t under sequence parallelism or scatter/gather",
    "Narayanan et al., SC'21, arXiv:2104.04473, sections 2.2.2, 3.2 and 4.1",
)
COPIES = Formula(
    "comm.dualpipe",
    "1 all_reduce of the gradients of both chunks with the mirrored rank, which holds them too",
    "DeepSeek-V3, arXiv:2412.19437, section 3.2.1: two copies of the parameters",
)


@dataclass(frozen=True, slots=True)
class Neighbors:
    """Chunks of a rank that another rank feeds, and those that feed another rank."""

    fed: int
    feeding: int


def pipeline_messages(job: Job, stage: Stage) -> tuple[Message, ...]:
    """Sends and receives of one rank of a stage in a step."""
    if job.layout.pp == 1:
        return ()
    found = neighbors(job, stage.index)
    parts = job.layout.tp if job.layout.scatter_gather else job.layout.sequence_split
    size, count = hidden_bytes(job) // parts, rounds(job)
    forward = Place("pp", "pp", stage.index, "forward")
    backward = Place("pp", "pp", stage.index, "backward")
    return (
        receive(forward, count * found.fed, size),
        send(forward, count * found.feeding, size),
        receive(backward, count * found.feeding, size),
        send(backward, count * found.fed, size),
    )


def neighbors(job: Job, rank: int) -> Neighbors:
    """How many of a rank's chunks have a neighbor on another rank."""
    held, last = chunks_of_rank(job, rank), chunk_count(job) - 1
    # The two chunks of a dualpipe rank belong to different copies of the model.
    own = () if job.layout.schedule == "dualpipe" else held
    fed = sum(chunk > 0 and chunk - 1 not in own for chunk in held)
    return Neighbors(fed, sum(chunk < last and chunk + 1 not in own for chunk in held))


def copy_messages(job: Job, stage: Stage, held: StageParameters) -> tuple[Message, ...]:
    """Gradients that dualpipe's two copies of the model add up."""
    if job.layout.schedule != "dualpipe" or job.layout.pp == 1:
        return ()
    size = held.total * job.recipe.gradient_bytes
    if job.layout.zero == 3:
        size //= job.layout.shard_size
    return (all_reduce(Place("dualpipe", "pp", stage.index, "grad_sync"), 1, size, 2),)
