"""The time of one microbatch on one rank of a stage, and of what runs once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stepsplit.analyzer.model.comm_ops import count_rank_microbatches
from stepsplit.analyzer.model.comm_volume import is_kept_gathered
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.model.exposed_comm import (
    BACKWARD,
    EXPOSED,
    OverlapCompute,
    TimedMessage,
    can_overlap,
    compute_exposed_time,
    count_last_microbatches,
    find_overlap_group,
    overlap_idle_ns,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.host_time import (
    HOST,
    HOST_CALLS,
    compute_expert_wait,
    compute_host_wait,
    compute_launch_time,
)
from stepsplit.analyzer.model.layer_time import LayerPass, compute_chunk_passes
from stepsplit.analyzer.model.memory_states import compute_stage_activations, find_offloaded_share
from stepsplit.analyzer.model.offload import TRANSFERS, compute_offload_ns, list_copies
from stepsplit.analyzer.model.optimizer_time import compute_optimizer_ns, list_optimizer_formulas
from stepsplit.analyzer.model.parameters import StageParameters
from stepsplit.analyzer.model.prediction import Communication
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.model.rank_layout import StageConfig
from stepsplit.analyzer.model.weight_copies import time_weight_copies


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
    copies = tuple(time_weight_copies(job, speed, parameters, chunk) for chunk in stage.chunks)
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
            last_microbatches=count_last_microbatches(job),
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
        idle_overlapped_ns=0.0 if is_cpu else overlap_idle_ns(job, messages, communication, idle),
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
            if axis != "cp" and can_overlap(job, axis):
                overlapping_ns += each.exposed_ns / m
    weight_ns = overlapping_ns * weight_share
    total = LayerPass(forward_ns, backward_ns - weight_ns, weight_ns)
    if not stage.layers:
        return tuple(total * (1 / len(chunks)) for _ in chunks)
    return tuple(total * (chunk.layers / stage.layers) for chunk in chunks)
