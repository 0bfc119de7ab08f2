"""Every message of one step, of one rank of each pipeline stage."""

from __future__ import annotations

from stepsplit.analyzer.model.comm.context import context_messages
from stepsplit.analyzer.model.comm.data import data_messages
from stepsplit.analyzer.model.comm.embedding import embedding_messages
from stepsplit.analyzer.model.comm.experts import expert_messages
from stepsplit.analyzer.model.comm.norm import norm_messages
from stepsplit.analyzer.model.comm.pipeline import (
    Neighbors,
    copy_messages,
    neighbors,
    pipeline_messages,
)
from stepsplit.analyzer.model.comm.sharded import sharded_messages
from stepsplit.analyzer.model.comm.tensor import tensor_messages
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Chunk, Stage, stages_of
from stepsplit.analyzer.model.work.parameters import StageParameters, stage_parameters


def messages_of(job: Job) -> tuple[Message, ...]:
    """What a rank of every stage sends and receives in a step, stage by stage.

    A recv is the other end of a neighbor's send and sends nothing itself: only wire_bytes of the
    others add up to traffic, and only one end of each pair costs time.
    """
    alike: dict[tuple[tuple[Chunk, ...], Neighbors], tuple[Message, ...]] = {}
    found: list[Message] = []
    for stage, held in zip(stages_of(job), stage_parameters(job), strict=True):
        shape = (stage.chunks, neighbors(job, stage.index))
        if shape not in alike:
            alike[shape] = _of_stage(job, stage, held)
        found += (_at(message, stage.index) for message in alike[shape])
    return tuple(found)


def _at(message: Message, stage: int) -> Message:
    """The message on another stage. Middle stages differ in nothing else, and there are many."""
    if message.stage == stage:
        return message
    return Message(
        message.strategy, message.op, message.axis, stage, message.phase,
        message.count, message.message_bytes, message.input_bytes, message.wire_bytes,
    )  # fmt: skip


def _of_stage(job: Job, stage: Stage, held: StageParameters) -> tuple[Message, ...]:
    found = (
        *tensor_messages(job, stage, held),
        *context_messages(job, stage),
        *expert_messages(job, stage),
        *pipeline_messages(job, stage),
        *sharded_messages(job, held),
        *data_messages(job, held),
        *embedding_messages(job, stage),
        *copy_messages(job, stage, held),
        *norm_messages(job, stage.index),
    )
    return tuple(message for message in found if message.count and message.input_bytes)
