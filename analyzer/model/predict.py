"""Prediction of a job's step: combines memory, FLOPs, communication and schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model import (
    comm_measured,
    comm_ops,
    comm_time,
    comm_volume,
    flops,
    layer_time,
    memory,
    memory_states,
    parameters,
    schedule,
    schedule_time,
    step_time,
)
from stepsplit.analyzer.model.comm_measured import Rates, TransferSweep
from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.comm_volume import messages_of
from stepsplit.analyzer.model.config import (
    HardwareConfig,
    JobConfig,
    first_alike,
    span_of,
    stages_of,
)
from stepsplit.analyzer.model.config_checks import check
from stepsplit.analyzer.model.config_decode import (
    TomlTable,
    decode_table,
    decoded_kinds,
    needed_keys,
    read_table,
)
from stepsplit.analyzer.model.flops import Convention, StepFlops, count_step_flops, mfu
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.hardware_config import hardware_file, measured_files
from stepsplit.analyzer.model.layer_time import speed_of
from stepsplit.analyzer.model.memory import fits, memory_of
from stepsplit.analyzer.model.parameters import StageParameters, stage_parameters, total_parameters
from stepsplit.analyzer.model.prediction import (
    GRADIENT_AXIS,
    Band,
    Communication,
    Prediction,
    StageMemory,
)
from stepsplit.analyzer.model.step_time import (
    Pipelined,
    Skew,
    StageTime,
    Timed,
    band_of,
    between_stages,
    confidence_of,
    doubts,
    pipelined,
    splits_of,
    stage_time,
    straggling,
)

# predict: a job in, its Prediction out.

CONVENTION: Convention = "C1"

_Alike = tuple[int, tuple[object, ...]]
"""Stages with the same key take the same time: first equal stage, and its messages' costs."""


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

    Example:
        >>> from stepsplit.analyzer import predict, read_job
        >>> prediction = predict(read_job("job.toml"))
        >>> f"{prediction.split.step_ns / 1e9:.0f} s", prediction.fits
        ('12 s', True)
    """
    check(job)
    timed = timed_messages(job, rates or Rates())
    held = stage_parameters(job)
    stages = stage_times(job, held, timed)
    pipeline = pipelined(job, stages, timed)
    skew, counted, kept = straggling(job), count_step_flops(job, CONVENTION), memory_of(job)
    splits = splits_of(job, stages, pipeline, skew)
    slowest = min(splits, key=lambda split: split.bubble_ns)
    reasons = doubts(job, stages, slowest)
    low_ns, high_ns = band_of(job, slowest, reasons)
    peak = job.hardware.peak_flops_per_s(job.training.dtype)
    world, step_ns = job.parallel.world_size, slowest.step_ns
    tokens = job.training.global_batch * job.training.seq_len
    return Prediction(
        parameters=total_parameters(job.model),
        parameters_per_stage=tuple(each.total for each in held),
        memory=kept,
        model_flops=counted.model,
        hardware_flops=counted.hardware,
        communication=_communication(job, stages, timed, pipeline),
        bubble_fraction=pipeline.time.bubble_fraction,
        bubble_overhead=pipeline.time.bubble_overhead,
        splits=splits,
        split=slowest,
        low_ns=low_ns,
        high_ns=high_ns,
        convention=CONVENTION,
        mfu=mfu(counted.model, step_ns, world, peak),
        hfu=mfu(counted.hardware, step_ns, world, peak),
        tokens_per_s_per_gpu=tokens / step_ns * 1e9 / world,
        fits=fits(job, kept),
        confidence=confidence_of(job, reasons),
        notes=reasons,
        formulas=collect_formulas(held, counted, kept, timed, stages, pipeline, skew),
    )


def timed_messages(job: JobConfig, rates: Rates) -> dict[int, tuple[Timed, ...]]:
    """Time one call of every message, by stage."""
    found: dict[int, list[Timed]] = {stage: [] for stage in range(job.parallel.pp)}
    known: dict[tuple[str, str, str, int], Band] = {}
    for message in messages_of(job):
        kind = (message.strategy, message.op, message.axis, message.message_bytes)
        if kind not in known:
            known[kind] = call_ns(job, message, rates)
        found[message.stage].append(Timed(message, known[kind]))
    return {stage: tuple(timed) for stage, timed in found.items()}


def call_ns(job: JobConfig, message: CommOp, rates: Rates) -> Band:
    """Time of one call. Messages of a ring are counted at the sender, because sending and receiving
    overlap."""
    if message.op == "recv" and message.axis != "pp":
        return Band(0.0, 0.0, 0.0)
    span = span_of(job, "expert_tp" if message.strategy == "expert-tp" else message.axis)
    return rates.time_of(message.op, message.message_bytes, span, job.hardware)


def stage_times(
    job: JobConfig, held: tuple[StageParameters, ...], timed: dict[int, tuple[Timed, ...]]
) -> tuple[StageTime, ...]:
    """Compute and exposed communication of each stage."""
    speed, found = speed_of(job), list[StageTime]()
    known: dict[_Alike, StageTime] = {}
    for stage, first in zip(stages_of(job), first_alike(job), strict=True):
        own = timed[stage.index]
        alike = first, tuple((e.message.phase, e.message.count, id(e.each)) for e in own)
        if alike not in known:
            known[alike] = stage_time(job, speed, stage, held[stage.index], own)
        found.append(known[alike].on(stage))
    return tuple(found)


def _communication(
    job: JobConfig,
    stages: tuple[StageTime, ...],
    timed: dict[int, tuple[Timed, ...]],
    pipeline: Pipelined,
) -> tuple[Communication, ...]:
    """All messages, stage by stage, with the axes of the mesh."""
    found: list[Communication] = []
    for stage in stages:
        index = stage.stage.index
        found += stage.communication
        found += between_stages(timed[index], pipeline.exposed_ns(index))
    return tuple(_on_mesh(job, each) for each in found)


def _on_mesh(job: JobConfig, one: Communication) -> Communication:
    """Replace dp by dp_replicate, or by dp_cp when gradient reduction spans context parallelism."""
    if one.message.axis != "dp":
        return one
    axis = "dp_replicate" if job.parallel.cp == 1 else GRADIENT_AXIS
    return replace(one, message=replace(one.message, axis=axis))


# The formulas used, in the order in which a prediction lists them.

ALWAYS = (parameters.TOTAL, flops.MFU, memory.RESERVED)
"""Formulas of every prediction."""

ORDER = (
    parameters.TOTAL, parameters.STAGE, parameters.LAYER_PARAMETERS, parameters.LATENT,
    parameters.EXPERT_PARAMETERS,
    *flops.CONVENTIONS.values(), flops.RECOMPUTE, flops.MFU,
    memory_states.STATES, memory_states.MEGATRON, memory_states.DEEPSPEED,
    memory_states.FSDP_STATES, memory_states.FULL, memory_states.EVERY, memory_states.KORTHIKANTI,
    memory_states.LAYER_ACTIVATIONS, schedule.IN_FLIGHT,
    memory.LOGITS, memory.GATHERED, memory.DUMMY, memory.OFFLOAD, memory.PEAK, memory.RESERVED,
    comm_ops.WIRE, comm_ops.TENSOR, comm_ops.SEQUENCE, comm_ops.LOSS, comm_ops.CONTEXT_RING,
    comm_ops.GATHER, comm_ops.ULYSSES, comm_ops.EXPERT_ROUTING, comm_ops.PIPELINE,
    comm_ops.COPIES, comm_ops.TIED,
    comm_volume.FSDP_MESSAGES, comm_volume.HSDP, comm_volume.DDP, comm_volume.REDUNDANCY,
    comm_volume.ALL_REDUCED, comm_volume.ZERO, comm_ops.NORM,
    comm_time.CHOICE, comm_time.RING_ALGORITHM, comm_time.TREE, comm_time.NVLS,
    comm_time.ALL_TO_ALL, comm_time.SEND, comm_measured.SWEEP, comm_measured.TUNER,
    layer_time.KERNEL, layer_time.ACCUMULATE, layer_time.UNIT_COPIES, step_time.EXPOSED,
    layer_time.PIECES, schedule_time.FRACTION, schedule_time.OVERHEAD,
    layer_time.UPDATE, layer_time.HOST, step_time.STRAGGLERS,
)  # fmt: skip


def collect_formulas(
    held: tuple[StageParameters, ...],
    counted: StepFlops,
    kept: tuple[StageMemory, ...],
    timed: dict[int, tuple[Timed, ...]],
    stages: tuple[StageTime, ...],
    pipeline: Pipelined,
    skew: Skew,
) -> tuple[Formula, ...]:
    """The formulas of a prediction's parts, each once, in ORDER."""
    sent = [each for stage in timed.values() for each in stage]
    groups = [
        ALWAYS, counted.formulas, pipeline.formulas, skew.formulas,
        *(each.formulas for each in held), *(each.formulas for each in kept),
        *(each.formulas for each in stages),
        *(each.message.formulas for each in sent), *(each.each.formulas for each in sent),
    ]  # fmt: skip
    if sent:
        groups.append((comm_ops.WIRE,))
    # Most messages share a tuple of formulas: read each tuple once.
    once = {id(group): group for group in groups}.values()
    found = {formula.id for group in once for formula in group}
    if comm_ops.TENSOR.id in found:
        # Listed with tensor parallelism even if the vocabulary is not split and the loss sends no
        # message.
        found.add(comm_ops.LOSS.id)
    return tuple(formula for formula in ORDER if formula.id in found)


