"""Peak memory of each pipeline stage, by category, with its error band."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import JobConfig, MemoryCorrection
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_peak import PEAK, MemoryNeeds, compute_needs, count_open_bytes
from stepsplit.analyzer.model.memory_states import (
    LayersByKind,
    States,
    compute_layers_by_kind,
    compute_states,
    count_chunks_in_flight,
)
from stepsplit.analyzer.model.offload import apply_offload
from stepsplit.analyzer.model.parameters import count_stage_parameters
from stepsplit.analyzer.model.prediction import StageMemory
from stepsplit.analyzer.model.rank_layout import StageConfig, find_equal_stages, list_stages
from stepsplit.analyzer.model.schedule import IN_FLIGHT

# The peak memory of every stage of a job, by category.


def compute_memory(
    job: JobConfig, calibration: MemoryCalibration | None = None
) -> tuple[StageMemory, ...]:
    """Peak allocated bytes of one rank of every pipeline stage.

    gradients, activations and transient are those at the moment of the peak; other is the
    framework's workspaces and the constant of the calibration.
    """
    learned = job.hardware.learned
    job_calibration = MemoryCalibration("", learned.activations, learned.constant_bytes)
    factors, needs = calibration or job_calibration, _compute_states_and_needs(job)
    return tuple(
        _build_stage_memory(states, each, rank, job, factors)
        for rank, (states, each) in enumerate(needs)
    )


def compute_peak_bytes(
    job: JobConfig,
    states: tuple[States, ...] | None = None,
    layers: LayersByKind | None = None,
    with_margin: bool = False,
) -> int:
    """The largest total_bytes of compute_memory, in less time: of equal stages only that with the
    most activations in flight is computed.

    states and layers are those of the job, computed here if the caller does not have them.
    with_margin: what the peak stays below with the chance MARGIN.
    """
    layers, held = layers or compute_layers_by_kind(job), states or list_stage_states(job)
    params = count_stage_parameters(job)
    most: dict[tuple[int, bool], tuple[int, StageConfig]] = {}
    for stage, alike in _list_alike(job):
        in_flight = count_chunks_in_flight(job, stage.index)
        if alike not in most or in_flight > most[alike][0]:
            most[alike] = in_flight, stage
    learned, peaks = job.hardware.learned, list[int]()
    fixed_bytes = job.profile.memory.workspace_bytes + learned.constant_bytes
    _, high = find_peak_errors(job)
    for in_flight, stage in most.values():
        own, index = held[stage.index], stage.index
        needs = compute_needs(job, stage, params[index], layers, own.gradients_bytes)
        moment = needs.find_peak(in_flight)
        saved_bytes = round(moment.activations_bytes * learned.activations)
        moment_bytes = saved_bytes + moment.transient_bytes - moment.missing_gradients_bytes
        peak_bytes = max(0, own.total_bytes + moment_bytes + fixed_bytes)
        if with_margin:
            more = 0 if learned != MemoryCorrection() else count_open_bytes(job, index)[1]
            width = OPEN_MARGIN_WIDTH if more else MARGIN_WIDTH
            peak_bytes = round((peak_bytes + more) * high ** (width / BAND_WIDTH))
        peaks.append(peak_bytes)
    return max(peaks)


def list_stage_states(job: JobConfig) -> tuple[States, ...]:
    """Weights, gradients and optimizer states on the device, by stage."""
    params, cache = count_stage_parameters(job), dict[int, States]()
    firsts = find_equal_stages(job)
    for first in {*firsts}:
        # The states of a rank that are on the device.
        parameters = params[first]
        states = compute_states(job, parameters)
        cache[first] = apply_offload(states, job.training).states if job.offloaded else states
    return tuple(cache[first] for first in firsts)


def is_within_memory(job: JobConfig, memory: tuple[StageMemory, ...]) -> bool:
    """Whether reserved memory and the CUDA context of every stage fit on the device."""
    return is_peak_within_memory(job, max(stage.total_bytes for stage in memory))


def is_peak_within_memory(job: JobConfig, peak_bytes: int) -> bool:
    """Whether the reserved memory of a peak and the CUDA context fit on the device."""
    return add_unallocated_bytes(peak_bytes) <= job.hardware.memory_bytes


def add_unallocated_bytes(peak_bytes: int) -> int:
    """What a device has to hold for a peak of allocated bytes: the memory that the allocator
    reserves for it, and the CUDA context."""
    return estimate_reserved_bytes(peak_bytes).bytes + CONTEXT_BYTES


def _list_alike(job: JobConfig) -> Iterator[tuple[StageConfig, tuple[int, bool]]]:
    """Each stage, and what those with equal needs share: equal chunks, and an input gradient to
    send, which the first stage has not."""
    for stage, first in zip(list_stages(job), find_equal_stages(job), strict=True):
        yield stage, (first, stage.index > 0)


def _compute_states_and_needs(
    job: JobConfig,
) -> tuple[tuple[States, MemoryNeeds], ...]:
    """States and needs of each stage; needs of equal stages, the first one apart, are computed
    once."""
    layers, stage_params = compute_layers_by_kind(job), count_stage_parameters(job)
    held = list_stage_states(job)
    cache: dict[tuple[int, bool], MemoryNeeds] = {}
    needs = []
    for stage, alike in _list_alike(job):
        index = stage.index
        if alike not in cache:
            gradients_bytes = held[index].gradients_bytes
            cache[alike] = compute_needs(job, stage, stage_params[index], layers, gradients_bytes)
        needs.append(cache[alike])
    return tuple(zip(held, needs, strict=True))


def _build_stage_memory(
    states: States, needs: MemoryNeeds, rank: int, job: JobConfig, calibration: MemoryCalibration
) -> StageMemory:
    moment = needs.find_peak(count_chunks_in_flight(job, rank))
    in_flight = (IN_FLIGHT,) if job.parallel.pp > 1 else ()
    saved_bytes = round(moment.activations_bytes * calibration.activations)
    modelled_bytes = states.total_bytes + saved_bytes + moment.transient_bytes
    modelled_bytes -= moment.missing_gradients_bytes
    other_bytes = job.profile.memory.workspace_bytes + calibration.constant_bytes
    return StageMemory(
        stage=rank,
        weights_bytes=states.weights_bytes,
        gradients_bytes=states.gradients_bytes - moment.missing_gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        activations_bytes=saved_bytes,
        transient_bytes=moment.transient_bytes,
        other_bytes=max(other_bytes, -modelled_bytes),
        missing_gradients_bytes=moment.missing_gradients_bytes,
        frozen_bytes=states.frozen_bytes,
        formulas=(*states.formulas, *needs.formulas, *in_flight, PEAK),
    )


# Error band of a predicted peak, and the memory that the allocator reserves for it.

RESERVED = Formula(
    "memory.reserved",
    "reserved = 1.05 (1.03 to 1.09) allocated; 1.2 (1.07 to 1.37) where FSDP gathers units, whose"
    " free blocks the allocator gives up when memory is short",
    "SimuMax, docs/b200: max_reserved over max_allocated of 43 Megatron-LM runs; FSDP2: nine own"
    " runs on H100 and H200, torch 2.11",
)

RESERVED_OVER_ALLOCATED = (1.03, 1.05, 1.09)
"""Low, middle and high, of the runs of RESERVED."""

CALIBRATED_BAND = (0.9, 1.1)
"""Error band of a calibrated peak: measured over predicted."""

PROGRAM_BAND = (0.85, 1.15)
"""Least error band of a program that is timed as a framework, but is not it: of 228 runs of one
(Hagemann et al.) that fit by this band with a chance of 0.9 or more 213 ran."""

CONTEXT_BYTES = 1 << 30
"""Outside PyTorch's allocator: the CUDA context and NCCL's buffers, 0.5 to 2 GiB per rank."""


@dataclass(frozen=True, slots=True)
class BytesBand:
    """Bytes with their error band: low_bytes <= bytes <= high_bytes."""

    bytes: int
    low_bytes: int
    high_bytes: int


def estimate_reserved_bytes(
    allocated_bytes: int, ratios: tuple[float, float, float] = RESERVED_OVER_ALLOCATED
) -> BytesBand:
    """Estimate the memory that PyTorch's allocator reserves for a number of allocated bytes.

    ratios are reserved over allocated bytes (low, expected, high), find_reserved_ratios of a job.
    """
    low, middle, high = (round(allocated_bytes * ratio) for ratio in ratios)
    return BytesBand(middle, low, high)


def find_reserved_ratios(job: JobConfig) -> tuple[float, float, float]:
    """Reserved over allocated bytes of a job's peak: low, expected, high."""
    ratios = job.profile.memory.reserved_gathering
    if not (ratios and job.is_fsdp and job.parallel.pp == 1):
        return RESERVED_OVER_ALLOCATED
    low, middle, high = ratios
    return low, middle, high


