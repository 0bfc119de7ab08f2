"""Search over a job's layouts: which fit in memory, lower bounds, and the fastest of each split."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, TypeVar

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.comm_ops import list_cp_ops, list_ep_ops, list_tp_ops
from stepsplit.analyzer.model.confidence import decide_confidence
from stepsplit.analyzer.model.config import JobConfig, ParallelConfig
from stepsplit.analyzer.model.config_checks import find_violation
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.host_time import compute_expert_wait, compute_launch_time
from stepsplit.analyzer.model.layer_time import compute_chunk_passes
from stepsplit.analyzer.model.memory import (
    compute_fit_chance,
    compute_peak_bytes,
    is_peak_within_memory,
    list_stage_states,
)
from stepsplit.analyzer.model.memory_states import LayersByKind, States, compute_layers_by_kind
from stepsplit.analyzer.model.parameters import count_stage_parameters, count_step_flops
from stepsplit.analyzer.model.plan_space import (
    Candidate,
    Choice,
    JobFamily,
    SearchCounts,
    list_families,
)
from stepsplit.analyzer.model.predict import (
    CONVENTION,
    TimedStep,
    compute_call_ns,
    predict_step,
    time_step,
)
from stepsplit.analyzer.model.rank_layout import StageConfig, list_stages
from stepsplit.analyzer.model.stragglers import compute_skew

_T = TypeVar("_T")

# The fastest layout of each split of the GPUs.

TimedLayout = tuple[Candidate, JobConfig]
"""A predicted layout and its job."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best layout of each split of the GPUs, fastest first, and counts of all layouts."""

    ranked: tuple[TimedLayout, ...]
    counts: SearchCounts


def search_layouts(
    job: JobConfig,
    gpus: int,
    keep: frozenset[str],
    top: int,
    rates: Rates,
    workers: int,
    with_margin: bool = False,
) -> SearchResult:
    """Search all layouts; the result does not depend on the number of processes.

    with_margin: only those whose peak fits with the chance MARGIN.

    Layouts are timed in the order of their lower bounds, until the next bound is above the slowest
    layout of the result. Raises DataError if a process died.
    """
    parts = bound_layouts(job, gpus, keep, rates, workers, with_margin)
    queue = sorted((one for part in parts for one in part.queue), key=_IN_ORDER)
    left_out_ns = min(part.left_out_ns for part in parts)
    best: dict[tuple[int, ...], TimedLayout] = {}
    ranked: list[TimedLayout] = []
    timed = 0
    with closing(_time_layouts([one.job for one in queue], rates, workers)) as candidates:
        for one in queue:
            if one.bound_ns > min(left_out_ns, _find_slowest_ns(ranked, top)):
                break
            timed += 1
            candidate = next(candidates)
            previous = best.get(candidate.choice.axes)
            if previous is None or make_sort_key(candidate) < make_sort_key(previous[0]):
                best[candidate.choice.axes] = candidate, one.job
                ranked = _drop_dominated(best.values())[:top]
    if left_out_ns < math.inf and left_out_ns <= _find_slowest_ns(ranked, top):
        return search_layouts(job, gpus, keep, top, rates, 1, with_margin)
    fit, too_big = sum(part.fit for part in parts), sum(part.too_big for part in parts)
    refused = sum((part.refused for part in parts), Counter[str]())
    # By name among equals: the parts end in any order.
    by_count = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    considered = fit + too_big + refused.total()
    counts = SearchCounts(considered, too_big, fit, timed, tuple(by_count))
    return SearchResult(tuple(ranked), counts)


TIMED_FIRST = 100
"""Layouts that are timed before other processes start to time those that follow."""

_TIMED_AT_ONCE = 16
"""Layouts of one task of a process, so that handing them over takes little beside timing them."""


def _time_layouts(
    jobs: Sequence[JobConfig], rates: Rates, workers: int
) -> Generator[Candidate, None, None]:
    """The candidates of these jobs, in order. Several processes work ahead of what is taken, until
    the generator is closed. Raises DataError if a process died."""
    first = len(jobs) if workers == 1 else TIMED_FIRST
    yield from (build_candidate(job, rates) for job in jobs[:first])
    later = [
        (jobs[begin : begin + _TIMED_AT_ONCE], rates)
        for begin in range(first, len(jobs), _TIMED_AT_ONCE)
    ]
    early: dict[int, list[Candidate]] = {}
    wanted = 0
    with closing(run_calls("layouts", _build_candidates, later, workers)) as results:
        for number, candidates in results:
            early[number] = candidates
            while wanted in early:
                yield from early.pop(wanted)
                wanted += 1


