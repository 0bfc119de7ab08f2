"""A metric's values on both sides, one a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from stepsplit.analyzer.compare.verdict.budget import Budget
from stepsplit.analyzer.compare.verdict.run_facts import RunFacts
from stepsplit.analyzer.compare.verdict.student import Difference, difference, distance
from stepsplit.analyzer.errors import UsageError

BANDWIDTH = "busbw"


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric on both sides, by its means over runs; harm is how much worse the candidate is, and
    allowed how much worse it may be, in the metric's unit. zero: it is that in every run."""

    budget: Budget
    baseline: float | None
    candidate: float
    harm: float
    allowed: float
    difference: Difference | None
    zero: bool


def sample_of(
    budget: Budget, baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> Sample:
    """The metric under its budget. Raises UsageError where a run does not tell it."""
    if budget.against == "baseline":
        return _against_baseline(budget, baseline, candidate)
    return _against_limit(budget, baseline, candidate)


def _against_baseline(
    budget: Budget, baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> Sample:
    if not baseline:
        raise UsageError(
            f"budget {budget.metric}:{budget.text} needs a baseline; name --baseline B"
        )
    before, own = _values(budget.metric, baseline), _values(budget.metric, candidate)
    worse, middle = budget.meaning.worse, fmean(before)
    return Sample(
        budget=budget,
        baseline=middle,
        candidate=fmean(own),
        harm=worse * (fmean(own) - middle),
        allowed=max(budget.ratio * abs(middle), budget.amount),
        difference=difference([worse * v for v in before], [worse * v for v in own]),
        zero=not any((*before, *own)),
    )


def _against_limit(
    budget: Budget, baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> Sample:
    """Held against its own limit, or the model's; a baseline tells the noise of a single run."""
    own = _values(budget.metric, candidate)
    worse, limits = budget.meaning.worse, [_limit(budget, run) for run in candidate]
    over = [worse * (value - limit) for value, limit in zip(own, limits, strict=True)]
    before = [v for run in baseline if (v := run.value(budget.metric)) is not None]
    return Sample(
        budget=budget,
        baseline=fmean(before) if before else None,
        candidate=fmean(own),
        harm=fmean(over),
        allowed=0.0,
        difference=distance(over, [worse * value for value in before]),
        zero=False,
    )


def _limit(budget: Budget, run: RunFacts) -> float:
    if budget.against == "limit":
        return budget.amount
    predicted = run.model(budget.metric)
    if predicted is None:
        raise UsageError(
            f"{run.name}: the model says nothing of {budget.metric}; analyze it with --run, or "
            "give another budget"
        )
    return predicted * (1 + budget.meaning.worse * budget.ratio)


def _values(metric: str, runs: Sequence[RunFacts]) -> list[float]:
    return [_value(metric, run) for run in runs]


def _value(metric: str, run: RunFacts) -> float:
    value = run.value(metric)
    if value is not None:
        return value
    name, _, axis = metric.partition(".")
    if axis and name != BANDWIDTH and axis in (run.setup.mesh or "").split():
        return 0.0
    raise UsageError(
        f"{run.name} does not tell {metric}; leave that budget out, or record and analyze the run "
        "so that it does"
    )


def spelled_out(budgets: Sequence[Budget], runs: Sequence[RunFacts]) -> Iterator[Budget]:
    """The budgets, one of all bandwidths as one for each axis and op that all runs have.

    Raises UsageError where there is none.
    """
    for budget in budgets:
        if budget.metric != BANDWIDTH:
            yield budget
            continue
        named = [{v.metric for v in run.values if v.metric.startswith("busbw.")} for run in runs]
        common = sorted(set.intersection(*named))
        if not common:
            raise UsageError("no collective has a bandwidth in all of these runs; leave busbw out")
        yield from (replace(budget, metric=name) for name in common)
