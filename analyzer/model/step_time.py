"""Step time: stages, exposed communication, pipeline and stragglers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.comm_ops import CommOp, count_rank_microbatches, is_torch_ring
from stepsplit.analyzer.model.comm_volume import is_kept_gathered, is_reduced_every_microbatch
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.host_time import (
    HOST,
    HOST_CALLS,
    compute_expert_wait,
    compute_host_wait,
    compute_launch_time,
)
from stepsplit.analyzer.model.layer_time import (
    AUTOCAST,
    BUCKET_COPIES,
    BUCKET_PASSES,
    UNIT_COPIES,
    LayerPass,
    compute_chunk_passes,
    select_framework_costs,
)
from stepsplit.analyzer.model.memory_states import (
    compute_stage_activations,
    count_updated_bytes,
    find_offloaded_share,
    has_buckets,
)
from stepsplit.analyzer.model.offload import TRANSFERS, compute_offload_ns, list_copies
from stepsplit.analyzer.model.optimizer_time import compute_optimizer_ns, list_optimizer_formulas
from stepsplit.analyzer.model.parameters import StageParameters, select_trained
from stepsplit.analyzer.model.prediction import Band, Communication
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.model.rank_layout import Chunk, StageConfig, list_rank_chunks, place_group
from stepsplit.analyzer.model.schedule_graph import Costs
from stepsplit.analyzer.model.schedule_time import (
    FRACTION,
    OVERHEAD,
    PipelineTime,
    compute_pipeline_time,
)

# The pipeline's window, bubbles and messages, from the times of its stages.

NETWORK_SHARE = Formula(
    "pipeline.network_share",
    "a message between stages on different nodes takes 1 + u as long; u: for how much of the"
    " filling and draining of the pipeline gathers of weights or reductions of gradients run over"
    " nodes, too",
    "two streams of data have half of a link each; own",
)

PIPELINE_STRATEGY = "pp"
"""The strategy of messages between pipeline stages."""


def compute_pipeline(
    job: JobConfig, stages: tuple[StageTime, ...], timed: dict[int, tuple[TimedMessage, ...]]
) -> PipelineResult:
    """Time the schedule with the stages' times, with and without its messages."""
    shared = _compute_network_share(job, stages)
    # Both get half of the link for as long as both use it.
    real = time_pipeline(job, stages, compute_transfer_ns(timed) * (1 + shared))
    if job.parallel.pp == 1:
        return PipelineResult(real, 0.0, (0.0,))
    messages_ns = tuple(
        sum(e.time.ns for e in timed[s] if _is_pipeline_message(e)) for s in range(job.parallel.pp)
    )
    transfers_ns = real.makespan_ns - time_pipeline(job, stages, 0.0).makespan_ns
    formulas = (FRACTION, OVERHEAD, *(NETWORK_SHARE,) * bool(shared))
    return PipelineResult(real, transfers_ns, messages_ns, formulas)


def time_pipeline(
    job: JobConfig, stages: tuple[StageTime, ...], transfer_ns: float
) -> PipelineTime:
    """The schedule with the stages' times and messages of this time between them."""
    layout, costs = job.parallel, list_chunk_costs(job, stages)
    if layout.pp == 1:
        return PipelineTime(job.microbatches * sum(map(sum, costs)), (0.0,))
    return compute_pipeline_time(
        layout.schedule, layout.pp, job.microbatches, layout.chunks, costs, transfer_ns
    )


def list_chunk_costs(job: JobConfig, stages: tuple[StageTime, ...]) -> Costs:
    """Forward, input gradient and weight gradient of a microbatch for each model stage, in ns."""
    costs: dict[int, tuple[float, float, float]] = {}
    for stage in stages:
        for chunk, position in enumerate(list_rank_chunks(job, stage.stage.index)):
            cost = stage.compute_chunk_cost(chunk)
            costs[position] = (cost.forward_ns, cost.input_ns, cost.weight_ns)
    return tuple(costs[place] for place in range(job.parallel.model_stages))


