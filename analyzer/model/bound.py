"""What physics alone allows: the least time of a step at the peaks of the data sheets, and how the
predicted compute is divided among kinds of kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, islice

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.comm_ops import CommOp, count_rank_microbatches
from stepsplit.analyzer.model.comm_volume import list_shared_ops
from stepsplit.analyzer.model.config import Efficiency, JobConfig
from stepsplit.analyzer.model.device_speed import DeviceSpeed, compute_device_speed, find_wide_peak
from stepsplit.analyzer.model.exposed_comm import TimedMessage
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.host_time import compute_layer_host_ns
from stepsplit.analyzer.model.layer_time import FUSED_BACKWARD, LayerPass, compute_chunk_passes
from stepsplit.analyzer.model.memory_states import compute_layers_by_kind, compute_stage_activations
from stepsplit.analyzer.model.optimizer_time import compute_optimizer_ns
from stepsplit.analyzer.model.parameters import StageParameters
from stepsplit.analyzer.model.pipeline import list_chunk_costs
from stepsplit.analyzer.model.prediction import Bound, ComputePart
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.model.rank_layout import (
    GroupPlacement,
    find_equal_stages,
    list_stages,
    place_group,
)
from stepsplit.analyzer.model.schedule_time import compute_pipeline_time
from stepsplit.analyzer.model.stage_time import StageTime

BOUND = Formula(
    "step.bound",
    "max of the resources of a GPU, each at its data sheet's peak: FLOPs of GEMMs and attention,"
    " with the ideal bubble of the schedule; bytes of its memory: weights read in forward and"
    " backward, saved activations written and read, the update; bytes received over the links in a"
    " node, and over those between nodes",
    "Williams et al., Roofline, CACM 2009; peaks of the data sheets, no fitted constant",
)


def compute_bound(
    job: JobConfig,
    parameters: Sequence[StageParameters],
    stages: Sequence[StageTime],
    timed: Mapping[int, tuple[TimedMessage, ...]],
) -> Bound | None:
    """The least time of a step (BOUND). None on a processor, which has no data sheet here."""
    if load_device(job.hardware.family).processor:
        return None
    least = _reduce_in_16_bits(job)
    # The device of the data sheet: kernels reach its peaks.
    perfect = Efficiency(gemm=1.0, attention=0.0, unfused_attention=1.0, memory=1.0, launch_ns=0.0)
    ideal = replace(least, hardware=replace(job.hardware, efficiency=perfect, clock=1.0, gemms=()))
    speed = _build_ideal_speed(ideal)
    # Kernels of the update at the peak of the memory; what it computes takes no time.
    bytes_per_ns = job.hardware.memory_bytes_per_s / 1e9
    memory_speed = DeviceSpeed(math.inf, math.inf, math.inf, math.inf, bytes_per_ns, 0.0)
    layout, configs, equal = job.parallel, list_stages(job), find_equal_stages(job)
    # The layers of all stages that differ at once: a layer takes as long in each.
    firsts = sorted(set(equal))
    chunks = [configs[first].chunks for first in firsts]
    passes = iter(compute_chunk_passes(ideal, speed, tuple(chain.from_iterable(chunks))))
    own = {
        first: tuple(islice(passes, len(each))) for first, each in zip(firsts, chunks, strict=True)
    }
    # The compute alone: a bound waits neither for messages nor for the host.
    nothing = LayerPass(0.0, 0.0, 0.0)
    computing = tuple(
        replace(one, passes=passes, comm=(nothing,) * len(passes), idle=(nothing,) * len(passes))
        for one, passes in zip(stages, (own[first] for first in equal), strict=True)
    )
    costs = list_chunk_costs(job, computing)
    if layout.pp == 1:
        compute_ns = job.microbatches * sum(map(sum, costs))
    else:
        compute_ns = compute_pipeline_time(
            layout.schedule, layout.pp, job.microbatches, layout.chunks, costs
        ).makespan_ns
    m, layers = count_rank_microbatches(job), compute_layers_by_kind(job)
    memory_ns = inside_ns = between_ns = 0.0
    for stage in firsts:
        update_ns = compute_optimizer_ns(ideal, memory_speed, parameters[stage])
        saved = compute_stage_activations(job, configs[stage], layers).saved_bytes
        size = min(job.training.weight_bytes, 1 if job.training.is_quantized else 4)
        moved_bytes = m * 2 * (parameters[stage].total * size + saved)
        memory_ns = max(memory_ns, update_ns + moved_bytes / job.hardware.memory_bytes_per_s * 1e9)
    if least is job:
        messages = {id(each): [one.message for one in each] for each in timed.values()}
    else:
        messages = {id(each): list(each) for each in list_shared_ops(least)}
    for ops in messages.values():
        links = [time_at_link_rate(job, one) for one in ops]
        inside_ns = max(inside_ns, sum(inside for inside, _ in links))
        between_ns = max(between_ns, sum(between for _, between in links))
    resources = (
        ("compute", round(compute_ns)),
        ("memory", round(memory_ns)),
        ("links in a node", round(inside_ns)),
        ("links between nodes", round(between_ns)),
    )
    name, ns = max(resources, key=lambda one: one[1])
    return Bound(ns, name, resources)


def _reduce_in_16_bits(job: JobConfig) -> JobConfig:
    """The job with gradients of 16 bits if it states no dtype: the least that it may send."""
    training = job.training
    is_open = job.stated is not None and "training.gradient_dtype" not in job.stated
    if not is_open or training.gradient_dtype != "fp32" or training.dtype == "fp32":
        return job
    return replace(job, training=replace(training, gradient_dtype="bf16"))


def _build_ideal_speed(job: JobConfig) -> DeviceSpeed:
    """GEMMs and attention at the peak, all else in no time; attention needs its scores once."""
    peak = (job.hardware.peak_flops_per_s(job.training.dtype) or math.inf) / 1e9
    wide = (find_wide_peak(job) or math.inf) / 1e9
    kernel = job.training.attention_kernel
    attention = peak if kernel.endswith("fp8") else wide
    backward = attention * FUSED_BACKWARD / 2 if job.training.flash_attention else attention
    return DeviceSpeed(peak, wide, attention, backward, math.inf, 0.0)


def time_at_link_rate(job: JobConfig, message: CommOp) -> tuple[float, float]:
    """Least time of all calls on the links in a node and on those between nodes, in ns, by any
    algorithm: what a rank has to receive; switches that add need one copy of a sum."""
    if message.op == "recv":
        return 0.0, 0.0
    group = place_group(job, "expert_tp" if message.strategy == "expert-tp" else message.axis)
    if message.strategy == "ep" and job.parallel.dispatcher != "all-to-all" and group.nodes > 1:
        group = GroupPlacement(group.nodes, 1)
    n, g, k = group.ranks, group.ranks_per_node, group.nodes
    total = message.count * message.message_bytes
    if n == 1:
        return 0.0, 0.0
    inside = between = 0.0
    match message.op:
        case "all_reduce":
            inside = total * (1 if job.hardware.nvls else 2 * (g - 1) / g) if g > 1 else 0.0
            between = total / g if k > 1 else 0.0
        case "all_to_all":
            inside, between = total * (g - 1) / n, total * (n - g) / n
        case "send":
            inside, between = (0.0, total) if k > 1 else (total, 0.0)
        case _:
            inside, between = total * (g - 1) / g, total * (k - 1) / k / g
    hardware = job.hardware
    return inside / hardware.intra.bytes_per_s * 1e9, between / hardware.inter.bytes_per_s * 1e9


# The predicted compute by kinds of kernels.


class _AttentionAlone(DeviceSpeed):
    """Speed of a device on which all but attention takes no time."""

    def compute_gemm_ns(
        self, rows: float, columns: float, inner: float, count: int = 1, result_bytes: int = 2
    ) -> float:
        return 0.0

    def compute_memory_ns(self, count_bytes: float, kernels: int = 0) -> float:
        return 0.0


class _MemoryAlone(DeviceSpeed):
    """Speed of a device on which GEMMs take no time."""

    def compute_gemm_ns(
        self, rows: float, columns: float, inner: float, count: int = 1, result_bytes: int = 2
    ) -> float:
        return 0.0


def _change_type(speed: DeviceSpeed, kind: type[DeviceSpeed], **changes: float) -> DeviceSpeed:
    values = {each.name: getattr(speed, each.name) for each in fields(DeviceSpeed)}
    return kind(**{**values, **changes})


def list_compute_parts(job: JobConfig, stage: StageTime, split: Split) -> tuple[ComputePart, ...]:
    """GEMMs, attention, memory-bound kernels and the update of a stage's compute, and the wait for
    the host, each with the rate that is taken for it.

    The first four add up to split.compute_ns, the host's is split.idle_ns.
    """
    speed, m = compute_device_speed(job), count_rank_microbatches(job)
    chunks = stage.stage.chunks
    endless = {"attention_flops_per_ns": math.inf, "attention_backward_flops_per_ns": math.inf}

    def sum_ns(own: DeviceSpeed) -> float:
        passes = compute_chunk_passes(job, own, chunks)
        return m * sum(each.forward_ns + each.input_ns + each.weight_ns for each in passes)

    launches_ns = sum_ns(_change_type(speed, _AttentionAlone, **endless))
    attention_ns = sum_ns(_change_type(speed, _AttentionAlone))
    memory_ns = sum_ns(_change_type(speed, _MemoryAlone, **endless)) - launches_ns
    gemm_ns = sum_ns(speed) - attention_ns - memory_ns
    counting = DeviceSpeed(1.0, 1.0, math.inf, math.inf, math.inf, 0.0)
    gemm_flops = sum_ns(counting)
    counting = replace(counting, attention_flops_per_ns=1.0, attention_backward_flops_per_ns=1.0)
    attention_flops = sum_ns(_change_type(counting, _AttentionAlone))
    bytes_per_s = speed.bytes_per_ns * speed.memory_ratio * 1e9
    optimizer_ns = round(stage.optimizer_ns)
    gemm, attention = round(gemm_ns), round(attention_ns)
    hardware = job.hardware
    peak, wide = hardware.peak_flops_per_s(job.training.dtype), find_wide_peak(job)
    memory = hardware.memory_bytes_per_s
    rest_ns = split.compute_ns - gemm - attention - optimizer_ns
    parts = (
        ComputePart("GEMM", gemm, _divide(gemm_flops, gemm_ns), peak, "flops_per_s"),
        ComputePart(
            "attention", attention, _divide(attention_flops, attention_ns), wide, "flops_per_s"
        ),
        ComputePart("memory-bound", rest_ns, bytes_per_s, memory, "bytes_per_s"),
        ComputePart("optimizer", optimizer_ns, bytes_per_s, memory, "bytes_per_s"),
        ComputePart("host", split.idle_ns, compute_layer_host_ns(job), None, "ns_per_layer"),
    )
    return tuple(part for part in parts if part.ns > 0 or part.name == "GEMM")


def _divide(flops: float, ns: float) -> float:
    return flops / ns * 1e9 if ns else 0.0
