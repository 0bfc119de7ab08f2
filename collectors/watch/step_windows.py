"""The times of the unprofiled steps of a rank, in windows."""

from __future__ import annotations

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
        self._steps: list[tuple[int, int, int, int]] = []
        self._start_unix_ns = 0

    def add(
        self, step: int, end_unix_ns: int, took_ns: int, local_ns: int = 0
    ) -> RankWindow | None:
        """Adds an unprofiled step; the window that it closes, or None.

        local_ns: the newest local time that is known; 0 for none.
        """
        steps = self._steps
        if not steps:
            self._start_unix_ns = end_unix_ns - took_ns
        steps.append((step, end_unix_ns, took_ns, local_ns))
        self.recent_ns.append(took_ns)
        is_full = len(steps) >= WINDOW_STEPS or end_unix_ns - self._start_unix_ns >= WINDOW_NS
        return self.close() if is_full else None

    def close(self) -> RankWindow | None:
        """Closes the window; None if it has no step."""
        steps, self._steps = self._steps, []
        if not steps:
            return None
        times = [took_ns for _, _, took_ns, _ in steps]
        local = [local_ns for _, _, _, local_ns in steps if local_ns]
        usual_ns = int(median(times))
        return RankWindow(
            rank=self._rank,
            first_step=steps[0][0],
            last_step=steps[-1][0],
            start_unix_ns=self._start_unix_ns,
            # What comes after the last step, as a last checkpoint, is no part of it.
            end_unix_ns=steps[-1][1],
            steps=len(times),
            min_step_ns=min(times),
            median_step_ns=usual_ns,
            max_step_ns=max(times),
            local_ns=int(median(local)) if local else 0,
            long_steps=tuple(one[:3] for one in steps if one[2] > LONG_STEP * usual_ns),
        )
