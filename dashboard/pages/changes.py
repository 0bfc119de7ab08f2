"""Where the level of a metric over runs changed for good; for the page alone, never for the gate.

Places are proposed by the partition into levels that is cheapest with a penalty a level (PELT:
R. Killick, P. Fearnhead, I. Eckley, J. Amer. Stat. Assoc. 107, 2012), and kept where the runs of
the two levels beside a place differ by more than chance makes of all places that were looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, fmean, median, variance

import numpy as np

from stepsplit.analyzer.regression.statistics import difference

FEWEST = 3
"""A level is of so many runs at least: one or two may be outliers."""
LEAST = 0.01
"""A smaller change, as a ratio of the level before it, is none."""
LOOKED_AT = 200
"""So many of the newest runs: among more places no permutation tells what is beyond chance."""
ALPHA = 0.05
"""So often at most, over all places together, a level may seem to change that did not."""
_PENALTY = 3.0
"""A level must explain so much more, in variances times the logarithm of the runs."""
_MAD_TO_SD = 1.4826


@dataclass(frozen=True, slots=True)
class Change:
    """A lasting change: at is the index of the first run of the new level, before and after are
    the means of the two levels, in the unit of the values."""

    at: int
    before: float
    after: float

    @property
    def ratio(self) -> float | None:
        """How far the level moved, by what it was; None where it was zero."""
        return (self.after - self.before) / abs(self.before) if self.before else None


def changes(values: Sequence[float]) -> tuple[Change, ...]:
    """The lasting changes among the newest LOOKED_AT values, oldest first."""
    older = max(0, len(values) - LOOKED_AT)
    newest = _changes(tuple(values[older:]))
    return tuple(Change(older + one.at, one.before, one.after) for one in newest)


@lru_cache(maxsize=64)
def _changes(values: tuple[float, ...]) -> tuple[Change, ...]:
    if len(values) < 2 * FEWEST:
        return ()
    level = ALPHA / (len(values) - 2 * FEWEST + 1)
    edges = [0, *_proposed(values), len(values)]
    while len(edges) > 2:
        chances = [_chance(before, after, level) for before, after in _sides(values, edges)]
        if max(chances) <= level:
            break
        del edges[1 + chances.index(max(chances))]
    sides = _sides(values, edges)
    return tuple(
        Change(at, fmean(before), fmean(after))
        for at, (before, after) in zip(edges[1:-1], sides, strict=True)
    )


def _sides(
    values: Sequence[float], edges: Sequence[int]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """The runs of the level before each edge, and of the one after it."""
    levels = [values[low:high] for low, high in pairwise(edges)]
    return list(pairwise(levels))


def _proposed(values: Sequence[float]) -> list[int]:
    """Where levels may begin, the first left out."""
    from ruptures import KernelCPD  # takes seconds to load

    penalty = _PENALTY * _noise(values) ** 2 * math.log(len(values))
    signal = np.array(values, dtype=np.float64)[:, None]
    found = KernelCPD("linear", min_size=FEWEST).fit(signal).predict(pen=penalty)
    return [int(edge) for edge in found[:-1]]


def _noise(values: Sequence[float]) -> float:
    """The sd of a run, from runs that follow one another: levels do not add to it. Never zero."""
    apart = median(abs(other - one) for one, other in pairwise(values))
    least = 0.1 * LEAST * max(map(abs, values))
    return max(_MAD_TO_SD * apart / math.sqrt(2), least, 1e-12)


def _chance(before: Sequence[float], after: Sequence[float], level: float) -> float:
    """How often runs of one level differ so; 1 for what is too little, or surely over the level."""
    moved = fmean(after) - fmean(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    # No t is surer than a normal one, and a permutation takes long.
    surely = NormalDist().inv_cdf(1 - level) * error
    if abs(moved) <= max(surely, LEAST * abs(fmean(before)), 1e-12):
        return 1.0
    return _rise(before, after) if moved > 0 else _rise(after, before)


def _rise(low: Sequence[float], high: Sequence[float]) -> float:
    found = difference(low, high)
    return 1.0 if found is None else max(found.p, found.dealt)
