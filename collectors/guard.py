"""Fault isolation: a failing collector costs a warning, never the training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# What a command of the collectors cannot do: one line, with the hint.


class CollectError(RuntimeError):
    """Bad input or a job that cannot be reached; the message names it and the hint."""


# How a collector fails: with one line of warning, and without breaking the training.


@contextmanager
def guarded(rank: int, lost: str) -> Iterator[None]:
    """A block of ours whose failure costs only what it would have recorded: `lost` names that."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - nothing of the user's runs in here
        reason = (str(error) or type(error).__name__).splitlines()[0]
        warn_lost(rank, f"{lost}: {reason}")


def warn_lost(rank: int, what: str) -> None:
    """Says on one line which rank lost what; also where warnings are errors."""
    text = f"stepsplit, rank {rank}: lost {what}"
    try:
        warnings.warn_explicit(text, RuntimeWarning, "stepsplit", 0)
    except RuntimeWarning:
        sys.stderr.write(f"{text}\n")


# Holds back what would end the process while it writes its files.


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