def compute_transfer_ns(timed: dict[int, tuple[TimedMessage, ...]]) -> float:
    """The time of one message between pipeline stages."""
    return max(
        (each.call.ns for stage in timed.values() for each in stage if _is_pipeline_message(each)),
        default=0.0,
    )


def _compute_network_share(job: JobConfig, stages: tuple[StageTime, ...]) -> float:
    """For how much of the pipeline's messages collectives of the gradients or weights use the same
    link between nodes (NETWORK_SHARE), 0..1."""
    if job.parallel.pp == 1 or place_group(job, "pp").nodes == 1:
        return 0.0
    last = _count_last_microbatches(job)
    busy = 0.0
    for stage in stages:
        overlapped_ns = sum(
            each.time.ns - each.exposed_ns
            for each in stage.communication
            if each.message.axis in DATA_AXES
            and each.message.phase in ONCE_A_STEP
            and place_group(job, each.message.axis).nodes > 1
        )
        busy = max(busy, min(1.0, overlapped_ns / (last * stage.compute_ns)))
    # The schedule waits for messages while it fills and drains, for up to pp microbatches.
    return busy * min(1.0, last / min(job.parallel.pp, job.microbatches))


def list_pipeline_messages(
    timed: tuple[TimedMessage, ...], exposed_ns: int
) -> tuple[Communication, ...]:
    """A stage's pipeline messages; the exposed time is split in proportion to their times."""
    messages = [each for each in timed if _is_pipeline_message(each)]
    total_ns = sum(each.time.ns for each in messages)
    return tuple(
        Communication(each.message, each.time, round(exposed_ns * each.time.ns / total_ns))
        for each in messages
        if total_ns
    )


def _is_pipeline_message(timed: TimedMessage) -> bool:
    return timed.message.strategy == PIPELINE_STRATEGY


# The predicted Split of each pipeline stage.

STRAGGLERS = Formula(
    "step.skew",
    "skew = s sqrt(2 ln n) of the step: the slowest of n nodes whose times vary by s",
    "expected maximum of n normal variables: Boucheron et al., Concentration Inequalities, 2013,"
    " section 2.5; s fitted",
)


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The pipeline's time and its messages' part of it.

    transfers_ns is how much shorter the pipeline would be without message time, moving_ns the time
    of each rank's own messages.
    """

    time: PipelineTime
    transfers_ns: float
    moving_ns: tuple[float, ...]
    formulas: tuple[Formula, ...] = ()

    def compute_exposed_ns(self, rank: int) -> int:
        """The part of a rank's bubble that is its own messages; the rest is waiting."""
        return round(min(self.transfers_ns, self.moving_ns[rank], self.time.bubbles_ns[rank]))


def compute_splits(
    job: JobConfig, stages: tuple[StageTime, ...], pipeline: PipelineResult, skew: Skew
) -> tuple[Split, ...]:
    """One Split per stage. All stages end the step together, so faster ones wait (bubble)."""
    splits = tuple(
        _build_split(job, stage, pipeline.compute_exposed_ns(stage.stage.index), bubble_ns)
        for stage, bubble_ns in zip(stages, pipeline.time.bubbles_ns, strict=True)
    )
    step_ns = max(split.step_ns for split in splits)
    skew_ns = round(skew.share * step_ns)
    # Each stage waits for the slowest one at the end of the step, which is bubble.
    return tuple(
        replace(split, skew_ns=skew_ns, bubble_ns=split.bubble_ns + step_ns - split.step_ns)
        for split in splits
    )


@dataclass(frozen=True, slots=True)
class Skew:
    """Wait for the slowest node as a share of the step, and its formula."""

    share: float
    formulas: tuple[Formula, ...]


def compute_skew(job: JobConfig) -> Skew:
    """Wait for the slowest node as a share of the step.

    On CPU each rank varies on its own; waits for other pp coordinates count as bubble.
    """
    nodes = max(1.0, job.parallel.world_size / job.hardware.gpus_per_node)
    formulas = (STRAGGLERS,) if nodes > 1 else ()
    if load_device(job.hardware.family).processor:
        nodes = job.parallel.world_size / job.parallel.pp
    efficiency = job.hardware.efficiency
    jitter = efficiency.jitter
    if job.is_fsdp and efficiency.jitter_per_layer is not None:
        jitter = efficiency.jitter_per_layer
    return Skew(jitter * math.sqrt(2 * math.log(nodes)), formulas)


