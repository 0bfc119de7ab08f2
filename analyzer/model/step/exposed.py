"""How much of a stage's communication its compute cannot hide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Band, Communication, Message
from stepsplit.analyzer.model.spec.job import Job

EXPOSED = Formula(
    "step.exposed",
    "overlapped: max(first or last call, t_comm - compute beside it); else all of t_comm",
    "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7; Zhao et al., PyTorch FSDP,"
    " arXiv:2304.11277, section 3.3",
)
TENSOR_LEFT = 0.25
"""Products overlapped with their own collective are cut in four: one part stays exposed (Wang et
al., ASPLOS 2023; Transformer Engine's default of four splits)."""
DATA_AXES = ("dp", "dp_shard", "dp_replicate", "expert_dp")
BACKWARD = ("backward", "recompute")


@dataclass(frozen=True, slots=True)
class Timed:
    """A message and the time of one call."""

    message: Message
    each: Band

    @property
    def time(self) -> Band:
        """All its calls in a step."""
        return self.each * self.message.count


@dataclass(frozen=True, slots=True)
class Beside:
    """Compute of one rank that communication can hide behind, in ns a step."""

    forward_ns: float
    backward_ns: float
    core_ns: float
    microbatches: int

    def of(self, axis: str, phase: str) -> float:
        """What runs beside an axis' communication in a phase."""
        backward = phase in BACKWARD
        if axis == "cp":
            return self.core_ns * (2.5 if backward else 1.0)
        once = 1 / self.microbatches if phase in ("grad_sync", "optimizer") else 1.0
        later = phase in (*BACKWARD, "grad_sync")
        return once * (self.backward_ns if later else self.forward_ns)


def exposed(job: Job, timed: Iterable[Timed], beside: Beside) -> tuple[Communication, ...]:
    """Each message with its exposed time; what shares an axis and a phase is hidden together."""
    kept = tuple(timed)
    return tuple(_communication(job, each, kept, beside) for each in kept)


def _communication(
    job: Job, one: Timed, all_of_stage: tuple[Timed, ...], beside: Beside
) -> Communication:
    share = 1.0
    if _overlaps(job, one.message):
        group = [each for each in all_of_stage if _together(each.message, one.message)]
        share = _share(group, _least(group, beside), beside)
    return Communication(one.message, one.time, round(one.time.ns * share))


def _overlaps(job: Job, message: Message) -> bool:
    if message.axis in DATA_AXES:
        return "dp" in job.layout.overlap
    if message.axis == "cp":
        return job.layout.context_kind == "ring" or "cp" in job.layout.overlap
    return message.axis in job.layout.overlap


def _together(one: Message, other: Message) -> bool:
    return _family(one) == _family(other)


def _family(message: Message) -> tuple[str, str]:
    axis = "dp" if message.axis in DATA_AXES else message.axis
    return axis, "backward" if message.phase in BACKWARD or _each(message) else message.phase


def _each(message: Message) -> bool:
    """Whether gradients leave in the backward of every microbatch, as FSDP sends them."""
    return message.strategy in ("fsdp", "hsdp") and message.phase == "grad_sync"


def _share(group: list[Timed], least: float, beside: Beside) -> float:
    """The share of a group's time that compute beside it leaves, at least so much."""
    total = sum(each.time.ns for each in group)
    if total <= 0:
        return 0.0
    return min(1.0, max(least, 1 - beside.of(*_family(group[0].message)) / total))


def _least(group: list[Timed], beside: Beside) -> float:
    """The share of the calls that nothing runs beside: the first or last of a phase."""
    axis, phase = _family(group[0].message)
    if axis == "tp":
        return TENSOR_LEFT
    if axis != "dp":
        return 0.0
    total = sum(each.time.ns for each in group)
    rounds = 1 if phase in ("grad_sync", "optimizer") else beside.microbatches
    largest = max(each.each.ns for each in group if each.message.count)
    return min(1.0, rounds * largest / total) if total else 0.0
