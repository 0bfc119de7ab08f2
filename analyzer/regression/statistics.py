"""Statistics of a check: Welch's t test, permutations, minimum detectable change."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from statistics import fmean, variance

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.regression.checks import Budget, build_budget
from stepsplit.analyzer.regression.metrics import RunMetrics, list_mesh_axes

# The values of a metric on both sides, one per run.

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
    if budget.against == "baseline":
        return _compare_to_baseline(budget, baseline, candidate)
    return _compare_to_limit(budget, baseline, candidate)


def _compare_to_baseline(
    budget: Budget, baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> Sample:
    if not baseline:
        raise UsageError(f"budget {budget.metric}:{budget.text} needs a baseline; pass --baseline")
    before, own = (
        _collect_values(budget.metric, baseline),
        _collect_values(budget.metric, candidate),
    )
    worse, middle = budget.meaning.worse, fmean(before)
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


def _compare_to_limit(
    budget: Budget, baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> Sample:
    """Compare with a fixed limit or the prediction; a baseline provides the noise of one run."""
    own = _collect_values(budget.metric, candidate)
    worse, limits = budget.meaning.worse, [_find_limit(budget, run) for run in candidate]
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
    return [_find_value(metric, run) for run in runs]


def _find_value(metric: str, run: RunMetrics) -> float:
    value = run.find_value(metric)
    if value is not None:
        return value
    name, _, axis = metric.partition(".")
    if axis and name != BANDWIDTH and axis in list_mesh_axes(run):
        return 0.0
    raise UsageError(
        f"{run.name} has no {metric}; remove that budget, or record and analyze the run with that "
        "metric"
    )


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


# Statistics of a few runs per side, one value per run: the steps of a run are not independent.
#
# Welch's t test (B. L. Welch, Biometrika 34, 1947; degrees of freedom by F. E. Satterthwaite,
# Biometrics Bulletin 2, 1946). The noise of runs is skewed, and then t alone raises false alarms
# if one side has fewer runs. A regression must therefore be confirmed by a permutation test, as far
# as the number of runs allows (R. A. Fisher, The Design of Experiments, 1935).

ALPHA = 0.02
"""False-alarm rate over all checked metrics together."""

MISS_RATE = 0.01
"""Rate at which a metric just over its budget may pass."""

DETECTABLE_RATIO = 1.5
"""A pass requires a minimum detectable change of at most this multiple of the budget, because the
noise of a few runs may look small by chance."""

POWER = 0.8
"""Power that defines the minimum detectable change."""

SINGLE_RUN_FACTOR = 4.0
"""Factor on the p-value of a single run, whose noise distribution is unknown."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of means: value, standard error, degrees of freedom and one-sided p-value.

    The last two fields are the p-value of a permutation test (1 if t is not significant) and its
    number of permutations.
    """

    mean: float
    error: float
    degrees_of_freedom: float
    p: float
    p_permutation: float = 0.0
    n_permutations: int = 1

    @property
    def low(self) -> float:
        """The lower bound of the confidence interval at level 1 - 2 ALPHA."""
        return self.mean - self._half_width

    @property
    def high(self) -> float:
        """The upper bound of the confidence interval."""
        return self.mean + self._half_width

    def confirm_by_permutation(self, level: float) -> bool:
        """Whether the permutation p-value is at most the level, or the smallest possible."""
        return self.p_permutation <= max(level, 1 / self.n_permutations)

    def is_within(self, budget: float) -> bool:
        """Whether the difference is within the budget with an error rate of MISS."""
        return (
            self.mean + compute_t_quantile(self.degrees_of_freedom, 1 - MISS_RATE) * self.error
            <= budget
        )

    def compute_detectable(self, budget: float) -> float:
        """The minimum detectable change beyond the budget at the power POWER."""
        power = compute_t_quantile(self.degrees_of_freedom, POWER) * self.error
        return max(budget, self._half_width) + power

    @property
    def _half_width(self) -> float:
        return compute_t_quantile(self.degrees_of_freedom, 1 - ALPHA) * self.error


def compute_difference(baseline: Sequence[float], candidate: Sequence[float]) -> Difference | None:
    """Candidate mean - baseline mean; a side with one run uses the noise of the other side. None if
    both sides have one run."""
    one, other = len(baseline), len(candidate)
    mean = fmean(candidate) - fmean(baseline)
    if one > 1 and other > 1:
        return _compute_welch(mean, baseline, candidate)
    known = baseline if one > 1 else candidate
    if len(known) < 2:
        return None
    error = math.sqrt(variance(known) * (1 / one + 1 / other))
    p = min(1.0, SINGLE_RUN_FACTOR * _compute_p(mean, error, len(known) - 1))
    return _add_permutation_test(Difference(mean, error, len(known) - 1, p), baseline, candidate)


def compute_two_sided_p(difference: Difference | None, is_single: bool) -> float:
    """The p-value of a difference in either direction; 1 for None. is_single: one side has one
    run."""
    if difference is None:
        return 1.0
    size, freedom = abs(difference.mean), difference.degrees_of_freedom
    p = 2 * _compute_p(size, difference.error, freedom)
    return min(1.0, p * (SINGLE_RUN_FACTOR if is_single else 1.0))


def compute_excess(values: Sequence[float], noise_of: Sequence[float] = ()) -> Difference | None:
    """The mean of the values compared with 0; a single value needs the noise of other runs."""
    known = values if len(values) > 1 else noise_of
    if len(known) < 2:
        return None
    mean, error = fmean(values), math.sqrt(variance(known) / len(values))
    p = _compute_p(mean, error, len(known) - 1)
    alone = SINGLE_RUN_FACTOR if len(values) == 1 else 1.0
    return Difference(mean, error, len(known) - 1, min(1.0, alone * p))


def _compute_welch(
    mean: float, baseline: Sequence[float], candidate: Sequence[float]
) -> Difference:
    n, m = len(baseline), len(candidate)
    one, other = variance(baseline) / n, variance(candidate) / m
    error, degrees_of_freedom = math.sqrt(one + other), float(n + m - 2)
    if error:
        degrees_of_freedom = error**4 / (one**2 / (n - 1) + other**2 / (m - 1))
    if n != m and math.comb(n + m, m) * ALPHA < 1:
        # Too few runs for a permutation test: use the degrees of freedom of the smaller side.
        degrees_of_freedom = min(n, m) - 1
    difference = Difference(
        mean, error, degrees_of_freedom, _compute_p(mean, error, degrees_of_freedom)
    )
    return _add_permutation_test(difference, baseline, candidate)


def _add_permutation_test(
    difference: Difference, baseline: Sequence[float], candidate: Sequence[float]
) -> Difference:
    """Add the permutation test if t is significant."""
    n_permutations = math.comb(len(baseline) + len(candidate), len(candidate))
    sure = difference.p <= ALPHA
    p_permutation = compute_permutation_p(baseline, candidate, n_permutations) if sure else 1.0
    return replace(difference, p_permutation=p_permutation, n_permutations=n_permutations)


def _compute_p(mean: float, error: float, degrees_of_freedom: float) -> float:
    if error == 0:
        return 0.0 if mean > 0 else 1.0
    return compute_t_probability(degrees_of_freedom, -mean / error)


# How many runs, or which budget, would decide at this noise.

MOST_RUNS = 200
"""No larger number of runs is proposed."""


def estimate_noise(*sides: Sequence[float]) -> float | None:
    """The standard deviation of a run around the mean of its side; None if no side has two."""
    known = [side for side in sides if len(side) > 1]
    if not known:
        return None
    squares = sum(variance(side) * (len(side) - 1) for side in known)
    return math.sqrt(squares / sum(len(side) - 1 for side in known))


def count_runs_needed(noise: float, allowed: float) -> int | None:
    """The runs per side with which equal sides pass in POWER of all cases; None above MOST_RUNS.

    noise: standard deviation of one run. allowed: the budget, in the same unit.
    """
    counts = range(2, MOST_RUNS + 1)
    at = bisect_left(counts, True, key=lambda n: compute_decidable(noise, n) <= allowed)
    return counts[at] if at < len(counts) else None


def compute_decidable(noise: float, runs: int) -> float:
    """The smallest budget with which so many runs per side, at least 2, pass in POWER of all cases.

    noise: standard deviation of one run.
    """
    return noise * _compute_decidable_ratio(runs) if noise else 0.0


@cache
def _compute_decidable_ratio(runs: int) -> float:
    """The smallest budget, in standard deviations of one run."""
    low, high = 0.0, 1.0
    while compute_pass_rate(1.0, high, runs) < POWER:
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        enough = compute_pass_rate(1.0, middle, runs) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return high


_PRECISION = 1e-3

_N_QUANTILES = 200


def propose_budgets(budgets: Sequence[Budget], runs: Sequence[RunMetrics]) -> list[Budget]:
    """The budgets, raised where equal sides of so many runs would not pass in POWER of all cases.

    Raises UsageError for a run without a metric.
    """
    return [_raise_budget(budget, runs) for budget in expand_budgets(budgets, runs)]


def _raise_budget(budget: Budget, runs: Sequence[RunMetrics]) -> Budget:
    if budget.meaning.exact or budget.against != "baseline" or len(runs) < 2:
        return budget
    values = _collect_values(budget.metric, runs)
    noise, middle = estimate_noise(values), abs(fmean(values))
    needed = compute_decidable(noise, len(runs)) if noise else 0.0
    if needed <= max(budget.ratio * middle, budget.amount):
        return budget
    # Rounded up, to a limit that people can read.
    if budget.meaning.unit == "share":
        return build_budget(budget.metric, f"{math.ceil(1000 * needed) / 10:g}pt")
    return build_budget(budget.metric, f"{math.ceil(100 * needed / middle)}%")


def compute_pass_rate(noise: float, allowed: float, runs: int) -> float:
    """How often so many runs per side, which differ by normal noise above 0 only, pass the check.

    The noise that the check itself estimates varies too: the mean is taken over its quantiles.
    """
    from scipy.special import gammaincinv, ndtr

    error, degrees_of_freedom = noise * math.sqrt(2 / runs), 2.0 * runs - 2
    levels = (np.arange(_N_QUANTILES) + 0.5) / _N_QUANTILES
    half = degrees_of_freedom / 2
    estimated = error * np.sqrt(gammaincinv(half, levels) / half)
    limit, detection, power = (
        compute_t_quantile(degrees_of_freedom, p) for p in (1 - MISS_RATE, 1 - ALPHA, POWER)
    )
    detectable = np.maximum(allowed, detection * estimated) + power * estimated
    telling = detectable <= DETECTABLE_RATIO * allowed
    passes = telling * ndtr((allowed - limit * estimated) / error)
    return float(np.mean(passes))


# scipy takes twice as long to import as numpy, and only the check needs it.


def compute_t_quantile(degrees_of_freedom: float, p: float) -> float:
    """The p quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, p))