def _build_split(
    job: JobConfig, stage: StageTime, pipeline_comm_ns: int, bubble_ns: float
) -> Split:
    m, communication = count_rank_microbatches(job), stage.communication
    sent_ns = sum(each.exposed_ns for each in communication if each.message.op == "send")
    return Split(
        compute_ns=round(m * stage.compute_ns + stage.optimizer_ns),
        collective_ns=sum(each.exposed_ns for each in communication) - sent_ns,
        p2p_ns=pipeline_comm_ns + sent_ns,
        bubble_ns=round(bubble_ns) - pipeline_comm_ns,
        copy_ns=round(stage.offload_ns),
        idle_ns=round(m * stage.idle_ns - stage.idle_overlapped_ns + stage.host_update_ns),
        overlapped_ns=sum(round(each.time.ns) - each.exposed_ns for each in communication),
    )


# The time of one microbatch on one rank of a stage, and of what runs once per step.


@dataclass(frozen=True, slots=True)
class StageTime:
    """Times of one rank of a pipeline stage.

    passes, comm and idle have one entry per chunk, for one microbatch: compute, exposed
    communication and waits for the host. communication lists every message except the pipeline's;
    equal stages share that of the first.
    idle_overlapped_ns is the idle time of a step that overlaps communication which runs once per
    step; optimizer_ns includes the copies around it. offload_ns are copies to and from the host,
    host_update_ns the update there.
    """

    stage: StageConfig
    passes: tuple[LayerPass, ...]
    comm: tuple[LayerPass, ...]
    idle: tuple[LayerPass, ...]
    communication: tuple[Communication, ...]
    optimizer_ns: float
    offload_ns: float
    host_update_ns: float = 0.0
    idle_overlapped_ns: float = 0.0
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    @property
    def compute_ns(self) -> float:
        """Compute of one microbatch on the whole rank."""
        return _sum_ns(self.passes)

    @property
    def idle_ns(self) -> float:
        """Host-bound idle time of one microbatch on the whole rank."""
        return _sum_ns(self.idle)

    def compute_chunk_cost(self, chunk: int) -> LayerPass:
        """Total time of one microbatch on one of the chunks."""
        return self.passes[chunk] + self.comm[chunk] + self.idle[chunk]


def compute_stage_time(
    job: JobConfig,
    speed: DeviceSpeed,
    stage: StageConfig,
    parameters: StageParameters,
    timed: tuple[TimedMessage, ...],
) -> StageTime:
    """Compute the times of a stage from its parameters and its timed messages."""
    passes = compute_chunk_passes(job, speed, stage.chunks)
    copies = tuple(_time_unit_copies(job, speed, parameters, chunk) for chunk in stage.chunks)
    once_ns = _sum_ns(copies) if is_kept_gathered(job) else 0.0
    if not once_ns:
        passes = tuple(one + copy for one, copy in zip(passes, copies, strict=True))
    is_cpu = load_device(job.hardware.family).processor
    messages = tuple(each for each in timed if each.message.strategy != "pp")
    m = count_rank_microbatches(job)
    communication = compute_exposed_time(
        job,
        messages,
        OverlapCompute(
            forward_ns=m * sum(each.forward_ns for each in passes),
            backward_ns=m * sum(each.input_ns + each.weight_ns for each in passes),
            core_ns=m * sum(each.core_ns for each in passes),
            core_backward_ns=m * sum(each.core_backward_ns for each in passes),
            microbatches=m,
            last_microbatches=_count_last_microbatches(job),
        ),
    )
    # The share of the weight gradients in the compute of the backward.
    weight_ns = sum(each.weight_ns for each in passes)
    backward_ns = weight_ns + sum(each.input_ns for each in passes)
    comm = _split_by_chunk(
        job, stage, communication, weight_ns / backward_ns if backward_ns else 0.0
    )
    idle = compute_idle_time(job, stage, passes, comm)
    return StageTime(
        stage=stage,
        passes=passes,
        comm=comm,
        idle=idle,
        communication=communication,
        optimizer_ns=compute_optimizer_ns(job, speed, parameters) + once_ns,
        offload_ns=_time_copies(job, stage, parameters, (*passes, *comm, *idle)),
        idle_overlapped_ns=0.0 if is_cpu else _overlap_idle_ns(job, messages, communication, idle),
        formulas=(
            *speed.formulas,
            *(formula for one in (*passes, *copies, *idle) for formula in one.formulas),
            *(EXPOSED,) * bool(communication),
            *list_optimizer_formulas(job),
            *(TRANSFERS,) * bool(job.offloaded),
            HOST,
            *(HOST_CALLS,) * (_sum_ns(idle) > 0 and not job.hardware.efficiency.host_ns),
        ),
    )


