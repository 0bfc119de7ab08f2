"""Fault isolation: a failing collector causes a warning and never stops the training."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from stepsplit.collectors.safe_io.safe_text import escape_controls

# Errors of the command line.


class CollectError(RuntimeError):
    """Bad input or an unreachable job; the message is one line and includes a hint."""


# The process that a collector began in.


def is_forked_child(pid: int) -> bool:
    """Whether this process is a forked child of the one with this pid; 0 for none."""
    return pid != 0 and os.getpid() != pid


# Failures inside the training process: one line of warning each.


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk and of a full quota."""

_full_folders: set[Path] = set()
"""Folders that this process has reported as full."""


@contextmanager
def warn_on_failure(rank: int, lost: str) -> Iterator[None]:
    """Turns an exception in the block into a warning; `lost` names the data that is missing.

    A full disk is reported once for a folder: everything written to it later fails as well.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL and error.filename:
            folder = Path(error.filename).parent
            if folder not in _full_folders:
                _full_folders.add(folder)
                name = errno.errorcode[error.errno]
                warn_lost(rank, f"its files: {os.strerror(error.errno)} ({name}) in {folder}")
        else:
            _warn_of_error(rank, lost, error)
    except Exception as error:  # noqa: BLE001 - no user code runs in here
        _warn_of_error(rank, lost, error)


def warn_lost(rank: int, what: str) -> None:
    """Warns on one line which rank lost what."""
    warn(f"rank {rank}: lost {what}")


def warn(text: str) -> None:
    """Prints one line on stderr; without a stderr the warning is lost, not the training."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"stepsplit: {escape_controls(text)}\n")


def is_reported_full(folder: Path) -> bool:
    """Whether this process has reported the folder's disk as full."""
    return folder in _full_folders


def forget_full_folder(folder: Path) -> None:
    """Reports a full disk again if the folder is still full in the next recording."""
    _full_folders.discard(folder)


def _warn_of_error(rank: int, lost: str, error: Exception) -> None:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    warn_lost(rank, f"{lost}: {reason}")


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