def _build_candidates(jobs: Sequence[JobConfig], rates: Rates) -> list[Candidate]:
    return [build_candidate(job, rates) for job in jobs]


def _find_slowest_ns(ranked: list[TimedLayout], top: int) -> float:
    """The step time above which no layout is listed."""
    return ranked[-1][0].step_ns if len(ranked) == top else math.inf


def _drop_dominated(layouts: Iterable[TimedLayout]) -> list[TimedLayout]:
    """Sort, and drop layouts that a faster one dominates: the same tp, pp and ep with less context
    parallelism, and not larger in memory."""
    shown: list[TimedLayout] = []
    for candidate, job in sorted(layouts, key=lambda raced: make_sort_key(raced[0])):
        own = candidate.choice
        is_dominated = any(
            (before.choice.tp, before.choice.pp, before.choice.ep) == (own.tp, own.pp, own.ep)
            and before.choice.cp < own.cp
            and before.peak_bytes <= candidate.peak_bytes
            for before, _ in shown
        )
        if not is_dominated:
            shown.append((candidate, job))
    return shown


def make_sort_key(candidate: Candidate) -> tuple[int, ...]:
    """Sort key: step time, then number of model-parallel ranks, peak memory, number of settings
    that differ from the default, and sizes of the axes."""
    choice = candidate.choice
    axes = choice.cp * choice.ep * choice.pp * choice.tp
    settings = choice.zero + choice.chunks + choice.sequence_parallel + (choice.recompute != "none")
    return candidate.step_ns, axes, candidate.peak_bytes, settings, *choice.axes


# Lower bounds of all layouts that fit, in one process or in several.

LEAST_FAMILIES = 4_000
"""Fewer families of layouts are searched faster by one process than another one starts."""

MOST_QUEUED = 4_000
"""Layouts that another process returns, those of the lowest bounds."""


@dataclass(frozen=True, slots=True)
class QueuedLayout:
    """A layout that fits, by its lower bound and its place in the search space."""

    bound_ns: float
    family: int
    place: int
    job: JobConfig


_IN_ORDER = attrgetter("bound_ns", "family", "place")


@dataclass(frozen=True, slots=True)
class BoundedLayouts:
    """Layouts of a part of the search space, and counts; left_out_ns is the lowest bound of those
    that fit and are not in the queue."""

    queue: tuple[QueuedLayout, ...]
    left_out_ns: float
    fit: int
    too_big: int
    refused: Counter[str]


def bound_layouts(
    job: JobConfig,
    gpus: int,
    keep: frozenset[str],
    rates: Rates,
    workers: int,
    with_margin: bool = False,
) -> list[BoundedLayouts]:
    """Filter and bound all layouts, in as many parts as processes, in any order.

    One process returns all that fit, by their bounds. Raises DataError if a process died.
    """
    if workers == 1 or are_few(list_families(job, gpus, keep)):
        return [_bound_part(job, gpus, keep, rates, with_margin, 0, 1)]
    every_part = [(job, gpus, keep, rates, with_margin, part, workers) for part in range(workers)]
    found = run_calls(f"layouts on {gpus} GPUs", _bound_part, every_part, workers)
    return [part for _, part in found]


def run_calls(
    where: str, function: Callable[..., _T], calls: Sequence[tuple[Any, ...]], workers: int
) -> Generator[tuple[int, _T], None, None]:
    """Yield the number and result of each call, by its arguments, as several processes end them.

    Raises DataError, which names `where`, if a process died.
    """
    if not calls:
        return
    # Imported here because a small search needs no other process.
    from stepsplit.analyzer.readers.workers import Task, run_tasks

    tasks = [Task(where, 0, function, arguments) for arguments in calls]
    results = run_tasks(tasks, workers)
    with closing(results):
        for number, result in results:
            if isinstance(result, DataError):
                raise result
            yield number, result


def are_few(families: Iterable[JobFamily]) -> bool:
    """Whether one process searches them faster than several."""
    return sum(1 for _ in islice(families, LEAST_FAMILIES)) < LEAST_FAMILIES