def compute_idle_time(
    job: JobConfig, stage: StageConfig, passes: Sequence[LayerPass], comm: Sequence[LayerPass]
) -> tuple[LayerPass, ...]:
    """How long the device waits for launches in each chunk's microbatch, from the compute and the
    exposed communication of its passes."""
    is_cpu = load_device(job.hardware.family).processor
    return tuple(
        compute_host_wait(
            compute + exposed,
            compute_launch_time(job, chunk.layers, chunk.expert_layers),
            is_cpu,
        )
        + compute_expert_wait(job, chunk.expert_layers)
        for compute, exposed, chunk in zip(passes, comm, stage.chunks, strict=True)
    )


def _time_copies(
    job: JobConfig,
    stage: StageConfig,
    parameters: StageParameters,
    passes: tuple[LayerPass, ...],
) -> float:
    """Time of a step in which nothing but copies to or from the host runs; passes are whatever else
    takes time in those of a microbatch."""
    if not job.offloaded:
        return 0.0
    forward_ns = sum(each.forward_ns for each in passes)
    offloaded = find_offloaded_share(job, stage) * len(stage.chunks)
    saved_bytes = compute_stage_activations(job, stage).saved_bytes * offloaded
    copies = list_copies(job, parameters, saved_bytes, forward_ns, _sum_ns(passes) - forward_ns)
    return compute_offload_ns(job.hardware, copies)


def _sum_ns(passes: tuple[LayerPass, ...]) -> float:
    return sum(each.forward_ns + each.input_ns + each.weight_ns for each in passes)


def _overlap_idle_ns(
    job: JobConfig,
    timed: tuple[TimedMessage, ...],
    communication: tuple[Communication, ...],
    idle: tuple[LayerPass, ...],
) -> float:
    """Idle time of one microbatch that overlaps communication which runs once per step."""
    movable_ns = {"forward": 0.0, "backward": 0.0}
    for key, group in _group_by_overlap(job, timed).items():
        total_ns = sum(each.time.ns for each in group)
        if key[1] in ONCE_A_STEP and total_ns and _can_overlap(job, key[0]):
            left_ns = sum(
                each.exposed_ns
                for each in communication
                if find_overlap_group(job, each.message) == key
            )
            alone_ns = _compute_min_exposed_share(job, key, group, total_ns) * total_ns
            movable_ns[_find_pass(key[1])] += max(0.0, left_ns - alone_ns)
    forward_ns = sum(each.forward_ns for each in idle)
    backward_ns = sum(each.input_ns + each.weight_ns for each in idle)
    return min(movable_ns["forward"], forward_ns) + min(movable_ns["backward"], backward_ns)