def estimate_allocated_band(
    job: JobConfig, stage: StageMemory, calibration: MemoryCalibration | None = None
) -> BytesBand:
    """A stage's predicted peak with its error band, from the framework or the calibration; with the
    correction of a calibrated device the narrower of both. What the job leaves open is in the
    band."""
    low, high = CALIBRATED_BAND if calibration else find_peak_errors(job)
    total, less, more = stage.total_bytes, 0, 0
    if calibration is None and job.hardware.learned == MemoryCorrection():
        less, more = count_open_bytes(job, stage.stage)
    return BytesBand(total, round((total - less) * low), round((total + more) * high))


def find_peak_errors(job: JobConfig) -> tuple[float, float]:
    """The ends of the band of a peak over the predicted one, beyond what the job leaves open."""
    known = job.profile.memory
    is_guess = job.model.experts is not None and not job.training.recipe
    low, high = known.low, (known.experts_high if is_guess else 0.0) or known.high
    if job.training.program:
        low, high = min(low, PROGRAM_BAND[0]), max(high, PROGRAM_BAND[1])
    if job.hardware.learned != MemoryCorrection():
        return max(low, CALIBRATED_BAND[0]), min(high, CALIBRATED_BAND[1])
    return low, high


def estimate_peak_band(job: JobConfig, memory: Sequence[StageMemory]) -> BytesBand:
    """The band of the largest peak: another stage than the largest may reach further."""
    bands = [estimate_allocated_band(job, stage) for stage in memory]
    return BytesBand(
        max(band.bytes for band in bands),
        max(band.low_bytes for band in bands),
        max(band.high_bytes for band in bands),
    )


