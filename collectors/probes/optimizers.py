"""One pair of hooks around the steps of all optimizers, with listeners that come and go.

torch iterates over its hooks while it calls them, so a hook must not add or remove hooks. This
pair stays registered; only its listeners change.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from stepsplit.collectors.guard import warn_lost


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks that get an optimizer before and after its step."""

    before: Callable[[Any], None]
    after: Callable[[Any], None]


def count_optimizer_steps(optimizer: Any) -> int | None:
    """The steps that the optimizer has ended, with those restored from a checkpoint.

    None if its state has no count, as that of SGD. A count on a GPU is waited for.
    """
    steps: Any = getattr(optimizer, "global_steps", None)
    if isinstance(steps, int):
        # A DeepSpeed engine, which steps like an optimizer.
        return steps
    state = getattr(optimizer, "state", {})
    weights = (weight for group in optimizer.param_groups for weight in group["params"][:1])
    counts = [state[weight].get("step") for weight in weights if state.get(weight)]
    return max((int(each) for each in counts if each is not None), default=None)


class ResumedSteps:
    """Finds the steps that a resumed job had done before, by the first optimizer that steps.

    known: these steps, if the framework knows them.
    """

    def __init__(self, known: int | None = None) -> None:
        self._known = known
        self._optimizer: Callable[[], Any] | None = None
        self._listener = Listener(self._note, ignore_step)
        add_listener(self._listener)

    def read(self, steps_ended: int) -> int:
        """The steps before, given those that have ended since; 0 if unknown. Ends the search."""
        return self.find(steps_ended) or 0

    def find(self, steps_ended: int) -> int | None:
        """As read(); None if unknown."""
        self.close()
        if self._known is not None:
            return self._known
        optimizer = None if self._optimizer is None else self._optimizer()
        count = None if optimizer is None else count_optimizer_steps(optimizer)
        return None if count is None else max(0, count - steps_ended)

    def close(self) -> None:
        """Ends the search."""
        remove_listener(self._listener)

    def _note(self, optimizer: Any) -> None:
        # An outer optimizer steps before the ones in it.
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)


def ignore_step(optimizer: Any) -> None:
    """Does nothing."""


_listeners: tuple[Listener, ...] = ()
_hooked = False


def add_listener(listener: Listener) -> None:
    """Adds a listener. A listener that raises is removed, and the training continues."""
    global _listeners, _hooked, _may_compile
    if not _hooked:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        _hooked = True
        # A part of torch._C, so that this does not import dynamo.
        eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
        _may_compile = getattr(eval_frame, "get_eval_frame_callback", _may_compile)
        register_optimizer_step_pre_hook(_call_before)
        register_optimizer_step_post_hook(_call_after)
    _listeners += (listener,)


def remove_listener(listener: Listener) -> None:
    """Removes a listener."""
    global _listeners
    _listeners = tuple(each for each in _listeners if each is not listener)


def _may_compile() -> object:
    """What torch would compile a function with that is called now; None outside of compiled code.
    Replaced by torch's own function, where it has one."""
    return True


def _call_before(optimizer: Any, args: Any, kwargs: Any) -> None:
    # Without the wrapper where nothing is compiled: it takes a quarter of what a step costs.
    (_run_before if _may_compile() is None else _without_dynamo(_run_before))(optimizer)


def _call_after(optimizer: Any, args: Any, kwargs: Any) -> None:
    (_run_after if _may_compile() is None else _without_dynamo(_run_after))(optimizer)


for _hook_of_ours in (_call_before, _call_after):
    # Keeps torch.compile out of the hooks, without the seconds that importing dynamo takes.
    _hook_of_ours._torchdynamo_disable = True  # type: ignore[attr-defined]


def _run_before(optimizer: Any) -> None:
    for listener in _listeners:
        call_listener(listener, listener.before, optimizer)


def _run_after(optimizer: Any) -> None:
    for listener in _listeners:
        call_listener(listener, listener.after, optimizer)


def _without_dynamo(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """The function, not compiled together with a compiled step; the mark of a hook does not hold
    for what the hook calls."""
    has_dynamo = hasattr(sys.modules.get("torch._dynamo"), "disable")
    return _disable_dynamo(function) if has_dynamo else function


@cache
def _disable_dynamo(function: Callable[[Any], None]) -> Callable[[Any], None]:
    disabled: Callable[[Any], None] = sys.modules["torch._dynamo"].disable(function)
    return disabled


def call_listener(listener: Listener, callback: Callable[[Any], None], optimizer: Any) -> None:
    """Calls one callback of the listener, and removes the listener if it raises."""
    try:
        callback(optimizer)
    except Exception as error:  # noqa: BLE001 - no user code runs in here
        remove_listener(listener)
        warn_lost(0, f"the data of an optimizer hook: {error!r}")
