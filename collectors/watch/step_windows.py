"""The times of the unprofiled steps of a rank, in windows."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from stepsplit.collectors.formats.watch_notes import LONG_STEP, WINDOW_STEPS, RankWindow

WINDOW_NS = 60_000_000_000
"""A window is closed after so long, or after WINDOW_STEPS."""


class StepRing:
    """Collects step times, and closes them into windows. recent_ns: the last WINDOW_STEPS."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.recent_ns: deque[int] = deque(maxlen=WINDOW_STEPS)
        self._times_ns: list[int] = []
        self._ends: list[tuple[int, int, int]] = []
        self._local_ns: list[int] = []
        self._first = self._last = self._start_unix_ns = self._length_ns = 0

    def add(self, step: int, took_ns: int, local_ns: int = 0) -> RankWindow | None:
        """Adds an unprofiled step that ended just now; the window that it closes, or None.

        local_ns: the newest local time that is known; 0 for none.
        """
        if not self._times_ns:
            self._first, self._length_ns = step, 0
            self._start_unix_ns = time.time_ns() - took_ns
        self._ends.append((step, time.time_ns(), took_ns))
        self._times_ns.append(took_ns)
        if local_ns:
            self._local_ns.append(local_ns)
        self.recent_ns.append(took_ns)
        self._last = step
        self._length_ns += took_ns
        is_full = len(self._times_ns) >= WINDOW_STEPS or self._length_ns >= WINDOW_NS
        return self.close() if is_full else None

    def close(self) -> RankWindow | None:
        """Closes the window; None if it has no step."""
        times, self._times_ns = self._times_ns, []
        local, self._local_ns = self._local_ns, []
        ends, self._ends = self._ends, []
        if not times:
            return None
        usual_ns = int(median(times))
        return RankWindow(
            rank=self._rank,
            first_step=self._first,
            last_step=self._last,
            start_unix_ns=self._start_unix_ns,
            # What comes after the last step, as a last checkpoint, is no part of it.
            end_unix_ns=ends[-1][1],
            steps=len(times),
            min_step_ns=min(times),
            median_step_ns=usual_ns,
            max_step_ns=max(times),
            local_ns=int(median(local)) if local else 0,
            long_steps=tuple(one for one in ends if one[2] > LONG_STEP * usual_ns),
        )
