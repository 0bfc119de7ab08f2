"""The clock of each rank, and the common clock on which ranks are compared."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.trace import Int64, Note


class Clock(Struct, frozen=True):
    """A rank's clock: t_reference = t - offset_ns - drift_ppm / 10^6 * (t - pivot).

    t is the rank's wall clock. Own times count from the t0 of the trace, common times from the t0
    of the run; wall_ns is the difference. offset_ns holds at pivot_ns, a wall time relative to the
    run's t0. drift_ppm is None if it cannot be distinguished from noise. sigma_ns (standard
    deviation of the offset) and residual_ns (median distance of the ends of calls) are None if no
    call links the clock.

    island is None for a clock that is aligned with the run's first rank. The times of others are
    comparable among those of one island alone: offset, drift, sigma, and residual are against the
    wall clock of its first rank, which island names.
    """

    rank: int
    host: str
    offset_ns: int
    wall_ns: int = 0
    pivot_ns: int = 0
    drift_ppm: float | None = None
    sigma_ns: int | None = None
    residual_ns: int | None = None
    island: int | None = None

    @property
    def _rate(self) -> float:
        return (self.drift_ppm or 0.0) * 1e-6

    def map_to_common_ns(self, own_ns: Int64) -> Int64:
        """Maps own times to the common clock."""
        common: Int64 = own_ns + (self.wall_ns - self.offset_ns)
        if self._rate:
            since = own_ns + (self.wall_ns - self.pivot_ns)
            common = common - np.rint(since * self._rate).astype(np.int64)
        return common

    def map_to_own_ns(self, common_ns: Int64) -> Int64:
        """Maps common times to the rank's own clock."""
        own: Int64 = common_ns - (self.wall_ns - self.offset_ns)
        if self._rate:
            since = common_ns + (self.offset_ns - self.pivot_ns)
            own = own + np.rint(since * (self._rate / (1 - self._rate))).astype(np.int64)
        return own

    def map_instant_to_common_ns(self, own_ns: int) -> int:
        """Maps a single own time to the common clock."""
        return int(self.map_to_common_ns(np.array([own_ns], dtype=np.int64))[0])

    def compute_offset_at(self, common_ns: int) -> int:
        """How far this clock is ahead at a common time."""
        wall = int(self.map_to_own_ns(np.array([common_ns], dtype=np.int64))[0]) + self.wall_ns
        return wall - common_ns


class Alignment(Struct, frozen=True):
    """The clocks, one per trace; common times count from t0_unix_ns."""

    clocks: tuple[Clock, ...]
    t0_unix_ns: int
    notes: tuple[Note, ...]