def _split_by_chunk(
    job: JobConfig,
    stage: StageConfig,
    communication: tuple[Communication, ...],
    weight_share: float,
) -> tuple[LayerPass, ...]:
    """Exposed communication of one microbatch, split over the chunks by their layers.

    In the backward the input gradient waits for communication inside a layer, and for what of
    context parallelism attention does not cover. What overlaps both gradients delays each by its
    share of the compute, so that a faster device makes neither longer. What a pipeline gathers once
    per step delays no microbatch but the first, and all stages at the same time.
    """
    m, chunks = count_rank_microbatches(job), stage.chunks
    forward_ns = backward_ns = overlapping_ns = 0.0
    for each in communication:
        axis, phase = find_overlap_group(job, each.message)
        if (axis, phase) == ("dp", "forward") and is_kept_gathered(job):
            continue
        if phase == "forward":
            forward_ns += each.exposed_ns / m
        elif phase in BACKWARD:
            backward_ns += each.exposed_ns / m
            if axis != "cp" and _can_overlap(job, axis):
                overlapping_ns += each.exposed_ns / m
    weight_ns = overlapping_ns * weight_share
    total = LayerPass(forward_ns, backward_ns - weight_ns, weight_ns)
    if not stage.layers:
        return tuple(total * (1 / len(chunks)) for _ in chunks)
    return tuple(total * (chunk.layers / stage.layers) for chunk in chunks)


def _count_last_microbatches(job: JobConfig) -> float:
    """Microbatches whose compute overlaps what runs once per step: the last one (for weights the
    first); interleaved, all but one chunk of the last group of pp."""
    layout = job.parallel
    if layout.schedule != "interleaved" or layout.chunks == 1:
        return 1.0
    return max(1.0, min(layout.pp, job.microbatches) * (1 - 1 / layout.chunks))


def _time_unit_copies(
    job: JobConfig, speed: DeviceSpeed, parameters: StageParameters, chunk: Chunk
) -> LayerPass:
    """Copies of the weights: FSDP's around its collectives, a quarter of them in the forward, and
    autocast's, half of them; half of both are of gradients. Of one microbatch, or of the step if a
    pipeline gathers once. And those to and from the buckets of DistributedDataParallel, once per
    step."""
    is_cast, is_copied = job.runs_transformers, has_buckets(job)
    if not (job.is_fsdp or is_cast or is_copied):
        return LayerPass(0.0, 0.0, 0.0)
    layers = parameters.dense_layers + parameters.expert_layers
    share = chunk.layers / layers if layers else 0.0
    copied, reduced = parameters.total * share, select_trained(job, parameters).total * share
    each_bytes = select_framework_costs(job).unit_bytes
    bucket_bytes = BUCKET_PASSES * count_updated_bytes(job.training) if is_copied else 0
    units_ns = speed.compute_memory_ns(each_bytes * copied)
    forward_ns = units_ns / 2 if is_cast else units_ns / 4
    if job.training.lora_rank:
        units_ns /= 2
    buckets_ns = speed.compute_memory_ns(bucket_bytes * reduced) / job.microbatches
    units = AUTOCAST if is_cast else UNIT_COPIES
    formulas = (*(units,) * bool(each_bytes), *(BUCKET_COPIES,) * is_copied)
    return LayerPass(forward_ns, 0.0, units_ns - forward_ns + buckets_ns, formulas=formulas)


# How much of a stage's communication is exposed.

EXPOSED = Formula(
    "step.exposed",
    "overlapped: max(first or last call + channels/multiprocessors of t_comm for gradients and"
    " weights, t_comm - concurrent compute), for what runs once per step the compute of one"
    " microbatch, interleaved of pp (1 - 1/v); else all of t_comm",
    "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7; Zhao et al., PyTorch FSDP,"
    " arXiv:2304.11277, section 3.3",
)

TENSOR_EXPOSED_SHARE = 0.25
"""A GEMM that overlaps its own collective is split in four, and one part stays exposed (Wang et
al., ASPLOS 2023; Transformer Engine's default of four splits)."""

DISPATCHER_PROCESSORS = {"all-to-all": 0, "deepep": 20, "hybridep": 16}
"""Multiprocessors that a dispatcher takes from the compute that overlaps it, which loses as much of
the time: 20 of 132 in DeepSeek-V3 (arXiv:2412.19437, section 3.2.2), 16 by default in HybridEP
(deepseek-ai/DeepEP, branch hybrid-ep)."""

