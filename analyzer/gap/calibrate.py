"""Calibration: fit the hardware constants of the model to recorded runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import cast

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.gap.calibration_sample import (
    AttentionSample,
    CalibrationSample,
    GemmSample,
    StageParts,
    StageSample,
    Transfer,
    compute_parts,
    read_sample,
    set_efficiency,
    set_peak,
)
from stepsplit.analyzer.model.comm_measured import Rates, TransferSweep
from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.config import (
    AttentionKernel,
    AttentionRate,
    Efficiency,
    HardwareConfig,
    Link,
    MemoryCorrection,
)
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import read_tables
from stepsplit.analyzer.model.device_speed import (
    DeviceSpeed,
    compute_attention_share,
    compute_device_speed,
)
from stepsplit.analyzer.model.hardware_config import MAX_SPREAD, load_attention_rate
from stepsplit.analyzer.model.layer_time import FUSED_BACKWARD
from stepsplit.analyzer.model.memory import NO_CALIBRATION, calibrate_memory, compute_memory
from stepsplit.analyzer.model.predict import time_step
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.model.rank_layout import GroupPlacement
from stepsplit.analyzer.model.stragglers import compute_skew
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules

# A calibration as TOML, for `file` in [hardware].

_DIGITS = 6


def format_hardware(calibration: Calibration) -> str:
    """The text of the file: all constants of the hardware and the measured transfers."""
    hardware = calibration.hardware
    runs = ", ".join(row.removeprefix("run:") for row in hardware.efficiency.rows)
    lines = [
        f"# stepsplit calibrate: {runs}. Reference it in a job.toml as `file` in [hardware].",
        f"name = {_quote_text(hardware.name)}",
        f"family = {_quote_text(hardware.family)}",
        f"memory_bytes = {hardware.memory_bytes}",
        f"memory_bytes_per_s = {_format_number(hardware.memory_bytes_per_s)}",
        f"gpus_per_node = {hardware.gpus_per_node}",
    ]
    if hardware.nvls:
        lines.append(f"nvls = {_format_number(hardware.nvls)}")
    if hardware.multiprocessors:
        lines.append(f"multiprocessors = {hardware.multiprocessors}")
    if hardware.clock != 1.0:
        lines.append(f"clock = {_format_number(hardware.clock)}")
    lines.append("\n[peaks]")
    lines += (f"{dtype} = {_format_number(peak)}" for dtype, peak in hardware.peaks_flops_per_s)
    links = (("intra", hardware.intra), ("nodes_link", hardware.inter), ("host", hardware.host))
    for key, link in links:
        lines += [
            f"\n[{key}]",
            f"name = {_quote_text(link.name)}",
            f"bytes_per_s = {_format_number(link.bytes_per_s)}",
            f"ring = {_format_number(link.ring)}",
            f"latency_ns = {_format_number(link.latency_ns)}",
        ]
    lines.append("\n[efficiency]")
    for field in fields(hardware.efficiency):
        value = getattr(hardware.efficiency, field.name)
        if isinstance(value, tuple):
            lines.append(f"{field.name} = [{', '.join(map(_quote_text, value))}]")
        elif (value or value != field.default) and not field.name.startswith("most_"):
            lines.append(f"{field.name} = {_format_number(value)}")
    if (attention := hardware.attention) is not None:
        lines += [
            "\n[attention]",
            f"forward = {_format_number(attention.forward_flops_per_s)}",
            f"backward = {_format_number(attention.backward_flops_per_s)}",
            f"start = {_format_number(attention.start_tokens)}",
            f"backward_start = {_format_number(attention.backward_start_tokens)}",
        ]
    if (learned := hardware.learned) != MemoryCorrection():
        lines += [
            "\n[learned]",
            f"activations = {_format_number(learned.activations)}",
            f"constant_bytes = {learned.constant_bytes}",
        ]
    for sweep in calibration.transfers:
        lines += [
            "\n[[transfers]]",
            f"op = {_quote_text(sweep.op)}",
            f"ranks = {sweep.ranks}",
            f"ranks_per_node = {sweep.ranks_per_node}",
            f"sizes_bytes = [{', '.join(map(str, sweep.sizes_bytes))}]",
            f"times_ns = [{', '.join(str(round(ns)) for ns in sweep.times_ns)}]",
        ]
    return "\n".join(lines) + "\n"


def _format_number(value: float) -> str:
    """Six digits in TOML syntax: 0.80541, 1.16605e+09, 3000.0."""
    text = f"{value:.{_DIGITS}g}"
    return text if set(text) & {".", "e"} else f"{text}.0"


def _quote_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# A calibration as JSON: the constants before and after, and the fit to the runs.

SCHEMA = "stepsplit.calibration/1"


def to_json(calibration: Calibration) -> str:
    """The calibration as JSON text."""
    stages = [
        {
            "run": one.run,
            "stage": one.stage,
            "measured": asdict(one.measured) | {"step_ns": one.step_ns},
            "predicted": asdict(one.predicted) | {"step_ns": one.predicted.step_ns},
        }
        for one in calibration.stages
    ]
    body = {
        "schema": SCHEMA,
        "known": asdict(calibration.known),
        "hardware": asdict(calibration.hardware),
        "transfers": [asdict(one) for one in calibration.transfers],
        "stages": stages,
        "refused": calibration.refused,
        "caveats": calibration.caveats,
    }
    return json.dumps(body, indent=1) + "\n"


# Fit of the constants.

ONE_LAYOUT_ERROR = 0.2
"""Least relative error for other layouts after runs of a single one; tested in
tests/gap/test_calibrate_demo.py."""

MIN_ERROR = 0.05
"""Lower bound of the error: runs of one day agree better than that by coincidence."""

MAX_ERROR = 2.0
"""No constants fit a run that takes more than three times what they or those of the others predict,
or less than a third."""

ERROR_STEP = 0.001
"""The error of the fit is rounded up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class ExplainedStage:
    """A stage of a run, measured and predicted with the fitted constants."""

    run: str
    stage: int
    step_ns: int
    measured: Split
    predicted: Split


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        known: hardware before the calibration.
        hardware: hardware with the fitted constants.
        transfers: measured transfer times by op, group and message size.
        stages: measured and predicted steps with the fitted constants.
        refused: constants that were not fitted because the hardware cannot be that fast, as
            sentences. Default: none.
        caveats: stated hardware that is not quite that of the runs, as sentences. Default: none.
    """

    known: HardwareConfig
    hardware: HardwareConfig
    transfers: tuple[TransferSweep, ...]
    stages: tuple[ExplainedStage, ...]
    refused: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    @property
    def rates(self) -> Rates:
        """The measured transfers as input of `predict`."""
        return Rates(self.transfers)


def calibrate(
    *places: str | Path, job: str | Path | None = None, rules: Rules = BUILT_IN
) -> Calibration:
    """Fit the hardware constants of the model to recorded runs.

    Args:
        places: one file, folder, archive or URL per recording.
        job: complete or partial job.toml for settings that cannot be inferred from a recording.
            Default: none.
        rules: kernel rules, see `read_rules`. Default: the built-in rules.

    Returns:
        A `Calibration` with the fitted hardware, the measured transfers and the fit of each stage.

    Raises:
        DataError: a recording cannot be read or has no full step.
        UsageError: no place is given, a job config is incomplete or of another job, or the runs are
            of different hardware or contradict each other.

    Examples:
        >>> from stepsplit.analyzer import calibrate
        >>> result = calibrate("runs/tp2", "runs/pp2")  # doctest: +SKIP
        >>> result.hardware.efficiency.gemm  # doctest: +SKIP
        0.62
    """
    if not places:
        raise UsageError("no run to calibrate from; pass the folder of a recording")
    job_table: TomlTable | None = None if job is None else read_tables((job,)).table
    return fit_calibration([read_sample(str(place), job_table, rules) for place in places])


def fit_calibration(runs: Sequence[CalibrationSample]) -> Calibration:
    """Fit the constants to the runs.

    Raises UsageError for runs on different hardware, for runs that contradict each other, and for a
    run that no constants fit.
    """
    known = runs[0].job.hardware
    different = next((one for one in runs if one.job.hardware.name != known.name), None)
    if different is not None:
        raise UsageError(
            f"different hardware: {runs[0].name} ran on {known.name}, {different.name} on"
            f" {different.job.hardware.name}; calibrate them separately"
        )
    # Without a stated table of GEMMs: their rate is fitted.
    runs = [_set_hardware(one, replace(one.job.hardware, gemms=())) for one in runs]
    stated = runs[0].job.hardware
    peaks = dict(stated.peaks_flops_per_s)
    narrow = [one for one in runs if one.job.training.dtype == "fp32"]
    # GEMMs of fp32 that exceed fp32's peak ran as TF32.
    if (
        narrow
        and peaks.keys() >= {"fp32", "tf32"}
        and fit_efficiency(narrow, stated.efficiency).gemm > 1
    ):
        peaks["fp32"] = max(peaks["fp32"], peaks["tf32"])
        stated = replace(stated, peaks_flops_per_s=tuple(peaks.items()))
        runs = [_set_hardware(one, stated) for one in runs]
    start = runs[0].job.hardware
    fitted, transfers = _fit_hardware(runs, start), build_sweeps(runs)
    rates = Rates(transfers)
    stages = tuple(each for one in runs for each in _explain_run(one, fitted, rates))
    error = _estimate_error(runs, start)
    worst = max(stages, key=_compute_step_error)
    worst_error = _compute_step_error(worst)
    if worst_error > MAX_ERROR:
        raise UsageError(
            f"no constants fit {worst.run}: the model predicts {_format_ratio(worst)} its step;"
            " check that --job describes this job, or record it again with nothing else running"
        )
    # Rounded up: with the digits of the file, the band still contains the step.
    error = max(error, math.ceil(worst_error / ERROR_STEP) * ERROR_STEP)
    fitted = replace(fitted, efficiency=replace(fitted.efficiency, error=error))
    impossible = find_impossible_rates(fit_efficiency(runs, start.efficiency), runs)
    refused = tuple(f"{one.name}: {one.reason}" for one in impossible)
    caveats = tuple(one.caveat for one in runs if one.caveat)
    return Calibration(known, fitted, transfers, stages, refused, caveats)


def _set_hardware(run: CalibrationSample, hardware: HardwareConfig) -> CalibrationSample:
    return replace(run, job=replace(run.job, hardware=hardware))


def _fit_hardware(runs: Sequence[CalibrationSample], known: HardwareConfig) -> HardwareConfig:
    timed = list(_list_known_transfers(runs))
    inside = [one for one in timed if one.ranks == one.ranks_per_node]
    across = [one for one in timed if one.ranks > one.ranks_per_node]
    # First within nodes: calls across nodes use both kinds of links.
    linked = _fit_link(inside, known, known.intra, lambda base, link: replace(base, intra=link))
    linked = _fit_link(across, linked, linked.inter, lambda base, link: replace(base, inter=link))
    dtypes = dict.fromkeys(one.job.training.dtype for one in runs)
    measured = fit_efficiency(runs, known.efficiency)
    efficiency = replace(
        _refuse(measured, known.efficiency, find_impossible_rates(measured, runs)),
        frameworks=(),
        devices=(known.name,),
        dtypes=tuple(dtypes),
        rows=tuple(dict.fromkeys(f"run:{one.name}" for one in runs)),
    )
    learned = fit_memory_correction(runs, known.learned)
    # A fitted constant takes the place of a stated rate, which would come before it.
    is_fitted = efficiency.attention != known.efficiency.attention
    attention = fit_attention_rate(runs) or (None if is_fitted else linked.attention)
    fitted = replace(linked, efficiency=efficiency, learned=learned, attention=attention)
    return raise_peaks(fitted)


def _estimate_error(runs: Sequence[CalibrationSample], known: HardwareConfig) -> float:
    """The largest relative error of a run predicted from the other runs (leave-one-out).

    Runs of a single layout do not tell of others. Raises UsageError above MAX_ERROR.
    """
    if len(runs) == 1:
        return ONE_LAYOUT_ERROR
    errors = [MIN_ERROR if len({one.job.parallel for one in runs}) > 1 else ONE_LAYOUT_ERROR]
    for i, one in enumerate(runs):
        others = [*runs[:i], *runs[i + 1 :]]
        found = _explain_run(one, _fit_hardware(others, known), Rates(build_sweeps(others)))
        for stage in found:
            errors.append(_compute_step_error(stage))
            if errors[-1] > MAX_ERROR:
                raise UsageError(
                    f"the runs contradict each other: the others predict {_format_ratio(stage)} the"
                    f" step of {stage.run}; calibrate it separately, or record all again with"
                    " nothing else running"
                )
    return max(errors)


def _compute_step_error(stage: ExplainedStage) -> float:
    """The larger of the predicted and the measured step over the other, less 1."""
    ratio = stage.predicted.step_ns / stage.step_ns
    return max(ratio, 1 / ratio) - 1


def _format_ratio(stage: ExplainedStage) -> str:
    return f"{float(f'{stage.predicted.step_ns / stage.step_ns:.2g}'):,g} times"


def _explain_run(
    run: CalibrationSample, hardware: HardwareConfig, rates: Rates
) -> list[ExplainedStage]:
    splits = time_step(replace(run.job, hardware=hardware), rates).splits
    return [
        ExplainedStage(run.name, one.stage, one.step_ns, one.split, splits[one.stage])
        for one in run.stages
    ]


# The constants of compute and host, from the stages of recorded runs.

MIN_OWN_SHARE = 0.2
"""Lower bound for the share of a family's time that is not due to memory traffic or launches."""

