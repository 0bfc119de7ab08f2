"""One pair of hooks around the steps of all optimizers, with listeners that come and go.

torch iterates over its hooks while it calls them, so a hook must not add or remove hooks. This
pair stays registered; only its listeners change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepsplit.collectors.guard import warn_lost


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks that get an optimizer before and after its step."""

    before: Callable[[Any], None]
    after: Callable[[Any], None]


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
    for listener in _listeners:
        call_listener(listener, listener.before, optimizer)


def _call_after(optimizer: Any, args: Any, kwargs: Any) -> None:
    for listener in _listeners:
        call_listener(listener, listener.after, optimizer)


for _hook_of_ours in (_call_before, _call_after):
    # Keeps torch.compile out of the hooks, without the seconds that importing dynamo takes.
    _hook_of_ours._torchdynamo_disable = True  # type: ignore[attr-defined]


def call_listener(listener: Listener, callback: Callable[[Any], None], optimizer: Any) -> None:
    """Calls one callback of the listener, and removes the listener if it raises."""
    try:
        callback(optimizer)
    except Exception as error:  # noqa: BLE001 - no user code runs in here
        remove_listener(listener)
        warn_lost(0, f"the data of an optimizer hook: {error!r}")
