"""predict: a job in, its Prediction out; the whole model on one page."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.comm.measured import Rates
from stepsplit.analyzer.model.comm.messages import messages_of
from stepsplit.analyzer.model.memory.memory import fits, memory_of
from stepsplit.analyzer.model.prediction import Band, Communication, Message, Prediction
from stepsplit.analyzer.model.spec.checks import check
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.span import span_of
from stepsplit.analyzer.model.spec.stages import first_alike, stages_of
from stepsplit.analyzer.model.step.confidence import band_of, confidence_of, doubts
from stepsplit.analyzer.model.step.exposed import Timed
from stepsplit.analyzer.model.step.pipeline import between_stages, pipelined
from stepsplit.analyzer.model.step.speed import speed_of
from stepsplit.analyzer.model.step.split import Pipelined, splits_of
from stepsplit.analyzer.model.step.stage_time import StageTime, stage_time
from stepsplit.analyzer.model.used import formulas_of
from stepsplit.analyzer.model.work.conventions import Convention
from stepsplit.analyzer.model.work.flops import hardware_flops, model_flops
from stepsplit.analyzer.model.work.mfu import mfu
from stepsplit.analyzer.model.work.parameters import (
    StageParameters,
    stage_parameters,
    total_parameters,
)

CONVENTION: Convention = "C1"
_Alike = tuple[int, tuple[object, ...]]
"""The first stage that holds the same, and what is sent how often at which cost."""


def predict(job: Job, rates: Rates | None = None) -> Prediction:
    """What the job's step should cost; rates hold what was measured of its links.

    Raises UsageError for a job that cannot be.
    """
    check(job)
    rates = rates or Rates()
    timed = timed_messages(job, rates)
    held = stage_parameters(job)
    stages = stage_times(job, held, timed)
    pipeline = pipelined(job, stages, timed)
    splits = splits_of(job, stages, pipeline)
    memory = memory_of(job)
    slowest = min(splits, key=lambda split: split.bubble_ns)
    flops, executed = model_flops(job, CONVENTION), hardware_flops(job, CONVENTION)
    reasons = doubts(job, stages, slowest)
    low_ns, high_ns = band_of(job, slowest, reasons)
    peak = job.hardware.peak_flops_per_s(job.recipe.dtype)
    world, step_ns = job.layout.world_size, slowest.step_ns
    return Prediction(
        parameters=total_parameters(job.model),
        parameters_per_stage=tuple(each.total for each in held),
        memory=memory,
        model_flops=flops,
        hardware_flops=executed,
        communication=_communication(job, stages, timed, pipeline),
        bubble_fraction=pipeline.time.bubble_fraction,
        bubble_overhead=pipeline.time.bubble_overhead,
        splits=splits,
        split=slowest,
        low_ns=low_ns,
        high_ns=high_ns,
        convention=CONVENTION,
        mfu=mfu(flops, step_ns, world, peak),
        hfu=mfu(executed, step_ns, world, peak),
        tokens_per_s_per_gpu=job.recipe.global_batch * job.recipe.seq_len / step_ns * 1e9 / world,
        fits=fits(job, memory),
        confidence=confidence_of(job, reasons),
        notes=reasons,
        formulas=formulas_of(job, rates),
    )


def timed_messages(job: Job, rates: Rates) -> dict[int, tuple[Timed, ...]]:
    """Every message of every stage with the time of one call."""
    found: dict[int, list[Timed]] = {stage: [] for stage in range(job.layout.pp)}
    known: dict[tuple[str, str, str, int], Band] = {}
    for message in messages_of(job):
        kind = (message.strategy, message.op, message.axis, message.message_bytes)
        if kind not in known:
            known[kind] = call_ns(job, message, rates)
        found[message.stage].append(Timed(message, known[kind]))
    return {stage: tuple(timed) for stage, timed in found.items()}


def call_ns(job: Job, message: Message, rates: Rates) -> Band:
    """What one call takes. A ring's message costs its time where it is sent: sending and receiving
    overlap."""
    if message.op == "recv" and message.axis != "pp":
        return Band(0.0, 0.0, 0.0)
    span = span_of(job, "expert_tp" if message.strategy == "expert-tp" else message.axis)
    return rates.time_of(message.op, message.message_bytes, span, job.hardware)


def stage_times(
    job: Job, held: tuple[StageParameters, ...], timed: dict[int, tuple[Timed, ...]]
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
    job: Job,
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


def _on_mesh(job: Job, one: Communication) -> Communication:
    """dp, all ranks that sum gradients, is dp_replicate unless context parallelism joins them."""
    if one.message.axis != "dp":
        return one
    axis = "dp_replicate" if job.layout.cp == 1 else "dp_cp"
    return replace(one, message=replace(one.message, axis=axis))
