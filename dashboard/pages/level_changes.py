"""Lasting changes of a metric over runs; shown on the page only, not used by the check command.

Change points are proposed by optimal partitioning (B. Jackson et al., IEEE Signal Process. Lett.
12, 2005) and kept if the levels before and after differ significantly, corrected for the number
of places tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, fmean

import numpy as np

from stepsplit.analyzer.significance import (
    compute_difference,
    estimate_successive_noise,
    run_welch_test,
)

MIN_LEVEL_RUNS = 3
"""Fewest runs of a level: one or two may be outliers."""

MIN_CHANGE = 0.01
"""Changes below this fraction of the previous level are ignored."""

MAX_RUNS = 200
"""Newest runs to search: with more, no permutation test reaches the corrected significance."""

ALPHA = 0.05
"""Probability of any false change over all places tested."""

_PENALTY = 3.0
"""Cost of a change of level, in units of variance times the logarithm of the number of runs."""


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A lasting change: `at` is the index of the first run of the new level; before and after are
    the means of the two levels, in the unit of the values."""

    at: int
    before: float
    after: float

    @property
    def ratio(self) -> float | None:
        """Relative change of the level; None if it was zero before."""
        return (self.after - self.before) / abs(self.before) if self.before else None


def find_level_changes(values: Sequence[float]) -> tuple[LevelChange, ...]:
    """Lasting changes among the newest MAX_RUNS values, oldest first."""
    older = max(0, len(values) - MAX_RUNS)
    newest = _detect_changes(tuple(values[older:]))
    return tuple(LevelChange(older + one.at, one.before, one.after) for one in newest)


@lru_cache(maxsize=64)
def _detect_changes(values: tuple[float, ...]) -> tuple[LevelChange, ...]:
    if len(values) < 2 * MIN_LEVEL_RUNS:
        return ()
    level = ALPHA / (len(values) - 2 * MIN_LEVEL_RUNS + 1)
    penalty = _PENALTY * _estimate_noise(values) ** 2 * math.log(len(values))
    edges = partition_into_levels(values, penalty)
    while len(edges) > 2:
        chances = [
            _compute_p_value(before, after, level)
            for before, after in _split_at_edges(values, edges)
        ]
        if max(chances) <= level:
            break
        del edges[1 + chances.index(max(chances))]
    sides = _split_at_edges(values, edges)
    return tuple(
        LevelChange(at, fmean(before), fmean(after))
        for at, (before, after) in zip(edges[1:-1], sides, strict=True)
    )


def partition_into_levels(values: Sequence[float], penalty: float) -> list[int]:
    """The edges of the levels, 0 and the number of values included, for which the squared distances
    of the values from their level's mean, and the penalty of each change, add up to the least."""
    shifted = np.array(values, dtype=np.float64) - fmean(values)  # or large squares would cancel
    sums = np.append(0.0, np.cumsum(shifted))
    squares = np.append(0.0, np.cumsum(shifted**2))
    # Of the values before each end: the least cost, and where the last level then begins.
    least = np.full(len(values) + 1, np.inf)
    least[0] = -penalty
    begins = np.zeros(len(values) + 1, dtype=np.int64)
    for end in range(MIN_LEVEL_RUNS, len(values) + 1):
        begin = np.arange(end - MIN_LEVEL_RUNS + 1)
        of_level = squares[end] - squares[begin] - (sums[end] - sums[begin]) ** 2 / (end - begin)
        cost = least[begin] + of_level + penalty
        begins[end] = cost.argmin()
        least[end] = cost[begins[end]]
    edges = [len(values)]
    while edges[-1]:
        edges.append(int(begins[edges[-1]]))
    return edges[::-1]


def _split_at_edges(
    values: Sequence[float], edges: Sequence[int]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """For each inner edge, the values of the level before it and of the level after it."""
    levels = [values[low:high] for low, high in pairwise(edges)]
    return list(pairwise(levels))


def _estimate_noise(values: Sequence[float]) -> float:
    """Standard deviation of a run, from consecutive differences so that level changes do not
    contribute. Never zero."""
    min_noise = 0.1 * MIN_CHANGE * max(map(abs, values))
    return max(estimate_successive_noise(values), min_noise, 1e-12)


def _compute_p_value(before: Sequence[float], after: Sequence[float], level: float) -> float:
    """The p value of the difference between two levels; 1 if it is too small to matter or to be
    significant."""
    shift = run_welch_test(before, after)
    # The normal test is a lower bound for the t test; it avoids slow permutations.
    min_shift = NormalDist().inv_cdf(1 - level) * shift.error
    if abs(shift.mean) <= max(min_shift, MIN_CHANGE * abs(fmean(before)), 1e-12):
        return 1.0
    low, high = (before, after) if shift.mean > 0 else (after, before)
    test = compute_difference(low, high)
    return 1.0 if test is None else max(test.p, test.p_permutation)
