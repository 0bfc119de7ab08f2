"""NCCL's environment, debug logs and Flight Recorder dumps of a job."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from stepsplit.collectors.guard import warn_lost

# What NCCL is to write of itself: the environment for its version.

STARTUP = "INIT,BOOTSTRAP,ENV,NET,GRAPH"
"""Subsystems that speak when communicators are made: a few hundred lines a rank."""

CALLS = f"{STARTUP},COLL,TUNING"
"""Also a line a call; left on, 10 GB an hour have been seen."""

_TIMESTAMPS = (2, 26)

_INSPECTOR, _INSPECTOR_P2P = (2, 28, 3), (2, 30)

_PLUGIN = "libnccl-profiler-inspector.so"

_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def log_environment(
    folder: Path, version: tuple[int, ...] | None, calls: bool = False
) -> dict[str, str]:
    """Variables that have NCCL write nccl/HOST.PID.log in the folder.

    version None: not known before the job runs; a variable that NCCL does not know does nothing.
    Without timestamps (before 2.26) the lines carry no time.
    """
    found = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": CALLS if calls else STARTUP,
        "NCCL_DEBUG_FILE": str(folder / "nccl" / "%h.%p.log"),
    }
    if version is None or version >= _TIMESTAMPS:
        found["NCCL_DEBUG_TIMESTAMP_LEVELS"] = "ALL"
        found["NCCL_DEBUG_TIMESTAMP_FORMAT"] = "[%F %T.%6f] "
    return found


def inspector_environment(
    folder: Path, version: tuple[int, ...] | None, plugin: Path
) -> dict[str, str]:
    """Variables that have NCCL's Inspector write what each collective took, every 10 s.

    Raises ValueError for an NCCL before 2.28.3, which has no Inspector.
    """
    if version is not None and version < _INSPECTOR:
        raise ValueError(
            f"NCCL {'.'.join(map(str, version))} has no Inspector: 2.28.3 is the first"
        )
    found = {
        "NCCL_PROFILER_PLUGIN": str(plugin),
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": str(folder / "nccl"),
        # By default it writes only when a communicator is destroyed, which many jobs never do.
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "10000000",
    }
    if version is None or version >= _INSPECTOR_P2P:
        found["NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES"] = "0"
    return found


def installed_version() -> tuple[int, ...] | None:
    """NCCL's version by the package that brings it; None where none of this Python does."""
    for package in _PACKAGES:
        try:
            return tuple(map(int, re.findall(r"\d+", metadata.version(package))[:3]))
        except metadata.PackageNotFoundError:
            continue
    return None


def inspector_plugin(environment: Mapping[str, str]) -> Path | None:
    """The Inspector's library on LD_LIBRARY_PATH; None where it is not."""
    folders = environment.get("LD_LIBRARY_PATH", "").split(":")
    found = (Path(folder) / _PLUGIN for folder in folders if folder)
    return next((path for path in found if path.is_file()), None)


# Keeps a log that NCCL writes below a size: it goes on writing, but no more is kept.

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


# What the Flight Recorder of torch saw: one entry a collective, with group, sequence and sizes.


def flight_json(rank: int, since_unix_ns: int) -> bytes | None:
    """The record of this process as JSON; None where this torch keeps none or it is empty.

    Warns where the record begins after since_unix_ns: then it has dropped what it saw first.
    """
    dump = _dump()
    entries: list[dict[str, Any]] = json.loads(dump).get("entries") or [] if dump else []
    if dump is None or not entries:
        return None
    if entries[0].get("record_id", 0) > 0 and entries[0]["time_created_ns"] > since_unix_ns:
        kept = f"all but the last {len(entries)} collectives of its Flight Recorder"
        warn_lost(rank, f"{kept}: set TORCH_FR_BUFFER_SIZE higher before the job starts")
    return dump


def _dump() -> bytes | None:
    try:
        from torch._C import _distributed_c10d
    except ImportError:
        return None
    # Private and on the move between releases of torch: look, do not assume.
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    text = dump()
    return text.encode() if isinstance(text, str) else bytes(text)