MIN_RATIO_SPREAD = 2.0
"""Launches and memory traffic are separable if their ratio varies this much between stages."""

HOST_BOUND = 0.2
"""Up to this share of the step a device may be idle for what the host does once per step: a
synchronization, the optimizer. It tells nothing of layers then."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One stage of one run: its predicted parts and its measurement."""

    run: CalibrationSample
    parts: StageParts
    sample: StageSample


def fit_efficiency(runs: Sequence[CalibrationSample], known: Efficiency) -> Efficiency:
    """Fit the constants of compute; constants without a measurement stay as known.

    Each constant is the geometric mean over all stages: least squares of the logarithms. Without
    kernel names all shares are scaled by the same factor.
    """
    rows = []
    for run in runs:
        parts = compute_parts(run.job)
        rows += [_Row(run, parts[sample.stage], sample) for sample in run.stages]
    if any(row.sample.products_ns <= 0 or row.sample.other_ns <= 0 for row in rows):
        # The fraction of the peak at the device's clock, to which the constants are relative,
        # that attention reaches in this job's forward: stated, constant, or that of its kernel.
        job = runs[0].job
        attention = compute_attention_share(job) / job.hardware.clock
        fitted = _scale_all(rows, replace(known, attention=attention))
    else:
        fitted = _fit_memory(rows, known)
        # GEMMs without their memory traffic and launches; by their shapes if these are known.
        gemms = []
        for row in rows:
            moves_ns = row.parts.product_moves / fitted.memory
            overhead_ns = moves_ns + row.parts.product_launches * fitted.launch_ns
            own_ns = _subtract_bounded(row.sample.products_ns, overhead_ns)
            gemms.append(own_ns / row.parts.products)
        gemm = fit_gemm_share(runs, fitted) or 1 / geometric_mean(gemms)
        fitted = replace(fitted, gemm=gemm, gemm_fp8=None)
        # Attention, fused or not, stays as known if none of its kernels was found.
        cores = [
            row.sample.attention_ns / row.parts.core
            for row in rows
            if row.sample.attention_ns > 0 and row.parts.core > 0
        ]
        if cores:
            share = 1 / geometric_mean(cores)
            fitted = replace(fitted, attention=share, unfused_attention=share)
    # The relative variation of step times: waits within a stage are proportional to it, and share
    # is what they would be if it were 1.
    jitters = []
    for run in runs:
        unit = replace(run.job.hardware.efficiency, jitter=1.0)
        share = compute_skew(set_efficiency(run.job, unit)).share
        skews = [one.split.skew_ns / (one.step_ns - one.split.skew_ns) for one in run.stages]
        jitters += [skew / share for skew in skews] if share else []
    jitter = min(fmean(jitters), MAX_SPREAD) if jitters else 0.0
    return replace(
        fitted,
        host_ns=_estimate_host_ns(rows, fitted) or known.host_ns,
        jitter=jitter or known.jitter,
        jitter_per_layer=None if jitter else known.jitter_per_layer,
    )


