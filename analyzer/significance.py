"""Statistical tests and spreads: whether a difference is more than noise.

The tests of the check, of slow links, of changes in the history and of late ranks, the standard
deviation by the median, weighted medians and conformal bounds are here and nowhere else. The
distributions are those of `scipy.special`, except for the tail of Student's t: `scipy.stats` calls
them too, and takes several times as long to import. numpy and scipy are imported by what needs
them, because a validation or a watch needs neither.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise
from statistics import fmean, median, variance
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Spread: the noise of values, with and without outliers.

SIGMA_OF_MAD = 1.4826
"""Standard deviation over median absolute deviation (MAD), of a normal distribution: 1 / the 75 %
quantile of the standard one. Up to half of the values may be outliers."""


def compute_median_and_mad(values: Sequence[float]) -> tuple[float, float]:
    """The median of one or more values, and the median of their distances from it."""
    middle = median(values)
    return middle, median(abs(value - middle) for value in values)


def estimate_noise(*sides: Sequence[float]) -> float | None:
    """The standard deviation of a run around the mean of its side; None if no side has two."""
    known = [side for side in sides if len(side) > 1]
    if not known:
        return None
    squares = sum(variance(side) * (len(side) - 1) for side in known)
    return math.sqrt(squares / sum(len(side) - 1 for side in known))


def estimate_successive_noise(values: Sequence[float]) -> float:
    """The standard deviation of two or more values around levels that last for several of them.

    It is taken from the differences of neighbors, to which a change of the level adds one outlier.
    """
    middle = median(abs(other - one) for one, other in pairwise(values))
    return SIGMA_OF_MAD * middle / math.sqrt(2)


def compute_weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The smallest of one or more values that, with those below it, has half of the weight."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    reached = list(accumulate(weights[i] for i in order))
    # Sums of fractions such as 3 x 1/3 miss the half by a rounding error.
    return values[order[bisect_left(reached, reached[-1] / 2 - 1e-9)]]


def compute_weighted_bound(
    errors: Sequence[float], weights: Sequence[float], further: float, level: float
) -> float:
    """What a further error of the same kind, of the weight further, stays below with this
    probability.

    Split conformal prediction: the smallest error that, with those below it, has this share of all
    weight, the largest if there are too few; of n equal weights that of rank ceil((n + 1) level)
    (Lei et al., Distribution-Free Predictive Inference for Regression, 2018).
    """
    order = sorted(range(len(errors)), key=lambda i: errors[i])
    reached = list(accumulate(weights[i] for i in order))
    needed = (reached[-1] + further) * level - 1e-9
    return errors[order[min(len(order) - 1, bisect_left(reached, needed))]]


# Few runs per side, one value per run: the steps of a run are not independent.
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


class Difference(Struct, frozen=True):
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
        """Whether the difference is within the budget with an error rate of MISS_RATE."""
        limit = compute_t_quantile(self.degrees_of_freedom, 1 - MISS_RATE)
        return self.mean + limit * self.error <= budget

    def compute_detectable(self, budget: float) -> float:
        """The minimum detectable change beyond the budget at the power POWER."""
        power = compute_t_quantile(self.degrees_of_freedom, POWER) * self.error
        return max(budget, self._half_width) + power

    @property
    def _half_width(self) -> float:
        return compute_t_quantile(self.degrees_of_freedom, 1 - ALPHA) * self.error


def run_welch_test(baseline: Sequence[float], candidate: Sequence[float]) -> Difference:
    """Welch's test whether the candidate's mean is larger, for two or more values per side.

    Equal values on both sides have p 1, and constant ones that differ 0 or 1.
    """
    n, m = len(baseline), len(candidate)
    one, other = variance(baseline) / n, variance(candidate) / m
    mean, error = fmean(candidate) - fmean(baseline), math.sqrt(one + other)
    degrees_of_freedom = float(n + m - 2)
    if error:
        degrees_of_freedom = error**4 / (one**2 / (n - 1) + other**2 / (m - 1))
    return Difference(
        mean, error, degrees_of_freedom, compute_t_p_value(mean, error, degrees_of_freedom)
    )


def compute_difference(baseline: Sequence[float], candidate: Sequence[float]) -> Difference | None:
    """Candidate mean - baseline mean; a side with one run uses the noise of the other side. None if
    both sides have one run."""
    n, m = len(baseline), len(candidate)
    n_permutations = math.comb(n + m, m)
    if n > 1 and m > 1:
        found = run_welch_test(baseline, candidate)
        if n != m and n_permutations * ALPHA < 1:
            # Too few runs for a permutation test: use the degrees of freedom of the smaller side.
            fewest = min(n, m) - 1
            p = compute_t_p_value(found.mean, found.error, fewest)
            found = replace(found, degrees_of_freedom=fewest, p=p)
    else:
        known = baseline if n > 1 else candidate
        if len(known) < 2:
            return None
        mean = fmean(candidate) - fmean(baseline)
        error = math.sqrt(variance(known) * (1 / n + 1 / m))
        p = SINGLE_RUN_FACTOR * compute_t_p_value(mean, error, len(known) - 1)
        found = Difference(mean, error, len(known) - 1, min(1.0, p))
    # A permutation test can only refuse what t found.
    p_permutation = compute_permutation_p(baseline, candidate) if found.p <= ALPHA else 1.0
    return replace(found, p_permutation=p_permutation, n_permutations=n_permutations)


def compute_two_sided_p(difference: Difference | None, is_single: bool) -> float:
    """The p-value of a difference in either direction; 1 for None. is_single: one side has one
    run."""
    if difference is None:
        return 1.0
    size, freedom = abs(difference.mean), difference.degrees_of_freedom
    p = 2 * compute_t_p_value(size, difference.error, freedom)
    return min(1.0, p * (SINGLE_RUN_FACTOR if is_single else 1.0))


def compute_excess(values: Sequence[float], noise_of: Sequence[float] = ()) -> Difference | None:
    """The mean of the values compared with 0; a single value needs the noise of other runs."""
    known = values if len(values) > 1 else noise_of
    if len(known) < 2:
        return None
    mean, error = fmean(values), math.sqrt(variance(known) / len(values))
    p = compute_t_p_value(mean, error, len(known) - 1)
    alone = SINGLE_RUN_FACTOR if len(values) == 1 else 1.0
    return Difference(mean, error, len(known) - 1, min(1.0, alone * p))


def compute_t_p_value(mean: float, error: float, degrees_of_freedom: float) -> float:
    """The probability of a mean at least this large, if the true one is 0."""
    if error == 0:
        return 0.0 if mean > 0 else 1.0
    return compute_t_tail(degrees_of_freedom, mean / error)


def compute_t_tail(degrees_of_freedom: float, t: float) -> float:
    """The probability that Student's t is at least this large.

    It is half of the regularized incomplete beta function I_x(a, 1/2), with a = n/2 and
    x = n / (n + t^2): NIST Digital Library of Mathematical Functions, 8.17.22 and 8.17.4. An
    analysis compares links by it, and scipy.special takes a quarter of a second to import.
    """
    n = degrees_of_freedom
    ratio = t * t / n
    x, rest = 1 / (1 + ratio), ratio / (1 + ratio)
    if rest == 0:
        return 0.5
    if x == 0:
        return float(t < 0)
    a, b = n / 2, 0.5
    # x^a (1 - x)^b / B(a, b)
    scale = math.exp(b * math.log(rest) - a * math.log1p(ratio) - _compute_log_beta_of_half(a))
    # The fraction converges fast below the mean of the beta distribution; above it, that of 1 - I.
    if x < (a + 1) / (a + b + 2):
        tail = scale * _compute_beta_fraction(a, b, x) / a / 2
    else:
        tail = 0.5 - scale * _compute_beta_fraction(b, a, rest) / b / 2
    return tail if t > 0 else 1 - tail


def _compute_log_beta_of_half(a: float) -> float:
    """The logarithm of the beta function of a and 1/2; of large ones by its asymptotic series, for
    the difference of two large logarithms of gamma functions has few digits."""
    if a < 20:
        return math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
    series = (-1 / 8, 1 / 192, -1 / 640, 17 / 14336, -31 / 18432)
    ratio = sum(term / a ** (2 * i + 1) for i, term in enumerate(series))
    return math.lgamma(0.5) - 0.5 * math.log(a) - ratio


_MOST_TERMS = 100_000
"""Of the continued fraction: below 1,000 up to ten million degrees of freedom."""


def _compute_beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of I_x(a, b), by Lentz's method, which needs no term in advance."""
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            lower, upper = 1 / (1 + term * lower), 1 + term / upper
            value *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            break
    return value


