"""Layout search: the fastest parallel layouts of a job that fit on a number of GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.memory import MARGIN, compute_peak_bytes
from stepsplit.analyzer.model.plan_search import (
    FilteredLayouts,
    add_confidence,
    are_few,
    bound_layouts,
    build_candidate,
    build_choice,
    find_nearest,
    make_sort_key,
    run_calls,
    search_layouts,
)
from stepsplit.analyzer.model.plan_space import (
    SCHEMA,
    AxisPlacement,
    Candidate,
    Choice,
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

# plan: a job and a number of GPUs in, a Plan out.

TOP = 8
"""Default number of layouts in a plan, one per split of the GPUs."""


def plan(
    job: JobConfig,
    gpus: int,
    keep: frozenset[str] = frozenset(),
    top: int = TOP,
    rates: Rates | None = None,
    price_per_gpu_hour: float | None = None,
    pareto: bool = False,
    workers: int = 1,
) -> Plan:
    """Find the fastest layouts of a job that fit on a number of GPUs.

    The first one fits with a margin for the error of the memory model: it fits with a chance of
    0.95 or more (0.9 where it may need more by what is not stated), if any does. So do those that
    follow, sorted by their steps, but for the last: the fastest of those that are less sure to fit,
    which may be faster than all. Where few leave a margin, more of these follow.

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
        workers: processes that search, if there are many layouts; default 1. The result is the
            same. With more, guard the script's calls by `if __name__ == "__main__"`.

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
    known = rates or Rates()
    found = search_layouts(job, gpus, keep, top, known, workers)
    if not found.ranked:
        raise UsageError(_explain_no_layout(job, gpus, find_nearest(job, gpus, keep)))
    ranked, margin = list(found.ranked), MARGIN
    unsure = [one for one in ranked if (one[0].fit_chance or 0.0) < MARGIN]
    if unsure:
        # What may run out of memory is no advice: those that leave a margin, and one place for the
        # fastest that leaves none.
        sure = search_layouts(job, gpus, keep, top, known, workers, with_margin=True).ranked
        unsure = [one for one in unsure if all(one[0] != other[0] for other in sure)]
        places = max(1, top - 1) if unsure else top
        ranked = [*sure[:places], *unsure][:top]
        # Where more may be needed by what is open, a layout leaves a margin with a lower chance.
        margin = min(MARGIN, sure[0][0].fit_chance or 0.0) if sure else 0.0
    best_job = ranked[0][1]
    first, *others = (add_confidence(each, its_job, known) for each, its_job in ranked)
    return Plan(
        gpus=gpus,
        best=first,
        runners_up=tuple(build_runner_up(first, other) for other in others),
        tree=build_decision_tree(job, gpus),
        places=list_placements(best_job),
        searched=found.counts,
        tokens=job.training.global_batch * job.training.seq_len,
        price_per_gpu_hour=price_per_gpu_hour,
        pareto=tuple(_list_pareto(job, gpus, keep, known, workers)) if pareto else (),
        read_as=job.notes,
        margin=margin,
    )


MOST_GPUS = 1_000_000
"""The largest clusters have a tenth of that."""


