"""Step time: stages, exposed communication, pipeline, stragglers, caveats and error band."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.comm_ops import CommOp, rounds
from stepsplit.analyzer.model.comm_volume import stays_gathered, sums_every_microbatch
from stepsplit.analyzer.model.config import (
    Chunk,
    JobConfig,
    StageConfig,
    chunk_count,
    chunks_of_rank,
    span_of,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.layer_time import (
    HOST,
    KERNEL,
    UNIT_COPIES,
    UPDATE,
    LayerPass,
    Speed,
    chunk_passes,
    host_bound,
    launches,
    offload_ns,
    optimizer_ns,
    traffic_of,
    waits,
)
from stepsplit.analyzer.model.parameters import StageParameters
from stepsplit.analyzer.model.prediction import Band, Communication, Confidence
from stepsplit.analyzer.model.schedule_time import (
    FRACTION,
    OVERHEAD,
    Costs,
    PipelineTime,
    pipeline_ns,
)

# The pipeline's window, bubbles and messages, from the times of its stages.

OWN = "pp"
"""The strategy of messages between pipeline stages."""


def pipelined(
    job: JobConfig, stages: tuple[StageTime, ...], timed: dict[int, tuple[Timed, ...]]
) -> Pipelined:
    """Time the schedule with the stages' times, with and without its messages."""
    layout, costs = job.parallel, costs_of(job, stages)
    if layout.pp == 1:
        alone = PipelineTime(job.microbatches * sum(map(sum, costs)), (0.0,))
        return Pipelined(alone, 0.0, (0.0,))
    shape = (layout.schedule, layout.pp, job.microbatches, layout.chunks)
    free = pipeline_ns(*shape, costs)
    real = pipeline_ns(*shape, costs, transfer_ns(timed))
    moving = tuple(sum(e.time.ns for e in timed[s] if _own(e)) for s in range(layout.pp))
    transfers_ns = real.makespan_ns - free.makespan_ns
    return Pipelined(real, transfers_ns, moving, (FRACTION, OVERHEAD))


def costs_of(job: JobConfig, stages: tuple[StageTime, ...]) -> Costs:
    """Forward, input gradient and weight gradient of a microbatch for each model stage, in ns."""
    found: dict[int, tuple[float, float, float]] = {}
    for stage in stages:
        for chunk, place in enumerate(chunks_of_rank(job, stage.stage.index)):
            cost = stage.cost(chunk)
            found[place] = (cost.forward_ns, cost.input_ns, cost.weight_ns)
    return tuple(found[place] for place in range(chunk_count(job)))


def transfer_ns(timed: dict[int, tuple[Timed, ...]]) -> float:
    """The time of one message between pipeline stages."""
    return max(
        (each.each.ns for stage in timed.values() for each in stage if _own(each)), default=0.0
    )


def between_stages(timed: tuple[Timed, ...], exposed_ns: int) -> tuple[Communication, ...]:
    """A stage's pipeline messages; the exposed time is split in proportion to their times."""
    own = [each for each in timed if _own(each)]
    total_ns = sum(each.time.ns for each in own)
    return tuple(
        Communication(each.message, each.time, round(exposed_ns * each.time.ns / total_ns))
        for each in own
        if total_ns
    )


def _own(each: Timed) -> bool:
    return each.message.strategy == OWN


# The predicted Split of each pipeline stage.

STRAGGLERS = Formula(
    "step.skew",
    "skew = s sqrt(2 ln n) of the step: the slowest of n nodes whose times vary by s",
    "expected maximum of n normal variables: Boucheron et al., Concentration Inequalities, 2013,"
    " section 2.5; s fitted",
)


@dataclass(frozen=True, slots=True)
class Pipelined:
    """The pipeline's time and its messages' part of it.

    transfers_ns is how much shorter the pipeline would be without message time, moving_ns the time
    of each rank's own messages.
    """

    time: PipelineTime
    transfers_ns: float
    moving_ns: tuple[float, ...]
    formulas: tuple[Formula, ...] = ()

    def exposed_ns(self, rank: int) -> int:
        """The part of a rank's bubble that is its own messages; the rest is waiting."""
        return round(min(self.transfers_ns, self.moving_ns[rank], self.time.holes_ns[rank]))