def _bound_part(
    job: JobConfig,
    gpus: int,
    keep: frozenset[str],
    rates: Rates,
    with_margin: bool,
    part: int,
    parts: int,
) -> BoundedLayouts:
    """The layouts of every parts-th combination of tp, pp, cp and ep, which share what is cached.

    All of them where there is one part, else the MOST_QUEUED of the lowest bounds.
    """
    layouts, bound = FilteredLayouts(), LowerBound(rates)
    memory = LayoutMemory(with_margin=with_margin)
    queue: list[QueuedLayout] = []
    order: dict[tuple[int, ...], int] = {}
    for number, jobs in enumerate(list_families(job, gpus, keep)):
        axes = jobs.layout
        key = (axes.tp, axes.pp, axes.cp, axes.ep)
        if order.setdefault(key, len(order)) % parts != part:
            continue
        _filter_family(layouts, jobs, memory)
        queue += [
            QueuedLayout(bound.compute_step_ns(one), number, place, one)
            for place, one in enumerate(layouts.fitting[len(queue) :])
        ]
    queue.sort(key=_IN_ORDER)
    most = len(queue) if parts == 1 else MOST_QUEUED
    left_out_ns = queue[most].bound_ns if most < len(queue) else math.inf
    return BoundedLayouts(
        tuple(queue[:most]), left_out_ns, len(queue), layouts.too_big, layouts.refused
    )


# Which layouts are valid and fit in memory.

_LayerKey = tuple[object, ...]
"""The settings that decide a layer's time and memory, apart from those of experts."""


def _make_layer_key(job: JobConfig) -> _LayerKey:
    layout, training = job.parallel, job.training
    return (
        layout.tp,
        layout.cp,
        layout.sequence_parallel,
        training.micro_batch,
        training.recompute,
        training.recompute_every,
        training.activation_dtype,
    )


_NUMBERS = re.compile(r"(?<=\w) (?:\d[\d.e+]*\b|\(\d[\d.e+]*\))|\s=.*")


@dataclass(slots=True)
class FilteredLayouts:
    """Feasible layouts, counts of the others, and the layout closest to fitting."""

    fitting: list[JobConfig] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    too_big: int = 0
    nearest: JobConfig | None = None
    nearest_bytes: int = 0


def find_nearest(job: JobConfig, gpus: int, keep: frozenset[str]) -> FilteredLayouts:
    """Where no layout fits: the one that is closest to fitting."""
    layouts, memory = FilteredLayouts(), LayoutMemory(whole=True)
    for jobs in list_families(job, gpus, keep):
        _filter_family(layouts, jobs, memory)
    return layouts


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """Peak memory of the layouts of one job.

    Caches the states, which depend on the layout alone, and the activations of a layer, which
    layouts with the same tp, cp, experts and microbatch share. whole: the peak of layouts whose
    states alone are too big is computed, too. with_margin: peaks are those that the band reaches
    with the chance MARGIN.
    """

    whole: bool = False
    with_margin: bool = False
    states: dict[ParallelConfig, tuple[States, ...]] = field(default_factory=dict)
    layers: dict[_LayerKey, LayersByKind] = field(default_factory=dict)

    def compute_peak_bytes(self, job: JobConfig) -> int:
        """The peak, or the states where these are too big."""
        layout = job.parallel
        if layout.sequence_parallel:
            layout = replace(layout, sequence_parallel=False)
        if layout not in self.states:
            self.states[layout] = list_stage_states(job)
        states = self.states[layout]
        state_bytes = max(each.total_bytes for each in states)
        if not self.whole and not is_peak_within_memory(job, state_bytes):
            return state_bytes
        key = (*_make_layer_key(job), job.parallel.ep, job.parallel.expert_tp)
        if key not in self.layers:
            self.layers[key] = compute_layers_by_kind(job)
        return compute_peak_bytes(job, states, self.layers[key], self.with_margin)


def _filter_family(layouts: FilteredLayouts, jobs: JobFamily, memory: LayoutMemory) -> None:
    """Filter the jobs of a family; stop at the first that is too big.

    The last one may still fit if it is a single microbatch: without gradient accumulation FSDP
    needs no fp32 sums.
    """
    for done, job in enumerate(jobs, 1):
        if _filter_job(layouts, job, memory):
            continue
        larger = len(jobs) - done
        if larger and (last := jobs[-1]).microbatches == 1:
            _filter_job(layouts, last, memory)
            larger -= 1
        layouts.too_big += larger
        return