COLLECTIVE_PROCESSORS = 16
"""The same of NCCL's collectives in a node, one for each channel that its logs name there ("16 coll
channels", NVIDIA/nccl issue 892; up to 24)."""

NETWORK_PROCESSORS = 2
"""The same over nodes, for each rank of the group in a node: "16 coll channels" with eight GPUs and
network cards, 2 with one (NVIDIA/nccl-tests issue 133). Neither is fitted."""

DATA_AXES = ("dp", "dp_shard", "dp_replicate", "expert_dp")

BACKWARD = ("backward", "recompute")

ONCE_A_STEP = ("grad_sync", "optimizer", "other")

OVERLAP_ORDER = ("cp", "ulysses", "tp", "ep", "pp", "dp")
"""Communication inside a layer overlaps first, prefetched communication last."""

OverlapGroup = tuple[str, str]
"""Axis (dp for all data-parallel axes) and phase (backward for all that runs in it)."""


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """A message and the time of one call (each)."""

    message: CommOp
    call: Band

    @property
    def time(self) -> Band:
        """The time of all calls in a step."""
        return self.call * self.message.count


@dataclass(frozen=True, slots=True)
class OverlapCompute:
    """Compute of one rank that communication can overlap, in ns per step; core is attention.

    last_microbatches: how many of the microbatches overlap communication that runs once per step.
    """

    forward_ns: float
    backward_ns: float
    core_ns: float
    core_backward_ns: float
    microbatches: int
    last_microbatches: float = 1.0

    def find_pool(self, phase: str) -> tuple[str, float]:
        """The pass that a phase overlaps, and its time (of the last microbatches if once per
        step)."""
        pool = _find_pass(phase)
        pass_ns = self.backward_ns if pool == "backward" else self.forward_ns
        return pool, pass_ns * self.find_window_share(phase)

    def find_window_share(self, phase: str) -> float:
        """The share of a pass that a phase can overlap."""
        return self.last_microbatches / self.microbatches if phase in ONCE_A_STEP else 1.0


def _find_pass(phase: str) -> str:
    return "backward" if phase in ("backward", "grad_sync") else "forward"


def compute_exposed_time(
    job: JobConfig, timed: Iterable[TimedMessage], compute: OverlapCompute
) -> tuple[Communication, ...]:
    """Compute the exposed time of each message.

    Messages of one axis and phase overlap together; compute that overlaps one axis is not used for
    another.
    """
    messages = tuple(timed)
    # Compute the exposed share of each group's time.
    groups = _group_by_overlap(job, messages)
    # By pass, and whether it runs once per step.
    used_ns: defaultdict[tuple[str, bool], float] = defaultdict(float)
    shares = {}
    for key in sorted(groups, key=lambda each: OVERLAP_ORDER.index(each[0])):
        group = groups[key]
        total_ns = sum(each.time.ns for each in group)
        shares[key] = 1.0
        if total_ns and _can_overlap(job, key[0]):
            pool, pass_ns = compute.find_pool(key[1])
            # Compute available for overlap: for context parallelism only attention's core, in a
            # ring without its last step, after which no message follows; in torch's forward only
            # the first.
            axis, phase = key
            # What overlaps another axis in every microbatch is in this window for its share.
            is_once = phase in ONCE_A_STEP
            free_ns = pass_ns - used_ns[pool, True]
            free_ns -= used_ns[pool, False] * compute.find_window_share(phase)
            if axis in ("cp", "ulysses"):
                core_ns = compute.core_backward_ns if phase == "backward" else compute.core_ns
                free_ns = min(
                    free_ns, core_ns * (_compute_ring_share(job, phase) if axis == "cp" else 1.0)
                )
            room_ns = max(0.0, free_ns)
            shares[key] = min(
                1.0,
                max(_compute_min_exposed_share(job, key, group, total_ns), 1 - room_ns / total_ns),
            )
            used_ns[pool, is_once] += total_ns * (1 - shares[key])
    return tuple(
        Communication(
            each.message,
            each.time,
            round(each.time.ns * shares[find_overlap_group(job, each.message)]),
        )
        for each in messages
    )


