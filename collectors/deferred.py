"""Holds back what would end the process while it writes its files."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_sigterm() -> Iterator[None]:
    """A SIGTERM that comes meanwhile comes afterwards.

    A launcher ends the other ranks where one fails, just when they write what they recorded. Only
    the main thread can hold it back, and none where a handler of C has it.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGTERM, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)
