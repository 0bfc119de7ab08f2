"""The times of steps before, during and after profiling, on the host and on the GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from stepsplit.collectors.formats.rank_record import StepTimes

MAX_KEPT_STEPS = 20
"""Number of step times kept per kind: the last ones before and the first ones after."""


class StepClock:
    """Measures the wall times of steps before, during and after profiling."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._before: deque[int] = deque(maxlen=MAX_KEPT_STEPS)
        self._profiled: list[int] = []
        self._after: list[int] = []

    def start(self, earlier_ns: Sequence[int] = ()) -> None:
        """Begins the first step. earlier_ns: times of the steps before it, as far as known."""
        self._before.extend(earlier_ns)
        self._last_ns = time.perf_counter_ns()

    def step(self, kind: str) -> None:
        """Ends a step. kind: "before", "profiled" or "after"; other steps are not kept."""
        now = time.perf_counter_ns()
        last, self._last_ns = self._last_ns, now
        if last is None:
            return
        durations = {"before": self._before, "profiled": self._profiled, "after": self._after}.get(
            kind
        )
        if durations is not None and (kind == "before" or len(durations) < MAX_KEPT_STEPS):
            durations.append(now - last)

    @property
    def full(self) -> bool:
        """Whether enough steps after the profiler were measured."""
        return len(self._after) >= MAX_KEPT_STEPS

    def collect_times(self) -> StepTimes:
        """The step times measured so far."""
        return StepTimes(tuple(self._before), tuple(self._profiled), tuple(self._after))


# The times of steps on the GPU, from pooled events that are asked and never waited for.

_MAX_PENDING = 64
"""Steps that the host may be ahead; beyond, no more events are recorded."""


class GpuStepClock:
    """Times steps between events on the current stream: the host may be steps ahead of the GPU.

    A step costs an event and a query, some microseconds. While a CUDA graph is captured nothing is
    recorded or asked, because both would end the capture.
    """

    def __init__(self) -> None:
        self._pool: list[Any] = []
        self._pending: deque[tuple[str, Any]] = deque()
        self._times: dict[str, deque[int]] = {
            "before": deque(maxlen=MAX_KEPT_STEPS),
            "profiled": deque(),
            "after": deque(),
        }

    def step(self, kind: str) -> None:
        """Ends a step: "before", "profiled" or "after"; the times of other steps are not kept."""
        if not torch.cuda.is_initialized():
            return
        if torch.cuda.is_current_stream_capturing() or len(self._pending) >= _MAX_PENDING:
            # The next interval would hold several steps.
            self._pending.clear()
            return
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        self._pending.append((kind, event))
        self._resolve()

    def collect(self, kind: str) -> tuple[int, ...]:
        """The times in ns of the steps of a kind that the GPU has ended."""
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            self._resolve()
        return tuple(self._times[kind])

    def _resolve(self) -> None:
        # The end of a step is the begin of the next: the event before it goes back to the pool.
        while len(self._pending) > 1 and self._pending[1][1].query():
            _, begin = self._pending.popleft()
            kind, end = self._pending[0]
            times_ns = self._times.get(kind)
            if times_ns is not None and (kind == "before" or len(times_ns) < MAX_KEPT_STEPS):
                times_ns.append(round(begin.elapsed_time(end) * 1e6))
            self._pool.append(begin)
