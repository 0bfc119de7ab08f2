"""One pair of hooks around the steps of all optimizers, with listeners that come and go; and the
time of the last gradient of a step.

torch iterates over its hooks while it calls them, so a hook must not add or remove hooks. This
pair stays registered; only its listeners change.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
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
        self._listener = Listener(self._note, _ignore)
        add_listener(self._listener)

    def read(self, steps_ended: int) -> int:
        """The steps before, given those that have ended since; 0 if unknown. Ends the search."""
        self.close()
        if self._known is not None:
            return self._known
        optimizer = None if self._optimizer is None else self._optimizer()
        count = None if optimizer is None else count_optimizer_steps(optimizer)
        return 0 if count is None else max(0, count - steps_ended)

    def close(self) -> None:
        """Ends the search."""
        remove_listener(self._listener)

    def _note(self, optimizer: Any) -> None:
        # An outer optimizer steps before the ones in it.
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)


def _ignore(optimizer: Any) -> None:
    """Does nothing."""


# The work of a rank before it waits for the gradients of others.


class LocalTimes:
    """Measures the local time of a step: from its begin to the last gradient of this rank.

    The gradient of the parameter that the optimizer has first is the last one to be ready. What a
    rank waits for afterwards, the reduction of gradients, is not in it; what it waits for before,
    tensor-parallel or pipeline neighbors, is. Sharded parameters (DTensor: FSDP2 copies their
    gradients to the host without overlap once they have a hook), DeepSpeed and optimizers that step
    within the backward pass have no such time.

    On a GPU, the times are those of events on its streams, which are never waited for: a step's
    time is known some steps later.
    """

    def __init__(self) -> None:
        self._listener = Listener(self._hook_first_parameter, _ignore)
        self._handle: Any = None
        self._clock: _HostClock | _DeviceClock = _HostClock()
        add_listener(self._listener)

    def begin_step(self) -> int:
        """Begins a step; returns the local time in ns of the newest one that is known since the
        last call, or 0."""
        return self._clock.begin_step()

    def close(self) -> None:
        """Removes the hooks."""
        remove_listener(self._listener)
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _hook_first_parameter(self, optimizer: Any) -> None:
        if self._handle is not None:
            return
        weights = (each for group in optimizer.param_groups for each in group["params"])
        weight = next(filter(_has_local_gradient, weights), None)
        if weight is None:
            remove_listener(self._listener)
            return
        if weight.is_cuda:
            self._clock = _DeviceClock()
        self._handle = weight.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, weight: Any) -> None:
        try:
            self._clock.note_gradient()
        except Exception as error:  # noqa: BLE001 - nothing may reach the backward pass
            self._clock = _HostClock()
            self.close()
            warn_lost(0, f"the local times of its steps: {error!r}")


def _has_local_gradient(weight: Any) -> bool:
    return weight.requires_grad and weight.is_leaf and not hasattr(weight, "device_mesh")


class _HostClock:
    """Times on the host."""

    def __init__(self) -> None:
        self._begin_ns = self._last_ns = 0

    def begin_step(self) -> int:
        begin, self._begin_ns = self._begin_ns, time.perf_counter_ns()
        return self._last_ns - begin if begin and self._last_ns > begin else 0

    def note_gradient(self) -> None:
        self._last_ns = time.perf_counter_ns()


_MOST_PENDING = 64
"""Steps whose events a GPU has not reached; a step beyond has no local time."""


class _DeviceClock:
    """Times on a GPU, by events on the streams of the training and of the backward pass."""

    def __init__(self) -> None:
        self._begin: Any = None
        self._last: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()

    def begin_step(self) -> int:
        if self._begin is not None and self._last is not None:
            self._pending.append((self._begin, self._last))
        newest_ns = 0
        while self._pending and self._pending[0][1].query():
            begin, last = self._pending.popleft()
            newest_ns = round(begin.elapsed_time(last) * 1e6)
        self._last = None
        self._begin = self._record() if len(self._pending) < _MOST_PENDING else None
        return newest_ns

    def note_gradient(self) -> None:
        if self._begin is not None:
            self._last = self._record()

    def _record(self) -> Any:
        """An event on the current stream; None within the capture of a graph."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_listeners: tuple[Listener, ...] = ()
_hooked = False


def add_listener(listener: Listener) -> None:
    """Adds a listener. A listener that raises is removed, and the training continues."""
    global _listeners
    _register_hooks()
    _listeners += (listener,)


def remove_listener(listener: Listener) -> None:
    """Removes a listener."""
    global _listeners
    _listeners = tuple(each for each in _listeners if each is not listener)


def _register_hooks() -> None:
    global _hooked
    if _hooked:
        return
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    _hooked = True
    register_optimizer_step_pre_hook(_call_before)
    register_optimizer_step_post_hook(_call_after)


def _call_before(optimizer: Any, args: Any, kwargs: Any) -> None:
    _without_dynamo(_run_before)(optimizer)


def _call_after(optimizer: Any, args: Any, kwargs: Any) -> None:
    _without_dynamo(_run_after)(optimizer)


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
