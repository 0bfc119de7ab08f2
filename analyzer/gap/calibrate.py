"""Calibration: fit the hardware constants of the model to recorded runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median

import numpy as np

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.gap.config_from_trace import job_of_run
from stepsplit.analyzer.model.comm_measured import SWEEP_OPS, Rates, TransferSweep
from stepsplit.analyzer.model.comm_ops import rounds
from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.config import (
    Efficiency,
    HardwareConfig,
    JobConfig,
    Learned,
    Link,
    Span,
    StageConfig,
    stages_of,
)
from stepsplit.analyzer.model.config_decode import TomlTable, read_table
from stepsplit.analyzer.model.layer_time import (
    Product,
    Speed,
    attention_products,
    expert_products,
    head_product,
    launches,
    mlp_products,
    speed_of,
)
from stepsplit.analyzer.model.memory import NONE, calibrate_memory, memory_of
from stepsplit.analyzer.model.parameters import StageParameters, stage_parameters
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.schedule_time import ideal_bubble_fraction
from stepsplit.analyzer.model.step_time import stage_time, straggling
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.recording import Recording, read_recording
from stepsplit.analyzer.split.kernels import kernel_families
from stepsplit.analyzer.split.run import RankSplit, RunSplit, split_run

# A calibration as TOML, for `file` in [hardware].

_DIGITS = 6


def hardware_text(found: Calibration) -> str:
    """The text of the file: all constants of the hardware and the measured transfers."""
    hardware = found.hardware
    runs = ", ".join(row.removeprefix("run:") for row in hardware.efficiency.rows)
    links = (("intra", hardware.intra), ("nodes_link", hardware.inter), ("host", hardware.host))
    parts = [
        f"# stepsplit calibrate: {runs}. Reference it in a job.toml as `file` in [hardware].",
        *_hardware_lines(hardware),
        *(line for key, link in links for line in _link(key, link)),
        *_efficiency(hardware.efficiency),
        *_learned(hardware.learned),
        *(line for sweep in found.transfers for line in _transfer(sweep)),
    ]
    return "\n".join(parts) + "\n"


def _hardware_lines(hardware: HardwareConfig) -> Iterable[str]:
    yield f"name = {_quoted(hardware.name)}"
    yield f"family = {_quoted(hardware.family)}"
    yield f"memory_bytes = {hardware.memory_bytes}"
    yield f"memory_bytes_per_s = {_number(hardware.memory_bytes_per_s)}"
    yield f"gpus_per_node = {hardware.gpus_per_node}"
    if hardware.nvls:
        yield f"nvls = {_number(hardware.nvls)}"
    if hardware.multiprocessors:
        yield f"multiprocessors = {hardware.multiprocessors}"
    yield "\n[peaks]"
    for dtype, peak in hardware.peaks_flops_per_s:
        yield f"{dtype} = {_number(peak)}"


def _link(key: str, link: Link) -> Iterable[str]:
    yield f"\n[{key}]"
    yield f"name = {_quoted(link.name)}"
    yield f"bytes_per_s = {_number(link.bytes_per_s)}"
    yield f"ring = {_number(link.ring)}"
    yield f"latency_ns = {_number(link.latency_ns)}"


def _efficiency(known: Efficiency) -> Iterable[str]:
    yield "\n[efficiency]"
    for key in ("gemm", "attention", "unfused_attention", "memory", "launch_ns", "tile", "jitter"):
        if getattr(known, key):
            yield f"{key} = {_number(getattr(known, key))}"
    if known.host_ns:
        yield f"host_ns = {_number(known.host_ns)}"
    yield f"error = {_number(known.error)}"
    for key in ("frameworks", "devices", "dtypes", "rows"):
        yield f"{key} = [{', '.join(map(_quoted, getattr(known, key)))}]"


def _learned(known: Learned) -> Iterable[str]:
    if known == Learned():
        return
    yield "\n[learned]"
    yield f"activations = {_number(known.activations)}"
    yield f"constant_bytes = {known.constant_bytes}"


def _transfer(sweep: TransferSweep) -> Iterable[str]:
    yield "\n[[transfers]]"
    yield f"op = {_quoted(sweep.op)}"
    yield f"ranks = {sweep.ranks}"
    yield f"ranks_per_node = {sweep.ranks_per_node}"
    yield f"sizes_bytes = [{', '.join(map(str, sweep.sizes_bytes))}]"
    yield f"times_ns = [{', '.join(str(round(ns)) for ns in sweep.times_ns)}]"


def _number(value: float) -> str:
    """Six digits in TOML syntax: 0.80541, 1.16605e+09, 3000.0."""
    text = f"{value:.{_DIGITS}g}"
    return text if set(text) & {".", "e"} else f"{text}.0"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# A calibration as JSON: the constants before and after, and the fit to the runs.

SCHEMA = "stepsplit.calibration/1"


def to_json(found: Calibration) -> str:
    """The calibration as JSON text."""
    body = {
        "schema": SCHEMA,
        "known": asdict(found.known),
        "hardware": asdict(found.hardware),
        "transfers": [asdict(one) for one in found.transfers],
        "stages": [_stage_json(one) for one in found.stages],
    }
    return json.dumps(body, indent=1) + "\n"


def _stage_json(one: ExplainedStage) -> dict[str, object]:
    measured = _split(one.measured) | {"step_ns": one.step_ns}
    predicted = _split(one.predicted) | {"step_ns": one.predicted.step_ns}
    return {"run": one.run, "stage": one.stage, "measured": measured, "predicted": predicted}


def _split(split: Split) -> dict[str, int]:
    return asdict(split)


# Fit of the constants.

ONE_RUN_ERROR = 0.2
"""Assumed relative error for other layouts after a single run; tested in
tests/gap/test_calibrate_demo.py."""

LEAST_ERROR = 0.05
"""Lower bound of the error: runs of one day agree better than that by coincidence."""


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
    """

    known: HardwareConfig
    hardware: HardwareConfig
    transfers: tuple[TransferSweep, ...]
    stages: tuple[ExplainedStage, ...]

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
        UsageError: no place is given, a job config is incomplete, or the runs are of different
            hardware.

    Example:
        >>> from stepsplit.analyzer import calibrate
        >>> result = calibrate("runs/tp2", "runs/pp2")  # doctest: +SKIP
        >>> result.hardware.efficiency.gemm  # doctest: +SKIP
        0.62
    """
    if not places:
        raise UsageError("no run to calibrate from; pass the folder of a recording")
    stated: TomlTable | None = None if job is None else read_table(job)
    return calibration_of([run_seen(str(place), stated, rules) for place in places])


def calibration_of(runs: Sequence[RunSeen]) -> Calibration:
    """Fit the constants to the runs. Raises UsageError for runs on different hardware."""
    known = runs[0].job.hardware
    other = next((one for one in runs if one.job.hardware.name != known.name), None)
    if other is not None:
        raise UsageError(
            f"different hardware: {runs[0].name} ran on {known.name}, {other.name} on"
            f" {other.job.hardware.name}; calibrate them separately"
        )
    fitted, transfers = _calibrated_hardware(runs, known), sweeps_seen(runs)
    fitted = replace(fitted, efficiency=replace(fitted.efficiency, error=_error(runs, known)))
    rates = Rates(transfers)
    stages = tuple(each for one in runs for each in _explained(one, fitted, rates))
    return Calibration(known, fitted, transfers, stages)


def _calibrated_hardware(runs: Sequence[RunSeen], known: HardwareConfig) -> HardwareConfig:
    linked = links_seen(runs, known)
    dtypes = dict.fromkeys(one.job.training.dtype for one in runs)
    efficiency = replace(
        efficiency_seen(runs, known.efficiency),
        frameworks=(),
        devices=(known.name,),
        dtypes=tuple(dtypes),
        rows=tuple(dict.fromkeys(f"run:{one.name}" for one in runs)),
    )
    learned = memory_seen(runs, known.learned)
    return within_peaks(replace(linked, efficiency=efficiency, learned=learned))


def _error(runs: Sequence[RunSeen], known: HardwareConfig) -> float:
    """The largest relative error of a run predicted from the other runs (leave-one-out)."""
    if len(runs) == 1:
        return ONE_RUN_ERROR
    missed = [LEAST_ERROR]
    for i, one in enumerate(runs):
        others = [*runs[:i], *runs[i + 1 :]]
        found = _explained(one, _calibrated_hardware(others, known), Rates(sweeps_seen(others)))
        missed += (abs(each.predicted.step_ns / each.step_ns - 1) for each in found)
    return max(missed)


def _explained(run: RunSeen, hardware: HardwareConfig, rates: Rates) -> list[ExplainedStage]:
    splits = predict(replace(run.job, hardware=hardware), rates).splits
    return [_explained_stage(run.name, seen, splits[seen.stage]) for seen in run.stages]


def _explained_stage(run: str, seen: StageSeen, predicted: Split) -> ExplainedStage:
    return ExplainedStage(run, seen.stage, seen.step_ns, seen.split, predicted)


# The constants of compute and host, from the stages of recorded runs.

LEAST_LEFT = 0.2
"""Lower bound for the share of a family's time that is not due to memory traffic or launches."""