def compute_t_probability(degrees_of_freedom: float, t: float) -> float:
    """The probability that Student's t is at most this."""
    from scipy.special import stdtr

    return float(stdtr(degrees_of_freedom, t))


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for multiple tests (S. Holm, Scandinavian Journal of Statistics 6,
    1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, least = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, p_values[i] * (len(p_values) - place)))
        adjusted[i] = least
    return adjusted


# Permutation test.

_MOST_WAYS, _SAMPLED, _SEED = 200_000, 10_000, 0
"""Above the first number of permutations a random sample of the second size is used."""


def compute_permutation_p(
    baseline: Sequence[float], candidate: Sequence[float], n_permutations: int
) -> float:
    """The share of assignments of the runs to the two sides with a candidate at least as bad.

    Computed exactly, or from a random sample if there are too many assignments.
    """
    if len(candidate) > len(baseline):
        # The smaller side has fewer combinations, and the test is symmetric.
        mirrored = [-run for run in candidate], [-run for run in baseline]
        return compute_permutation_p(*mirrored, n_permutations)
    runs, m = np.array([*candidate, *baseline]), len(candidate)
    if n_permutations <= _MOST_WAYS:
        sums = runs[_list_combinations(len(runs), m)].sum(axis=1)
        return float(np.mean(sums >= _compute_threshold(candidate)))
    dice = np.random.default_rng(_SEED)
    sums = np.array([dice.permutation(runs)[:m].sum() for _ in range(_SAMPLED)])
    return float((np.sum(sums >= _compute_threshold(candidate)) + 1) / (len(sums) + 1))


@cache
def _list_combinations(count: int, chosen: int) -> npt.NDArray[np.int8]:
    """All combinations of `chosen` of `count` indices, one per row."""
    return np.array(list(combinations(range(count), chosen)), dtype=np.int8)


def _compute_threshold(candidate: Sequence[float]) -> float:
    """The candidate's sum, with a tolerance for rounding."""
    total = math.fsum(candidate)
    return total - 1e-9 * abs(total)
