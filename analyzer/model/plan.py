"""Layout search: the fastest parallel layouts of a job that fit on a number of GPUs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.comm_ops import context_messages, expert_messages, tensor_messages
from stepsplit.analyzer.model.config import Chunk, Experts, JobConfig, StageConfig, stages_of
from stepsplit.analyzer.model.config_checks import first_fault
from stepsplit.analyzer.model.layer_time import chunk_passes, launches, speed_of
from stepsplit.analyzer.model.memory import fits, memory_of
from stepsplit.analyzer.model.parameters import stage_parameters
from stepsplit.analyzer.model.plan_space import (
    SCHEMA,
    AxisPlacement,
    Candidate,
    Choice,
    Plan,
    Reason,
    RunnerUp,
    Searched,
    Trial,
    families,
    places_of,
    runner_up,
    tree_of,
)
from stepsplit.analyzer.model.predict import call_ns, predict
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.step_time import straggling

# plan: a job and a number of GPUs in, a Plan out.

TOP = 8
"""Default number of layouts in a plan, one per split of the GPUs."""

Raced = tuple[Candidate, JobConfig]
"""A predicted layout and its job."""


def plan(
    job: JobConfig,
    gpus: int,
    keep: frozenset[str] = frozenset(),
    top: int = TOP,
    rates: Rates | None = None,
) -> Plan:
    """Find the fastest layouts of a job that fit on a number of GPUs.

    The search is exact: a layout is skipped only if a lower bound of its step time is above the
    slowest layout of the result.

    Args:
        job: gives model, sequence, batch, precision, framework and hardware. Its layout, microbatch
            size and recomputation are ignored unless keep names them.
        gpus: number of GPUs, 1 or more.
        keep: settings to keep as the job has them, out of "tp", "pp", "cp", "ep", "expert_tp",
            "zero", "sequence_parallel", "schedule", "chunks", "micro_batch", "recompute"; default
            none.
        top: layouts to return, each with a different split of the GPUs; default 8.
        rates: measured collective times, as read_rates returns them; default None: the constants
            of the hardware preset.

    Returns:
        The Plan: the best layout, the runners-up and why they are slower.

    Raises:
        UsageError: gpus is below 1, or no layout is valid and fits in memory.

    Example:
        >>> from stepsplit.analyzer import plan, read_job
        >>> best = plan(read_job("job.toml"), gpus=16).best
        >>> best.choice.tp, best.choice.pp, f"{best.step_ns / 1e9:.0f} s"
        (4, 4, '49 s')
    """
    if gpus < 1:
        raise UsageError(f"number of GPUs must be 1 or more, not {gpus}; set --gpus")
    sifted = sift(job, gpus, keep)
    if not sifted.fitting:
        raise UsageError(_nothing(job, gpus, sifted))
    raced, timed = _race(sifted.fitting, top, rates or Rates())
    (first, best_job), *others = raced
    return Plan(
        gpus=gpus,
        best=first,
        runners_up=tuple(runner_up(first, other) for other, _ in others),
        tree=tree_of(job, gpus),
        places=places_of(best_job),
        searched=_searched(sifted, timed),
    )


def _race(fitting: list[JobConfig], top: int, rates: Rates) -> tuple[list[Raced], int]:
    """The best layout of each split of the GPUs, fastest first, and how many layouts were timed.

    Layouts are timed in the order of their lower bounds, until the next bound is above the slowest
    layout of the result.
    """
    floor = Floor(rates)
    ahead = sorted((floor.step_ns(job), n) for n, job in enumerate(fitting))
    found: dict[tuple[int, ...], Raced] = {}
    shown: list[Raced] = []
    for timed, (floor_ns, n) in enumerate(ahead):
        if len(shown) == top and floor_ns > shown[-1][0].step_ns:
            return shown, timed
        one = candidate_of(fitting[n], rates)
        known = found.get(one.choice.axes)
        if known is None or _order(one) < _order(known[0]):
            found[one.choice.axes] = one, fitting[n]
            shown = _apart(found.values())[:top]
    return shown, len(ahead)


def _apart(found: Iterable[Raced]) -> list[Raced]:
    """Sort, and drop layouts that a faster one dominates: the same tp, pp and ep with less context
    parallelism, and not larger in memory."""
    kept: list[Raced] = []
    for one, job in sorted(found, key=lambda raced: _order(raced[0])):
        if not any(_spares(before, one) for before, _ in kept):
            kept.append((one, job))
    return kept


def _spares(before: Candidate, one: Candidate) -> bool:
    a, b = before.choice, one.choice
    same = (a.tp, a.pp, a.ep) == (b.tp, b.pp, b.ep)
    return same and a.cp < b.cp and before.peak_bytes <= one.peak_bytes


def _order(one: Candidate) -> tuple[int, ...]:
    """Sort key: step time, then number of model-parallel ranks, peak memory, and number of settings
    that differ from the default."""
    choice = one.choice
    axes = choice.cp * choice.ep * choice.pp * choice.tp
    settings = choice.zero + choice.chunks + choice.sequence_parallel + (choice.recompute != "none")
    return one.step_ns, axes, one.peak_bytes, settings


def _searched(sifted: Sifted, timed: int) -> Searched:
    refused = tuple(sifted.refused.most_common())
    return Searched(sifted.considered, sifted.too_big, len(sifted.fitting), timed, refused)


def _nothing(job: JobConfig, gpus: int, sifted: Sifted) -> str:
    """The error message if no layout is left: the closest layout, and a hint."""
    where = f"no layout on {gpus} x {job.hardware.name}"
    if sifted.nearest is None:
        why = ", ".join(kind for kind, _ in sifted.refused.most_common(2)) or "global_batch"
        return f"{where} is valid ({why}); change the number of GPUs or global_batch"
    near = choice_of(sifted.nearest)
    axes = f"tp {near.tp} pp {near.pp} cp {near.cp} dp {near.dp_replicate * near.dp_shard}"
    lacks = (
        f"{units.gibibytes(sifted.nearest_bytes)} of {units.gibibytes(job.hardware.memory_bytes)}"
    )
    return f"{where} fits; the closest is {axes} with {lacks}; use more GPUs or a shorter seq_len"


# Which layouts are valid and fit in memory.

_NUMBERS = re.compile(r"(?<=\w) (?:\d[\d.e+]*\b|\(\d[\d.e+]*\))|\s=.*")


@dataclass(slots=True)
class Sifted:
    """Feasible layouts, counts of the others, and the layout closest to fitting."""

    fitting: list[JobConfig] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    too_big: int = 0
    nearest: JobConfig | None = None
    nearest_bytes: int = 0

    @property
    def considered(self) -> int:
        return len(self.fitting) + self.refused.total() + self.too_big


def sift(job: JobConfig, gpus: int, keep: frozenset[str]) -> Sifted:
    """Check every layout of the search space for validity and memory."""
    found = Sifted()
    for family in families(job, gpus, keep):
        _weigh(found, family)
    return found


def _weigh(found: Sifted, family: tuple[JobConfig, ...]) -> None:
    """Filter jobs that differ only in the microbatch, smallest first; stop at the first too big.

    The last one may still fit if it is a single microbatch: without gradient accumulation FSDP
    needs no fp32 sums.
    """
    for at, job in enumerate(family):
        if _take(found, job):
            continue
        left = family[at + 1 :]
        if left and left[-1].microbatches == 1:
            _take(found, left[-1])
            left = left[:-1]
        found.too_big += len(left)
        return


def _take(found: Sifted, job: JobConfig) -> bool:
    """Count one job. Returns False if it is too big, so that larger ones can be skipped."""
    fault = first_fault(job)
    if fault is not None:
        found.refused[_kind(fault.problem)] += 1
        return True
    memory = memory_of(job)
    if fits(job, memory):
        found.fitting.append(job)
        return True
    found.too_big += 1
    _miss(found, job, max(stage.total_bytes for stage in memory))
    return False


def _miss(found: Sifted, job: JobConfig, peak_bytes: int) -> None:
    if found.nearest is None or peak_bytes < found.nearest_bytes:
        found.nearest, found.nearest_bytes = job, peak_bytes


def _kind(problem: str) -> str:
    """Remove the numbers from a problem: "heads 96 / tp 7 = 13.7" -> "heads / tp"."""
    return _NUMBERS.sub("", problem)


# A lower bound of the step time, to skip layouts that can't be among the fastest.

_IN_LAYERS = ("forward", "backward", "recompute")

SLACK = 1e-9
"""Rounding of sums in a different order stays below this ratio."""

_Alike = tuple[object, ...]
"""The settings that decide a layer's time."""


