"""Counts optimizer steps from the hooks that torch calls around every optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepsplit.collectors.optimizers import Listener, listen


class StepCounter:
    """Calls `ended(step)` at the end of each training step, counted from 0.

    A step ends with the first optimizer seen, its leader; with the outermost one where optimizers
    wrap each other. A leader that no longer steps is succeeded by the first that steps twice
    without it. What a launcher or a data loader runs never steps.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._running: list[int] = []
        self._leader: int | None = None
        self._others: set[int] = set()
        self.steps = 0
        """Steps that have ended."""

    def install(self) -> None:
        """Hooks into every optimizer of the process."""
        listen(Listener(self._before, self._after))

    def _before(self, optimizer: Any) -> None:
        if id(optimizer) in self._running:
            # It began twice without ending: a step of before has raised.
            self._running.clear()
        self._running.append(id(optimizer))

    def _after(self, optimizer: Any) -> None:
        running = self._running
        while running and running.pop() != id(optimizer):
            pass
        if not running and self._leads(id(optimizer)):
            self._others.clear()
            self.steps += 1
            self._ended(self.steps - 1)

    def _leads(self, optimizer: int) -> bool:
        if self._leader is None or optimizer in self._others:
            self._leader = optimizer
        if optimizer == self._leader:
            return True
        self._others.add(optimizer)
        return False
