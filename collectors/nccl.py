"""What NCCL is to write of itself: the environment for its version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

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
