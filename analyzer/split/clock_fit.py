"""Offset, drift and uncertainty of a clock, from the ends of shared calls."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import group_ids, group_median, list_distinct
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.trace import Float, Int64


class ClockFit(Struct, frozen=True):
    """offset_ns holds at pivot_ns; drift is in ns per ns, 0 if not measurable."""

    offset_ns: float
    pivot_ns: float
    drift: float
    sigma_ns: float
    residual_ns: float

    def map_to_common_ns(self, wall_ns: Int64) -> Int64:
        """Maps times of the fitted clock to its reference clock."""
        drift = self.drift * (wall_ns - round(self.pivot_ns)).astype(np.float64)
        return wall_ns - round(self.offset_ns) - np.rint(drift).astype(np.int64)

    def compose(self, outer: ClockFit) -> ClockFit:
        """Composes two fits: this clock against the reference of outer."""
        pivot = np.array([round(self.pivot_ns)], dtype=np.int64)
        offset = int((pivot - outer.map_to_common_ns(self.map_to_common_ns(pivot)))[0])
        return ClockFit(
            float(offset), float(pivot[0]), self.drift + outer.drift,
            float(np.hypot(self.sigma_ns, outer.sigma_ns)),
            max(self.residual_ns, outer.residual_ns),
        )  # fmt: skip

    def add_uncertainty(self, sigma_ns: float) -> ClockFit:
        """Adds the uncertainty of the reference."""
        return replace(self, sigma_ns=float(np.hypot(self.sigma_ns, sigma_ns)))

    def shift(self, by_ns: int) -> ClockFit:
        """Shifts the offset, and adds the shift to the uncertainty."""
        doubt = self.sigma_ns + abs(by_ns)
        return replace(self, offset_ns=self.offset_ns + by_ns, sigma_ns=doubt)


EXACT = ClockFit(0.0, 0.0, 0.0, 0.0, 0.0)


# Offset, drift and uncertainty of a clock, from the ends of shared calls.
#
# The measurement is apart_ns = (end on this clock) - (end on the reference). It contains the offset
# and drift of the clock, a bias for the kind of call (group, op and size: the position of a rank in
# the ring or tree decides how long its kernel runs on), and noise with outliers.

BIAS_NS = 1_500
"""Systematic difference between the ends of one kind of call: 1 to 7 us on real hosts with 8
GPUs."""

_BINS, _FEWEST, _SHORTEST_NS = 32, 6, 10_000_000

_USUAL, _MOST = 2e-5, 1e-4
"""Free-running computer clocks drift by about 20 ppm, two against each other by at most 100 ppm:
the uncertainty of the drift without data, and its upper limit."""

_NO_CLOCK = 1e-3
"""No two clocks drift apart as fast: the times of such a rank are damaged."""

_SURE, _WORTH_NS = 3.0, 5_000
"""A drift is applied if it exceeds its uncertainty by this factor, and if it shifts the clock by
more than the biases of the calls can."""


def fit_offset_and_drift(at_ns: Int64, apart_ns: Int64, kind: Int64) -> ClockFit:
    """Fits offset and drift to the differences of ends; kind is the same for calls with one bias.

    At least one call; at_ns is the time on the fitted clock.
    """
    start = int(apart_ns[len(apart_ns) // 2])
    apart = (apart_ns - start).astype(np.float64)
    pivot = float(np.median(at_ns))
    since = (at_ns - pivot).astype(np.float64)
    drift, doubt = _estimate_drift(since, apart, kind)
    level = apart - drift * since
    offset, sigma = _combine_kinds(_compute_kind_medians(level, kind), _estimate_noise(level, kind))
    residual = float(np.median(np.abs(level - offset)))
    sigma = float(np.hypot(sigma, doubt * np.ptp(since) / 2))
    return ClockFit(start + offset, pivot, drift, sigma, residual)


class _Kinds(Struct, frozen=True):
    """Median and number of calls of each kind; of_row is the median of each row's kind."""

    middle: Float
    count: Int64
    of_row: Float


def _compute_kind_medians(level: Float, kind: Int64) -> _Kinds:
    label = group_ids(kind)
    middle = group_median(label, level)
    return _Kinds(middle, np.bincount(label), middle[label])


def _combine_kinds(kinds: _Kinds, noise_ns: float) -> tuple[float, float]:
    """(offset, its standard deviation): the weighted mean over kinds, each with its bias and
    noise."""
    spread = BIAS_NS**2 + (1.25 * noise_ns) ** 2 / kinds.count
    middle = float(np.median(np.repeat(kinds.middle, np.minimum(kinds.count, 99))))
    sane = np.abs(kinds.middle - middle) <= 4 * np.sqrt(spread)
    weight = np.where(sane, 1 / spread, 0.0)
    weight = weight if weight.any() else 1 / spread
    return float((weight * kinds.middle).sum() / weight.sum()), float(1 / np.sqrt(weight.sum()))


def _estimate_noise(level: Float, kind: Int64) -> float:
    """The standard deviation of the residuals around the median of each kind."""
    left = np.abs(level - _compute_kind_medians(level, kind).of_row)
    free = max(len(level) - len(list_distinct(kind)) - 2, 1)
    return SIGMA_OF_MAD * float(np.median(left)) * float(np.sqrt(len(level) / free))


def _estimate_drift(since: Float, apart: Float, kind: Int64) -> tuple[float, float]:
    """(drift in ns per ns, its uncertainty); 0 if span and noise allow no measurement.

    The biases of the kinds are removed first.
    """
    span = float(np.ptp(since))
    if len(since) < len(list_distinct(kind)) + _FEWEST or span < _SHORTEST_NS:
        return 0.0, _USUAL
    slope = _estimate_slope(since, apart)
    for _ in range(2):
        level = apart - slope * since
        slope += _estimate_slope(since, level - _compute_kind_medians(level, kind).of_row)
    noise = _estimate_noise(apart - slope * since, kind)
    doubt = 1.25 * noise / (float(np.std(since)) * np.sqrt(len(since)))
    if abs(slope) > _NO_CLOCK:
        return 0.0, _MOST
    if abs(slope) > _SURE * doubt and abs(slope) * span > _WORTH_NS:
        return slope, doubt
    return 0.0, min(max(abs(slope), doubt), _MOST)


def _estimate_slope(since: Float, apart: Float) -> float:
    """Theil-Sen slope: the median slope between the medians of time bins."""
    order = np.argsort(since, kind="stable")
    # Bins of equal size, the first ones larger by one if they must be.
    bins = min(_BINS, max(len(order) // 3, 2))
    size, larger = divmod(len(order), bins)
    time_bin = np.repeat(np.arange(bins), size + (np.arange(bins) < larger))
    x, y = (group_median(time_bin, values[order]) for values in (since, apart))
    i, j = np.triu_indices(len(x), k=1)
    apart_in_time = x[j] - x[i]
    valid = apart_in_time > 0
    return float(np.median((y[j] - y[i])[valid] / apart_in_time[valid])) if valid.any() else 0.0