def splits_of(
    job: JobConfig, stages: tuple[StageTime, ...], pipeline: Pipelined, skew: Skew
) -> tuple[Split, ...]:
    """One Split per stage. All stages end the step together, so faster ones wait (bubble)."""
    whole = tuple(
        _split(job, stage, pipeline.exposed_ns(stage.stage.index), holes)
        for stage, holes in zip(stages, pipeline.time.holes_ns, strict=True)
    )
    step_ns = max(split.step_ns for split in whole)
    skew_ns = round(skew.share * step_ns)
    return tuple(_until(replace(split, skew_ns=skew_ns), step_ns + skew_ns) for split in whole)


@dataclass(frozen=True, slots=True)
class Skew:
    """Wait for the slowest node as a share of the step, and its formula."""

    share: float
    formulas: tuple[Formula, ...]


def straggling(job: JobConfig) -> Skew:
    """Wait for the slowest node as a share of the step.

    On CPU each rank varies on its own; waits for other pp coordinates count as bubble.
    """
    nodes = max(1.0, job.parallel.world_size / job.hardware.gpus_per_node)
    formulas = (STRAGGLERS,) if nodes > 1 else ()
    if job.hardware.family == "cpu":
        nodes = job.parallel.world_size / job.parallel.pp
    return Skew(job.hardware.efficiency.jitter * math.sqrt(2 * math.log(nodes)), formulas)


def _split(job: JobConfig, stage: StageTime, between_ns: int, holes_ns: float) -> Split:
    m, found = rounds(job), stage.communication
    sent_ns = sum(each.exposed_ns for each in found if each.message.op == "send")
    return Split(
        compute_ns=round(m * stage.compute_ns + stage.optimizer_ns),
        collective_ns=sum(each.exposed_ns for each in found) - sent_ns,
        p2p_ns=between_ns + sent_ns,
        bubble_ns=round(holes_ns) - between_ns,
        copy_ns=round(stage.offload_ns),
        idle_ns=round(m * stage.idle_ns - stage.idle_overlapped_ns),
        overlapped_ns=sum(round(each.time.ns) - each.exposed_ns for each in found),
    )


def _until(split: Split, step_ns: int) -> Split:
    """Add the wait for the slowest stage at the end of the step to the bubble."""
    return replace(split, bubble_ns=split.bubble_ns + step_ns - split.step_ns)


# Caveats: cases in which the model is known to be wrong.

MOSTLY = 0.4
"""Share of communication above which a step depends more on link constants than on kernels."""

UNSURE = 0.25
"""What each caveat adds to the error, a ratio: the mean error on published runs of a framework
that was not fitted (nanotron on H100)."""


def doubts(job: JobConfig, stages: tuple[StageTime, ...], split: Split) -> tuple[str, ...]:
    """Reasons why the step time may be far off."""
    found = []
    if any(_host_bound(job, stage) for stage in stages):
        found.append("host-bound: launching a layer takes about as long as computing it")
    found += [
        f"{axis} crosses nodes: a group of {span_of(job, axis).ranks} over"
        f" {span_of(job, axis).nodes} nodes communicates over the network in every layer"
        for axis in ("tp", "cp", "ep")
        if span_of(job, axis).nodes > 1
    ]
    if job.training.offload & {"parameters", "activations"}:
        found.append("transfers of offloaded parameters and activations are not modelled")
    if split.exposed_comm_ns > MOSTLY * split.step_ns:
        found.append("communication takes most of the step: the estimate depends on link constants")
    return (*found, *_unfitted(job))


def _host_bound(job: JobConfig, stage: StageTime) -> bool:
    """Whether launching takes about as long as computing and the launch time is not calibrated."""
    return not job.hardware.efficiency.host_ns and any(
        host_bound(one, launches(job, chunk.layers))
        for one, chunk in zip(stage.passes, stage.stage.chunks, strict=True)
    )


