"""Prediction of a job's step: combines memory, FLOPs, communication and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model import (
    comm_measured,
    comm_ops,
    comm_time,
    comm_volume,
    device_speed,
    elementwise,
    host_time,
    layer_time,
    memory,
    memory_peak,
    memory_states,
    offload,
    optimizer_time,
    parameters,
    schedule,
    schedule_time,
    weight_copies,
)
from stepsplit.analyzer.model.bound import BOUND, compute_bound, list_compute_parts
from stepsplit.analyzer.model.comm_measured import Rates, TransferSweep
from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.comm_volume import list_shared_ops
from stepsplit.analyzer.model.confidence import (
    Caveat,
    decide_confidence,
    estimate_step_band,
    is_calibrated,
    list_caveats,
    list_open_caveats,
    list_unproven_caveats,
    sort_caveats,
)
from stepsplit.analyzer.model.config import HardwareConfig, JobConfig
from stepsplit.analyzer.model.config_checks import check
from stepsplit.analyzer.model.config_decode import (
    TomlTable,
    collect_kinds,
    decode_table,
    list_required_keys,
    read_table,
)
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.exposed_comm import EXPOSED, TimedMessage
from stepsplit.analyzer.model.features import KeyFeature
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.hardware_config import list_measured_files, read_hardware_file
from stepsplit.analyzer.model.memory import (
    add_allocated_band,
    compute_fit_chance,
    compute_memory,
    is_within_memory,
)
from stepsplit.analyzer.model.offload import compute_host_updates_ns
from stepsplit.analyzer.model.parameters import (
    Convention,
    StageParameters,
    StepFlops,
    compute_mfu,
    count_parameters,
    count_stage_parameters,
    count_step_flops,
)
from stepsplit.analyzer.model.pipeline import (
    NETWORK_SHARE,
    PipelineResult,
    compute_pipeline,
    compute_transfer_ns,
    list_pipeline_messages,
    time_pipeline,
)
from stepsplit.analyzer.model.prediction import (
    GRADIENT_AXIS,
    Band,
    Bound,
    Communication,
    Confidence,
    Prediction,
    StageMemory,
    UnstatedKey,
)
from stepsplit.analyzer.model.rank_layout import (
    GroupPlacement,
    find_equal_stages,
    list_stages,
    place_group,
)
from stepsplit.analyzer.model.stage_split import compute_splits
from stepsplit.analyzer.model.stage_time import StageTime, compute_idle_time, compute_stage_time
from stepsplit.analyzer.model.stragglers import STRAGGLERS, Skew, compute_skew
from stepsplit.analyzer.model.unstated import list_unstated

# predict: a job in, its Prediction out.

CONVENTION: Convention = "C1"


def predict(job: JobConfig, rates: Rates | None = None) -> Prediction:
    """Predict the time, memory and utilization of one training step.

    Args:
        job: model, layout, training settings and hardware, as read_job returns them.
        rates: measured collective times of the cluster, as read_rates returns them; default None:
            the constants of the hardware preset.

    Returns:
        The Prediction: times in ns, memory in bytes, one Split per pipeline stage.

    Raises:
        UsageError: the job is not valid, for example when tp does not divide the heads.

    Examples:
        >>> from stepsplit.analyzer import predict, read_job
        >>> prediction = predict(read_job("job.toml"))
        >>> f"{prediction.split.step_ns / 1e9:.0f} s", prediction.fits
        ('12 s', True)
    """
    predicted = predict_step(job, rates or Rates())
    step, unstated, caveats = predicted.step, predicted.unstated, predicted.caveats
    flops = count_step_flops(job, CONVENTION)
    low_ns, high_ns = estimate_step_band(job, step.split, caveats, unstated)
    bound = compute_bound(job, step.parameters, step.stages, step.timed)
    world, step_ns = job.parallel.world_size, step.split.step_ns
    if bound is not None:
        low_ns = min(max(low_ns, bound.ns), step_ns)
    tokens = job.training.global_batch * job.training.seq_len
    pipeline = step.pipeline
    return Prediction(
        parameters=count_parameters(job.model),
        parameters_per_stage=tuple(each.total for each in step.parameters),
        memory=tuple(add_allocated_band(job, each) for each in step.memory),
        model_flops=flops.model,
        hardware_flops=flops.hardware,
        communication=tuple(
            each for stage in range(job.parallel.pp) for each in step.list_communication(stage)
        ),
        bubble_fraction=pipeline.time.bubble_fraction,
        bubble_overhead=pipeline.time.bubble_overhead,
        splits=step.splits,
        split=step.split,
        low_ns=low_ns,
        high_ns=high_ns,
        convention=CONVENTION,
        mfu=step.compute_mfu(flops.model),
        hfu=step.compute_mfu(flops.hardware),
        tokens_per_s_per_gpu=tokens / step_ns * 1e9 / world,
        fits=is_within_memory(job, step.memory),
        fit_chance=compute_fit_chance(job, step.memory),
        confidence=predicted.confidence,
        notes=tuple(each.text for each in caveats),
        formulas=collect_formulas(
            step.parameters, flops, step.memory, step.timed, step.stages, pipeline, step.skew, bound
        ),
        unstated=unstated,
        read_as=job.notes,
        bound=bound,
        find_parts=partial(
            list_compute_parts, job, step.stages[step.splits.index(step.split)], step.split
        ),
    )


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """The time of a job's step, what of the job is open, and how sure the time is."""

    step: TimedStep
    unstated: tuple[UnstatedKey, ...]
    caveats: tuple[Caveat, ...]
    confidence: Confidence


