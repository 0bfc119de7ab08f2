"""What a few runs a side can tell, one value a run: a run's steps are no samples of their own.

Student's t with the variances not pooled (B. L. Welch, Biometrika 34, 1947; degrees of freedom by
F. E. Satterthwaite, Biometrics Bulletin 2, 1946). Noise of runs is skewed, and then t alone raises
false alarms where one side has fewer runs: so a permutation of the runs must agree with an alarm,
as far as their number allows (R. A. Fisher, The Design of Experiments, 1935).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from scipy.special import stdtr, stdtrit

from stepsplit.analyzer.compare.verdict.permutation import by_permutation

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
        return self.mean + float(stdtrit(self.freedom, 1 - MISS)) * self.error <= budget

    def detectable(self, budget: float) -> float:
        """The smallest true difference that would be found over the budget in POWER of cases."""
        power = float(stdtrit(self.freedom, POWER)) * self.error
        return max(budget, self._reach) + power

    @property
    def _reach(self) -> float:
        return float(stdtrit(self.freedom, 1 - ALPHA)) * self.error


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
    return float(stdtr(freedom, -mean / error))


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
