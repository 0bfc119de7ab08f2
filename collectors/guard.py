"""Fault isolation: a failing collector causes a warning and never stops the training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Errors of the command line.


class CollectError(RuntimeError):
    """Bad input or an unreachable job; the message is one line and includes a hint."""


# Failures inside the training process: one line of warning each.


@contextmanager
def warn_on_failure(rank: int, lost: str) -> Iterator[None]:
    """Turns an exception in the block into a warning; `lost` names the data that is missing."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - no user code runs in here
        reason = (str(error) or type(error).__name__).splitlines()[0]
        warn_lost(rank, f"{lost}: {reason}")


def warn_lost(rank: int, what: str) -> None:
    """Warns on one line which rank lost what; prints it if warnings are turned into errors."""
    text = f"stepsplit, rank {rank}: lost {what}"
    try:
        warnings.warn_explicit(text, RuntimeWarning, "stepsplit", 0)
    except RuntimeWarning:
        sys.stderr.write(f"{text}\n")


# SIGTERM while files are written.


@contextmanager
def delay_sigterm() -> Iterator[None]:
    """Delays a SIGTERM until the block has ended.

    When a rank fails, the launcher terminates the others just as they write their recordings. It
    works on the main thread only, and not if the handler was installed by C code.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    received: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        received.append(number)

    signal.signal(signal.SIGTERM, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        if received:
            os.kill(os.getpid(), signal.SIGTERM)
