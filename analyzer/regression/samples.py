"""The values of a budget's metric on both sides of a check, and budgets that the noise allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.regression.checks import Budget, build_budget
from stepsplit.analyzer.regression.metrics import RunMetrics, list_mesh_axes
from stepsplit.analyzer.significance import (
    Difference,
    compute_decidable,
    compute_difference,
    compute_excess,
    estimate_noise,
)

BANDWIDTH = "busbw"


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric on both sides, as means over runs.

    harm is how much worse the candidate is, allowed how much worse it may be, in the metric's unit.
    zero: whether the metric is 0 in every run. noise: standard deviation of one run around the mean
    of its side; None if no side has two runs.
    """

    budget: Budget
    baseline: float | None
    candidate: float
    harm: float
    allowed: float
    difference: Difference | None
    zero: bool
    noise: float | None = None


def build_sample(
    budget: Budget, baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> Sample:
    """Build the sample of a budget. Raises UsageError for a run without the metric."""
    worse = budget.meaning.worse
    if budget.against == "baseline":
        if not baseline:
            rule = f"{budget.metric}:{budget.text}"
            raise UsageError(f"budget {rule} needs a baseline; pass --baseline")
        before = _collect_values(budget.metric, baseline)
        own = _collect_values(budget.metric, candidate)
        middle = fmean(before)
        return Sample(
            budget=budget,
            baseline=middle,
            candidate=fmean(own),
            harm=worse * (fmean(own) - middle),
            allowed=max(budget.ratio * abs(middle), budget.amount),
            difference=compute_difference([worse * v for v in before], [worse * v for v in own]),
            zero=not any((*before, *own)),
            noise=estimate_noise(before, own),
        )
    # Against a fixed limit or the prediction, a baseline only provides the noise of one run.
    own = _collect_values(budget.metric, candidate)
    limits = [_find_limit(budget, run) for run in candidate]
    over = [worse * (value - limit) for value, limit in zip(own, limits, strict=True)]
    before = [v for run in baseline if (v := run.find_value(budget.metric)) is not None]
    return Sample(
        budget=budget,
        baseline=fmean(before) if before else None,
        candidate=fmean(own),
        harm=fmean(over),
        allowed=0.0,
        difference=compute_excess(over, [worse * value for value in before]),
        zero=False,
        noise=estimate_noise(own) if len(own) > 1 else estimate_noise(before),
    )


def _find_limit(budget: Budget, run: RunMetrics) -> float:
    if budget.against == "limit":
        return budget.amount
    predicted = run.find_prediction(budget.metric)
    if predicted is None:
        raise UsageError(
            f"{run.name}: no prediction of {budget.metric}; analyze the run with --job, or use "
            "another budget"
        )
    return predicted * (1 + budget.meaning.worse * budget.ratio)


def _collect_values(metric: str, runs: Sequence[RunMetrics]) -> list[float]:
    """The value of each run; 0 where its mesh has the axis and nothing was measured on it."""
    values = []
    name, _, axis = metric.partition(".")
    for run in runs:
        value = run.find_value(metric)
        if value is None and axis and name != BANDWIDTH and axis in list_mesh_axes(run):
            value = 0.0
        if value is None:
            raise UsageError(
                f"{run.name} has no {metric}; remove that budget, or record and analyze the run "
                "with that metric"
            )
        values.append(value)
    return values


def expand_budgets(budgets: Sequence[Budget], runs: Sequence[RunMetrics]) -> Iterator[Budget]:
    """Expand a busbw budget to one for each axis and op that all runs have.

    Raises UsageError if there is none.
    """
    for budget in budgets:
        if budget.metric != BANDWIDTH:
            yield budget
            continue
        named = [{v.metric for v in run.values if v.metric.startswith("busbw.")} for run in runs]
        common = sorted(set.intersection(*named))
        if not common:
            raise UsageError("no collective has a bandwidth in all runs; remove the busbw budget")
        yield from (replace(budget, metric=name) for name in common)


def propose_budgets(budgets: Sequence[Budget], runs: Sequence[RunMetrics]) -> list[Budget]:
    """The budgets, raised where equal sides of so many runs would not pass in POWER of all cases.

    Raises UsageError for a run without a metric.
    """
    proposed = []
    for budget in expand_budgets(budgets, runs):
        proposed.append(budget)
        if budget.meaning.exact or budget.against != "baseline" or len(runs) < 2:
            continue
        values = _collect_values(budget.metric, runs)
        noise, middle = estimate_noise(values), abs(fmean(values))
        needed = compute_decidable(noise, len(runs)) if noise else 0.0
        if needed > max(budget.ratio * middle, budget.amount):
            # Rounded up, to a limit that people can read.
            if budget.meaning.unit == "share":
                limit = f"{math.ceil(1000 * needed) / 10:g}pt"
            else:
                limit = f"{math.ceil(100 * needed / middle)}%"
            proposed[-1] = build_budget(budget.metric, limit)
    return proposed
