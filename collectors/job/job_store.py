"""The job's store, by which ranks exchange values without a collective."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import distributed


def set_store_value(key: str, value: str) -> None:
    """Sets a value in the job's store for other ranks, if the job has a store."""
    store = get_store()
    if store is not None:
        store.set(f"stepsplit/{key}", value)


def increment_counter(key: str) -> int:
    """Increments a counter of the job: 1 for the first call. Raises RuntimeError without store."""
    store = open_own_store()
    if store is None:
        raise RuntimeError("the job has no store")
    return int(store.add(f"stepsplit/{key}", 1))


def claim_value(key: str, value: str, is_free: Callable[[str], bool]) -> str:
    """Sets the key unless its value is taken, in one operation, and returns its value then.

    Of ranks that claim it at the same moment one wins, and the others get its value. A job without
    a store that can do this gets its own value. is_free: whether an earlier value may be replaced.
    """
    store, name = open_own_store(), f"stepsplit/{key}"
    if store is None:
        return value
    # A get of a key that is not set would wait for it.
    earlier = store.get(name).decode() if store.check([name]) else ""
    if earlier and not is_free(earlier):
        return str(earlier)
    try:
        return str(store.compare_set(name, earlier, value).decode())
    except NotImplementedError:
        return value


def wait_for_value(key: str, timeout_s: float, poll_s: float) -> str | None:
    """Waits for the value of the key in the job's store; None if it is not set in time.

    For background threads: it uses a separate connection to the store.
    """
    found = wait_for_first((key,), timeout_s, poll_s)
    return None if found is None else found[1]


def wait_for_first(keys: Sequence[str], timeout_s: float, poll_s: float) -> tuple[str, str] | None:
    """Waits until one of the keys is set; it and its value, the first in order if several are."""
    deadline = time.monotonic() + timeout_s
    with EXIT_GUARD.poll() as may_ask:
        store = open_own_store() if may_ask else None
    while store is not None and time.monotonic() < deadline:
        with EXIT_GUARD.poll() as may_ask:
            if not may_ask:
                break
            for key in keys:
                if store.check([f"stepsplit/{key}"]):
                    return key, str(store.get(f"stepsplit/{key}").decode())
        EXIT_GUARD.ending.wait(poll_s)
    return None


class SharedValues:
    """Values that the ranks share through the job's store, over a connection of its own.

    For one background thread. No call waits for another rank. Raises RuntimeError if the job has
    no store that can be used from a thread.
    """

    def __init__(self) -> None:
        store = open_own_store()
        if store is None:
            raise RuntimeError("the job's store cannot be read from a thread")
        self._store: Any = store

    def write(self, key: str, value: str) -> None:
        """Sets a value; it replaces the earlier one."""
        with EXIT_GUARD.poll() as may_ask:
            if may_ask:
                self._store.set(f"stepsplit/{key}", value)

    def read(self, key: str) -> str | None:
        """The value; None if it is not set."""
        name = f"stepsplit/{key}"
        with EXIT_GUARD.poll() as may_ask:
            is_set = may_ask and self._store.check([name])
            return str(self._store.get(name).decode()) if is_set else None


def get_store() -> Any | None:
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


def open_own_store() -> Any | None:
    """The store over a connection of its own; None if the store cannot be cloned."""
    clone = getattr(get_store(), "clone", None)
    return None if clone is None else clone()


class _ExitGuard:
    """Keeps threads that poll the store out of it while the process ends.

    A thread that is in torch's C++ when Python ends never gets Python's lock back: it is ended
    there, and C++ aborts the process ("terminate called without an active exception"), after the
    training has finished. At exit this waits a moment for calls in progress, and lets none begin.
    """

    def __init__(self) -> None:
        self.ending = threading.Event()
        self._changed = threading.Condition()
        self._calls = 0
        self._is_registered = False

    @contextmanager
    def poll(self) -> Iterator[bool]:
        """A call of the store by a background thread; whether it may begin."""
        with self._changed:
            if not self._is_registered:
                self._is_registered = True
                atexit.register(self._close)
            may_begin = not self.ending.is_set()
            self._calls += may_begin
        try:
            yield may_begin
        finally:
            with self._changed:
                self._calls -= may_begin
                self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self.ending.set()
            self._changed.wait_for(lambda: not self._calls, _LAST_CALLS_S)


# A thread within a call of the store would raise from it after the store is gone.
_LAST_CALLS_S = 2.0

EXIT_GUARD = _ExitGuard()
"""That of all background threads of this process that ask the store."""