def predict_step(job: JobConfig, rates: Rates) -> PredictedStep:
    """The part of a prediction that concerns the time of the step. Raises as predict."""
    step = time_step(job, rates)
    unstated = list_alternatives(step, rates)
    caveats = sort_caveats((*step.caveats, *list_open_caveats(unstated)))
    caveats = caveats or list_unproven_caveats(job)
    return PredictedStep(step, unstated, caveats, decide_confidence(job, caveats))


def list_alternatives(step: TimedStep, rates: Rates) -> tuple[UnstatedKey, ...]:
    """The keys that the job does not state and that move its step, by how much they do.

    None of a job whose constants come from the user's own runs, which had the same settings.
    """
    if is_calibrated(step.job):
        return ()

    def time_job(job: JobConfig, feature: KeyFeature) -> int:
        if feature.moves == "launches" and all(
            compute_idle_time(job, one.stage, one.passes, one.comm) == one.idle
            for one in step.stages
        ):
            # As many launches are hidden as before.
            return step.split.step_ns
        timed = time_messages(job, rates) if feature.moves == "messages" else step.timed
        times = compute_stage_times(job, count_stage_parameters(job), timed)
        # All stages take as long, however much of the bubble is that of messages.
        time = time_pipeline(job, times, compute_transfer_ns(timed))
        pipeline = PipelineResult(time, 0.0, (0.0,) * job.parallel.pp)
        return compute_splits(job, times, pipeline, compute_skew(job))[0].step_ns

    fits = is_within_memory(step.job, step.memory)
    return list_unstated(step.job, step.split.step_ns, fits, time_job)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The times of a job's step: those of messages, stages and the pipeline, which a prediction
    lists. split is that of the slowest stage."""

    job: JobConfig
    parameters: tuple[StageParameters, ...]
    timed: dict[int, tuple[TimedMessage, ...]]
    stages: tuple[StageTime, ...]
    pipeline: PipelineResult
    skew: Skew
    memory: tuple[StageMemory, ...]
    splits: tuple[Split, ...]
    split: Split
    caveats: tuple[Caveat, ...]

    def compute_mfu(self, flops: int) -> float | None:
        """The utilization by these FLOPs of a step."""
        peak = self.job.hardware.peak_flops_per_s(self.job.training.dtype)
        return compute_mfu(flops, self.split.step_ns, self.job.parallel.world_size, peak)

    def list_communication(self, stage: int) -> Iterator[Communication]:
        """All messages of a stage, with the axes of the mesh."""
        exposed_ns = self.pipeline.compute_exposed_ns(stage)
        gradient_axis = "dp_replicate" if self.job.parallel.cp == 1 else GRADIENT_AXIS
        for each in (
            *self.stages[stage].communication,
            *list_pipeline_messages(self.timed[stage], exposed_ns),
        ):
            message = each.message.move_to_stage(stage)
            if message.axis == "dp":
                message = replace(message, axis=gradient_axis)
            yield Communication(message, each.time, each.exposed_ns)


def time_step(job: JobConfig, rates: Rates) -> TimedStep:
    """Time one step of the job. Raises UsageError if the job is not valid."""
    check(job)
    stage_params, timed = count_stage_parameters(job), time_messages(job, rates)
    stages = compute_stage_times(job, stage_params, timed)
    pipeline = compute_pipeline(job, stages, timed)
    skew, memory_of_stages = compute_skew(job), compute_memory(job)
    splits = compute_splits(job, stages, pipeline, skew)
    slowest = min(splits, key=lambda split: split.bubble_ns)
    caveats = list_caveats(job, stages, slowest, memory_of_stages)
    return TimedStep(
        job, stage_params, timed, stages, pipeline, skew, memory_of_stages, splits, slowest, caveats
    )


def time_messages(job: JobConfig, rates: Rates) -> dict[int, tuple[TimedMessage, ...]]:
    """Time one call of every message, by stage; equal stages have the same tuple, with the stage
    of the first."""
    call_times: dict[tuple[str, str, str, int], Band] = {}
    shared: dict[int, tuple[TimedMessage, ...]] = {}
    stages = list_shared_ops(job)

    def time_call(op: CommOp) -> Band:
        key = op.strategy, op.op, op.axis, op.message_bytes
        if key not in call_times:
            call_times[key] = compute_call_ns(job, op, rates)
        return call_times[key]

    for ops in stages:
        if id(ops) not in shared:
            shared[id(ops)] = tuple(TimedMessage(op, time_call(op)) for op in ops)
    return {stage: shared[id(ops)] for stage, ops in enumerate(stages)}


def compute_call_ns(job: JobConfig, message: CommOp, rates: Rates) -> Band:
    """Time of one call. Messages of a ring are counted at the sender, because sending and receiving
    overlap; an all_to_all that sends everything to one rank takes the time of a send. DeepEP and
    HybridEP send one message to each node."""
    if message.op == "recv" and message.axis != "pp":
        return Band(0.0, 0.0, 0.0)
    span = place_group(job, "expert_tp" if message.strategy == "expert-tp" else message.axis)
    sent_to = span
    if message.strategy == "ep" and job.parallel.dispatcher != "all-to-all" and span.nodes > 1:
        sent_to = GroupPlacement(span.nodes, 1)
    is_permutation = message.op == "all_to_all" and message.wire_bytes == message.input_bytes
    op = "send" if is_permutation else message.op
    return rates.estimate_call_time(op, message.message_bytes, span, job.hardware, sent_to)


def compute_stage_times(
    job: JobConfig,
    stage_params: tuple[StageParameters, ...],
    timed: dict[int, tuple[TimedMessage, ...]],
) -> tuple[StageTime, ...]:
    """Compute and exposed communication of each stage."""
    speed, times = compute_device_speed(job), list[StageTime]()
    updates_ns = compute_host_updates_ns(job, stage_params)
    cache: dict[tuple[int, int], StageTime] = {}
    for stage, first in zip(list_stages(job), find_equal_stages(job), strict=True):
        messages = timed[stage.index]
        key = first, id(messages)
        if key not in cache:
            cache[key] = compute_stage_time(job, speed, stage, stage_params[stage.index], messages)
        update_ns = updates_ns[stage.index]
        times.append(replace(cache[key], stage=stage, host_update_ns=update_ns))
    return tuple(times)


# The formulas used, in the order in which a prediction lists them.

ALWAYS = (parameters.TOTAL, parameters.MFU, memory.RESERVED)
"""Formulas of every prediction."""

ORDER = (
    parameters.TOTAL, parameters.STAGE, parameters.LAYER_PARAMETERS, parameters.LATENT,
    parameters.EXPERT_PARAMETERS, parameters.ADAPTERS,
    *parameters.CONVENTIONS.values(), parameters.RECOMPUTE, parameters.MFU,
    memory_states.STATES, memory_states.MEGATRON, memory_states.DEEPSPEED,
    memory_states.FSDP_STATES, memory_states.ADAPTED, memory_states.FULL, memory_states.EVERY,
    memory_states.KORTHIKANTI,
    memory_states.LAYER_ACTIVATIONS, memory_states.PARTS, schedule.IN_FLIGHT,
    memory_peak.LOGITS, memory_peak.RING, memory_peak.GATHERED, memory_peak.BUCKETS,
    memory_peak.DUMMY,
    offload.OFFLOAD, memory_peak.PEAK, memory_peak.TORCH,
    memory_peak.FSDP_STEP, memory_peak.UNREDUCED,
    memory.RESERVED,
    comm_ops.WIRE, comm_ops.TENSOR, comm_ops.SEQUENCE, comm_ops.FP8_GATHER, comm_ops.LOSS,
    comm_ops.ADAPTED,
    comm_ops.CONTEXT_RING, comm_ops.CONTEXT_TORCH,
    comm_ops.GATHER, comm_ops.ULYSSES, comm_ops.EXPERT_ROUTING, comm_ops.ONCE_PER_RANK,
    comm_ops.PIPELINE,
    comm_ops.COPIES, comm_ops.TIED,
    comm_volume.FSDP_MESSAGES, comm_volume.HSDP, comm_volume.DDP, comm_volume.REDUNDANCY,
    comm_volume.ALL_REDUCED, comm_volume.ZERO, comm_volume.INSTANCES, comm_ops.NORM,
    comm_time.CHOICE, comm_time.RING_ALGORITHM, comm_time.TREE, comm_time.NVLS,
    comm_time.ALL_TO_ALL, comm_time.SEND, comm_measured.SWEEP, comm_measured.TUNER,
    device_speed.KERNEL, device_speed.LOADED, device_speed.GEMM_TABLE,
    device_speed.ATTENTION, device_speed.UNALIGNED,
    layer_time.CASTS, layer_time.EXPERTS_FP32, elementwise.EAGER, elementwise.UNFUSED,
    elementwise.CLAMPED, layer_time.LORA,
    layer_time.ACCUMULATE, layer_time.MTP, weight_copies.UNIT_COPIES, weight_copies.AUTOCAST,
    weight_copies.BUCKET_COPIES,
    layer_time.SEQUENCE_COPIES, layer_time.EARLY_STOP, layer_time.SELECTIVE_OPS,
    EXPOSED, layer_time.PIECES, schedule_time.FRACTION, schedule_time.OVERHEAD,
    NETWORK_SHARE,
    optimizer_time.UPDATE, optimizer_time.FOREACH, optimizer_time.MUON,
    offload.HOST_UPDATE, offload.TRANSFERS,
    host_time.HOST, host_time.HOST_CALLS, host_time.EXPERT_LAUNCH, STRAGGLERS, BOUND,
)  # fmt: skip


def collect_formulas(
    stage_params: tuple[StageParameters, ...],
    step_flops: StepFlops,
    stage_memory: tuple[StageMemory, ...],
    timed: dict[int, tuple[TimedMessage, ...]],
    stages: tuple[StageTime, ...],
    pipeline: PipelineResult,
    skew: Skew,
    bound: Bound | None,
) -> tuple[Formula, ...]:
    """The formulas of a prediction's parts, each once, in ORDER."""
    messages = [each for stage in timed.values() for each in stage]
    groups = [
        ALWAYS, step_flops.formulas, pipeline.formulas, skew.formulas,
        *(each.formulas for each in stage_params), *(each.formulas for each in stage_memory),
        *(each.formulas for each in stages),
        *(each.message.formulas for each in messages), *(each.call.formulas for each in messages),
    ]  # fmt: skip
    if messages:
        groups.append((comm_ops.WIRE,))
    if bound is not None:
        groups.append((BOUND,))
    # Most messages share a tuple of formulas: read each tuple once.
    unique_groups = {id(group): group for group in groups}.values()
    used_ids = {formula.id for group in unique_groups for formula in group}
    if comm_ops.TENSOR.id in used_ids:
        # Listed with tensor parallelism even if the vocabulary is not split and the loss sends no
        # message.
        used_ids.add(comm_ops.LOSS.id)
    return tuple(formula for formula in ORDER if formula.id in used_ids)