def _check_numbers(gpus: int, price_per_gpu_hour: float | None) -> None:
    if not 1 <= gpus <= MOST_GPUS:
        limits = f"1 to {MOST_GPUS:,}"
        raise UsageError(f"number of GPUs must be {limits}, not {gpus}; set --gpus")
    if price_per_gpu_hour is not None and not 0 < price_per_gpu_hour < math.inf:
        raise UsageError(f"price per GPU hour must be above 0, not {price_per_gpu_hour:g}")


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
    job: JobConfig, gpus: int, keep: frozenset[str], rates: Rates, workers: int
) -> Iterator[ParetoPoint]:
    """The points by GPUs and step time; one on more GPUs is faster than all on fewer with as little
    memory."""
    shown: list[ParetoPoint] = []
    counts = [gpus // divisor for divisor in GPU_DIVISORS if gpus % divisor == 0]
    fronts = _find_fronts(job, counts, keep, rates, workers)
    for count in counts:
        for candidate in fronts[count]:
            headroom_bytes = job.hardware.memory_bytes - candidate.peak_bytes
            point = ParetoPoint(count, candidate, headroom_bytes)
            is_beaten = any(
                other.candidate.step_ns <= candidate.step_ns
                and other.headroom_bytes >= headroom_bytes
                for other in shown
            )
            if not is_beaten:
                shown.append(point)
                yield point


def _find_fronts(
    job: JobConfig, counts: Sequence[int], keep: frozenset[str], rates: Rates, workers: int
) -> dict[int, list[Candidate]]:
    """The front of each number of GPUs, the largest searches first. Raises DataError if a process
    died."""
    largest_first = sorted(counts, reverse=True)
    if workers == 1 or are_few(list_families(job, largest_first[0], keep)):
        return {count: _find_front(job, count, keep, rates) for count in largest_first}
    every_count = [(job, count, keep, rates) for count in largest_first]
    found = run_calls(f"layouts on {largest_first[0]} GPUs", _find_front, every_count, workers)
    return {largest_first[number]: front for number, front in found}


def _find_front(job: JobConfig, gpus: int, keep: frozenset[str], rates: Rates) -> list[Candidate]:
    """The layouts of one number of GPUs from the fastest to the smallest, each with less memory
    than all faster ones.

    A layout is not timed if one that is no larger is faster than its lower bound.
    """
    front: list[Candidate] = []
    jobs: dict[Choice, JobConfig] = {}
    (found,) = bound_layouts(job, gpus, keep, rates, 1)
    for one in found.queue:
        peak_bytes = compute_peak_bytes(one.job)
        no_larger = [each for each in front if each.peak_bytes <= peak_bytes]
        if any(each.step_ns <= one.bound_ns for each in no_larger):
            continue
        candidate = build_candidate(one.job, rates)
        key = make_sort_key(candidate)
        if any(make_sort_key(each) < key for each in no_larger):
            continue
        front = [
            each for each in front if make_sort_key(each) < key or each.peak_bytes < peak_bytes
        ]
        front.append(candidate)
        jobs[candidate.choice] = one.job
    listed = _thin_front(sorted(front, key=make_sort_key), job.hardware.memory_bytes)
    return [add_confidence(each, jobs[each.choice], rates) for each in listed]


def _thin_front(front: list[Candidate], memory_bytes: int) -> list[Candidate]:
    """Only those that save LEAST_SAVING over the one listed before."""
    listed = front[:1]
    for each in front[1:]:
        if listed[-1].peak_bytes - each.peak_bytes >= LEAST_SAVING * memory_bytes:
            listed.append(each)
    return listed


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
        "read_as": plan.read_as,
        "margin": plan.margin,
    }
    parts = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def from_json(text: str, source: object = "plan.json") -> Plan:
    """Read a plan from JSON. Raises DataError if the text is not of this schema."""
    try:
        body = json.loads(text)
        if body["schema"] == SCHEMA:
            searched = body["searched"]
            return Plan(
                gpus=int(body["gpus"]),
                best=_parse_candidate(body["best"]),
                runners_up=tuple(_parse_runner_up(row) for row in body["runners_up"]),
                tree=tuple(Trial(**row) for row in body["tree"]),
                places=tuple(AxisPlacement(**row) for row in body["places"]),
                searched=SearchCounts(
                    **{**searched, "refused": tuple(searched["refused"].items())}
                ),
                tokens=int(body.get("tokens", 0)),
                price_per_gpu_hour=body.get("price_per_gpu_hour"),
                pareto=tuple(
                    ParetoPoint(
                        row["gpus"], _parse_candidate(row["candidate"]), row["headroom_bytes"]
                    )
                    for row in body.get("pareto", ())
                ),
                read_as=tuple(map(str, body.get("read_as", ()))),
                margin=float(body.get("margin", 0.0)),
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(source, f"not a stepsplit plan ({error})", _HINT) from None
    raise DataError(source, f"schema is {body['schema']}, expected {SCHEMA}", _HINT)


def _build_candidate_row(candidate: Candidate) -> dict[str, Any]:
    recompute = candidate.choice.recompute_value
    return asdict(candidate) | {
        "choice": asdict(candidate.choice) | {"recompute": recompute},
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


def _parse_candidate(row: Mapping[str, Any]) -> Candidate:
    values = {key: value for key, value in row.items() if key != "step_ns"}
    values["choice"] = _parse_choice(row["choice"])
    values["split"] = Split(**row["split"])
    values["exposed_ns"] = tuple(row["exposed_ns"].items())
    candidate = Candidate(**values)
    if candidate.step_ns != row["step_ns"]:
        raise ValueError(
            f"step_ns is {row['step_ns']}, but its buckets add up to {candidate.step_ns}"
        )
    return candidate


def _parse_choice(row: Mapping[str, Any]) -> Choice:
    """Recomputed parts of a layer are a list; a plan of an earlier version joins them by a +."""
    layers, recompute = row["layers_per_stage"], row["recompute"]
    stages = None if layers is None else tuple(layers)
    if not isinstance(recompute, str):
        recompute = "+".join(recompute)
    return Choice(**{**row, "layers_per_stage": stages, "recompute": recompute})


def _parse_runner_up(row: Mapping[str, Any]) -> RunnerUp:
    reasons = tuple(Reason(**reason) for reason in row["reasons"])
    return RunnerUp(
        _parse_candidate(row["candidate"]), row["behind_ns"], row["more_bytes"], reasons
    )