def _unfitted(job: JobConfig) -> tuple[str, ...]:
    """Framework, device and dtype for which the efficiencies are not calibrated."""
    known, hardware = job.hardware.efficiency, job.hardware
    if not known.rows:
        return (f"{hardware.name}: efficiencies are not calibrated",)
    return tuple(
        f"{hardware.family} efficiencies are calibrated on {' and '.join(fitted)}, not {this}"
        for fitted, this in (
            (known.frameworks, job.training.framework),
            (known.devices, hardware.name),
            (known.dtypes, job.training.dtype),
        )
        if fitted and this not in fitted
    )


def confidence_of(job: JobConfig, reasons: tuple[str, ...]) -> Confidence:
    """low with any caveat; calibrated if the user's own runs set the constants."""
    if reasons:
        return "low"
    calibrated = any(row.startswith("run:") for row in job.hardware.efficiency.rows)
    return "calibrated" if calibrated else "high"


def band_of(job: JobConfig, split: Split, reasons: tuple[str, ...]) -> tuple[int, int]:
    """Error band of the step time in ns, which contains 9 of 10 published runs."""
    off = job.hardware.efficiency.error + UNSURE * len(reasons)
    return round(split.step_ns / (1 + off)), round(split.step_ns * (1 + off))


# The time of one microbatch on one rank of a stage, and of what runs once per step.


@dataclass(frozen=True, slots=True)
class StageTime:
    """Times of one rank of a pipeline stage.

    passes, comm and idle have one entry per chunk, for one microbatch: compute, exposed
    communication and waits for the host. communication lists every message except the pipeline's.
    idle_overlapped_ns is the idle time of a step that overlaps communication which runs once per
    step.
    """

    stage: StageConfig
    passes: tuple[LayerPass, ...]
    comm: tuple[LayerPass, ...]
    idle: tuple[LayerPass, ...]
    communication: tuple[Communication, ...]
    optimizer_ns: float
    offload_ns: float
    idle_overlapped_ns: float = 0.0
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    def on(self, stage: StageConfig) -> StageTime:
        """The same times for another, equal stage."""
        if stage == self.stage:
            return self
        moved = tuple(
            Communication(each.message.on(stage.index), each.time, each.exposed_ns)
            for each in self.communication
        )
        return replace(self, stage=stage, communication=moved)

    @property
    def compute_ns(self) -> float:
        """Compute of one microbatch on the whole rank."""
        return _sum_ns(self.passes)

    @property
    def idle_ns(self) -> float:
        """Host-bound idle time of one microbatch on the whole rank."""
        return _sum_ns(self.idle)

    def cost(self, chunk: int) -> LayerPass:
        """Total time of one microbatch on one of the chunks."""
        return self.passes[chunk] + self.comm[chunk] + self.idle[chunk]


def stage_time(
    job: JobConfig,
    speed: Speed,
    stage: StageConfig,
    held: StageParameters,
    timed: tuple[Timed, ...],
) -> StageTime:
    """Compute the times of a stage from its parameters and its timed messages."""
    passes = tuple(
        one + _copies(job, speed, held, chunk)
        for one, chunk in zip(chunk_passes(job, speed, stage.chunks), stage.chunks, strict=True)
    )
    host = tuple(launches(job, chunk.layers) for chunk in stage.chunks)
    alone = job.hardware.family == "cpu"
    inside = tuple(each for each in timed if each.message.strategy != "pp")
    found = exposed(job, inside, _beside(job, passes))
    comm = _spread(job, stage, found)
    idle = tuple(waits(a + b, c, alone) for a, b, c in zip(passes, comm, host, strict=True))
    return StageTime(
        stage=stage,
        passes=passes,
        comm=comm,
        idle=idle,
        communication=found,
        optimizer_ns=optimizer_ns(job, speed, held),
        offload_ns=offload_ns(job, held),
        idle_overlapped_ns=0.0 if alone else _overlap_idle_ns(job, inside, found, idle),
        formulas=(KERNEL, *_collect_formulas(passes), *(EXPOSED,) * bool(found), UPDATE, HOST),
    )


def _collect_formulas(passes: tuple[LayerPass, ...]) -> Iterator[Formula]:
    return (formula for one in passes for formula in one.formulas)


def _sum_ns(passes: tuple[LayerPass, ...]) -> float:
    return sum(each.forward_ns + each.input_ns + each.weight_ns for each in passes)