@dataclass(frozen=True, slots=True)
class LayerFloors:
    """Lower bound of one layer's time by kind, in ns; expert_ns is 0 without experts."""

    dense_ns: float
    expert_ns: float

    def of(self, chunk: Chunk) -> float:
        return chunk.dense_layers * self.dense_ns + chunk.expert_layers * self.expert_ns


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of step times for the layouts of one job.

    Caches the time of a layer, which layouts with the same tp, cp and experts share.
    """

    rates: Rates
    known: dict[_Alike, float] = field(default_factory=dict)

    def step_ns(self, job: JobConfig) -> float:
        """Lower bound of the predicted step time.

        Leaves out embedding, head, pipeline messages, gradient reduction and optimizer. Counts the
        microbatches of each rank, plus the fill and drain of the first chunks before it.
        """
        layers, m = self._layers(job), job.microbatches
        held = [[layers.of(chunk) for chunk in stage.chunks] for stage in stages_of(job)]
        if job.parallel.schedule == "dualpipe":
            most = m / 2 * max(map(sum, held))
        elif job.parallel.schedule in ("1f1b", "interleaved"):
            before = accumulate((chunks[0] for chunks in held), initial=0.0)
            most = max(m * sum(chunks) + ns for chunks, ns in zip(held, before, strict=False))
        else:
            most = m * max(map(sum, held))
        return most * (1 + straggling(job).share) * (1 - SLACK)

    def _layers(self, job: JobConfig) -> LayerFloors:
        experts, layout, recipe = job.model.experts, job.parallel, job.training
        alike = (
            layout.tp, layout.cp, layout.sequence_parallel, recipe.micro_batch, recipe.recompute,
            recipe.recompute_every, recipe.activation_dtype,
        )  # fmt: skip
        if experts is None:
            return LayerFloors(self._once(alike, lambda: _one_layer(job)), 0.0)
        spread = (*alike, layout.ep, layout.expert_tp)
        return LayerFloors(
            self._once(alike, lambda: _without_experts(_one_layer(job)))
            if experts.dense_layers
            else 0.0,
            self._once(spread, lambda: _all_with_experts(_one_layer(job), experts)),
        )

    def _once(self, alike: _Alike, one: Callable[[], JobConfig]) -> float:
        if alike not in self.known:
            self.known[alike] = _middle_ns(one(), self.rates)
        return self.known[alike]


def _one_layer(job: JobConfig) -> JobConfig:
    """A job of three layers in three stages with one microbatch: the middle stage is one layer.

    It has only as many data-parallel ranks as its experts need.
    """
    spread = job.parallel.ep * job.parallel.expert_tp
    dp = spread // math.gcd(spread, job.parallel.tp * job.parallel.cp)
    layout = replace(
        job.parallel, pp=3, dp_replicate=dp, dp_shard=1, zero=0, schedule="1f1b", chunks=1,
        layers_per_stage=None,
    )  # fmt: skip
    recipe = replace(job.training, global_batch=job.training.micro_batch * dp)
    return replace(job, parallel=layout, training=recipe, model=replace(job.model, layers=3))


def _without_experts(one: JobConfig) -> JobConfig:
    layout = replace(one.parallel, ep=1, expert_tp=1)
    return replace(one, parallel=layout, model=replace(one.model, experts=None))


def _all_with_experts(one: JobConfig, experts: Experts) -> JobConfig:
    return replace(one, model=replace(one.model, experts=replace(experts, dense_layers=0)))


def _middle_ns(one: JobConfig, rates: Rates) -> float:
    """Lower bound of the middle layer's time: compute plus communication that never overlaps, or
    the host's launch time if that is longer.

    More microbatches can only increase overlap, so communication that may overlap is left out.
    """
    stage = stages_of(one)[1]
    (device,) = chunk_passes(one, speed_of(one), stage.chunks)
    backward_ns = device.input_ns + device.weight_ns
    host = launches(one, 1)
    launched = max(device.forward_ns, host.forward_ns) + max(backward_ns, host.input_ns)
    return max(device.forward_ns + backward_ns + _sent_ns(one, stage, rates), launched)


def _sent_ns(one: JobConfig, stage: StageConfig, rates: Rates) -> float:
    """Time of the layer's messages that never overlap; a cp ring overlaps attention."""
    ring = {"cp"} if one.parallel.context_kind == "ring" else set()
    shown = {"tp", "ep", "cp"} - one.parallel.overlap - ring
    messages = (
        *tensor_messages(one, stage, stage_parameters(one)[stage.index]),
        *context_messages(one, stage),
        *expert_messages(one, stage),
    )
    return sum(
        message.count * call_ns(one, message, rates).ns
        for message in messages
        if message.phase in _IN_LAYERS and message.axis in shown and message.input_bytes
    )