def _filter_job(layouts: FilteredLayouts, job: JobConfig, memory: LayoutMemory) -> bool:
    """Count one job. Returns False if it is too big, so that larger ones can be skipped."""
    fault = find_violation(job)
    if fault is not None:
        # Remove the numbers from a problem: "heads 96 / tp 7 = 13.7" -> "heads / tp".
        layouts.refused[_NUMBERS.sub("", fault.problem)] += 1
        return True
    peak_bytes = memory.compute_peak_bytes(job)
    if is_peak_within_memory(job, peak_bytes):
        layouts.fitting.append(job)
        return True
    layouts.too_big += 1
    if layouts.nearest is None or peak_bytes < layouts.nearest_bytes:
        layouts.nearest, layouts.nearest_bytes = job, peak_bytes
    return False


# A lower bound of the step time, to skip layouts that can't be among the fastest.

_IN_LAYERS = ("forward", "backward", "recompute")

SLACK = 1e-9
"""Rounding of sums in a different order stays below this ratio."""


@dataclass(frozen=True, slots=True)
class LayerLowerBounds:
    """Lower bound of one layer's time by kind, in ns; expert_ns is 0 without experts."""

    dense_ns: float
    expert_ns: float


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Lower bounds of step times for the layouts of one job.

    Caches the time of a layer, which layouts with the same tp, cp and experts share.
    """

    rates: Rates
    layer_ns: dict[_LayerKey, float] = field(default_factory=dict)

    def compute_step_ns(self, job: JobConfig) -> float:
        """Lower bound of the predicted step time.

        Leaves out embedding, head, pipeline messages, gradient reduction and optimizer. Counts the
        microbatches of each rank, plus the fill and drain of the first chunks before it.
        """
        layers, m = self._compute_layers(job), job.microbatches
        chunk_ns = [
            [
                chunk.dense_layers * layers.dense_ns + chunk.expert_layers * layers.expert_ns
                for chunk in stage.chunks
            ]
            for stage in list_stages(job)
        ]
        if job.parallel.schedule == "dualpipe":
            longest_ns = m / 2 * max(map(sum, chunk_ns))
        elif job.parallel.schedule in ("1f1b", "interleaved"):
            before = accumulate((chunks[0] for chunks in chunk_ns), initial=0.0)
            longest_ns = max(
                m * sum(chunks) + ns for chunks, ns in zip(chunk_ns, before, strict=False)
            )
        else:
            longest_ns = m * max(map(sum, chunk_ns))
        return longest_ns * (1 + compute_skew(job).share) * (1 - SLACK)

    def _compute_layers(self, job: JobConfig) -> LayerLowerBounds:
        experts, layout, key = job.model.experts, job.parallel, _make_layer_key(job)
        if experts is None:
            return LayerLowerBounds(
                self._cache_layer_ns(key, lambda: _build_one_layer_job(job)), 0.0
            )
        expert_key = (*key, layout.ep, layout.expert_tp)

        def build_dense() -> JobConfig:
            one = _build_one_layer_job(job)
            alone = replace(one.parallel, ep=1, expert_tp=1)
            return replace(one, parallel=alone, model=replace(one.model, experts=None))

        def build_experts() -> JobConfig:
            one = _build_one_layer_job(job)
            everywhere = replace(experts, dense_layers=0)
            return replace(one, model=replace(one.model, experts=everywhere))

        dense_ns = self._cache_layer_ns(key, build_dense) if experts.dense_layers else 0.0
        return LayerLowerBounds(dense_ns, self._cache_layer_ns(expert_key, build_experts))

    def _cache_layer_ns(self, key: _LayerKey, build_job: Callable[[], JobConfig]) -> float:
        if key not in self.layer_ns:
            self.layer_ns[key] = _compute_middle_layer_ns(build_job(), self.rates)
        return self.layer_ns[key]


def _build_one_layer_job(job: JobConfig) -> JobConfig:
    """A job of three layers in three stages with one microbatch: the middle stage is one layer.

    It has only as many data-parallel ranks as its experts need.
    """
    expert_ranks = job.parallel.ep * job.parallel.expert_tp
    dp = expert_ranks // math.gcd(expert_ranks, job.parallel.tp * job.parallel.cp)
    layout = replace(
        job.parallel, pp=3, dp_replicate=dp, dp_shard=1, zero=0, schedule="1f1b", chunks=1,
        layers_per_stage=None,
    )  # fmt: skip
    training = replace(job.training, global_batch=job.training.micro_batch * dp)
    if training.recompute_layers:
        training = replace(training, recompute="none", recompute_layers=0)
    model = replace(job.model, layers=3, mtp_layers=0)
    return replace(job, parallel=layout, training=training, model=model)


def _compute_middle_layer_ns(job: JobConfig, rates: Rates) -> float:
    """Lower bound of the middle layer's time: compute plus communication that never overlaps, or
    the host's launch time if that is longer, and the wait for the launches of experts.

    More microbatches can only increase overlap, so communication that may overlap is left out.
    """
    stage = list_stages(job)[1]
    (device,) = compute_chunk_passes(job, compute_device_speed(job), stage.chunks)
    backward_ns = device.input_ns + device.weight_ns
    host = compute_launch_time(job, 1)
    launched = max(device.forward_ns, host.forward_ns) + max(backward_ns, host.input_ns)
    wait = compute_expert_wait(job, stage.expert_layers)
    busy = max(device.forward_ns + backward_ns + _sum_never_hidden_ns(job, stage, rates), launched)
    return busy + wait.forward_ns + wait.input_ns


def _sum_never_hidden_ns(job: JobConfig, stage: StageConfig, rates: Rates) -> float:
    """Time of the layer's messages that never overlap; a cp ring overlaps attention."""
    ring = {"cp"} if job.parallel.context_kind == "ring" else set()
    exposed_axes = {"tp", "ep", "cp"} - job.parallel.overlap - ring
    messages = (
        *list_tp_ops(job, stage, count_stage_parameters(job)[stage.index]),
        *list_cp_ops(job, stage),
        *list_ep_ops(job, stage),
    )
    return sum(
        message.count * compute_call_ns(job, message, rates).ns
        for message in messages
        if message.phase in _IN_LAYERS and message.axis in exposed_axes and message.input_bytes
    )


