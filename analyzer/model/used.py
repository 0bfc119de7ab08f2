"""Which formulas a prediction of a job rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stepsplit.analyzer.model.comm import (
    algorithms,
    calls,
    context,
    data,
    embedding,
    experts,
    norm,
    pairs,
    pipeline,
    sharded,
    sweep,
    table,
    tensor,
    time,
)
from stepsplit.analyzer.model.comm.measured import Rates
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory import (
    activations,
    band,
    offload,
    peak,
    recompute,
    states,
    transient,
)
from stepsplit.analyzer.model.schedule import steady
from stepsplit.analyzer.model.schedule.in_flight import IN_FLIGHT
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import TWO_STAGES
from stepsplit.analyzer.model.spec.span import span_of
from stepsplit.analyzer.model.step import exposed, host, optimizer, ring, speed, split, traffic
from stepsplit.analyzer.model.work import flops, layers, mfu, parameters
from stepsplit.analyzer.model.work.conventions import CONVENTIONS, Convention

CONTEXTS = {"ring": context.RING, "all-gather": context.GATHER, "ulysses": context.ULYSSES}
"""By Layout.context_kind."""
_REDUCED = ("tp", "dp", "dp_replicate", "expert_dp")
"""Axes over which something large is summed, perhaps by the switch."""


def formulas_of(
    job: Job, rates: Rates | None = None, convention: Convention = "C1"
) -> tuple[Formula, ...]:
    """The formulas of the job's parameters, FLOPs, memory, messages and times, each once.

    rates are what was measured of its links, convention that of its FLOPs.
    """
    return (
        *_of_work(job, convention),
        *_of_memory(job),
        *_of_messages(job),
        *_of_links(job, rates or Rates()),
        *_of_step(job),
    )


def states_formula(job: Job) -> Formula:
    """The convention by which the job's framework keeps weights, gradients and optimizer."""
    match job.recipe.framework:
        case "megatron":
            return states.MEGATRON
        case "deepspeed":
            return states.DEEPSPEED
        case "fsdp2" | "ddp" | "huggingface":
            return states.FSDP
    return states.STATES


def kept_formula(job: Job) -> Formula:
    """What says how much of a layer stays until its backward pass."""
    if job.recipe.recompute in calls.FULL_RECOMPUTE:
        return recompute.FULL if job.recipe.recompute == "full" else recompute.EVERY
    of_gpt = not (job.recipe.flash_attention or job.model.gated or job.model.experts)
    return activations.KORTHIKANTI if of_gpt else activations.LAYER


def _of_work(job: Job, convention: Convention) -> Iterator[Formula]:
    yield from (parameters.TOTAL, parameters.STAGE, layers.LAYER)
    if job.model.latent is not None:
        yield layers.LATENT
    if job.model.experts is not None:
        yield layers.EXPERTS
    yield CONVENTIONS[convention]
    if job.recipe.recompute != "none":
        yield flops.RECOMPUTE
    yield mfu.MFU


def _of_memory(job: Job) -> Iterator[Formula]:
    yield from (states_formula(job), kept_formula(job))
    if job.layout.pp > 1:
        yield IN_FLIGHT
    yield transient.LOGITS
    if _gathers(job):
        yield transient.GATHERED
    elif job.recipe.framework == "megatron" and job.recipe.gradient_bytes == 4:
        yield transient.DUMMY
    if job.recipe.offload:
        yield offload.OFFLOAD
    yield from (peak.PEAK, band.RESERVED)


def _gathers(job: Job) -> bool:
    """Whether weights are whole only while they are used; FSDP2's ZeRO-2 is SHARD_GRAD_OP."""
    return job.layout.zero == 3 or (job.layout.zero == 2 and job.recipe.framework == "fsdp2")


def _of_messages(job: Job) -> Iterator[Formula]:
    layout = job.layout
    if layout.world_size == 1:
        return
    yield calls.WIRE
    if layout.tp > 1:
        yield from (tensor.TENSOR, *(tensor.SEQUENCE,) * layout.sequence_parallel, tensor.LOSS)
    if layout.cp > 1:
        yield CONTEXTS[layout.context_kind]
    if job.model.experts is not None and layout.ep * layout.expert_tp > 1:
        yield experts.EXPERTS
    if layout.pp > 1:
        yield from _of_pipeline(job)
    yield from _of_data(job)
    if layout.tp * layout.pp > 1 or layout.shard_size > 1:
        yield norm.NORM


def _of_pipeline(job: Job) -> Iterator[Formula]:
    yield pipeline.PIPELINE
    if job.layout.schedule == "dualpipe":
        yield pipeline.COPIES
    # A V shape and dualpipe have the first and the last stage on one rank.
    if job.model.tied and job.layout.schedule not in TWO_STAGES:
        yield embedding.TIED


def _of_data(job: Job) -> Iterator[Formula]:
    layout = job.layout
    if layout.zero == 3:
        if layout.shard_size > 1:
            yield sharded.FSDP
        if layout.dp_replicate > 1:
            yield sharded.HSDP
    elif layout.gradient_ranks > 1:
        if data.hands_out(job):
            yield from (data.DDP, data.REDUNDANCY)
        elif layout.zero:
            yield data.ALL_REDUCED if data.sums_whole(job) else data.ZERO
        else:
            yield data.DDP


def _of_links(job: Job, rates: Rates) -> Iterator[Formula]:
    layout = job.layout
    if layout.world_size == 1:
        return
    yield from (time.CHOICE, algorithms.RING, algorithms.TREE)
    if _switch_sums(job):
        yield algorithms.NVLS
    if layout.ep > 1 or (layout.cp > 1 and layout.context_kind == "ulysses"):
        yield pairs.ALL_TO_ALL
    if layout.pp > 1 or (layout.cp > 1 and layout.context_kind == "ring"):
        yield pairs.SEND
    if rates.sweeps:
        yield sweep.SWEEP
    if rates.tables:
        yield table.TUNER


def _switch_sums(job: Job) -> bool:
    """Whether NCCL may use NVLS for one of the job's groups."""
    spans = (span_of(job, axis) for axis in _REDUCED)
    return job.hardware.nvls > 0 and any(
        math.isfinite(algorithms.nvls_ns(1.0, span, job.hardware)) for span in spans
    )


def _of_step(job: Job) -> Iterator[Formula]:
    yield from (speed.KERNEL, traffic.ACCUMULATE)
    if _gathers(job) and job.recipe.framework == "fsdp2":
        yield traffic.UNIT_COPIES
    if job.layout.world_size > 1:
        yield exposed.EXPOSED
    if ring.comes_in_pieces(job):
        yield ring.PIECES
    if job.layout.pp > 1:
        yield from (steady.FRACTION, steady.OVERHEAD)
    yield from (optimizer.UPDATE, host.HOST)
    if job.layout.world_size > job.hardware.gpus_per_node:
        yield split.STRAGGLERS
