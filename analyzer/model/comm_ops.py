"""Messages of the model: the bytes and wire bytes of each kind of collective call."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.formulas import Formula


@dataclass(frozen=True, slots=True)
class Message:
    """One kind of communication of one rank of a stage: count calls in a step.

    message_bytes follow nccl-tests (the gathered buffer of all_gather and reduce_scatter),
    input_bytes are what the call is given (a trace's In msg nelems), wire_bytes what the rank
    sends; each of one call. phase is where it happens: forward, backward, recompute, grad_sync,
    optimizer or other.
    """

    strategy: str
    op: str
    axis: str
    stage: int
    phase: str
    count: int
    message_bytes: int
    input_bytes: int
    wire_bytes: int


WIRE = Formula(
    "comm.wire",
    "all_reduce 2 S (n-1)/n; all_gather, reduce_scatter, all_to_all S (n-1)/n; send, broadcast S"
    " (S message bytes: the gathered buffer; ring algorithms, and no rank sends less)",
    "NVIDIA/nccl-tests PERFORMANCE.md; Patarasuk and Yuan, J. Parallel Distrib. Comput. 2009",
)

FULL_RECOMPUTE = ("full", "every", "sqrt")
"""Settings that run the whole forward pass of every layer again, its communication included."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a step a call happens and who asks for it; see prediction.Message."""

    strategy: str
    axis: str
    stage: int
    phase: str


def all_reduce(place: Place, count: int, input_bytes: int, ranks: int) -> Message:
    """count sums of a buffer that every rank has whole."""
    sent = 2 * input_bytes * (ranks - 1) // ranks
    return _message(place, "all_reduce", count, input_bytes, input_bytes, sent)


def all_gather(place: Place, count: int, input_bytes: int, ranks: int) -> Message:
    """count times every rank gives input_bytes and gets those of all."""
    gathered, sent = input_bytes * ranks, input_bytes * (ranks - 1)
    return _message(place, "all_gather", count, gathered, input_bytes, sent)


def reduce_scatter(place: Place, count: int, input_bytes: int, ranks: int) -> Message:
    """count times every rank gives a whole buffer and gets its share of the sum."""
    sent = input_bytes * (ranks - 1) // ranks
    return _message(place, "reduce_scatter", count, input_bytes, input_bytes, sent)


def all_to_all(place: Place, count: int, input_bytes: int, ranks: int) -> Message:
    """count times every rank spreads input_bytes evenly over all."""
    sent = input_bytes * (ranks - 1) // ranks
    return _message(place, "all_to_all", count, input_bytes, input_bytes, sent)


def broadcast(place: Place, count: int, input_bytes: int) -> Message:
    """count times one rank gives a buffer that all others get; a ring hands it on once a rank."""
    return _message(place, "broadcast", count, input_bytes, input_bytes, input_bytes)


def send(place: Place, count: int, input_bytes: int) -> Message:
    """count messages to a neighbor."""
    return _message(place, "send", count, input_bytes, input_bytes, input_bytes)


def receive(place: Place, count: int, input_bytes: int) -> Message:
    """count messages from a neighbor: the other end of its sends, so this rank sends nothing."""
    return _message(place, "recv", count, input_bytes, input_bytes, 0)


def _message(
    place: Place, op: str, count: int, message_bytes: int, input_bytes: int, wire_bytes: int
) -> Message:
    return Message(
        place.strategy, op, place.axis, place.stage, place.phase,
        count, message_bytes, input_bytes, wire_bytes,
    )  # fmt: skip


def rounds(job: Job) -> int:
    """Microbatches that pass each chunk of a rank: half of them where dualpipe's copies share."""
    halves = job.layout.schedule == "dualpipe" and job.layout.pp > 1
    return job.microbatches // 2 if halves else job.microbatches


def hidden_bytes(job: Job) -> int:
    """What one layer hands to the next for a microbatch, whole over tensor parallelism (T h)."""
    return job.tokens * job.model.hidden * job.recipe.activation_bytes
