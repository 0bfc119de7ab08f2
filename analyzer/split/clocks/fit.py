"""One clock against another, from the ends of calls that end together: offset, drift, and doubt.

What is measured is apart_ns = (end here) - (end there). It holds the offset and the drift of the
clock, a bias of the call's kind (where a rank sits in a ring or tree decides by how much its kernel
outlives others'; one number for each group, op and size), and noise with outliers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import distinct, labels_of, runs_of
from stepsplit.analyzer.trace import Int64

Float = npt.NDArray[np.float64]
BIAS_NS = 1_500
"""How far the ends of one kind of call lie apart for good: 1 to 7 us on real hosts of 8 GPUs."""
_BINS, _FEWEST, _SHORTEST_NS = 32, 6, 10_000_000
_USUAL, _MOST = 2e-5, 1e-4
"""Free-running clocks of computers drift by some 20 ppm, two against each other by 100 at most: the
doubt where the data say nothing, and where they say little."""
_SURE, _WORTH_NS = 3.0, 2_000
"""A drift counts if it is so many times its own doubt, and moves the clock by so much in all."""
_NORMAL = 1.4826
"""The standard deviation of normal noise over the median of its size."""


@dataclass(frozen=True, slots=True)
class ClockFit:
    """offset_ns holds at pivot_ns; drift is in ns per ns, 0 where none can be told."""

    offset_ns: float
    pivot_ns: float
    drift: float
    sigma_ns: float
    residual_ns: float

    def common_ns(self, wall_ns: Int64) -> Int64:
        """Times of the fitted clock on the one that it was fitted to."""
        drift = self.drift * (wall_ns - round(self.pivot_ns)).astype(np.float64)
        return wall_ns - round(self.offset_ns) - np.rint(drift).astype(np.int64)

    def then(self, other: ClockFit) -> ClockFit:
        """The clock against a third, given the second's against that."""
        pivot = np.array([round(self.pivot_ns)], dtype=np.int64)
        offset = int((pivot - other.common_ns(self.common_ns(pivot)))[0])
        return ClockFit(
            float(offset), float(pivot[0]), self.drift + other.drift,
            float(np.hypot(self.sigma_ns, other.sigma_ns)),
            max(self.residual_ns, other.residual_ns),
        )  # fmt: skip

    def doubted(self, sigma_ns: float) -> ClockFit:
        """The same, where what it was fitted to is itself in doubt."""
        return replace(self, sigma_ns=float(np.hypot(self.sigma_ns, sigma_ns)))

    def moved(self, by_ns: int) -> ClockFit:
        """The same, moved by what it is then in doubt about too."""
        doubt = self.sigma_ns + abs(by_ns)
        return replace(self, offset_ns=self.offset_ns + by_ns, sigma_ns=doubt)


def fitted(at_ns: Int64, apart_ns: Int64, kind: Int64) -> ClockFit:
    """The clock that explains the ends apart; kind is the same for calls of one bias. At least one.

    at_ns is when, on the clock that is fitted.
    """
    start = int(apart_ns[len(apart_ns) // 2])
    apart = (apart_ns - start).astype(np.float64)
    pivot = float(np.median(at_ns))
    since = (at_ns - pivot).astype(np.float64)
    drift, doubt = _drift(since, apart, kind)
    level = apart - drift * since
    offset, sigma = _together(_middle_of_kinds(level, kind), _noise(level, kind))
    residual = float(np.median(np.abs(level - offset)))
    sigma = float(np.hypot(sigma, doubt * np.ptp(since) / 2))
    return ClockFit(start + offset, pivot, drift, sigma, residual)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The median of each kind and how many calls it has; of_row has the median of each row's."""

    middle: Float
    count: Int64
    of_row: Float


def _middle_of_kinds(level: Float, kind: Int64) -> _Kinds:
    label = labels_of(kind)
    order, first = runs_of(label)
    parts = np.split(level[order], first[1:])
    middle = np.array([np.median(part) for part in parts])
    return _Kinds(middle, np.array([len(part) for part in parts]), middle[label])


def _together(kinds: _Kinds, noise_ns: float) -> tuple[float, float]:
    """(offset, its standard deviation): the mean of kinds, each with its own bias and noise."""
    spread = BIAS_NS**2 + (1.25 * noise_ns) ** 2 / kinds.count
    middle = float(np.median(np.repeat(kinds.middle, np.minimum(kinds.count, 99))))
    sane = np.abs(kinds.middle - middle) <= 4 * np.sqrt(spread)
    weight = np.where(sane, 1 / spread, 0.0)
    weight = weight if weight.any() else 1 / spread
    return float((weight * kinds.middle).sum() / weight.sum()), float(1 / np.sqrt(weight.sum()))


def _noise(level: Float, kind: Int64) -> float:
    """The standard deviation of what is left when each kind has its own middle."""
    left = np.abs(level - _middle_of_kinds(level, kind).of_row)
    free = max(len(level) - len(distinct(kind)) - 2, 1)
    return _NORMAL * float(np.median(left)) * float(np.sqrt(len(level) / free))


def _drift(since: Float, apart: Float, kind: Int64) -> tuple[float, float]:
    """(ns per ns, its doubt): 0 where span and noise do not allow to tell it.

    The biases of kinds are taken out first.
    """
    span = float(np.ptp(since))
    if len(since) < len(distinct(kind)) + _FEWEST or span < _SHORTEST_NS:
        return 0.0, _USUAL
    slope = _slope(since, apart)
    for _ in range(2):
        level = apart - slope * since
        slope += _slope(since, level - _middle_of_kinds(level, kind).of_row)
    noise = _noise(apart - slope * since, kind)
    doubt = 1.25 * noise / (float(np.std(since)) * np.sqrt(len(since)))
    if abs(slope) > _SURE * doubt and abs(slope) * span > _WORTH_NS:
        return slope, doubt
    return 0.0, min(max(abs(slope), doubt), _MOST)


def _slope(since: Float, apart: Float) -> float:
    """Theil and Sen's: the median slope between the medians of stretches of time."""
    order = np.argsort(since, kind="stable")
    parts = np.array_split(order, min(_BINS, max(len(order) // 3, 2)))
    x = np.array([np.median(since[part]) for part in parts])
    y = np.array([np.median(apart[part]) for part in parts])
    i, j = np.triu_indices(len(x), k=1)
    apart_in_time = x[j] - x[i]
    told = apart_in_time > 0
    return float(np.median((y[j] - y[i])[told] / apart_in_time[told])) if told.any() else 0.0