# Measurements that a job.toml names (nccl-tests sweeps, NCCL logs, calibrated runs) -> Rates.

_MEND_RATES = "use the output of nccl-tests, or an NCCL log written with NCCL_DEBUG_SUBSYS=TUNING"


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

    Example:
        >>> from stepsplit.analyzer import predict, read_job, read_rates
        >>> job = read_job("job.toml")
        >>> rates = read_rates("job.toml", job.hardware)
        >>> len(rates.sweeps)
        0
        >>> prediction = predict(job, rates)
    """
    return rates_of(read_table(path), hardware)


def rates_of(run: TomlTable, hardware: HardwareConfig) -> Rates:
    """Read the measurements that [hardware] names: measured, transfers and file.

    Paths are relative to the job.toml. A sweep over more ranks than one node has is taken to run on
    full nodes. For the same op and ranks, measured wins over file. Raises DataError for a file
    without a measurement.
    """
    table = run.inner("hardware")
    places = [Path(table.where).parent / name for name in measured_files(table)]
    found = _measured(places, hardware.gpus_per_node) if places else Rates()
    file = hardware_file(table)
    own = (*_transfers(table), *(() if file is None else _transfers(file)))
    return Rates((*found.sweeps, *own), found.tables)


def _transfers(table: TomlTable) -> tuple[TransferSweep, ...]:
    """The sweeps that a calibration wrote from recorded runs."""
    stated = decode_table(table.select("transfers"), {"transfers": list[dict[str, object]]})
    path = table.path("transfers")
    return tuple(
        _transfer(TomlTable(table.where, f"{path}[{i}]", each))
        for i, each in enumerate(stated.get("transfers", ()))
    )


def _transfer(table: TomlTable) -> TransferSweep:
    stated = decode_table(table, decoded_kinds(TransferSweep), needed_keys(TransferSweep))
    try:
        return TransferSweep(**stated, swept=False)
    except UsageError as error:
        raise table.error("times_ns", str(error), "calibrate again") from None


def _measured(places: list[Path], ranks_per_node: int) -> Rates:
    """Read the files. The readers import numpy, so they are imported only here."""
    from stepsplit.analyzer.model.comm_measured import sweeps_of, tuner_tables
    from stepsplit.analyzer.readers.nccl.nccl_tests import Sweeps
    from stepsplit.analyzer.readers.nccl.records import NcclLog
    from stepsplit.analyzer.readers.registry import read_files

    found = Rates()
    for place in places:
        read = [each.content for each in read_files(place)]
        sweeps = [sweep for one in read if isinstance(one, Sweeps) for sweep in one.sweeps]
        tables = [table for one in read if isinstance(one, NcclLog) for table in tuner_tables(one)]
        known = sweeps_of(sweeps, ranks_per_node)
        if not known and not tables:
            raise DataError(place, "contains no sweep and no tuner table", _MEND_RATES)
        found = Rates((*found.sweeps, *known), (*found.tables, *tables))
    return found