def _exposed_ns(job: JobConfig, found: tuple[Communication, ...], phases: tuple[str, ...]) -> float:
    return sum(float(each.exposed_ns) for each in found if family(job, each.message)[1] in phases)


def _overlap_idle_ns(
    job: JobConfig,
    timed: tuple[Timed, ...],
    found: tuple[Communication, ...],
    idle: tuple[LayerPass, ...],
) -> float:
    """Idle time of one microbatch that overlaps communication which runs once per step."""
    movable_ns = {"forward": 0.0, "backward": 0.0}
    for key, group in _group_by_family(job, timed).items():
        total_ns = sum(each.time.ns for each in group)
        if key[1] in ONCE and total_ns and _overlaps(job, key[0]):
            left_ns = sum(each.exposed_ns for each in found if family(job, each.message) == key)
            alone_ns = _least(job, key, group, total_ns) * total_ns
            movable_ns[_pass_of(key[1])] += max(0.0, left_ns - alone_ns)
    forward_ns = sum(each.forward_ns for each in idle)
    backward_ns = sum(each.input_ns + each.weight_ns for each in idle)
    return min(movable_ns["forward"], forward_ns) + min(movable_ns["backward"], backward_ns)


def _spread(
    job: JobConfig, stage: StageConfig, found: tuple[Communication, ...]
) -> tuple[LayerPass, ...]:
    """Exposed communication of one microbatch, split over the chunks by their layers."""
    m, chunks = rounds(job), stage.chunks
    forward = _exposed_ns(job, found, ("forward",)) / m
    backward = _exposed_ns(job, found, BACKWARD) / m
    whole = LayerPass(forward, backward, 0.0)
    if not stage.layers:
        return tuple(whole * (1 / len(chunks)) for _ in chunks)
    return tuple(whole * (chunk.layers / stage.layers) for chunk in chunks)


def _beside(job: JobConfig, passes: tuple[LayerPass, ...]) -> Beside:
    m = rounds(job)
    return Beside(
        forward_ns=m * sum(each.forward_ns for each in passes),
        backward_ns=m * sum(each.input_ns + each.weight_ns for each in passes),
        core_ns=m * sum(each.core_ns for each in passes),
        core_backward_ns=m * sum(each.core_backward_ns for each in passes),
        microbatches=m,
    )


def _copies(job: JobConfig, speed: Speed, held: StageParameters, chunk: Chunk) -> LayerPass:
    """FSDP copies around its collectives, a quarter of them in the forward.

    A pipeline gathers once per step, so each microbatch has a share of the time.
    """
    if job.parallel.zero != 3:
        return LayerPass(0.0, 0.0, 0.0)
    times = 1 / rounds(job) if stays_gathered(job) else 1.0
    layers = held.dense_layers + held.expert_layers
    share = chunk.layers / layers if layers else 0.0
    each_bytes = traffic_of(job).unit_bytes
    whole = speed.moved_ns(each_bytes * held.total * share * times)
    formulas = (UNIT_COPIES,) if each_bytes else ()
    return LayerPass(whole / 4, 0.0, whole * 3 / 4, formulas=formulas)


# How much of a stage's communication is exposed.

EXPOSED = Formula(
    "step.exposed",
    "overlapped: max(first or last call, t_comm - concurrent compute); else all of t_comm",
    "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7; Zhao et al., PyTorch FSDP,"
    " arXiv:2304.11277, section 3.3",
)

TENSOR_LEFT = 0.25
"""A GEMM that overlaps its own collective is split in four, and one part stays exposed (Wang et
al., ASPLOS 2023; Transformer Engine's default of four splits)."""

DATA_AXES = ("dp", "dp_shard", "dp_replicate", "expert_dp")

BACKWARD = ("backward", "recompute")

ONCE = ("grad_sync", "optimizer", "other")

HIDDEN_FIRST = ("cp", "tp", "ep", "pp", "dp")
"""Communication inside a layer overlaps first, prefetched communication last."""

Family = tuple[str, str]
"""Axis (dp for all data-parallel axes) and phase (backward for all that runs in it)."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A message and the time of one call (each)."""

    message: CommOp
    each: Band

    @property
    def time(self) -> Band:
        """The time of all calls in a step."""
        return self.each * self.message.count


