"""The prediction of a job: the whole model on one page."""

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

# predict: a job in, its Prediction out; the whole model on one page.

CONVENTION: Convention = "C1"

_Alike = tuple[int, tuple[object, ...]]
"""The first stage that holds the same, and what is sent how often at which cost."""


def predict(job: JobConfig, rates: Rates | None = None) -> Prediction:
    """What the job's step should cost; rates hold what was measured of its links.

    Raises UsageError for a job that cannot be.
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
    """Every message of every stage with the time of one call."""
    found: dict[int, list[Timed]] = {stage: [] for stage in range(job.parallel.pp)}
    known: dict[tuple[str, str, str, int], Band] = {}
    for message in messages_of(job):
        kind = (message.strategy, message.op, message.axis, message.message_bytes)
        if kind not in known:
            known[kind] = call_ns(job, message, rates)
        found[message.stage].append(Timed(message, known[kind]))
    return {stage: tuple(timed) for stage, timed in found.items()}


def call_ns(job: JobConfig, message: CommOp, rates: Rates) -> Band:
    """What one call takes. A ring's message costs its time where it is sent: sending and receiving
    overlap."""
    if message.op == "recv" and message.axis != "pp":
        return Band(0.0, 0.0, 0.0)
    span = span_of(job, "expert_tp" if message.strategy == "expert-tp" else message.axis)
    return rates.time_of(message.op, message.message_bytes, span, job.hardware)


def stage_times(
    job: JobConfig, held: tuple[StageParameters, ...], timed: dict[int, tuple[Timed, ...]]
) -> tuple[StageTime, ...]:
    """What each stage computes, and what its compute cannot hide."""
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
    """All messages, stage by stage, by the mesh's own axes."""
    found: list[Communication] = []
    for stage in stages:
        index = stage.stage.index
        found += stage.communication
        found += between_stages(timed[index], pipeline.exposed_ns(index))
    return tuple(_on_mesh(job, each) for each in found)


def _on_mesh(job: JobConfig, one: Communication) -> Communication:
    """dp, all ranks that sum gradients, is dp_replicate unless context parallelism joins them."""
    if one.message.axis != "dp":
        return one
    axis = "dp_replicate" if job.parallel.cp == 1 else GRADIENT_AXIS
    return replace(one, message=replace(one.message, axis=axis))


# The formulas that these computations chose, in the order in which a prediction lists them.

ALWAYS = (parameters.TOTAL, flops.MFU, memory.RESERVED)
"""What every prediction rests on, whatever the job."""

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
    """The formulas that a prediction's parts carry, each once, in ORDER."""
    sent = [each for stage in timed.values() for each in stage]
    groups = [
        ALWAYS, counted.formulas, pipeline.formulas, skew.formulas,
        *(each.formulas for each in held), *(each.formulas for each in kept),
        *(each.formulas for each in stages),
        *(each.message.formulas for each in sent), *(each.each.formulas for each in sent),
    ]  # fmt: skip
    if sent:
        groups.append((comm_ops.WIRE,))
    # Most messages share their formulas: each tuple is looked into once.
    once = {id(group): group for group in groups}.values()
    found = {formula.id for group in once for formula in group}
    if comm_ops.TENSOR.id in found:
        # Listed with tensor parallelism, also where the vocabulary is whole and the loss sends
        # nothing.
        found.add(comm_ops.LOSS.id)
    return tuple(formula for formula in ORDER if formula.id in found)


# What was measured on a job.toml's cluster: nccl-tests sweeps, NCCL logs, own runs -> Rates.

_MEND_RATES = "name the output of nccl-tests, or a log of NCCL with NCCL_DEBUG_SUBSYS=TUNING"


def read_rates(path: str | Path, hardware: HardwareConfig) -> Rates:
    """The measurements that [hardware] of the file names, as rates_of. Raises DataError."""
    return rates_of(read_table(path), hardware)


def rates_of(run: TomlTable, hardware: HardwareConfig) -> Rates:
    """The measurements that [hardware] measured, transfers and file of a job.toml name.

    Paths are relative to the job.toml. A sweep of more ranks than the hardware has in a node ran on
    full nodes. Of one op and ranks, measured counts before the file. Raises DataError for a file
    that holds no measurement.
    """
    table = run.inner("hardware")
    places = [Path(table.where).parent / name for name in measured_files(table)]
    found = _measured(places, hardware.gpus_per_node) if places else Rates()
    file = hardware_file(table)
    own = (*_transfers(table), *(() if file is None else _transfers(file)))
    return Rates((*found.sweeps, *own), found.tables)


def _transfers(table: TomlTable) -> tuple[TransferSweep, ...]:
    """The sweeps that a calibration took from recorded runs."""
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
    """The readers bring numpy along, so they are loaded only where something was measured."""
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
            raise DataError(place, "holds no sweep and no table of times", _MEND_RATES)
        found = Rates((*found.sweeps, *known), (*found.tables, *tables))
    return found
