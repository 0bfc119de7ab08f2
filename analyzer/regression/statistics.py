"""Statistics of a check: Welch's t test, permutations, minimum detectable change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from statistics import fmean, variance

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.regression.checks import Budget
from stepsplit.analyzer.regression.metrics import RunFacts

# A metric's values on both sides, one a run.

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
            f"{run.name}: the model says nothing of {budget.metric}; analyze it with --job, or "
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


# What a few runs a side can tell, one value a run: a run's steps are no samples of their own.
#
# Student's t with the variances not pooled (B. L. Welch, Biometrika 34, 1947; degrees of freedom
# by F. E. Satterthwaite, Biometrics Bulletin 2, 1946). Noise of runs is skewed, and then t alone
# raises false alarms where one side has fewer runs: so a permutation of the runs must agree with
# an alarm, as far as their number allows (R. A. Fisher, The Design of Experiments, 1935).

ALPHA = 0.02
"""A false alarm may be raised so often where nothing changed, over all gated metrics together."""

MISS = 0.01
"""A metric that is just over its budget may pass so often."""

POWER = 0.8
"""A detectable effect is one that would be found so often."""

ALONE = 4.0
"""The p of a single run counts so many times: nothing tells the shape of its noise."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a mean lies above what it is held against: mean, its standard error, the degrees of
    freedom of that error.

    p is how often runs that do not differ would lie so far above, by t. dealt is that of the runs
    dealt anew onto the sides, in so many ways; 1 where t alone is not sure.
    """

    mean: float
    error: float
    freedom: float
    p: float
    dealt: float = 0.0
    ways: int = 1

    @property
    def low(self) -> float:
        """The lower end of the interval that misses the true difference in 2 ALPHA of cases."""
        return self.mean - self._reach

    @property
    def high(self) -> float:
        """The upper end of it."""
        return self.mean + self._reach

    def told_by_order(self, level: float) -> bool:
        """Whether the order of the runs is as rare as the level, or the rarest that there is."""
        return self.dealt <= max(level, 1 / self.ways)

    def within(self, budget: float) -> bool:
        """Whether it surely is no more than that: wrong in MISS of cases."""
        return self.mean + t_quantile(self.freedom, 1 - MISS) * self.error <= budget

    def detectable(self, budget: float) -> float:
        """The smallest true difference that would be found over the budget in POWER of cases."""
        power = t_quantile(self.freedom, POWER) * self.error
        return max(budget, self._reach) + power

    @property
    def _reach(self) -> float:
        return t_quantile(self.freedom, 1 - ALPHA) * self.error


def difference(baseline: Sequence[float], candidate: Sequence[float]) -> Difference | None:
    """Candidate mean - baseline mean; a side of one run takes the noise of the other. None where
    neither side tells its noise."""
    one, other = len(baseline), len(candidate)
    mean = fmean(candidate) - fmean(baseline)
    if one > 1 and other > 1:
        return _of_two(mean, baseline, candidate)
    known = baseline if one > 1 else candidate
    if len(known) < 2:
        return None
    error = math.sqrt(variance(known) * (1 / one + 1 / other))
    p = min(1.0, ALONE * _p(mean, error, len(known) - 1))
    return _dealt(Difference(mean, error, len(known) - 1, p), baseline, candidate)


def distance(values: Sequence[float], noise_of: Sequence[float] = ()) -> Difference | None:
    """The mean of the values from zero. One value takes the noise of others; None without them."""
    known = values if len(values) > 1 else noise_of
    if len(known) < 2:
        return None
    mean, error = fmean(values), math.sqrt(variance(known) / len(values))
    p = _p(mean, error, len(known) - 1)
    alone = ALONE if len(values) == 1 else 1.0
    return Difference(mean, error, len(known) - 1, min(1.0, alone * p))


def _of_two(mean: float, baseline: Sequence[float], candidate: Sequence[float]) -> Difference:
    n, m = len(baseline), len(candidate)
    one, other = variance(baseline) / n, variance(candidate) / m
    error, freedom = math.sqrt(one + other), float(n + m - 2)
    if error:
        freedom = error**4 / (one**2 / (n - 1) + other**2 / (m - 1))
    if n != m and math.comb(n + m, m) * ALPHA < 1:
        # Too few runs for a permutation to tell much: t takes the freedom of the smaller side.
        freedom = min(n, m) - 1
    found = Difference(mean, error, freedom, _p(mean, error, freedom))
    return _dealt(found, baseline, candidate)


def _dealt(found: Difference, baseline: Sequence[float], candidate: Sequence[float]) -> Difference:
    """With what dealing the runs anew tells, where t is sure."""
    ways = math.comb(len(baseline) + len(candidate), len(candidate))
    sure = found.p <= ALPHA
    dealt = by_permutation(baseline, candidate, ways) if sure else 1.0
    return replace(found, dealt=dealt, ways=ways)


def _p(mean: float, error: float, freedom: float) -> float:
    if error == 0:
        return 0.0 if mean > 0 else 1.0
    return t_probability(freedom, -mean / error)


# scipy takes as long to import as all of numpy, twice over; only a check needs it.


def t_quantile(freedom: float, p: float) -> float:
    """The p quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, p))


def t_probability(freedom: float, t: float) -> float:
    """The probability that Student's t is at most this."""
    from scipy.special import stdtr

    return float(stdtr(freedom, t))


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p as it counts among the others, so that a false alarm over all is as rare as of one.

    Source: S. Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, least = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, p_values[i] * (len(p_values) - place)))
        adjusted[i] = least
    return adjusted


# How rare the order of the runs is, among all ways to deal them onto two sides.

_MOST_WAYS, _SAMPLED, _SEED = 200_000, 10_000, 0
"""Of more ways than that some are sampled, always by the same dice."""


def by_permutation(baseline: Sequence[float], candidate: Sequence[float], ways: int) -> float:
    """Of all ways to deal the runs onto the two sides, those with a candidate no better than it is.

    Where there are too many ways, of a sample of them and the one that happened.
    """
    if len(candidate) > len(baseline):
        # Fewer runs are dealt faster, and turned round they say the same.
        turned = [-run for run in candidate], [-run for run in baseline]
        return by_permutation(*turned, ways)
    runs, m = np.array([*candidate, *baseline]), len(candidate)
    if ways <= _MOST_WAYS:
        dealt = runs[_ways(len(runs), m)].sum(axis=1)
        return float(np.mean(dealt >= _no_better(candidate)))
    dice = np.random.default_rng(_SEED)
    dealt = np.array([dice.permutation(runs)[:m].sum() for _ in range(_SAMPLED)])
    return float((np.sum(dealt >= _no_better(candidate)) + 1) / (len(dealt) + 1))


@cache
def _ways(count: int, chosen: int) -> npt.NDArray[np.int8]:
    """Each way to choose so many of them, a row of places."""
    return np.array(list(combinations(range(count), chosen)), dtype=np.int8)


def _no_better(candidate: Sequence[float]) -> float:
    """The candidate's sum, with room for the rounding of sums in another order."""
    total = math.fsum(candidate)
    return total - 1e-9 * abs(total)
