"""What a calibration fits: a recorded run's compute, transfers, memory and kernels."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.gap.config_from_trace import infer_job
from stepsplit.analyzer.model.comm_measured import SWEEP_OPS
from stepsplit.analyzer.model.comm_ops import count_rank_microbatches
from stepsplit.analyzer.model.config import Efficiency, HardwareConfig, JobConfig
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.device_speed import DeviceSpeed, compute_device_speed
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.host_time import compute_launch_time
from stepsplit.analyzer.model.layer_time import (
    Gemm,
    build_head_gemm,
    list_attention_gemms,
    list_expert_gemms,
    list_mlp_gemms,
)
from stepsplit.analyzer.model.parameters import StageParameters, count_stage_parameters
from stepsplit.analyzer.model.preset_names import find_preset, list_hardware_names
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.model.rank_layout import StageConfig, list_stages
from stepsplit.analyzer.model.stage_time import compute_stage_time
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.recording import Recording, read_recording
from stepsplit.analyzer.split.kernel_shapes import (
    AttentionShape,
    GemmShape,
    find_attention_kernel,
    find_dtype,
    is_backward,
    parse_attention,
    parse_gemm,
)
from stepsplit.analyzer.split.kernels import (
    KernelWork,
    collect_compute,
    find_kernel_work,
    sum_kernel_families,
)
from stepsplit.analyzer.split.run import RankSplit, RunSplit, find_recorded_device
from stepsplit.analyzer.split_recording import split_recording

# The measurements of a recorded run: compute by kind, idle time, transfers, memory.

PRODUCTS, ATTENTION = "gemm", "attention"
"""Names of kernel families in the built-in rules."""


@dataclass(frozen=True, slots=True)
class StageSample:
    """The median full step of a stage's ranks with its compute by kind, in ns.

    products_ns, attention_ns and other_ns add up to split.compute_ns; products_ns is 0 if the trace
    has no kernel names. peak_bytes is the largest allocation of a rank, None if not measured.
    """

    stage: int
    step_ns: int
    split: Split
    products_ns: float
    attention_ns: float
    other_ns: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """The median transfer time, without waits, of `count` calls of one size in a group."""

    op: str
    ranks: int
    ranks_per_node: int
    message_bytes: int
    count: int
    ns: int


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """One recorded run: job config, recorded stages and transfers, cores of a host (0: unknown),
    the kernels whose shapes were recorded, and a caveat about the stated device ("": none)."""

    name: str
    job: JobConfig
    stages: tuple[StageSample, ...]
    transfers: tuple[Transfer, ...]
    cores: int = 0
    kernels: KernelSamples = field(default_factory=lambda: KernelSamples())
    caveat: str = ""


def read_sample(
    place: str, job_table: TomlTable | None, rules: Rules = BUILT_IN
) -> CalibrationSample:
    """Read the recording of a run; job_table is a job.toml for what cannot be inferred.

    Raises DataError, also for a recording without a full step; UsageError for an incomplete config
    or one of other hardware.
    """
    recording = read_recording([place], rules=rules)
    split = split_recording(recording)
    stages = collect_stages(recording, split)
    if not stages:
        raise DataError(place, "no full step", "record at least three complete steps")
    job = infer_job(recording.spec, split, job_table)
    hosts = () if recording.spec is None else recording.spec.hosts
    cores = max((host.cores for host in hosts), default=0)
    device = find_recorded_device(recording.spec, split)
    return CalibrationSample(
        name=recording.name,
        job=job,
        stages=stages,
        transfers=collect_transfers(split),
        cores=cores,
        kernels=collect_kernels(split),
        caveat=check_device(recording.name, device, job.hardware),
    )


def check_device(run: str, device: str, hardware: HardwareConfig) -> str:
    """Compare the device of a run, as its driver reports it, with the stated hardware.

    Returns a caveat if that is another device of the same family, else "". Raises UsageError for
    another family.
    """
    preset = find_preset(device)
    stated = hardware.family
    # A device without a preset is some GPU.
    recorded = load_hardware(preset).family if preset is not None else ""
    is_other = recorded != stated if recorded else load_device(stated).processor
    if is_other:
        raise UsageError(
            f"different hardware: {run} ran on {preset or device or 'a GPU'}, [hardware] is"
            f" {hardware.name}; leave [hardware] out, or calibrate from a run on {hardware.name}"
        )
    if preset in (None, hardware.name) or hardware.name not in list_hardware_names():
        return ""
    return f"{run} ran on {preset}, [hardware] is {hardware.name}: its peaks are the limits"


def collect_stages(recording: Recording, split: RunSplit) -> tuple[StageSample, ...]:
    """One entry per stage with full steps, in order."""
    stages: dict[int, list[RankSplit]] = {}
    for rank in split.ranks:
        if any(step.kind == "full" for step in rank.steps):
            stages.setdefault(split.layout.find_stage(rank.trace.rank), []).append(rank)
    samples = []
    for stage, ranks in sorted(stages.items()):
        steps = [step.split for rank in ranks for step in rank.steps if step.kind == "full"]
        # The median of each bucket, which need not add up to the median step.
        columns = np.median([[*one.buckets_ns, one.overlapped_ns] for one in steps], axis=0)
        median_split = Split(*(int(ns) for ns in columns))
        rows = sum_kernel_families([rank.trace for rank in ranks], [rank.windows for rank in ranks])
        total_ns = sum(row.total_ns for row in rows) or 1
        family_ns = Counter[str]()
        for row in rows:
            family_ns[row.family] += row.total_ns
        products, attention = family_ns[PRODUCTS] / total_ns, family_ns[ATTENTION] / total_ns
        present = {rank.trace.rank for rank in ranks}
        peaks = [
            record.memory.peak_allocated_bytes
            for record in recording.records
            if record.memory and record.memory.peak_allocated_bytes and record.rank.rank in present
        ]
        samples.append(
            StageSample(
                stage=stage,
                step_ns=int(median(one.step_ns for one in steps)),
                split=median_split,
                products_ns=median_split.compute_ns * products,
                attention_ns=median_split.compute_ns * attention,
                other_ns=median_split.compute_ns * (1 - products - attention),
                peak_bytes=max(peaks, default=None),
            )
        )
    return tuple(samples)


def collect_transfers(split: RunSplit) -> tuple[Transfer, ...]:
    """The calls with measured transfers, one row per kind and size."""
    host = {rank.trace.rank: rank.trace.host for rank in split.ranks}
    rows = []
    for one in split.collectives:
        if one.busbw_bytes_per_s is None or one.message_bytes is None or one.op == "recv":
            continue
        ranks = split.matched.groups[one.group].ranks
        hosts = [host.get(rank, "") for rank in ranks]
        per_node = len(ranks) // len(set(hosts))
        rows.append(
            Transfer(
                SWEEP_OPS.get(one.op, one.op), len(ranks), max(1, per_node),
                one.message_bytes, one.count, one.transfer_ns_median,
            )
        )  # fmt: skip
    return tuple(rows)


# Kernels whose shapes were recorded.


@dataclass(frozen=True, slots=True)
class GemmSample:
    """All runs of a GEMM of one shape: their number and summed time in ns."""

    shape: GemmShape
    dtype: str
    count: int
    took_ns: int


@dataclass(frozen=True, slots=True)
class AttentionSample:
    """All runs of an attention kernel (as attention_kernel in job.toml) on one shape."""

    shape: AttentionShape
    kernel: str
    backward: bool
    count: int
    took_ns: int


@dataclass(frozen=True, slots=True)
class KernelSamples:
    """The GEMMs and attention kernels of the full steps of all ranks with recorded shapes, and the
    time in ns of all GEMMs."""

    gemms: tuple[GemmSample, ...] = ()
    attention: tuple[AttentionSample, ...] = ()
    all_gemms_ns: int = 0


_GEMM_OPS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$")
"""The ops of a CPU run that multiply themselves; those around them have the same shapes."""

_SPLIT_SUM = ("splitk", "reduce")
"""Both are in the name of the second kernel of a GEMM with a split inner dimension."""


def collect_kernels(split: RunSplit) -> KernelSamples:
    """The kernels of the run with shapes; none of attention on a CPU, where its ops are nested."""
    counts: dict[tuple[KernelWork, str], list[int]] = defaultdict(lambda: [0, 0])
    for rank in split.ranks:
        compute = collect_compute(rank.trace, rank.windows)
        work, work_id = find_kernel_work(rank.trace, compute.row)
        count = np.bincount(work_id, minlength=len(work))
        took = np.bincount(work_id, compute.took_ns, minlength=len(work))
        family = dict(zip(work_id.tolist(), compute.name_id.tolist(), strict=True))
        for i, one in enumerate(work):
            own = counts[one, compute.kinds.find_family(family[i])]
            own[0] += int(count[i])
            own[1] += round(took[i])
    on_device = all(rank.trace.on_device for rank in split.ranks)
    gemms, attention, total = [], [], 0
    for (one, name), (count_of, took_ns) in counts.items():
        if name == PRODUCTS:
            total += took_ns
            shape = parse_gemm(one.shapes)
            if shape and (_GEMM_OPS.search(one.name) or on_device):
                again = all(word in one.name.lower() for word in _SPLIT_SUM)
                gemms.append(GemmSample(shape, find_dtype(one), 0 if again else count_of, took_ns))
        elif name == ATTENTION and on_device and (core := parse_attention(one.shapes)):
            kernel, backward = find_attention_kernel(one.name), is_backward(one.name)
            attention.append(AttentionSample(core, kernel, backward, count_of, took_ns))
    return KernelSamples(tuple(gemms), tuple(attention), total)


# The predicted compute of a stage, separated by constant.


@dataclass(frozen=True, slots=True)
class StageParts:
    """One step of a stage's rank: compute = products / gemm + core / attention + (product_moves +
    other_moves) / memory + (product_launches + other_launches) x launch_ns; times in ns at the
    peaks. host counts launches of a layer's forward.
    """

    products: float
    core: float
    product_moves: float
    other_moves: float
    product_launches: float
    other_launches: float
    host: float


def compute_parts(job: JobConfig) -> tuple[StageParts, ...]:
    """The parts of every stage in order."""
    peak = compute_device_speed(set_peak(job))
    # Devices that are infinitely fast except for one kind of work, whose time thus remains.
    free = replace(
        peak, linear_flops_per_ns=math.inf, head_flops_per_ns=math.inf,
        attention_flops_per_ns=math.inf, attention_backward_flops_per_ns=math.inf,
        bytes_per_ns=math.inf,
    )  # fmt: skip
    work = replace(
        free,
        linear_flops_per_ns=peak.linear_flops_per_ns,
        head_flops_per_ns=peak.head_flops_per_ns,
    )
    core = replace(
        free,
        attention_flops_per_ns=peak.attention_flops_per_ns,
        attention_backward_flops_per_ns=peak.attention_backward_flops_per_ns,
    )
    moves, starts = replace(free, bytes_per_ns=peak.bytes_per_ns), replace(free, launch_ns=1.0)
    # A host that takes 1 ns for each launch counts them.
    unit = set_efficiency(job, replace(job.hardware.efficiency, host_ns=1.0))
    found = []
    for stage, parameters in zip(list_stages(job), count_stage_parameters(job), strict=True):
        product_moves = _compute_products_ns(job, stage, moves)
        product_starts = _compute_products_ns(job, stage, starts)
        launches = 0.0
        for chunk in stage.chunks:
            launch = compute_launch_time(unit, chunk.layers, chunk.expert_layers)
            launches += launch.forward_ns + launch.input_ns
        found.append(
            StageParts(
                products=_compute_ns(job, stage, parameters, work),
                core=_compute_ns(job, stage, parameters, core),
                product_moves=product_moves,
                other_moves=_compute_ns(job, stage, parameters, moves) - product_moves,
                product_launches=product_starts,
                other_launches=_compute_ns(job, stage, parameters, starts) - product_starts,
                host=count_rank_microbatches(job) * launches,
            )
        )
    return tuple(found)


def set_peak(job: JobConfig) -> JobConfig:
    known = job.hardware.efficiency
    peak = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, tile=known.tile, gemm_result=known.gemm_result)
    return set_efficiency(replace(job, hardware=replace(job.hardware, attention=None)), peak)


def set_efficiency(job: JobConfig, efficiency: Efficiency) -> JobConfig:
    return replace(job, hardware=replace(job.hardware, efficiency=efficiency))


def _compute_ns(
    job: JobConfig, stage: StageConfig, parameters: StageParameters, speed: DeviceSpeed
) -> float:
    found = compute_stage_time(job, speed, stage, parameters, ())
    return count_rank_microbatches(job) * found.compute_ns + found.optimizer_ns


def _compute_products_ns(job: JobConfig, stage: StageConfig, speed: DeviceSpeed) -> float:
    """The time of the GEMMs, recomputed ones included."""
    again = job.training.recompute in ("full", "every", "sqrt")
    dense = (*list_attention_gemms(job), *list_mlp_gemms(job, job.model.ffn))
    total_ns = stage.dense_layers * _sum_passes_ns(dense, speed, again)
    if job.model.experts is not None:
        mixture = (*list_attention_gemms(job), *list_expert_gemms(job, job.model.experts))
        total_ns += stage.expert_layers * _sum_passes_ns(mixture, speed, again)
    if stage.head:
        total_ns += _sum_passes_ns((build_head_gemm(job),), speed, False)
    return count_rank_microbatches(job) * total_ns


def _sum_passes_ns(products: tuple[Gemm, ...], speed: DeviceSpeed, again: bool) -> float:
    return sum(
        (2 if again else 1) * one.compute_forward_ns(speed)
        + one.compute_input_ns(speed)
        + one.compute_weight_ns(speed)
        for one in products
    )