def add_allocated_band(job: JobConfig, stage: StageMemory) -> StageMemory:
    """The memory of a stage with the error band of its peak."""
    band = estimate_allocated_band(job, stage)
    return replace(stage, total_bytes_low=band.low_bytes, total_bytes_high=band.high_bytes)


# How sure it is that a job fits.

BAND_WIDTH = 1.6449
"""Standard deviations from a predicted peak to either end of its band, which holds for 9 of 10 runs
and is taken as lognormal on both sides."""

MARGIN, MARGIN_WIDTH, OPEN_MARGIN_WIDTH = 0.95, 1.6449, 1.2816
"""Chance to fit that a search for layouts leaves to what it recommends, and the standard deviations
below which a peak stays with that chance; where it may need more by what is open, in half of the
cases, below those with a chance of 0.9. Of 38 first picks of published tuning tables with a chance
of 0.9 one, with 0.93, had run out of memory."""


def compute_fit_chance(job: JobConfig, memory: Sequence[StageMemory]) -> float:
    """The chance that the peak fits with what the allocator reserves and the CUDA context, 0..1.

    The mean of two: as predicted, and with what the job leaves open.
    """
    is_open = job.hardware.learned == MemoryCorrection()
    totals = [stage.total_bytes for stage in memory]
    more = [count_open_bytes(job, stage.stage)[1] if is_open else 0 for stage in memory]
    peaks = max(totals), max(map(sum, zip(totals, more, strict=True)))
    return sum(_compute_chance(job, peak_bytes) for peak_bytes in peaks) / len(peaks)


