"""How rare the order of the runs is, among all ways to deal them onto two sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

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