def _fit_memory(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    """Fit memory, and launch_ns if the stages differ enough, to all work except GEMMs."""
    ratios = [row.parts.other_launches / row.parts.other_moves for row in rows]
    if max(ratios) >= MIN_RATIO_SPREAD * min(ratios):
        # Least squares of the ratios: each stage counts the same, however long it takes.
        left = np.array(
            [
                (
                    row.parts.other_moves / row.sample.other_ns,
                    row.parts.other_launches / row.sample.other_ns,
                )
                for row in rows
            ]
        )
        moves, launch_ns = np.linalg.lstsq(left, np.ones(len(rows)), rcond=None)[0].tolist()
        if moves > 0 and launch_ns > 0:
            return replace(known, memory=1 / moves, launch_ns=launch_ns)
    slow = [
        _subtract_bounded(row.sample.other_ns, row.parts.other_launches * known.launch_ns)
        / row.parts.other_moves
        for row in rows
    ]
    return replace(known, memory=1 / geometric_mean(slow))


def _scale_all(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    """Scale all constants by one factor to match the measured sum."""
    ratios = []
    for row in rows:
        parts = row.parts
        moves = (parts.product_moves + parts.other_moves) / known.memory
        starts = (parts.product_launches + parts.other_launches) * known.launch_ns
        predicted_ns = parts.products / known.gemm + parts.core / known.attention + moves + starts
        ratios.append(row.sample.split.compute_ns / predicted_ns)
    times = geometric_mean(ratios)
    return replace(
        known,
        gemm=known.gemm / times,
        gemm_fp8=None if known.gemm_fp8 is None else known.gemm_fp8 / times,
        attention=known.attention / times,
        unfused_attention=known.unfused_attention / times,
        memory=known.memory / times,
        launch_ns=known.launch_ns * times,
    )


def _subtract_bounded(whole_ns: float, taken_ns: float) -> float:
    return max(whole_ns - taken_ns, MIN_OWN_SHARE * whole_ns)


def _estimate_host_ns(rows: Sequence[_Row], fitted: Efficiency) -> float:
    """The host time to launch a layer's forward; 0 if never exposed.

    On a CPU run all of it is idle time; on a device it is the time with which the model has the
    idle time of the run that is idle for the largest part of its step.
    """
    found = []
    for row in rows:
        if host_ns := _solve_host_ns(row, fitted):
            found.append((row.sample.split.idle_ns / row.sample.step_ns, host_ns))
    if not found:
        return 0.0
    if load_device(rows[0].run.job.hardware.family).processor:
        return fmean(host_ns for _, host_ns in found)
    return max(found)[1]


def _solve_host_ns(row: _Row, fitted: Efficiency) -> float:
    sample, job = row.sample, row.run.job
    split, alone = sample.split, load_device(job.hardware.family).processor
    if "optimizer" in job.offloaded:
        return 0.0  # idle for the host's update too, whose rate is not known
    if row.parts.host <= 0 or split.idle_ns <= (0.0 if alone else HOST_BOUND * sample.step_ns):
        return 0.0
    hidden = 0 if alone else split.compute_ns + split.exposed_comm_ns
    most_ns = (split.idle_ns + hidden) / row.parts.host

    def compute_excess(host_ns: float) -> float:
        with_host = set_efficiency(job, replace(fitted, host_ns=host_ns))
        return time_step(with_host, Rates()).splits[sample.stage].idle_ns - split.idle_ns

    if alone or compute_excess(most_ns) <= 0:
        return most_ns
    from scipy.optimize import brentq  # takes long to import

    return float(brentq(compute_excess, 1.0, most_ns)) if compute_excess(1.0) < 0 else 0.0


# GEMMs and attention at their recorded shapes.

LEAST_SHAPED = 0.5
"""Share of the time of all GEMMs whose shapes must be known, to fit their rate to these."""


def fit_gemm_share(runs: Sequence[CalibrationSample], known: Efficiency) -> float | None:
    """The fraction of the peak that reproduces the summed time of the GEMMs with recorded shapes in
    the dtype of their job; None if these are a small part.

    Independent of whether the job config has the work that ran.
    """
    ideal_ns, own_ns, total_ns = 0.0, 0.0, 0
    for run in runs:
        peak = compute_device_speed(set_peak(run.job))
        total_ns += run.kernels.all_gemms_ns
        for gemm in run.kernels.gemms:
            if gemm.dtype == run.job.training.dtype:
                ideal_ns += _time_gemms(gemm, replace(peak, bytes_per_ns=math.inf))
                moved_ns = _time_gemms(gemm, replace(peak, linear_flops_per_ns=math.inf))
                overhead_ns = moved_ns / known.memory + gemm.count * known.launch_ns
                own_ns += _subtract_bounded(gemm.took_ns, overhead_ns)
                total_ns -= gemm.took_ns
    if not own_ns or total_ns > (1 - LEAST_SHAPED) * sum(one.kernels.all_gemms_ns for one in runs):
        return None
    return ideal_ns / own_ns


def _time_gemms(gemm: GemmSample, speed: DeviceSpeed) -> float:
    shape = gemm.shape
    one_ns = speed.compute_gemm_ns(shape.rows, shape.columns, shape.inner)
    return gemm.count * shape.count * one_ns


def fit_attention_rate(runs: Sequence[CalibrationSample]) -> AttentionRate | None:
    """The rate of fused attention at long sequences, forward and backward, from kernels with
    recorded shapes; None without both, or if the device cannot be that fast.

    The tokens at which a kernel reaches half of its rate are the published ones (0 without any).
    """
    hardware, dtype = runs[0].job.hardware, runs[0].job.training.dtype
    samples = [one for run in runs for one in run.kernels.attention]
    halves = [[one for one in samples if one.backward == backward] for backward in (False, True)]
    if not all(halves) or not runs[0].job.training.flash_attention:
        return None
    rates, starts = zip(*(_fit_half(half, hardware) for half in halves), strict=True)
    peak = hardware.peak_flops_per_s("bf16" if dtype == "fp8" else dtype) or math.inf
    if max(rates) > MAX_OVER_PEAK * peak:
        return None
    return AttentionRate(rates[0], rates[1], starts[0], starts[1])


def _fit_half(samples: Sequence[AttentionSample], hardware: HardwareConfig) -> tuple[float, float]:
    """The rate of one pass in FLOP/s, and the start tokens of the kernel that ran longest."""
    longest = max(samples, key=lambda one: one.took_ns)
    published = load_attention_rate(cast(AttentionKernel, longest.kernel), hardware.family)
    start = 0.0
    if published is not None:
        rate = published.rate
        start = rate.backward_start_tokens if longest.backward else rate.start_tokens
    flops = 0.0
    for one in samples:
        forward = one.count * one.shape.causal_forward_flops * (1 + start / one.shape.tokens)
        flops += FUSED_BACKWARD * forward if one.backward else forward
    return flops / sum(one.took_ns for one in samples) * 1e9, start


# Links: the measured transfers, and fitted constants for all other calls.

SMALL_BYTES, LARGE_BYTES = 8 << 10, 64 << 10
"""Messages up to the first are used to fit latency, from the second to fit bandwidth."""

FIT_ROUNDS = 12
"""Alternating fits of latency and bandwidth."""

MAX_LATENCY_SHARE = 0.25
"""Upper bound of the latency as a share of the fastest call if no small message was measured."""

Place = tuple[str, int, int]
"""(op, ranks, ranks per node)"""

Put = Callable[[HardwareConfig, Link], HardwareConfig]


def build_sweeps(runs: Sequence[CalibrationSample]) -> tuple[TransferSweep, ...]:
    """One sweep per op and group, with the median over runs at each size."""
    points: dict[Place, dict[int, list[int]]] = {}
    for one in _list_known_transfers(runs):
        place = (one.op, one.ranks, one.ranks_per_node)
        points.setdefault(place, {}).setdefault(one.message_bytes, []).append(one.ns)
    return tuple(
        TransferSweep(
            *place, tuple(sorted(sizes)), tuple(median(sizes[s]) for s in sorted(sizes)), False
        )
        for place, sizes in sorted(points.items())
    )


def _list_known_transfers(runs: Sequence[CalibrationSample]) -> Iterable[Transfer]:
    return (one for run in runs for one in run.transfers if one.op in TIMED_OPS and one.ranks > 1)


def _fit_link(
    points: list[Transfer], hardware: HardwareConfig, link: Link, put: Put
) -> HardwareConfig:
    """Fit latency to the small messages and bandwidth to the large ones, alternating."""
    small = [one for one in points if one.message_bytes <= SMALL_BYTES]
    large = [one for one in points if one.message_bytes >= LARGE_BYTES]
    if large and not small:
        quickest = min(one.ns for one in large)
        link = replace(link, latency_ns=min(link.latency_ns, MAX_LATENCY_SHARE * quickest))
    for _ in range(FIT_ROUNDS):
        if small:
            times = _compute_slowdown(small, put(hardware, link))
            link = replace(link, latency_ns=link.latency_ns * times)
        if large:
            times = _compute_slowdown(large, put(hardware, link))
            link = replace(link, bytes_per_s=link.bytes_per_s / times)
    return put(hardware, link)


def _compute_slowdown(points: list[Transfer], hardware: HardwareConfig) -> float:
    """The geometric mean of measured / predicted time of the calls."""
    return geometric_mean(
        one.ns
        / time_of(
            one.op, one.message_bytes, GroupPlacement(one.ranks, one.ranks_per_node), hardware
        ).ns
        for one in points
    )


# The memory correction, from the recorded peaks of the ranks.


def fit_memory_correction(
    runs: Sequence[CalibrationSample], known: MemoryCorrection
) -> MemoryCorrection:
    """The memory correction from the run with the fullest rank; as known without a measurement, or
    if its constant would be more than the device has: the job is not what ran."""
    fullest = max(runs, key=_find_peak_bytes)
    if not _find_peak_bytes(fullest):
        return known
    predicted = compute_memory(fullest.job, NO_CALIBRATION)
    peaks = tuple(stage.peak_bytes for stage in fullest.stages if stage.peak_bytes is not None)
    measured = peaks if len(peaks) == len(predicted) else (max(peaks),)
    correction = calibrate_memory(predicted, measured, fullest.name)
    if abs(correction.constant_bytes) > fullest.job.hardware.memory_bytes:
        return known
    return MemoryCorrection(correction.activations, correction.constant_bytes)


def _find_peak_bytes(run: CalibrationSample) -> int:
    return max((stage.peak_bytes or 0 for stage in run.stages), default=0)


# Rates that the hardware cannot reach are refused.

MAX_OVER_PEAK = 1.1
"""A measured rate may exceed the published peak by this much: clocks vary."""

CPU_FLOPS_PER_S = {"fp32": 64 * 6e9}
"""Upper bound for a core: two fused multiply-adds of 512 bits a cycle, at 6 GHz."""

MATRIX_FLOPS_PER_S = 2048 * 6e9
"""The same for shorter dtypes: a core with matrix units."""


@dataclass(frozen=True, slots=True)
class ImpossibleRate:
    """A constant of Efficiency by its name, and why it is not what the hardware did."""

    name: str
    reason: str


def find_impossible_rates(
    fitted: Efficiency, runs: Sequence[CalibrationSample]
) -> tuple[ImpossibleRate, ...]:
    """The fitted rates above what the hardware can do: GEMM first, which limits attention on CPUs.

    A rate is too high if the job of the model has more work than what ran.
    """
    dtype, hardware = runs[0].job.training.dtype, runs[0].job.hardware
    peak = hardware.peak_flops_per_s(dtype) or 0.0
    limit, name = _find_limit(runs, dtype)
    gemm, attention = fitted.gemm * peak, fitted.attention * peak
    found = []
    if gemm > limit:
        why = "the job has more work than what ran: check [model] and [training]"
        found.append(ImpossibleRate("gemm", f"{_format_rate(gemm)} is above {name}; {why}"))
    elif load_device(hardware.family).processor and attention > gemm:
        limit, name = gemm, f"the GEMMs' {_format_rate(gemm)}"
    if attention > limit:
        why = "not all of its kernels are known as attention, or the job has more of it than ran"
        found.append(
            ImpossibleRate("attention", f"{_format_rate(attention)} is above {name}; {why}")
        )
    return tuple(found)


def _find_limit(runs: Sequence[CalibrationSample], dtype: str) -> tuple[float, str]:
    """FLOPs per second that the hardware cannot exceed, and what they are."""
    hardware = runs[0].job.hardware
    if load_device(hardware.family).processor:
        cores = min(one.cores for one in runs)
        limit = cores * CPU_FLOPS_PER_S.get(dtype, MATRIX_FLOPS_PER_S) or math.inf
        return limit, f"what {cores} cores can do"
    peaks = dict(hardware.peaks_flops_per_s)
    # GEMMs of fp32 may run as TF32.
    peak = max(peaks.get(dtype, math.inf), peaks.get("bf16", 0.0) / 2 if dtype == "fp32" else 0.0)
    return peak * MAX_OVER_PEAK, f"the peak of {hardware.name}"


def _format_rate(flops_per_s: float) -> str:
    return f"{units.format_flops(flops_per_s)}/s"


def _refuse(
    fitted: Efficiency, known: Efficiency, impossible: Sequence[ImpossibleRate]
) -> Efficiency:
    """The constants, those of impossible rates as known; attention is no faster than GEMMs."""
    names = {one.name for one in impossible}
    gemm = known.gemm if "gemm" in names else fitted.gemm
    if "attention" not in names:
        return replace(fitted, gemm=gemm)
    return replace(
        fitted,
        gemm=gemm,
        attention=min(known.attention, gemm),
        unfused_attention=min(known.unfused_attention, gemm),
    )


# Peaks that a run exceeded are raised to the measured rate.


def raise_peaks(hardware: HardwareConfig) -> HardwareConfig:
    """Raise the peaks of the recorded dtypes and the memory bandwidth so that all efficiencies are
    at most 1."""
    known = hardware.efficiency
    faster = max(1.0, known.gemm, known.attention, known.unfused_attention)
    wider = max(1.0, known.memory)
    efficiency = replace(
        known,
        gemm=known.gemm / faster,
        attention=known.attention / faster,
        unfused_attention=known.unfused_attention / faster,
        memory=known.memory / wider,
    )
    # The recorded dtypes, and those of the same peak, which run on the same units. On a CPU all:
    # its peaks are guesses that are right in proportion at best.
    recorded, peaks = set(hardware.efficiency.dtypes), dict(hardware.peaks_flops_per_s)
    if "fp8" in recorded:
        recorded.add("bf16")  # the dtype of its attention and head
    own = {peak for dtype, peak in peaks.items() if dtype in recorded}
    is_guess = load_device(hardware.family).processor
    raised = tuple(d for d, peak in peaks.items() if is_guess or peak in own)
    return replace(
        hardware,
        peaks_flops_per_s=tuple(
            (dtype, peak * faster if dtype in raised else peak)
            for dtype, peak in hardware.peaks_flops_per_s
        ),
        memory_bytes_per_s=hardware.memory_bytes_per_s * wider,
        efficiency=efficiency,
    )