# A job and its prediction -> a Candidate.


def build_candidate(job: JobConfig, rates: Rates) -> Candidate:
    """Time a step of the job and build its candidate."""
    step = time_step(job, rates)
    return Candidate(
        choice=build_choice(job),
        microbatches=job.microbatches,
        split=step.split,
        exposed_ns=_sum_exposed_by_axis(step),
        peak_bytes=max(stage.total_bytes for stage in step.memory),
        mfu=step.compute_mfu(count_step_flops(job, CONVENTION).model),
        confidence=decide_confidence(job, step.caveats),
        fit_chance=compute_fit_chance(job, step.memory),
    )


CHOSEN = frozenset(
    {
        "parallel.zero", "parallel.sequence_parallel", "parallel.chunks", "parallel.expert_tp",
        "training.recompute",
    }
)  # fmt: skip
"""Keys that a search chooses, so that the job of a layout states them."""


def add_confidence(candidate: Candidate, job: JobConfig, rates: Rates) -> Candidate:
    """The candidate with the confidence of a prediction of its job, which also asks what the job
    leaves open; that takes several times as long as the step, so only what is shown is asked."""
    stated = job if job.stated is None else replace(job, stated=job.stated | CHOSEN)
    return replace(candidate, confidence=predict_step(stated, rates).confidence)


def build_choice(job: JobConfig) -> Choice:
    layout, training = job.parallel, job.training
    return Choice(
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        ep=layout.ep,
        expert_tp=layout.expert_tp,
        sequence_parallel=layout.sequence_parallel,
        zero=layout.zero,
        schedule=layout.schedule,
        chunks=layout.chunks,
        layers_per_stage=layout.layers_per_stage,
        micro_batch=training.micro_batch,
        recompute=_format_recompute(job),
    )


def _format_recompute(job: JobConfig) -> str:
    """What is recomputed, in one word: parts of a layer are joined by a +."""
    training = job.training
    if training.recompute_parts:
        return "+".join(sorted(training.recompute_parts))
    return (
        f"every-{training.recompute_every}" if training.recompute == "every" else training.recompute
    )


def _sum_exposed_by_axis(step: TimedStep) -> tuple[tuple[str, int], ...]:
    """Exposed communication of the slowest stage by axis, with all data-parallel axes as dp."""
    exposed_ns: Counter[str] = Counter()
    for communication in step.list_communication(step.splits.index(step.split)):
        if communication.exposed_ns:
            axis = communication.message.axis
            exposed_ns["dp" if axis.startswith("dp") else axis] += communication.exposed_ns
    return tuple(exposed_ns.most_common())
