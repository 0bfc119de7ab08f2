"""Clocks: how the time of a rank maps to the reference clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.trace import Int64, Note

# How a rank's clock maps to the one that all ranks share.


@dataclass(frozen=True, slots=True)
class Clock:
    """A rank's clock: t_reference = t - offset_ns - drift_ppm / 10^6 * (t - pivot).

    t is the rank's wall clock. own times count from the trace's own t0, common ones from the run's;
    wall_ns lies between these two, pivot_ns is the wall time, from the run's t0, at which offset_ns
    holds. drift_ppm is None where none can be told from noise, sigma_ns (one standard deviation of
    the offset) and residual_ns (the median distance of the ends of calls) where nothing joins.
    """

    rank: int
    host: str
    offset_ns: int
    wall_ns: int = 0
    pivot_ns: int = 0
    drift_ppm: float | None = None
    sigma_ns: int | None = None
    residual_ns: int | None = None

    @property
    def _rate(self) -> float:
        return (self.drift_ppm or 0.0) * 1e-6

    def common_ns(self, own_ns: Int64) -> Int64:
        """The rank's own times on the common clock."""
        common: Int64 = own_ns + (self.wall_ns - self.offset_ns)
        if self._rate:
            since = own_ns + (self.wall_ns - self.pivot_ns)
            common = common - np.rint(since * self._rate).astype(np.int64)
        return common

    def own_ns(self, common_ns: Int64) -> Int64:
        """Times of the common clock on the rank's own."""
        own: Int64 = common_ns - (self.wall_ns - self.offset_ns)
        if self._rate:
            since = common_ns + (self.offset_ns - self.pivot_ns)
            own = own + np.rint(since * (self._rate / (1 - self._rate))).astype(np.int64)
        return own

    def common_at(self, own_ns: int) -> int:
        """One own time on the common clock."""
        return int(self.common_ns(np.array([own_ns], dtype=np.int64))[0])

    def offset_at(self, common_ns: int) -> int:
        """How far the clock is ahead at that common time."""
        wall = int(self.own_ns(np.array([common_ns], dtype=np.int64))[0]) + self.wall_ns
        return wall - common_ns


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clocks, one a trace; common times count from t0_unix_ns."""

    clocks: tuple[Clock, ...]
    t0_unix_ns: int
    notes: tuple[Note, ...]