def _group_by_overlap(
    job: JobConfig, timed: Iterable[TimedMessage]
) -> dict[OverlapGroup, list[TimedMessage]]:
    groups: defaultdict[OverlapGroup, list[TimedMessage]] = defaultdict(list)
    for each in timed:
        groups[find_overlap_group(job, each.message)].append(each)
    return groups


def find_overlap_group(job: JobConfig, message: CommOp) -> OverlapGroup:
    """Axis and phase of the messages that overlap together with this one."""
    axis = "dp" if message.axis in DATA_AXES else message.axis
    in_backward = message.phase in BACKWARD or _is_reduced_every_microbatch(job, message)
    return axis, "backward" if in_backward else message.phase


def _is_reduced_every_microbatch(job: JobConfig, message: CommOp) -> bool:
    """Whether gradient reduction runs in the backward of every microbatch."""
    if message.phase != "grad_sync" or job.parallel.pp > 1:
        return False
    sharded = message.strategy in ("fsdp", "hsdp")
    return sharded or (message.strategy == "zero-2" and is_reduced_every_microbatch(job))


def _can_overlap(job: JobConfig, axis: str) -> bool:
    """Whether the axis can overlap compute; on CPU, FSDP has one stream and waits for each call.

    What torch.compile traces waits for each functional collective where it is called
    (_functional_collectives.py, _maybe_wrap_tensor).
    """
    if axis == "dp" and job.is_fsdp and load_device(job.hardware.family).processor:
        return False
    if axis == "cp":
        waits = is_torch_ring(job) and job.training.compile
        return (_is_ring(job) and not waits) or "cp" in job.parallel.overlap
    return ("cp" if axis == "ulysses" else axis) in job.parallel.overlap


def _compute_ring_share(job: JobConfig, phase: str) -> float:
    """The share of attention's core beside which the ring sends."""
    if is_torch_ring(job):
        return 1.0 if phase == "backward" else 1 / job.parallel.cp
    return 1 - 1 / job.parallel.ring if _is_ring(job) else 1.0


def _is_ring(job: JobConfig) -> bool:
    return job.parallel.ring > 1


def _compute_min_exposed_share(
    job: JobConfig, key: OverlapGroup, group: list[TimedMessage], total_ns: float
) -> float:
    """The share of the calls' time that cannot overlap: the first or last of a phase, and what the
    compute beside the others loses by the multiprocessors that they take; in a ring the last hop of
    the gradients of keys and values, one of 2 (c-1) calls in the backward, with torch one of its c
    all_to_alls."""
    axis, phase = key
    if axis == "tp":
        return TENSOR_EXPOSED_SHARE
    if axis == "ep" and job.hardware.multiprocessors:
        return DISPATCHER_PROCESSORS[job.parallel.dispatcher] / job.hardware.multiprocessors
    if axis == "cp" and phase == "backward" and is_torch_ring(job):
        hops_ns = sum(each.time.ns for each in group if each.message.op == "all_to_all")
        return hops_ns / job.parallel.cp / total_ns
    if axis == "cp" and phase == "backward" and _is_ring(job):
        return 1 / (2 * (job.parallel.ring - 1))
    if axis != "dp":
        return 0.0
    largest_ns = max(each.call.ns for each in group if each.message.count)
    # How often per step such calls start without concurrent compute.
    alone = 1 if phase in ONCE_A_STEP or is_kept_gathered(job) else job.microbatches
    processors = job.hardware.multiprocessors
    taken_ns = 0.0
    for each in group:
        span = place_group(job, each.message.axis)
        over_nodes = min(COLLECTIVE_PROCESSORS, NETWORK_PROCESSORS * span.ranks_per_node)
        channels = COLLECTIVE_PROCESSORS if span.nodes == 1 else over_nodes
        taken_ns += each.time.ns * channels / processors if processors else 0.0
    return min(1.0, (alone * largest_ns + taken_ns) / total_ns)
