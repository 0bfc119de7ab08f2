"""Prediction: what a step should cost, by the same words as what it did cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.formula import Formula

SCHEMA = "stepsplit.prediction/1"
Confidence = Literal["calibrated", "high", "low"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak bytes allocated on one rank of a pipeline stage, by what they are for."""

    stage: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    transient_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
            + self.activations_bytes + self.transient_bytes + self.other_bytes
        )  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class Band:
    """A time in ns with what it may well be instead: low_ns <= ns <= high_ns."""

    ns: float
    low_ns: float
    high_ns: float

    def __mul__(self, times: float) -> Band:
        return Band(self.ns * times, self.low_ns * times, self.high_ns * times)


@dataclass(frozen=True, slots=True)
class Communication:
    """A message, the time of all its calls in a step, and how much of that compute cannot hide."""

    message: Message
    time: Band
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of one step. Bytes and splits are a rank's, FLOPs the whole job's.

    splits holds one Split a pipeline stage, split the slowest stage's. mfu and hfu follow
    convention (flops.CONVENTIONS), None where no peak is known at the dtype. confidence is low
    where the model is known to fail, and notes say why.
    """

    parameters: int
    parameters_per_stage: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    model_flops: int
    hardware_flops: int
    communication: tuple[Communication, ...]
    bubble_fraction: float
    bubble_overhead: float
    splits: tuple[Split, ...]
    split: Split
    low_ns: int
    high_ns: int
    convention: str
    mfu: float | None
    hfu: float | None
    tokens_per_s_per_gpu: float
    fits: bool
    confidence: Confidence
    notes: tuple[str, ...]
    formulas: tuple[Formula, ...]
