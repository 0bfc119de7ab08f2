"""Notices that the steps of a job have stopped."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from stepsplit.collectors.attach import messages
from stepsplit.collectors.formats import rank_state
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.safe_io.safe_text import escape_controls


def say(text: str) -> None:
    sys.stderr.write(f"{escape_controls(text)}\n")


ExplainStop: TypeAlias = Callable[[int], str | None]

STOPPED_S = 5.0
"""Steps that have stopped for less are not looked into."""

UNKNOWN_STEP_S = 60.0
"""As long as that a first step may take, which compiles and allocates."""

# Asking all ranks why they stand still takes a few seconds, and is not to be most of the waiting.
_LOOK_AGAIN_S = 20.0


class StopWatch:
    """Notices that the steps of a job have stopped.

    explain: says why, given the process of a rank; None if the job is not stuck after all, such as
    in an evaluation. Without it, the user is pointed to `stepsplit hang` once.
    """

    def __init__(self, explain: ExplainStop | None = None) -> None:
        self._explain, self._look_at_s = explain, 0.0

    def check(self, ranks: Sequence[messages.Status]) -> None:
        """Raises CollectError with the reason if the steps of the ranks have stopped for good."""
        # The rank that ended a step last: a step is over only when all ranks have ended it, but one
        # that goes on shows that the job does.
        stopped_s = min((rank.since_step_ns for rank in ranks), default=0) / 1e9
        usual_s = max((rank.longest_step_ns for rank in ranks), default=0) / 1e9
        limit_s = max(STOPPED_S, rank_state.USUAL_STEPS * usual_s) if usual_s else UNKNOWN_STEP_S
        if stopped_s < limit_s or time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_AGAIN_S
        what, pid = f"no step has ended for {stopped_s:.0f} s", ranks[0].pid
        if self._explain is None:
            self._look_at_s = math.inf
            say(f"{what}; where the job hangs: stepsplit hang {pid}")
        elif (why := self._explain(pid)) is not None:
            raise CollectError(f"{what}: {why}; see stepsplit hang {pid}")
