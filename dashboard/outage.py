"""A server that cannot be reached: one line of it, and longer and longer pauses."""

from __future__ import annotations

import random

from stepsplit.collectors.guard import warn

POLL_S = 5.0
"""From one batch of a watch to the next, which is also the first pause after a failure."""

LONGEST_PAUSE_S = 300.0
"""Longest time between two attempts to reach the server."""


class Outage:
    """Reports a failure that lasts with one line, that of its begin."""

    def __init__(self) -> None:
        self._is_reported = False

    def report(self, text: str) -> None:
        """Prints the failure if it is the first one."""
        if not self._is_reported:
            warn(text)
        self._is_reported = True

    def end(self) -> None:
        """The next failure is a new one."""
        self._is_reported = False


def choose_pause_s(failures: int) -> float:
    """The pause after so many failures and one more, of which hosts take different parts: those
    that lost a server together must not come back together."""
    return min(LONGEST_PAUSE_S, POLL_S * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)
