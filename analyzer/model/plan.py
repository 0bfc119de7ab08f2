"""Layout search: the fastest parallel layouts of a job that fit on a number of GPUs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.comm_ops import list_cp_ops, list_ep_ops, list_tp_ops
from stepsplit.analyzer.model.config import (
    Chunk,
    Experts,
    JobConfig,
    ParallelConfig,
    StageConfig,
    list_stages,
)
from stepsplit.analyzer.model.config_checks import find_violation
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.layer_time import (
    compute_chunk_passes,
    compute_expert_wait,
    compute_launch_time,
)
from stepsplit.analyzer.model.memory import (
    compute_peak_bytes,
    is_peak_within_memory,
    list_stage_states,
)
from stepsplit.analyzer.model.memory_states import LayersByKind, States, compute_layers_by_kind
from stepsplit.analyzer.model.parameters import count_stage_parameters
from stepsplit.analyzer.model.plan_space import (
    SCHEMA,
    AxisPlacement,
    Candidate,
    Choice,
    JobFamily,
    ParetoPoint,
    Plan,
    Reason,
    RunnerUp,
    SearchCounts,
    Trial,
    build_decision_tree,
    build_runner_up,
    list_families,
    list_placements,
)
from stepsplit.analyzer.model.predict import compute_call_ns, predict
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.step_time import compute_skew

# plan: a job and a number of GPUs in, a Plan out.

TOP = 8
"""Default number of layouts in a plan, one per split of the GPUs."""

TimedLayout = tuple[Candidate, JobConfig]
"""A predicted layout and its job."""


def plan(
    job: JobConfig,
    gpus: int,
    keep: frozenset[str] = frozenset(),
    top: int = TOP,
    rates: Rates | None = None,
    price_per_gpu_hour: float | None = None,
    pareto: bool = False,
) -> Plan:
    """Find the fastest layouts of a job that fit on a number of GPUs.

    The search is exact: a layout is skipped only if a lower bound of its step time is above the
    slowest layout of the result.

    Args:
        job: gives model, sequence, batch, precision, framework and hardware. Its layout, microbatch
            size and recomputation are ignored unless keep names them.
        gpus: number of GPUs, 1 or more.
        keep: settings to keep as the job has them, such as "tp" or "schedule"; default none.
        top: layouts to return, each with a different split of the GPUs; default 8.
        rates: measured collective times, as read_rates returns them; default None: the constants
            of the hardware preset.
        price_per_gpu_hour: price of a GPU per hour, for the cost of a million tokens (see
            Plan.compute_cost); default None.
        pareto: whether to list the layouts that no other beats in step time, memory and GPUs, on
            these, a half, a quarter and an eighth of them; default False. Each needs a search.

    Returns:
        The Plan: the best layout, the runners-up and why they are slower.

    Raises:
        UsageError: gpus is below 1, the price is not above 0, or no layout is valid and fits in
            memory.

    Examples:
        >>> from stepsplit.analyzer import plan, read_job
        >>> best = plan(read_job("job.toml"), gpus=16).best
        >>> best.choice.tp, best.choice.pp, f"{best.step_ns / 1e9:.0f} s"
        (4, 4, '47 s')
    """
    _check_numbers(gpus, price_per_gpu_hour)
    filtered = filter_feasible(job, gpus, keep)
    if not filtered.fitting:
        raise UsageError(_explain_no_layout(job, gpus, filtered))
    ranked, timed = _rank_layouts(filtered.fitting, top, rates or Rates())
    (first, best_job), *others = ranked
    return Plan(
        gpus=gpus,
        best=first,
        runners_up=tuple(build_runner_up(first, other) for other, _ in others),
        tree=build_decision_tree(job, gpus),
        places=list_placements(best_job),
        searched=_summarize_search(filtered, timed),
        tokens=job.training.global_batch * job.training.seq_len,
        price_per_gpu_hour=price_per_gpu_hour,
        pareto=tuple(_list_pareto(job, gpus, keep, rates or Rates())) if pareto else (),
    )


def _check_numbers(gpus: int, price_per_gpu_hour: float | None) -> None:
    if gpus < 1:
        raise UsageError(f"number of GPUs must be 1 or more, not {gpus}; set --gpus")
    if price_per_gpu_hour is not None and not 0 < price_per_gpu_hour < math.inf:
        raise UsageError(f"price per GPU hour must be above 0, not {price_per_gpu_hour:g}")


def _rank_layouts(
    fitting: list[JobConfig], top: int, rates: Rates
) -> tuple[list[TimedLayout], int]:
    """The best layout of each split of the GPUs, fastest first, and how many layouts were timed.

    Layouts are timed in the order of their lower bounds, until the next bound is above the slowest
    layout of the result.
    """
    bound = LowerBound(rates)
    queue = sorted((bound.compute_step_ns(job), n) for n, job in enumerate(fitting))
    best: dict[tuple[int, ...], TimedLayout] = {}
    top_layouts: list[TimedLayout] = []
    for timed, (bound_ns, n) in enumerate(queue):
        if len(top_layouts) == top and bound_ns > top_layouts[-1][0].step_ns:
            return top_layouts, timed
        candidate = build_candidate(fitting[n], rates)
        previous = best.get(candidate.choice.axes)
        if previous is None or _make_sort_key(candidate) < _make_sort_key(previous[0]):
            best[candidate.choice.axes] = candidate, fitting[n]
            top_layouts = _drop_dominated(best.values())[:top]
    return top_layouts, len(queue)


def _drop_dominated(layouts: Iterable[TimedLayout]) -> list[TimedLayout]:
    """Sort, and drop layouts that a faster one dominates: the same tp, pp and ep with less context
    parallelism, and not larger in memory."""
    shown: list[TimedLayout] = []
    for candidate, job in sorted(layouts, key=lambda raced: _make_sort_key(raced[0])):
        if not any(_is_dominating(before, candidate) for before, _ in shown):
            shown.append((candidate, job))
    return shown


def _is_dominating(before: Candidate, candidate: Candidate) -> bool:
    a, b = before.choice, candidate.choice
    same = (a.tp, a.pp, a.ep) == (b.tp, b.pp, b.ep)
    return same and a.cp < b.cp and before.peak_bytes <= candidate.peak_bytes


def _make_sort_key(candidate: Candidate) -> tuple[int, ...]:
    """Sort key: step time, then number of model-parallel ranks, peak memory, and number of settings
    that differ from the default."""
    choice = candidate.choice
    axes = choice.cp * choice.ep * choice.pp * choice.tp
    settings = choice.zero + choice.chunks + choice.sequence_parallel + (choice.recompute != "none")
    return candidate.step_ns, axes, candidate.peak_bytes, settings


def _summarize_search(filtered: FilteredLayouts, timed: int) -> SearchCounts:
    refused = tuple(filtered.refused.most_common())
    return SearchCounts(
        filtered.considered, filtered.too_big, len(filtered.fitting), timed, refused
    )


def _explain_no_layout(job: JobConfig, gpus: int, filtered: FilteredLayouts) -> str:
    """The error message if no layout is left: the closest layout, and a hint."""
    where = f"no layout on {gpus} x {job.hardware.name}"
    if filtered.nearest is None:
        refusals = ", ".join(kind for kind, _ in filtered.refused.most_common(2)) or "global_batch"
        return f"{where} is valid ({refusals}); change the number of GPUs or global_batch"
    near = build_choice(filtered.nearest)
    axes = f"tp {near.tp} pp {near.pp} cp {near.cp} dp {near.dp_replicate * near.dp_shard}"
    memory = (
        f"{units.format_gibibytes(filtered.nearest_bytes)} of "
        f"{units.format_gibibytes(job.hardware.memory_bytes)}"
    )
    return f"{where} fits; the closest is {axes} with {memory}; use more GPUs or a shorter seq_len"


# Layouts that no other beats in step time, memory and number of GPUs at once.

GPU_DIVISORS = (8, 4, 2, 1)
"""The list has layouts on these fractions of the GPUs."""

LEAST_SAVING = 0.05
"""Share of the device's memory that a slower layout must save to be listed."""