@dataclass(frozen=True, slots=True)
class Beside:
    """Compute of one rank that communication can overlap, in ns per step; core is attention."""

    forward_ns: float
    backward_ns: float
    core_ns: float
    core_backward_ns: float
    microbatches: int

    def pool(self, phase: str) -> tuple[str, float]:
        """The pass that a phase overlaps, and its time (of one microbatch if once per step)."""
        pool = _pass_of(phase)
        whole_ns = self.backward_ns if pool == "backward" else self.forward_ns
        return pool, whole_ns / self.microbatches if phase in ONCE else whole_ns


def _pass_of(phase: str) -> str:
    return "backward" if phase in ("backward", "grad_sync") else "forward"


def exposed(job: JobConfig, timed: Iterable[Timed], beside: Beside) -> tuple[Communication, ...]:
    """Compute the exposed time of each message.

    Messages of one axis and phase overlap together; compute that overlaps one axis is not used for
    another.
    """
    kept = tuple(timed)
    left = _left(job, _group_by_family(job, kept), beside)
    return tuple(
        Communication(
            each.message, each.time, round(each.time.ns * left[family(job, each.message)])
        )
        for each in kept
    )


def _group_by_family(job: JobConfig, timed: Iterable[Timed]) -> dict[Family, list[Timed]]:
    groups: defaultdict[Family, list[Timed]] = defaultdict(list)
    for each in timed:
        groups[family(job, each.message)].append(each)
    return groups


def family(job: JobConfig, message: CommOp) -> Family:
    """Axis and phase of the messages that overlap together with this one."""
    axis = "dp" if message.axis in DATA_AXES else message.axis
    inside = message.phase in BACKWARD or _every_microbatch(job, message)
    return axis, "backward" if inside else message.phase


def _every_microbatch(job: JobConfig, message: CommOp) -> bool:
    """Whether gradient reduction runs in the backward of every microbatch."""
    if message.phase != "grad_sync" or job.parallel.pp > 1:
        return False
    sharded = message.strategy in ("fsdp", "hsdp")
    return sharded or (message.strategy == "zero-2" and sums_every_microbatch(job))


def _left(job: JobConfig, groups: dict[Family, list[Timed]], beside: Beside) -> dict[Family, float]:
    """Compute the exposed share of each group's time."""
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


def _overlaps(job: JobConfig, axis: str) -> bool:
    """Whether the axis can overlap compute; on CPU, FSDP has one stream and waits for each call."""
    if job.hardware.family == "cpu" and job.parallel.zero == 3 and axis == "dp":
        return False
    if axis == "cp":
        return _turns(job) or "cp" in job.parallel.overlap
    return axis in job.parallel.overlap


def _room_ns(job: JobConfig, key: Family, beside: Beside, free_ns: float) -> float:
    """Compute available for overlap: for context parallelism only attention's core, in a ring
    without its last step, after which no message follows."""
    if key[0] == "cp":
        core_ns = beside.core_backward_ns if key[1] == "backward" else beside.core_ns
        free_ns = min(free_ns, core_ns * (1 - 1 / job.parallel.cp if _turns(job) else 1.0))
    return max(0.0, free_ns)


def _turns(job: JobConfig) -> bool:
    return job.parallel.context_kind == "ring"


def _least(job: JobConfig, key: Family, group: list[Timed], total_ns: float) -> float:
    """The share of the calls that cannot overlap: the first or last of a phase; in a ring the last
    hop of the gradients of keys and values, one of 2 (c-1) in the backward."""
    axis, phase = key
    if axis == "tp":
        return TENSOR_LEFT
    if axis == "cp" and phase == "backward" and _turns(job):
        return 1 / (2 * (job.parallel.cp - 1))
    if axis != "dp":
        return 0.0
    largest_ns = max(each.each.ns for each in group if each.message.count)
    return min(1.0, _starts(job, phase) * largest_ns / total_ns)


def _starts(job: JobConfig, phase: str) -> int:
    """How often per step such calls start without concurrent compute."""
    return 1 if phase in ONCE or stays_gathered(job) else job.microbatches