# Measurements that a job.toml names (nccl-tests sweeps, NCCL logs, calibrated runs) -> Rates.

_RATES_HINT = "use the output of nccl-tests, or an NCCL log written with NCCL_DEBUG_SUBSYS=TUNING"


def read_rates(path: str | Path, hardware: HardwareConfig) -> Rates:
    """Read the measured collective times that [hardware] of a job.toml names.

    Uses the keys measured (output of nccl-tests, NCCL logs), transfers (written by a calibration)
    and file. If several give the same op and number of ranks, measured wins.

    Args:
        path: the job.toml; paths in it are relative to its folder.
        hardware: the hardware of the job (job.hardware); its GPUs per node decide which sweeps ran
            on several full nodes.

    Returns:
        The Rates for predict and plan; empty when the file names no measurement.

    Raises:
        DataError: a named file is missing, cannot be read or contains no measurement.

    Examples:
        >>> from stepsplit.analyzer import predict, read_job, read_rates
        >>> job = read_job("job.toml")
        >>> rates = read_rates("job.toml", job.hardware)
        >>> len(rates.sweeps)
        0
        >>> prediction = predict(job, rates)
    """
    return read_hardware_rates(read_table(path), hardware)


def read_hardware_rates(job_table: TomlTable, hardware: HardwareConfig) -> Rates:
    """Read the measurements that [hardware] names: measured, transfers and file.

    Paths are relative to the job.toml. A sweep over more ranks than one node has is taken to run on
    full nodes. For the same op and ranks, measured wins over file. Raises DataError for a file
    without a measurement.
    """
    table = job_table.get_subtable("hardware")
    paths = [Path(table.where).parent / name for name in list_measured_files(table)]
    rates = _read_measured(paths, hardware.gpus_per_node) if paths else Rates()
    file = read_hardware_file(table)
    transfers = (*_read_transfers(table), *(() if file is None else _read_transfers(file)))
    return Rates((*rates.sweeps, *transfers), rates.tables)


