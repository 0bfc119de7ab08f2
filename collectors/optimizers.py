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


def listen(listener: Listener) -> None:
    """Adds a listener. A listener that raises is removed, and the training continues."""
    global _listeners
    _hook()
    _listeners += (listener,)


def leave(listener: Listener) -> None:
    """Removes a listener."""
    global _listeners
    _listeners = tuple(each for each in _listeners if each is not listener)


def _hook() -> None:
    global _hooked
    if _hooked:
        return
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    _hooked = True
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    for listener in _listeners:
        call(listener, listener.before, optimizer)


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    for listener in _listeners:
        call(listener, listener.after, optimizer)


for _hook_of_ours in (_before, _after):
    # Keeps torch.compile out of the hooks, without the seconds that importing dynamo takes.
    _hook_of_ours._torchdynamo_disable = True  # type: ignore[attr-defined]


def call(listener: Listener, part: Callable[[Any], None], optimizer: Any) -> None:
    """Calls one callback of the listener, and removes the listener if it raises."""
    try:
        part(optimizer)
    except Exception as error:  # noqa: BLE001 - nothing of the user's runs in here
        leave(listener)
        warn_lost(0, f"the data of an optimizer hook: {error!r}")