# A job and its prediction -> a Candidate.


def candidate_of(job: JobConfig, rates: Rates) -> Candidate:
    """Predict the job and build its candidate."""
    prediction = predict(job, rates)
    return Candidate(
        choice=choice_of(job),
        microbatches=job.microbatches,
        split=prediction.split,
        exposed_ns=_exposed(prediction),
        peak_bytes=max(stage.total_bytes for stage in prediction.memory),
        mfu=prediction.mfu,
        confidence=prediction.confidence,
    )


def choice_of(job: JobConfig) -> Choice:
    layout, recipe = job.parallel, job.training
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
        micro_batch=recipe.micro_batch,
        recompute=_recompute(job),
    )


def _recompute(job: JobConfig) -> str:
    """The value of recompute in a job.toml."""
    recipe = job.training
    return f"every-{recipe.recompute_every}" if recipe.recompute == "every" else recipe.recompute


def _exposed(prediction: Prediction) -> tuple[tuple[str, int], ...]:
    """Exposed communication of the slowest stage by axis, with all data-parallel axes as dp."""
    stage = prediction.splits.index(prediction.split)
    found: Counter[str] = Counter()
    for one in prediction.communication:
        if one.message.stage == stage and one.exposed_ns:
            axis = one.message.axis
            found["dp" if axis.startswith("dp") else axis] += one.exposed_ns
    return tuple(found.most_common())


