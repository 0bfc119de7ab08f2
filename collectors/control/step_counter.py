"""Counts optimizer steps from the hooks that torch calls around every optimizer's step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from stepsplit.collectors.control.deepspeed_steps import enclose_engines
from stepsplit.collectors.optimizers import Listener, listen

SUCCESSION = 16
"""An optimizer that has stepped so often without the leader leads: the leader is gone."""


class StepCounter:
    """Calls `ended(step)` at the end of each training step, counted from 0.

    A step ends with the first optimizer seen, its leader; with the outermost one where optimizers
    wrap each other. What a launcher or a data loader runs never steps.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._running: list[Any] = []
        self._leader: int | None = None
        self._others: Counter[int] = Counter()
        self.steps = 0
        """Steps that have ended."""

    def install(self) -> None:
        """Hooks into every optimizer of the process."""
        listener = Listener(self._before, self._after)
        listen(listener)
        enclose_engines(listener)

    def _before(self, optimizer: Any) -> None:
        if self._running and not _steps_now(self._running[0]):
            # It began and never ended: it has raised, and may be replaced.
            self._running.clear()
            self._leader = None
        self._running.append(optimizer)

    def _after(self, optimizer: Any) -> None:
        running = self._running
        while running and running.pop() is not optimizer:
            pass
        if not running and self._leads(id(optimizer)):
            self._others.clear()
            self.steps += 1
            self._ended(self.steps - 1)

    def _leads(self, optimizer: int) -> bool:
        self._others[optimizer] += 1
        if self._leader is None or self._others[optimizer] >= SUCCESSION:
            self._leader = optimizer
        return optimizer == self._leader


def _steps_now(optimizer: Any) -> bool:
    """Whether a call of one of the optimizer's own methods, or around it, has not returned yet."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if first and frame.f_locals.get(first[0]) is optimizer and first[0] != "optimizer":
            return True
        frame = frame.f_back
    return False