APART = 2.0
"""Launches and memory traffic are separable if their ratio varies this much between stages."""

HOST_BOUND = 0.05
"""A device that is idle for less than this share of the step is not host-bound."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One stage of one run: its predicted parts and its measurement."""

    parts: StageParts
    seen: StageSeen


def efficiency_seen(runs: Sequence[RunSeen], known: Efficiency) -> Efficiency:
    """Fit the constants of compute; constants without a measurement stay as known.

    Each constant is the geometric mean over all stages: least squares of the logarithms. Without
    kernel names all shares are scaled by the same factor.
    """
    rows = [_Row(parts, seen) for run in runs for parts, seen in _both(run)]
    if any(row.seen.products_ns <= 0 or row.seen.other_ns <= 0 for row in rows):
        found = _scaled(rows, known)
    else:
        found = _attention(rows, _products(rows, _memory(rows, known)))
    return replace(
        found,
        host_ns=_host_ns(runs, rows) or known.host_ns,
        jitter=_jitter(runs) or known.jitter,
    )


def _both(run: RunSeen) -> list[tuple[StageParts, StageSeen]]:
    parts = parts_of(run.job)
    return [(parts[seen.stage], seen) for seen in run.stages]


def _memory(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    """Fit memory, and launch_ns if the stages differ enough, to all work except GEMMs."""
    told = _moves_and_launches(rows)
    if told is not None:
        return replace(known, memory=1 / told[0], launch_ns=told[1])
    slow = [
        _left(row.seen.other_ns, row.parts.other_launches * known.launch_ns) / row.parts.other_moves
        for row in rows
    ]
    return replace(known, memory=1 / geometric_mean(slow))


def _moves_and_launches(rows: Sequence[_Row]) -> tuple[float, float] | None:
    """(1 / memory, launch_ns) by least squares of the ratios; None if not separable."""
    ratios = [row.parts.other_launches / row.parts.other_moves for row in rows]
    if max(ratios) < APART * min(ratios):
        return None
    left = np.array(
        [
            (
                row.parts.other_moves / row.seen.other_ns,
                row.parts.other_launches / row.seen.other_ns,
            )
            for row in rows
        ]
    )
    moves, launch_ns = np.linalg.lstsq(left, np.ones(len(rows)), rcond=None)[0].tolist()
    return (moves, launch_ns) if moves > 0 and launch_ns > 0 else None


def _products(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    slow = [
        _left(row.seen.products_ns, _beside_products_ns(row, known)) / row.parts.products
        for row in rows
    ]
    return replace(known, gemm=1 / geometric_mean(slow))


def _beside_products_ns(row: _Row, known: Efficiency) -> float:
    """The time of memory traffic and launches of the GEMMs."""
    moves = row.parts.product_moves / known.memory
    return moves + row.parts.product_launches * known.launch_ns


def _attention(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    """Fit the efficiency of attention, fused or not; as known if no attention kernel was found."""
    slow = [
        row.seen.attention_ns / row.parts.core
        for row in rows
        if row.seen.attention_ns > 0 and row.parts.core > 0
    ]
    if not slow:
        return known
    share = 1 / geometric_mean(slow)
    return replace(known, attention=share, unfused_attention=share)


def _scaled(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    """Scale all constants by one factor to match the measured sum."""
    times = geometric_mean([row.seen.split.compute_ns / _predicted(row, known) for row in rows])
    return replace(
        known,
        gemm=known.gemm / times,
        attention=known.attention / times,
        unfused_attention=known.unfused_attention / times,
        memory=known.memory / times,
        launch_ns=known.launch_ns * times,
    )


def _predicted(row: _Row, known: Efficiency) -> float:
    parts = row.parts
    moves = (parts.product_moves + parts.other_moves) / known.memory
    starts = (parts.product_launches + parts.other_launches) * known.launch_ns
    return parts.products / known.gemm + parts.core / known.attention + moves + starts


def _left(whole_ns: float, taken_ns: float) -> float:
    return max(whole_ns - taken_ns, LEAST_LEFT * whole_ns)


def _jitter(runs: Sequence[RunSeen]) -> float:
    """The relative variation of step times; 0 if no run had waits within a stage."""
    each = []
    for run in runs:
        unit = replace(run.job.hardware.efficiency, jitter=1.0)
        job = replace(run.job, hardware=replace(run.job.hardware, efficiency=unit))
        times = straggling(job).share
        skews = [one.split.skew_ns / (one.step_ns - one.split.skew_ns) for one in run.stages]
        each += [skew / times for skew in skews] if times else []
    return fmean(each) if each else 0.0


def _host_ns(runs: Sequence[RunSeen], rows: Sequence[_Row]) -> float:
    """The host time to launch a layer's forward, 0 if never exposed.

    On a CPU run all of it is idle time, on a device only the part not hidden by its work.
    """
    alone = runs[0].job.hardware.family == "cpu"
    each = []
    for row in rows:
        split, host = row.seen.split, row.parts.host
        if host <= 0 or split.idle_ns <= (0.0 if alone else HOST_BOUND * row.seen.step_ns):
            continue
        hidden = 0 if alone else split.compute_ns + split.exposed_comm_ns
        each.append((split.idle_ns + hidden) / host)
    return fmean(each) if each else 0.0


# Links: the measured transfers, and fitted constants for all other calls.

SMALL_BYTES, LARGE_BYTES = 8 << 10, 64 << 10
"""Messages up to the first are used to fit latency, from the second to fit bandwidth."""

ROUNDS = 12
"""Alternating fits of latency and bandwidth."""

AT_MOST = 0.25
"""Upper bound of the latency as a share of the fastest call if no small message was measured."""

Place = tuple[str, int, int]
"""(op, ranks, ranks per node)"""

Put = Callable[[HardwareConfig, Link], HardwareConfig]


def sweeps_seen(runs: Sequence[RunSeen]) -> tuple[TransferSweep, ...]:
    """One sweep per op and group, with the median over runs at each size."""
    points: dict[Place, dict[int, list[int]]] = {}
    for one in _known(runs):
        place = (one.op, one.ranks, one.ranks_per_node)
        points.setdefault(place, {}).setdefault(one.message_bytes, []).append(one.ns)
    return tuple(
        TransferSweep(
            *place, tuple(sorted(sizes)), tuple(median(sizes[s]) for s in sorted(sizes)), False
        )
        for place, sizes in sorted(points.items())
    )


def links_seen(runs: Sequence[RunSeen], hardware: HardwareConfig) -> HardwareConfig:
    """The hardware with links fitted to the transfers; links without transfers as known."""
    known = list(_known(runs))
    inside = [one for one in known if one.ranks == one.ranks_per_node]
    across = [one for one in known if one.ranks > one.ranks_per_node]
    hardware = _fitted(inside, hardware, hardware.intra, _intra)
    return _fitted(across, hardware, hardware.inter, _inter)


def _intra(hardware: HardwareConfig, link: Link) -> HardwareConfig:
    return replace(hardware, intra=link)


def _inter(hardware: HardwareConfig, link: Link) -> HardwareConfig:
    return replace(hardware, inter=link)


def _known(runs: Sequence[RunSeen]) -> Iterable[Transfer]:
    return (one for run in runs for one in run.transfers if one.op in TIMED_OPS and one.ranks > 1)


def _fitted(
    points: list[Transfer], hardware: HardwareConfig, link: Link, put: Put
) -> HardwareConfig:
    """Fit latency to the small messages and bandwidth to the large ones, alternating."""
    small = [one for one in points if one.message_bytes <= SMALL_BYTES]
    large = [one for one in points if one.message_bytes >= LARGE_BYTES]
    if large and not small:
        quickest = min(one.ns for one in large)
        link = replace(link, latency_ns=min(link.latency_ns, AT_MOST * quickest))
    for _ in range(ROUNDS):
        if small:
            times = _slower(small, put(hardware, link))
            link = replace(link, latency_ns=link.latency_ns * times)
        if large:
            times = _slower(large, put(hardware, link))
            link = replace(link, bytes_per_s=link.bytes_per_s / times)
    return put(hardware, link)


def _slower(points: list[Transfer], hardware: HardwareConfig) -> float:
    """The geometric mean of measured / predicted time of the calls."""
    return geometric_mean(
        one.ns
        / time_of(one.op, one.message_bytes, Span(one.ranks, one.ranks_per_node), hardware).ns
        for one in points
    )


# The memory correction, from the recorded peaks of the ranks.


def memory_seen(runs: Sequence[RunSeen], known: Learned) -> Learned:
    """The memory correction from the run with the fullest rank; as known without a measurement."""
    fullest = max(runs, key=_peak)
    if not _peak(fullest):
        return known
    predicted = memory_of(fullest.job, NONE)
    peaks = tuple(stage.peak_bytes for stage in fullest.stages if stage.peak_bytes is not None)
    measured = peaks if len(peaks) == len(predicted) else (max(peaks),)
    found = calibrate_memory(predicted, measured, fullest.name)
    return Learned(found.activations, found.constant_bytes)


def _peak(run: RunSeen) -> int:
    return max((stage.peak_bytes or 0 for stage in run.stages), default=0)


# The predicted compute of a stage, separated by constant.

_FREE = Speed(math.inf, math.inf, math.inf, math.inf, 0.0)


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


def parts_of(job: JobConfig) -> tuple[StageParts, ...]:
    """The parts of every stage in order."""
    held = stage_parameters(job)
    both = zip(stages_of(job), held, strict=True)
    return tuple(_parts(job, stage, parameters) for stage, parameters in both)


def _parts(job: JobConfig, stage: StageConfig, held: StageParameters) -> StageParts:
    peak = speed_of(_at_peak(job))
    work = replace(
        _FREE,
        linear_flops_per_ns=peak.linear_flops_per_ns,
        head_flops_per_ns=peak.head_flops_per_ns,
        tile=peak.tile,
        multiprocessors=peak.multiprocessors,
    )
    core = replace(_FREE, attention_flops_per_ns=peak.attention_flops_per_ns)
    moves, starts = replace(_FREE, bytes_per_ns=peak.bytes_per_ns), replace(_FREE, launch_ns=1.0)
    product_moves, product_starts = (_products_ns(job, stage, each) for each in (moves, starts))
    return StageParts(
        products=_compute_ns(job, stage, held, work),
        core=_compute_ns(job, stage, held, core),
        product_moves=product_moves,
        other_moves=_compute_ns(job, stage, held, moves) - product_moves,
        product_launches=product_starts,
        other_launches=_compute_ns(job, stage, held, starts) - product_starts,
        host=rounds(job) * sum(_launches(job, chunk.layers) for chunk in stage.chunks),
    )


def _at_peak(job: JobConfig) -> JobConfig:
    known = job.hardware.efficiency
    peak = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, tile=known.tile)
    return replace(job, hardware=replace(job.hardware, efficiency=peak))


def _compute_ns(job: JobConfig, stage: StageConfig, held: StageParameters, speed: Speed) -> float:
    found = stage_time(job, speed, stage, held, ())
    return rounds(job) * found.compute_ns + found.optimizer_ns


def _products_ns(job: JobConfig, stage: StageConfig, speed: Speed) -> float:
    """The time of the GEMMs, recomputed ones included."""
    again = job.training.recompute in ("full", "every", "sqrt")
    dense = (*attention_products(job), *mlp_products(job, job.model.ffn))
    found = stage.dense_layers * _passes_ns(dense, speed, again)
    if job.model.experts is not None:
        mixture = (*attention_products(job), *expert_products(job, job.model.experts))
        found += stage.expert_layers * _passes_ns(mixture, speed, again)
    if stage.head:
        found += _passes_ns((head_product(job),), speed, False)
    return rounds(job) * found


def _passes_ns(products: tuple[Product, ...], speed: Speed, again: bool) -> float:
    return sum(
        (2 if again else 1) * one.forward_ns(speed) + one.input_ns(speed) + one.weight_ns(speed)
        for one in products
    )


def _launches(job: JobConfig, layers: int) -> float:
    unit = replace(job.hardware.efficiency, host_ns=1.0)
    found = launches(replace(job, hardware=replace(job.hardware, efficiency=unit)), layers)
    return found.forward_ns + found.input_ns


# Peaks that a run exceeded are raised to the measured rate.


def within_peaks(hardware: HardwareConfig) -> HardwareConfig:
    """Raise peaks and memory bandwidth so that all efficiencies are at most 1."""
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
    return replace(
        hardware,
        peaks_flops_per_s=tuple((d, peak * faster) for d, peak in hardware.peaks_flops_per_s),
        memory_bytes_per_s=hardware.memory_bytes_per_s * wider,
        efficiency=efficiency,
    )


# The measurements of a recorded run: compute by kind, idle time, transfers, memory.

PRODUCTS, ATTENTION = "gemm", "attention"
"""Names of kernel families in the built-in rules."""


@dataclass(frozen=True, slots=True)
class StageSeen:
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
class RunSeen:
    """One recorded run: job config, recorded stages and transfers."""

    name: str
    job: JobConfig
    stages: tuple[StageSeen, ...]
    transfers: tuple[Transfer, ...]


def run_seen(place: str, stated: TomlTable | None, rules: Rules = BUILT_IN) -> RunSeen:
    """Read the recording of a run; stated is a job.toml for settings that cannot be inferred.

    Raises DataError, also for a recording without a full step; UsageError for an incomplete config.
    """
    recording = read_recording([place], rules=rules)
    found = split_run(recording.traces, recording.spec, ideal_bubble_fraction)
    stages = stages_seen(recording, found)
    if not stages:
        raise DataError(place, "no full step", "record at least three complete steps")
    job = job_of_run(recording.spec, found, stated)
    return RunSeen(recording.name, job, stages, transfers_seen(found))


def stages_seen(recording: Recording, found: RunSplit) -> tuple[StageSeen, ...]:
    """One entry per stage with full steps, in order."""
    stages: dict[int, list[RankSplit]] = {}
    for rank in found.ranks:
        if any(step.kind == "full" for step in rank.steps):
            stages.setdefault(found.layout.stage(rank.trace.rank), []).append(rank)
    return tuple(_stage_seen(stage, ranks, recording) for stage, ranks in sorted(stages.items()))


def _stage_seen(stage: int, ranks: list[RankSplit], recording: Recording) -> StageSeen:
    steps = [step.split for rank in ranks for step in rank.steps if step.kind == "full"]
    split, shares = median_split(steps), _shares(ranks)
    present = {rank.trace.rank for rank in ranks}
    peaks = [
        record.memory.peak_allocated_bytes
        for record in recording.records
        if record.memory and record.memory.peak_allocated_bytes and record.rank.rank in present
    ]
    return StageSeen(
        stage=stage,
        step_ns=int(median(one.step_ns for one in steps)),
        split=split,
        products_ns=split.compute_ns * shares[0],
        attention_ns=split.compute_ns * shares[1],
        other_ns=split.compute_ns * (1 - shares[0] - shares[1]),
        peak_bytes=max(peaks, default=None),
    )


def median_split(steps: list[Split]) -> Split:
    """The median of each bucket, which need not add up to the median step."""
    columns = np.median([[*one.buckets_ns, one.overlapped_ns] for one in steps], axis=0)
    return Split(*(int(ns) for ns in columns))


def _shares(ranks: list[RankSplit]) -> tuple[float, float]:
    """The shares of GEMMs and attention in the kernel time."""
    rows = kernel_families([rank.trace for rank in ranks], [rank.windows for rank in ranks])
    total = sum(row.total_ns for row in rows) or 1
    products, attention = (
        sum(row.total_ns for row in rows if row.family == family) / total
        for family in (PRODUCTS, ATTENTION)
    )
    return products, attention


def transfers_seen(found: RunSplit) -> tuple[Transfer, ...]:
    """The calls with measured transfers, one row per kind and size."""
    host = {rank.trace.rank: rank.trace.host for rank in found.ranks}
    rows = []
    for one in found.collectives:
        if one.busbw_bytes_per_s is None or one.message_bytes is None or one.op == "recv":
            continue
        ranks = found.matched.groups[one.group].ranks
        hosts = [host.get(rank, "") for rank in ranks]
        per_node = len(ranks) // len(set(hosts))
        rows.append(
            Transfer(
                SWEEP_OPS.get(one.op, one.op), len(ranks), max(1, per_node),
                one.message_bytes, one.count, one.transfer_ns_median,
            )
        )  # fmt: skip
    return tuple(rows)