def _list_pareto(
    job: JobConfig, gpus: int, keep: frozenset[str], rates: Rates
) -> Iterator[ParetoPoint]:
    """The points by GPUs and step time; one on more GPUs is faster than all on fewer with as little
    memory."""
    shown: list[ParetoPoint] = []
    for divisor in GPU_DIVISORS:
        if gpus % divisor == 0:
            fitting = filter_feasible(job, gpus // divisor, keep).fitting
            for candidate in _find_front(job, fitting, rates):
                point = ParetoPoint(
                    gpus // divisor, candidate, job.hardware.memory_bytes - candidate.peak_bytes
                )
                if not any(_is_beaten(point, other) for other in shown):
                    shown.append(point)
                    yield point


def _is_beaten(point: ParetoPoint, other: ParetoPoint) -> bool:
    return (
        other.candidate.step_ns <= point.candidate.step_ns
        and other.headroom_bytes >= point.headroom_bytes
    )


def _find_front(job: JobConfig, fitting: list[JobConfig], rates: Rates) -> list[Candidate]:
    """The layouts of one number of GPUs from the fastest to the smallest, each with less memory
    than all faster ones.

    A layout is not timed if one that is no larger is faster than its lower bound.
    """
    bound, front = LowerBound(rates), list[Candidate]()
    peaks = [compute_peak_bytes(each) for each in fitting]
    queue = sorted((bound.compute_step_ns(each), n) for n, each in enumerate(fitting))
    for bound_ns, n in queue:
        if any(each.step_ns <= bound_ns and each.peak_bytes <= peaks[n] for each in front):
            continue
        candidate = build_candidate(fitting[n], rates)
        key = _make_sort_key(candidate)
        if any(_make_sort_key(each) < key and each.peak_bytes <= peaks[n] for each in front):
            continue
        front = [each for each in front if _make_sort_key(each) < key or each.peak_bytes < peaks[n]]
        front.append(candidate)
    return _thin_front(sorted(front, key=_make_sort_key), job.hardware.memory_bytes)


def _thin_front(front: list[Candidate], memory_bytes: int) -> list[Candidate]:
    """Only those that save LEAST_SAVING over the one listed before."""
    listed = front[:1]
    for each in front[1:]:
        if listed[-1].peak_bytes - each.peak_bytes >= LEAST_SAVING * memory_bytes:
            listed.append(each)
    return listed


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

    @property
    def considered(self) -> int:
        return len(self.fitting) + self.refused.total() + self.too_big


def filter_feasible(job: JobConfig, gpus: int, keep: frozenset[str]) -> FilteredLayouts:
    """Check every layout of the search space for validity and memory."""
    layouts, memory = FilteredLayouts(), LayoutMemory()
    for family in list_families(job, gpus, keep):
        _filter_family(layouts, family, memory)
    if layouts.fitting:
        return layouts
    layouts, memory = FilteredLayouts(), LayoutMemory(whole=True)
    for family in list_families(job, gpus, keep):
        _filter_family(layouts, family, memory)
    return layouts


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """Peak memory of the layouts of one job.

    Caches the states, which depend on the layout alone, and the activations of a layer, which
    layouts with the same tp, cp, experts and microbatch share. whole: the peak of layouts whose
    states alone are too big is computed, too.
    """

    whole: bool = False
    states: dict[ParallelConfig, tuple[States, ...]] = field(default_factory=dict)
    layers: dict[_LayerKey, LayersByKind] = field(default_factory=dict)

    def compute_peak_bytes(self, job: JobConfig) -> int:
        """The peak, or the states where these are too big."""
        states = self._find_states(job)
        state_bytes = max(each.total_bytes for each in states)
        if not self.whole and not is_peak_within_memory(job, state_bytes):
            return state_bytes
        key = (*_make_layer_key(job), job.parallel.ep, job.parallel.expert_tp)
        if key not in self.layers:
            self.layers[key] = compute_layers_by_kind(job)
        return compute_peak_bytes(job, states, self.layers[key])

    def _find_states(self, job: JobConfig) -> tuple[States, ...]:
        layout = job.parallel
        if layout.sequence_parallel:
            layout = replace(layout, sequence_parallel=False)
        if layout not in self.states:
            self.states[layout] = list_stage_states(job)
        return self.states[layout]


def _filter_family(layouts: FilteredLayouts, family: JobFamily, memory: LayoutMemory) -> None:
    """Filter the jobs of a family; stop at the first that is too big.

    The last one may still fit if it is a single microbatch: without gradient accumulation FSDP
    needs no fp32 sums.
    """
    for done, job in enumerate(family, 1):
        if _filter_job(layouts, job, memory):
            continue
        larger = len(family) - done
        if larger and (last := family[-1]).microbatches == 1:
            _filter_job(layouts, last, memory)
            larger -= 1
        layouts.too_big += larger
        return


def _filter_job(layouts: FilteredLayouts, job: JobConfig, memory: LayoutMemory) -> bool:
    """Count one job. Returns False if it is too big, so that larger ones can be skipped."""
    fault = find_violation(job)
    if fault is not None:
        layouts.refused[_strip_numbers(fault.problem)] += 1
        return True
    peak_bytes = memory.compute_peak_bytes(job)
    if is_peak_within_memory(job, peak_bytes):
        layouts.fitting.append(job)
        return True
    layouts.too_big += 1
    _update_nearest(layouts, job, peak_bytes)
    return False


def _update_nearest(layouts: FilteredLayouts, job: JobConfig, peak_bytes: int) -> None:
    if layouts.nearest is None or peak_bytes < layouts.nearest_bytes:
        layouts.nearest, layouts.nearest_bytes = job, peak_bytes


def _strip_numbers(problem: str) -> str:
    """Remove the numbers from a problem: "heads 96 / tp 7 = 13.7" -> "heads / tp"."""
    return _NUMBERS.sub("", problem)


# A lower bound of the step time, to skip layouts that can't be among the fastest.

_IN_LAYERS = ("forward", "backward", "recompute")

SLACK = 1e-9
"""Rounding of sums in a different order stays below this ratio."""


@dataclass(frozen=True, slots=True)
class LayerLowerBounds:
    """Lower bound of one layer's time by kind, in ns; expert_ns is 0 without experts."""

    dense_ns: float
    expert_ns: float

    def compute_chunk_ns(self, chunk: Chunk) -> float:
        return chunk.dense_layers * self.dense_ns + chunk.expert_layers * self.expert_ns


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
            [layers.compute_chunk_ns(chunk) for chunk in stage.chunks] for stage in list_stages(job)
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
        return LayerLowerBounds(
            self._cache_layer_ns(key, lambda: _remove_experts(_build_one_layer_job(job)))
            if experts.dense_layers
            else 0.0,
            self._cache_layer_ns(
                expert_key, lambda: _make_all_expert(_build_one_layer_job(job), experts)
            ),
        )

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


def _remove_experts(job: JobConfig) -> JobConfig:
    layout = replace(job.parallel, ep=1, expert_tp=1)
    return replace(job, parallel=layout, model=replace(job.model, experts=None))


def _make_all_expert(job: JobConfig, experts: Experts) -> JobConfig:
    return replace(job, model=replace(job.model, experts=replace(experts, dense_layers=0)))


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
    """Predict the job and build its candidate."""
    prediction = predict(job, rates)
    return Candidate(
        choice=build_choice(job),
        microbatches=job.microbatches,
        split=prediction.split,
        exposed_ns=_sum_exposed_by_axis(prediction),
        peak_bytes=max(stage.total_bytes for stage in prediction.memory),
        mfu=prediction.mfu,
        confidence=prediction.confidence,
    )


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
    """The value of recompute in a job.toml."""
    training = job.training
    if training.recompute_parts:
        return "+".join(sorted(training.recompute_parts))
    return (
        f"every-{training.recompute_every}" if training.recompute == "every" else training.recompute
    )


def _sum_exposed_by_axis(prediction: Prediction) -> tuple[tuple[str, int], ...]:
    """Exposed communication of the slowest stage by axis, with all data-parallel axes as dp."""
    stage = prediction.splits.index(prediction.split)
    exposed_ns: Counter[str] = Counter()
    for communication in prediction.communication:
        if communication.message.stage == stage and communication.exposed_ns:
            axis = communication.message.axis
            exposed_ns["dp" if axis.startswith("dp") else axis] += communication.exposed_ns
    return tuple(exposed_ns.most_common())


# Plan <-> JSON. Scripts rely on these keys.

_HINT = "plan the job again"


def to_json(plan: Plan) -> str:
    """Write the plan as JSON (schema stepsplit.plan/1, times in whole ns).

    Each top-level key has its own line.
    """
    body = {
        "schema": SCHEMA,
        "gpus": plan.gpus,
        "best": _build_candidate_row(plan.best),
        "runners_up": [_build_runner_row(one) for one in plan.runners_up],
        "tree": [asdict(trial) for trial in plan.tree],
        "places": [asdict(place) for place in plan.places],
        "searched": asdict(plan.searched) | {"refused": dict(plan.searched.refused)},
        "tokens": plan.tokens,
        "price_per_gpu_hour": plan.price_per_gpu_hour,
        "cost_per_million_tokens": plan.compute_cost(plan.best, plan.gpus),
        "pareto": [_build_pareto_row(plan, point) for point in plan.pareto],
    }
    parts = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def from_json(text: str, source: object = "plan.json") -> Plan:
    """Read a plan from JSON. Raises DataError if the text is not of this schema."""
    try:
        body = json.loads(text)
        if body["schema"] == SCHEMA:
            return _parse_plan(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(source, f"not a stepsplit plan ({error})", _HINT) from None
    raise DataError(source, f"schema is {body['schema']}, expected {SCHEMA}", _HINT)


def _build_candidate_row(candidate: Candidate) -> dict[str, Any]:
    return asdict(candidate) | {
        "exposed_ns": dict(candidate.exposed_ns),
        "step_ns": candidate.step_ns,
    }


def _build_pareto_row(plan: Plan, point: ParetoPoint) -> dict[str, Any]:
    return {
        "gpus": point.gpus,
        "candidate": _build_candidate_row(point.candidate),
        "headroom_bytes": point.headroom_bytes,
        "cost_per_million_tokens": plan.compute_cost(point.candidate, point.gpus),
    }


def _build_runner_row(runner: RunnerUp) -> dict[str, Any]:
    return {
        "candidate": _build_candidate_row(runner.candidate),
        "behind_ns": runner.behind_ns,
        "more_bytes": runner.more_bytes,
        "reasons": [asdict(reason) for reason in runner.reasons],
    }


def _parse_plan(body: Mapping[str, Any]) -> Plan:
    searched = body["searched"]
    return Plan(
        gpus=int(body["gpus"]),
        best=_parse_candidate(body["best"]),
        runners_up=tuple(_parse_runner_up(row) for row in body["runners_up"]),
        tree=tuple(Trial(**row) for row in body["tree"]),
        places=tuple(AxisPlacement(**row) for row in body["places"]),
        searched=SearchCounts(**{**searched, "refused": tuple(searched["refused"].items())}),
        tokens=int(body.get("tokens", 0)),
        price_per_gpu_hour=body.get("price_per_gpu_hour"),
        pareto=tuple(
            ParetoPoint(row["gpus"], _parse_candidate(row["candidate"]), row["headroom_bytes"])
            for row in body.get("pareto", ())
        ),
    )


def _parse_candidate(row: Mapping[str, Any]) -> Candidate:
    layers = row["choice"]["layers_per_stage"]
    stages = None if layers is None else tuple(layers)
    values = {key: value for key, value in row.items() if key != "step_ns"}
    values["choice"] = Choice(**{**row["choice"], "layers_per_stage": stages})
    values["split"] = Split(**row["split"])
    values["exposed_ns"] = tuple(row["exposed_ns"].items())
    candidate = Candidate(**values)
    if candidate.step_ns != row["step_ns"]:
        raise ValueError(
            f"step_ns is {row['step_ns']}, but its buckets add up to {candidate.step_ns}"
        )
    return candidate


def _parse_runner_up(row: Mapping[str, Any]) -> RunnerUp:
    reasons = tuple(Reason(**reason) for reason in row["reasons"])
    return RunnerUp(
        _parse_candidate(row["candidate"]), row["behind_ns"], row["more_bytes"], reasons
    )
