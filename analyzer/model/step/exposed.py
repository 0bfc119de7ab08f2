"""How much of a stage's communication its compute cannot hide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from stepsplit.analyzer.model.comm.data import sums_every_microbatch
from stepsplit.analyzer.model.comm.sharded import stays_gathered
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Band, Communication, Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.step.layer import FUSED_BACKWARD
from stepsplit.analyzer.model.step.speed import BACKWARD_ATTENTION

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
ONCE = ("grad_sync", "optimizer", "other")
HIDDEN_FIRST = ("cp", "tp", "ep", "pp", "dp")
"""What runs inside a layer hides before what only has to be there in time."""
CORE_BACKWARD = FUSED_BACKWARD / BACKWARD_ATTENTION
"""Time of attention's backward over that of its forward."""
Family = tuple[str, str]
"""An axis, all data-parallel ones as dp, and a phase, what happens in the backward as backward."""


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
    """Time of one rank that communication can hide behind, in ns a step; core_ns is attention's."""

    forward_ns: float
    backward_ns: float
    core_ns: float
    microbatches: int

    def pool(self, phase: str) -> tuple[str, float]:
        """The pass that a phase runs beside, and its time: at the step's end of one microbatch."""
        beside = "backward" if phase in ("backward", "grad_sync") else "forward"
        whole_ns = self.backward_ns if beside == "backward" else self.forward_ns
        return beside, whole_ns / self.microbatches if phase in ONCE else whole_ns


def exposed(job: Job, timed: Iterable[Timed], beside: Beside) -> tuple[Communication, ...]:
    """Each message with its exposed time; what shares an axis and a phase is hidden together, and
    no compute hides two axes."""
    kept = tuple(timed)
    groups: defaultdict[Family, list[Timed]] = defaultdict(list)
    for each in kept:
        groups[family(job, each.message)].append(each)
    left = _left(job, groups, beside)
    return tuple(
        Communication(
            each.message, each.time, round(each.time.ns * left[family(job, each.message)])
        )
        for each in kept
    )


def family(job: Job, message: Message) -> Family:
    """What the message is hidden with."""
    axis = "dp" if message.axis in DATA_AXES else message.axis
    inside = message.phase in BACKWARD or _every_microbatch(job, message)
    return axis, "backward" if inside else message.phase


def _every_microbatch(job: Job, message: Message) -> bool:
    """Whether gradients leave in the backward of every microbatch."""
    if message.phase != "grad_sync" or job.layout.pp > 1:
        return False
    sharded = message.strategy in ("fsdp", "hsdp")
    return sharded or (message.strategy == "zero-2" and sums_every_microbatch(job))


def _left(job: Job, groups: dict[Family, list[Timed]], beside: Beside) -> dict[Family, float]:
    """The share of each group's time that stays exposed."""
    used: defaultdict[str, float] = defaultdict(float)
    found = {}
    for key in sorted(groups, key=lambda each: HIDDEN_FIRST.index(each[0])):
        group = groups[key]
        total_ns = sum(each.time.ns for each in group)
        found[key] = 1.0
        if total_ns and _overlaps(job, key[0]):
            pool, whole_ns = beside.pool(key[1])
            room_ns = _room_ns(job, key, beside, whole_ns - used[pool])
            found[key] = min(1.0, max(_least(job, key, group, total_ns), 1 - room_ns / total_ns))
            used[pool] += total_ns * (1 - found[key])
    return found


def _overlaps(job: Job, axis: str) -> bool:
    """On a CPU FSDP has no stream beside the one that computes: it waits for each of its calls."""
    if job.hardware.family == "cpu" and job.layout.zero == 3 and axis == "dp":
        return False
    if axis == "cp":
        return _turns(job) or "cp" in job.layout.overlap
    return axis in job.layout.overlap


def _room_ns(job: Job, key: Family, beside: Beside, free_ns: float) -> float:
    """Context parallelism hides behind attention's core alone, a ring not behind the last of its
    pieces, when all has come round."""
    if key[0] == "cp":
        core_ns = beside.core_ns * (CORE_BACKWARD if key[1] == "backward" else 1.0)
        free_ns = min(free_ns, core_ns * (1 - 1 / job.layout.cp if _turns(job) else 1.0))
    return max(0.0, free_ns)


def _turns(job: Job) -> bool:
    return job.layout.context_kind == "ring"


def _least(job: Job, key: Family, group: list[Timed], total_ns: float) -> float:
    """The share of the calls that nothing runs beside: the first or last of a phase; in a ring
    the gradients of keys and values as they come home, one of its 2 (c-1) turns backward."""
    axis, phase = key
    if axis == "tp":
        return TENSOR_LEFT
    if axis == "cp" and phase == "backward" and _turns(job):
        return 1 / (2 * (job.layout.cp - 1))
    if axis != "dp":
        return 0.0
    largest_ns = max(each.each.ns for each in group if each.message.count)
    return min(1.0, _starts(job, phase) * largest_ns / total_ns)


def _starts(job: Job, phase: str) -> int:
    """How often in a step such calls start with nothing beside them."""
    return 1 if phase in ONCE or stays_gathered(job) else job.microbatches
