"""How long steps take beside the profiler: what it costs to be recorded."""

from __future__ import annotations

import time
from collections import deque

from stepsplit.collectors.rank_record import StepTimes

KEPT = 20
"""Steps of each kind that are kept, the latest before and the first after."""


class StepClock:
    """Sorts the wall times of steps into before, under and after the profiler."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._before: deque[int] = deque(maxlen=KEPT)
        self._profiled: list[int] = []
        self._after: list[int] = []

    def step(self, kind: str) -> None:
        """Ends a step. kind: "before", "profiled" or "after"; any other is in none of them."""
        now = time.perf_counter_ns()
        last, self._last_ns = self._last_ns, now
        if last is None:
            return
        kept = {"before": self._before, "profiled": self._profiled, "after": self._after}.get(kind)
        if kept is not None and (kind == "before" or len(kept) < KEPT):
            kept.append(now - last)

    @property
    def full(self) -> bool:
        """Whether enough steps after the profiler are known."""
        return len(self._after) >= KEPT

    def times(self) -> StepTimes:
        """What was measured so far."""
        return StepTimes(tuple(self._before), tuple(self._profiled), tuple(self._after))
