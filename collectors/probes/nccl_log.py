"""NCCL's logs: the environment variables that enable them, and a limit of their size."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

# Environment variables that enable NCCL's logs, by NCCL version.

STARTUP_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH"
"""Subsystems that log when communicators are created: a few hundred lines per rank."""

CALL_SUBSYSTEMS = f"{STARTUP_SUBSYSTEMS},COLL,TUNING"
"""Also a line per call, which can reach 10 GB per hour."""

# The first NCCL with NCCL_DEBUG_TIMESTAMP_LEVELS.
_TIMESTAMPS = (2, 26)

# The first NCCL with the Inspector plugin, and the first whose Inspector notes sends and receives.
_INSPECTOR, _INSPECTOR_P2P = (2, 28, 3), (2, 30)

_PLUGIN = "libnccl-profiler-inspector.so"

_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def build_log_environment(
    folder: Path, version: tuple[int, ...] | None, calls: bool = False
) -> dict[str, str]:
    """Environment variables that make NCCL write nccl/HOST.PID.log in the folder.

    If version is None (not known before the job runs), all variables are set: NCCL ignores those
    that it does not know. Before NCCL 2.26 the lines have no timestamps.
    """
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": CALL_SUBSYSTEMS if calls else STARTUP_SUBSYSTEMS,
        "NCCL_DEBUG_FILE": str(folder / "nccl" / "%h.%p.log"),
    }
    if version is None or version >= _TIMESTAMPS:
        variables["NCCL_DEBUG_TIMESTAMP_LEVELS"] = "ALL"
        variables["NCCL_DEBUG_TIMESTAMP_FORMAT"] = "[%F %T.%6f] "
    return variables


def build_inspector_environment(
    folder: Path, version: tuple[int, ...] | None, plugin: Path
) -> dict[str, str]:
    """Environment variables that make NCCL's Inspector write the time of each collective.

    The Inspector writes every 10 s. Raises ValueError for an NCCL before 2.28.3, which has none.
    """
    if version is not None and version < _INSPECTOR:
        raise ValueError(
            f"NCCL {'.'.join(map(str, version))} has no Inspector; it needs 2.28.3 or later"
        )
    variables = {
        "NCCL_PROFILER_PLUGIN": str(plugin),
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": str(folder / "nccl"),
        # By default it writes only when a communicator is destroyed; many jobs never do that.
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "10000000",
    }
    if version is None or version >= _INSPECTOR_P2P:
        variables["NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES"] = "0"
    return variables


def find_installed_version() -> tuple[int, ...] | None:
    """The version of the installed NCCL package; None if this Python has none."""
    for package in _PACKAGES:
        try:
            return tuple(map(int, re.findall(r"\d+", metadata.version(package))[:3]))
        except metadata.PackageNotFoundError:
            continue
    return None


def find_inspector_plugin(environment: Mapping[str, str]) -> Path | None:
    """The Inspector's library on LD_LIBRARY_PATH; None if it is missing."""
    folders = environment.get("LD_LIBRARY_PATH", "").split(":")
    candidates = (Path(folder) / _PLUGIN for folder in folders if folder)
    return next((path for path in candidates if path.is_file()), None)


# Limits the size of a log while NCCL goes on writing to it.

# With NCCL_DEBUG_SUBSYS=COLL a line for each call: this is some hours of a large job.
MAX_LOG_BYTES = 256 << 20

_CHECK_INTERVAL_S = 5.0


def build_log_path(environment: Mapping[str, str], pid: int) -> Path | None:
    """The NCCL log file of a process; None if NCCL does not write one file per process."""
    pattern = environment.get("NCCL_DEBUG_FILE", "")
    if "%p" not in pattern:
        return None
    # As NCCL's getHostNameForLog: up to the first dot, without characters that a path cannot have.
    host = socket.gethostname().partition(".")[0].replace("%", "-").replace("/", "-")
    return Path(pattern.replace("%h", host).replace("%p", str(pid)))


def limit_log_size(
    path: Path, max_bytes: int = MAX_LOG_BYTES, interval_s: float = _CHECK_INTERVAL_S
) -> None:
    """Limits the size of the log from now on, in a background thread."""
    arguments = (path, max_bytes, interval_s)
    threading.Thread(target=_watch_log, args=arguments, name="stepsplit-nccl", daemon=True).start()


def truncate_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Truncates the log to the size limit; returns whether it was larger.

    NCCL continues to write at its old offset; the range in between is sparse and takes no space.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        os.truncate(path, max_bytes)
    except OSError:
        return False
    return True


def _watch_log(path: Path, max_bytes: int, interval_s: float) -> None:
    while True:
        time.sleep(interval_s)
        truncate_log(path, max_bytes)
