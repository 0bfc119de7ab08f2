"""Who has tried too many wrong passwords of late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MOST_FAILURES, WINDOW_S = 10, 60.0
_MOST_ADDRESSES = 10_000


class Throttle:
    """Failures by address; threads may share it. Each server process counts for itself."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._failures: dict[str, list[float]] = {}

    def failed(self, address: str) -> None:
        """Somebody at the address was wrong."""
        with self._lock:
            recent = self._recent(address)
            # Whoever has ever more addresses pushes out the oldest, not the server's memory.
            self._failures.pop(address, None)
            self._failures[address] = [*recent, self._now()][-MOST_FAILURES:]
            if len(self._failures) > _MOST_ADDRESSES:
                del self._failures[next(iter(self._failures))]

    def wait_s(self, address: str) -> float:
        """How long the address must wait before it is listened to again; 0 for not at all."""
        with self._lock:
            recent = self._recent(address)
            if len(recent) < MOST_FAILURES:
                return 0.0
            return recent[0] + WINDOW_S - self._now()

    def _recent(self, address: str) -> list[float]:
        since = self._now() - WINDOW_S
        return [at for at in self._failures.get(address, ()) if at > since]
