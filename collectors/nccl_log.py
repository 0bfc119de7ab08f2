"""Keeps a log that NCCL writes below a size: it goes on writing, but no more is kept."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

MOST_BYTES = 256 << 20
_EVERY_S = 5.0


def log_path(environment: Mapping[str, str], pid: int) -> Path | None:
    """The log of a process whose NCCL writes one to a file of its own; None where it does not."""
    pattern = environment.get("NCCL_DEBUG_FILE", "")
    if "%p" not in pattern:
        return None
    return Path(pattern.replace("%h", socket.gethostname()).replace("%p", str(pid)))


def keep_small(path: Path, most_bytes: int = MOST_BYTES, every_s: float = _EVERY_S) -> None:
    """Looks after the log from now on, in a thread."""
    arguments = (path, most_bytes, every_s)
    threading.Thread(target=_watch, args=arguments, name="stepsplit-nccl", daemon=True).start()


def cut(path: Path, most_bytes: int = MOST_BYTES) -> bool:
    """Whether the log had grown beyond the size; then it is cut there.

    NCCL writes on where it was: what lies between takes no room on the disk.
    """
    try:
        if path.stat().st_size <= most_bytes:
            return False
        os.truncate(path, most_bytes)
    except OSError:
        return False
    return True


def _watch(path: Path, most_bytes: int, every_s: float) -> None:
    while True:
        time.sleep(every_s)
        cut(path, most_bytes)