def _compute_chance(job: JobConfig, peak_bytes: int) -> float:
    room = (job.hardware.memory_bytes - CONTEXT_BYTES) / RESERVED_OVER_ALLOCATED[1] / peak_bytes
    if room <= 0:
        return 0.0
    low, high = find_peak_errors(job)
    width = abs(math.log(high if room > 1 else low)) / BAND_WIDTH
    if not width:
        return float(room >= 1)
    return (1 + math.erf(math.log(room) / width / math.sqrt(2))) / 2


# Calibration of the memory model on one measured run.

MIN_FACTOR, MAX_FACTOR = 0.5, 3.0
"""Limits of the factor on the activations; outside of them a constant is fitted instead. Chosen,
not measured."""


@dataclass(frozen=True, slots=True)
class MemoryCalibration:
    """Fitted on one run, named by run: a factor on the activations of every stage, and a constant
    added to the predicted bytes of every rank."""

    run: str
    activations: float
    constant_bytes: int


NO_CALIBRATION = MemoryCalibration("", 1.0, 0)


def calibrate_memory(
    predicted: tuple[StageMemory, ...], measured_bytes: tuple[int, ...], run: str
) -> MemoryCalibration:
    """Fit the calibration to measured peaks of allocated bytes: one per stage, or only the largest.

    predicted is the memory of the same job without a calibration. One peak gives the factor; one
    per stage gives factor and constant by least squares. If the factor is outside LEAST..MOST,
    something other than activations is missing, and the difference becomes the constant. Raises
    UsageError for any other number of peaks, and for a peak of no bytes.
    """
    if not all(peak_bytes > 0 for peak_bytes in measured_bytes):
        raise UsageError(f"a measured peak must be above 0 bytes, not {min(measured_bytes)}")
    if len(measured_bytes) == 1:
        # The smallest factor with which any stage reaches the measured peak.
        measured = measured_bytes[0]
        factors = [
            (measured - stage.total_bytes) / stage.activations_bytes + 1
            for stage in predicted
            if stage.activations_bytes
        ]
        fitted = min(factors, default=0.0), 0.0
    elif len(measured_bytes) == len(predicted):
        fitted = _fit_stages(predicted, measured_bytes)
    else:
        given, stages = len(measured_bytes), len(predicted)
        raise UsageError(f"{given} measured peaks for {stages} stages; give 1 or {stages}")
    if MIN_FACTOR <= fitted[0] <= MAX_FACTOR:
        return MemoryCalibration(run, fitted[0], round(fitted[1]))
    above = max(measured_bytes) - max(stage.total_bytes for stage in predicted)
    return MemoryCalibration(run, 1.0, above)


def _fit_stages(
    predicted: tuple[StageMemory, ...], measured: tuple[int, ...]
) -> tuple[float, float]:
    """Slope and intercept of the memory other than states over the predicted activations."""
    activations = [float(stage.activations_bytes) for stage in predicted]
    other_bytes = [
        total - (stage.total_bytes - stage.activations_bytes)
        for stage, total in zip(predicted, measured, strict=True)
    ]
    mean_activations, mean_rest = (
        sum(activations) / len(activations),
        sum(other_bytes) / len(other_bytes),
    )
    variance = sum((each - mean_activations) ** 2 for each in activations)
    if variance == 0:
        return (mean_rest / mean_activations if mean_activations else 0.0), 0.0
    covariance = sum(
        (h - mean_activations) * (r - mean_rest)
        for h, r in zip(activations, other_bytes, strict=True)
    )
    return covariance / variance, mean_rest - covariance / variance * mean_activations
