"""Counts optimizer steps from the hooks that torch calls around every optimizer's step."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from stepsplit.collectors.probes.imports import when_imported
from stepsplit.collectors.probes.optimizers import (
    Listener,
    add_listener,
    call_listener,
    count_optimizer_steps,
)

LEADER_CHANGE_STEPS = 16
"""After this many steps without the leading optimizer another one becomes the leader."""


class StepCounter:
    """Calls `ended(step)` at the end of each training step, counted from 0.

    A step ends when the leader has stepped: the first optimizer that stepped, or the outermost one
    if optimizers wrap each other.
    """

    def __init__(self, on_step_end: Callable[[int], None]) -> None:
        self._handle_step_end = on_step_end
        self._running: list[Any] = []
        self._leader: int | None = None
        self._others: Counter[int] = Counter()
        self._stepped: Any = None
        self.steps = 0
        """Number of steps that have ended."""

    def install(self) -> None:
        """Hooks into every optimizer of the process."""
        listener = Listener(self._enter_step, self._exit_step)
        add_listener(listener)
        when_imported(_ENGINE, lambda: _wrap_engine(listener))

    def read_steps_before(self, steps_ended: int) -> int:
        """The steps of a resumed job before this process, by its optimizer; 0 if unknown.

        Call it within `ended`.
        """
        return self.find_steps_before(steps_ended) or 0

    def find_steps_before(self, steps_ended: int) -> int | None:
        """As read_steps_before; None if unknown."""
        count = None if self._stepped is None else count_optimizer_steps(self._stepped)
        return None if count is None else max(0, count - steps_ended)

    def _enter_step(self, optimizer: Any) -> None:
        if self._running and not _is_stepping(self._running[0]):
            # It began and never ended, so it has raised and may be replaced.
            self._running.clear()
            self._leader = None
        self._running.append(optimizer)

    def _exit_step(self, optimizer: Any) -> None:
        running = self._running
        while running and running.pop() is not optimizer:
            pass
        # It was called by another one, whose step is not over.
        if running:
            return
        # The leader is replaced by an optimizer that steps often without it.
        own = id(optimizer)
        self._others[own] += 1
        if self._leader is None or self._others[own] >= LEADER_CHANGE_STEPS:
            self._leader = own
        if own == self._leader:
            self._others.clear()
            self.steps += 1
            self._stepped = optimizer
            try:
                self._handle_step_end(self.steps - 1)
            finally:
                # Not kept, as the script may drop it.
                self._stepped = None


def _is_stepping(optimizer: Any) -> bool:
    """Whether a method of the optimizer is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if first and frame.f_locals.get(first[0]) is optimizer and first[0] != "optimizer":
            return True
        frame = frame.f_back
    return False


# DeepSpeed: the engine counts as the optimizer, since its inner ones step per parameter group.

_ENGINE = "deepspeed.runtime.engine"


def _wrap_engine(listener: Listener) -> None:
    """Reports each step of a DeepSpeed engine to the listener, as an outer optimizer."""
    engine_type: Any = getattr(sys.modules[_ENGINE], "DeepSpeedEngine", None)
    original = getattr(engine_type, "_take_model_step", None)
    if original is None:
        return

    @functools.wraps(original)
    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        call_listener(listener, listener.before, engine)
        result = original(engine, *args, **kwargs)
        call_listener(listener, listener.after, engine)
        return result

    engine_type._take_model_step = step