# Plan <-> JSON. Scripts rely on these keys.

_HINT = "plan the job again"


def to_json(plan: Plan) -> str:
    """Write the plan as JSON (schema stepsplit.plan/1, times in whole ns).

    Each top-level key has its own line.
    """
    body = {
        "schema": SCHEMA,
        "gpus": plan.gpus,
        "best": _candidate_row(plan.best),
        "runners_up": [_runner_row(one) for one in plan.runners_up],
        "tree": [asdict(trial) for trial in plan.tree],
        "places": [asdict(place) for place in plan.places],
        "searched": asdict(plan.searched) | {"refused": dict(plan.searched.refused)},
    }
    parts = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def from_json(text: str, source: object = "plan.json") -> Plan:
    """Read a plan from JSON. Raises DataError if the text is not of this schema."""
    try:
        body = json.loads(text)
        if body["schema"] == SCHEMA:
            return _plan(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(source, f"not a stepsplit plan ({error})", _HINT) from None
    raise DataError(source, f"schema is {body['schema']}, expected {SCHEMA}", _HINT)


def _candidate_row(one: Candidate) -> dict[str, Any]:
    return asdict(one) | {"exposed_ns": dict(one.exposed_ns), "step_ns": one.step_ns}


def _runner_row(one: RunnerUp) -> dict[str, Any]:
    return {
        "candidate": _candidate_row(one.candidate),
        "behind_ns": one.behind_ns,
        "more_bytes": one.more_bytes,
        "reasons": [asdict(reason) for reason in one.reasons],
    }


def _plan(body: Mapping[str, Any]) -> Plan:
    searched = body["searched"]
    return Plan(
        gpus=int(body["gpus"]),
        best=_candidate(body["best"]),
        runners_up=tuple(_runner(row) for row in body["runners_up"]),
        tree=tuple(Trial(**row) for row in body["tree"]),
        places=tuple(AxisPlacement(**row) for row in body["places"]),
        searched=Searched(**{**searched, "refused": tuple(searched["refused"].items())}),
    )


def _candidate(row: Mapping[str, Any]) -> Candidate:
    layers = row["choice"]["layers_per_stage"]
    stages = None if layers is None else tuple(layers)
    told = {key: value for key, value in row.items() if key != "step_ns"}
    told["choice"] = Choice(**{**row["choice"], "layers_per_stage": stages})
    told["split"] = Split(**row["split"])
    told["exposed_ns"] = tuple(row["exposed_ns"].items())
    found = Candidate(**told)
    if found.step_ns != row["step_ns"]:
        raise ValueError(f"step_ns is {row['step_ns']}, but its buckets add up to {found.step_ns}")
    return found


def _runner(row: Mapping[str, Any]) -> RunnerUp:
    reasons = tuple(Reason(**reason) for reason in row["reasons"])
    return RunnerUp(_candidate(row["candidate"]), row["behind_ns"], row["more_bytes"], reasons)