def _read_transfers(table: TomlTable) -> tuple[TransferSweep, ...]:
    """The sweeps that a calibration wrote from recorded runs."""
    decode_table(table.select("transfers"), {"transfers": list[dict[str, object]]})
    return tuple(map(_read_transfer, table.list_subtables("transfers")))


def _read_transfer(table: TomlTable) -> TransferSweep:
    values = decode_table(table, collect_kinds(TransferSweep), list_required_keys(TransferSweep))
    try:
        return TransferSweep(**values, swept=False)
    except UsageError as error:
        raise table.build_error("times_ns", str(error), "calibrate again") from None


def _read_measured(paths: list[Path], ranks_per_node: int) -> Rates:
    """Read the files. The readers import numpy, so they are imported only here."""
    from stepsplit.analyzer.readers.any_file import read_files
    from stepsplit.analyzer.readers.nccl.nccl_tests import Sweeps
    from stepsplit.analyzer.readers.nccl.records import NcclLog

    rates = Rates()
    for path in paths:
        contents = [each.content for each in read_files(path)]
        sweeps = [sweep for one in contents if isinstance(one, Sweeps) for sweep in one.sweeps]
        tables = [
            table
            for one in contents
            if isinstance(one, NcclLog)
            for table in comm_measured.build_tuner_tables(one)
        ]
        job_sweeps = comm_measured.build_sweeps(sweeps, ranks_per_node)
        if not job_sweeps and not tables:
            raise DataError(path, "contains no sweep and no tuner table", _RATES_HINT)
        rates = Rates((*rates.sweeps, *job_sweeps), (*rates.tables, *tables))
    return rates
