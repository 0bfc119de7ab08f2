"""Which formulas a prediction of a job rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stepsplit.analyzer.model import flops, parameters
from stepsplit.analyzer.model.comm_measured import SWEEP, TUNER, Rates
from stepsplit.analyzer.model.comm_ops import (
    CONTEXT_RING,
    COPIES,
    EXPERT_ROUTING,
    FULL_RECOMPUTE,
    GATHER,
    LOSS,
    NORM,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    TIED,
    ULYSSES,
    WIRE,
)
from stepsplit.analyzer.model.comm_time import (
    ALL_TO_ALL,
    CHOICE,
    NVLS,
    RING_ALGORITHM,
    SEND,
    TREE,
    nvls_ns,
)
from stepsplit.analyzer.model.comm_volume import (
    ALL_REDUCED,
    DDP,
    FSDP_MESSAGES,
    HSDP,
    REDUNDANCY,
    ZERO,
    hands_out,
    sums_whole,
)
from stepsplit.analyzer.model.config import TWO_STAGES, JobConfig, span_of
from stepsplit.analyzer.model.flops import CONVENTIONS, MFU, Convention
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.layer_time import (
    ACCUMULATE,
    HOST,
    KERNEL,
    PIECES,
    UNIT_COPIES,
    UPDATE,
    comes_in_pieces,
)
from stepsplit.analyzer.model.memory import DUMMY, GATHERED, LOGITS, OFFLOAD, PEAK, RESERVED
from stepsplit.analyzer.model.memory_states import (
    DEEPSPEED,
    EVERY,
    FSDP_STATES,
    FULL,
    KORTHIKANTI,
    LAYER_ACTIVATIONS,
    MEGATRON,
    STATES,
)
from stepsplit.analyzer.model.parameters import EXPERT_PARAMETERS, LATENT, LAYER_PARAMETERS
from stepsplit.analyzer.model.schedule import IN_FLIGHT
from stepsplit.analyzer.model.schedule_time import FRACTION, OVERHEAD
from stepsplit.analyzer.model.step_time import EXPOSED, STRAGGLERS

CONTEXTS = {"ring": CONTEXT_RING, "all-gather": GATHER, "ulysses": ULYSSES}
"""By Layout.context_kind."""

_REDUCED = ("tp", "dp", "dp_replicate", "expert_dp")
"""Axes over which something large is summed, perhaps by the switch."""


def formulas_of(
    job: JobConfig, rates: Rates | None = None, convention: Convention = "C1"
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


def states_formula(job: JobConfig) -> Formula:
    """The convention by which the job's framework keeps weights, gradients and optimizer."""
    match job.training.framework:
        case "megatron":
            return MEGATRON
        case "deepspeed":
            return DEEPSPEED
        case "fsdp2" | "ddp" | "huggingface":
            return FSDP_STATES
    return STATES


def kept_formula(job: JobConfig) -> Formula:
    """What says how much of a layer stays until its backward pass."""
    if job.training.recompute in FULL_RECOMPUTE:
        return FULL if job.training.recompute == "full" else EVERY
    of_gpt = not (job.training.flash_attention or job.model.gated or job.model.experts)
    return KORTHIKANTI if of_gpt else LAYER_ACTIVATIONS


def _of_work(job: JobConfig, convention: Convention) -> Iterator[Formula]:
    yield from (parameters.TOTAL, parameters.STAGE, LAYER_PARAMETERS)
    if job.model.latent is not None:
        yield LATENT
    if job.model.experts is not None:
        yield EXPERT_PARAMETERS
    yield CONVENTIONS[convention]
    if job.training.recompute != "none":
        yield flops.RECOMPUTE
    yield MFU


def _of_memory(job: JobConfig) -> Iterator[Formula]:
    yield from (states_formula(job), kept_formula(job))
    if job.parallel.pp > 1:
        yield IN_FLIGHT
    yield LOGITS
    if _gathers(job):
        yield GATHERED
    elif job.training.framework == "megatron" and job.training.gradient_bytes == 4:
        yield DUMMY
    if job.training.offload:
        yield OFFLOAD
    yield from (PEAK, RESERVED)


def _gathers(job: JobConfig) -> bool:
    """Whether weights are whole only while they are used; FSDP2's ZeRO-2 is SHARD_GRAD_OP."""
    return job.parallel.zero == 3 or (job.parallel.zero == 2 and job.training.framework == "fsdp2")


def _of_messages(job: JobConfig) -> Iterator[Formula]:
    layout = job.parallel
    if layout.world_size == 1:
        return
    yield WIRE
    if layout.tp > 1:
        yield from (TENSOR, *(SEQUENCE,) * layout.sequence_parallel, LOSS)
    if layout.cp > 1:
        yield CONTEXTS[layout.context_kind]
    if job.model.experts is not None and layout.ep * layout.expert_tp > 1:
        yield EXPERT_ROUTING
    if layout.pp > 1:
        yield from _of_pipeline(job)
    yield from _of_data(job)
    if layout.tp * layout.pp > 1 or layout.shard_size > 1:
        yield NORM


def _of_pipeline(job: JobConfig) -> Iterator[Formula]:
    yield PIPELINE
    if job.parallel.schedule == "dualpipe":
        yield COPIES
    # A V shape and dualpipe have the first and the last stage on one rank.
    if job.model.tied and job.parallel.schedule not in TWO_STAGES:
        yield TIED


def _of_data(job: JobConfig) -> Iterator[Formula]:
    layout = job.parallel
    if layout.zero == 3:
        if layout.shard_size > 1:
            yield FSDP_MESSAGES
        if layout.dp_replicate > 1:
            yield HSDP
    elif layout.gradient_ranks > 1:
        if hands_out(job):
            yield from (DDP, REDUNDANCY)
        elif layout.zero:
            yield ALL_REDUCED if sums_whole(job) else ZERO
        else:
            yield DDP


def _of_links(job: JobConfig, rates: Rates) -> Iterator[Formula]:
    layout = job.parallel
    if layout.world_size == 1:
        return
    yield from (CHOICE, RING_ALGORITHM, TREE)
    if _switch_sums(job):
        yield NVLS
    if layout.ep > 1 or (layout.cp > 1 and layout.context_kind == "ulysses"):
        yield ALL_TO_ALL
    if layout.pp > 1 or (layout.cp > 1 and layout.context_kind == "ring"):
        yield SEND
    if rates.sweeps:
        yield SWEEP
    if rates.tables:
        yield TUNER


def _switch_sums(job: JobConfig) -> bool:
    """Whether NCCL may use NVLS for one of the job's groups."""
    spans = (span_of(job, axis) for axis in _REDUCED)
    return job.hardware.nvls > 0 and any(
        math.isfinite(nvls_ns(1.0, span, job.hardware)) for span in spans
    )


def _of_step(job: JobConfig) -> Iterator[Formula]:
    yield from (KERNEL, ACCUMULATE)
    if _gathers(job) and job.training.framework == "fsdp2":
        yield UNIT_COPIES
    if job.parallel.world_size > 1:
        yield EXPOSED
    if comes_in_pieces(job):
        yield PIECES
    if job.parallel.pp > 1:
        yield from (FRACTION, OVERHEAD)
    yield from (UPDATE, HOST)
    if job.parallel.world_size > job.hardware.gpus_per_node:
        yield STRAGGLERS