def compute_t_quantile(degrees_of_freedom: float, p: float) -> float:
    """The p quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, p))


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for multiple tests (S. Holm, Scandinavian Journal of Statistics 6,
    1979); scipy has only those that control the rate of false discoveries."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, least = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, p_values[i] * (len(p_values) - place)))
        adjusted[i] = least
    return adjusted


# Permutation test.

_MOST_PERMUTATIONS, _N_SAMPLED, _SEED = 200_000, 10_000, 0
"""Above the first number of permutations (ten runs against ten have 184,756) a random sample of the
second size is used: its p-value of 2 % has a standard error of 0.14 %. The same runs get the same
answer."""


def compute_permutation_p(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """The share of assignments of the runs to the two sides with a candidate at least as bad.

    Computed exactly, or from a random sample if there are too many assignments.
    """
    import numpy as np

    if len(candidate) > len(baseline):
        # The smaller side has fewer combinations, and the test is symmetric.
        return compute_permutation_p([-run for run in candidate], [-run for run in baseline])
    runs, m = np.array([*candidate, *baseline]), len(candidate)
    total = math.fsum(candidate)
    threshold = total - 1e-9 * abs(total)  # the same values in another order are no smaller
    if math.comb(len(runs), m) <= _MOST_PERMUTATIONS:
        sums = runs[_list_combinations(len(runs), m)].sum(axis=1)
        return float(np.mean(sums >= threshold))
    dice = np.random.default_rng(_SEED)
    sums = np.array([dice.permutation(runs)[:m].sum() for _ in range(_N_SAMPLED)])
    return float((np.sum(sums >= threshold) + 1) / (len(sums) + 1))


@cache
def _list_combinations(count: int, chosen: int) -> npt.NDArray[np.int8]:
    """All combinations of `chosen` of `count` indices, one per row."""
    import numpy as np

    return np.array(list(combinations(range(count), chosen)), dtype=np.int8)


# How many runs, or which budget, would decide at this noise.

MOST_RUNS = 200
"""No larger number of runs is proposed."""


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


_PRECISION = 1e-3


@cache
def _compute_decidable_ratio(runs: int) -> float:
    """The smallest budget, in standard deviations of one run."""
    low, high = 0.0, 1.0
    while compute_pass_rate(high, runs) < POWER:
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        enough = compute_pass_rate(middle, runs) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return high


_N_QUANTILES = 200


def compute_pass_rate(allowed: float, runs: int) -> float:
    """How often so many runs per side, which differ by normal noise only, pass the check.

    allowed is in standard deviations of a run.

    The noise that the check itself estimates varies too: the mean is taken over its quantiles.
    """
    import numpy as np
    from scipy.special import gammaincinv, ndtr

    error, degrees_of_freedom = math.sqrt(2 / runs), 2.0 * runs - 2
    levels = (np.arange(_N_QUANTILES) + 0.5) / _N_QUANTILES
    half = degrees_of_freedom / 2
    # The quantiles of the square root of chi square / degrees of freedom.
    estimated = error * np.sqrt(gammaincinv(half, levels) / half)
    limit, detection, power = (
        compute_t_quantile(degrees_of_freedom, p) for p in (1 - MISS_RATE, 1 - ALPHA, POWER)
    )
    detectable = np.maximum(allowed, detection * estimated) + power * estimated
    telling = detectable <= DETECTABLE_RATIO * allowed
    passes = telling * ndtr((allowed - limit * estimated) / error)
    return float(np.mean(passes))


# Ranks that arrive last.


def compute_last_p_value(last: int, calls: int, members: int) -> float:
    """The probability of arriving last at least this often, for equal members.

    The upper tail of the binomial distribution with probability 1 / members; 1 at or below its
    mean. To 9 digits: further ones of numpy's logarithms depend on the processor. The import of
    scipy's bdtrc would take as long as many an analysis, and its ninth digit is another one for
    four of a thousand numbers.
    """
    import numpy as np

    if last * members <= calls:
        return 1.0
    odds = 1 / (members - 1)
    first = (
        math.lgamma(calls + 1) - math.lgamma(last + 1) - math.lgamma(calls - last + 1)
        - last * math.log(members) + (calls - last) * math.log1p(-1 / members)
    )  # fmt: skip
    # 80 standard deviations or more above the mean the terms are 0.
    more = np.arange(last, min(calls, last + 40 * (math.isqrt(calls) + 1)))
    terms = np.concatenate(([0.0], np.cumsum(np.log((calls - more) / (more + 1) * odds))))
    return min(1.0, float(f"{np.exp(first + terms).sum():.9g}"))
