"""NCCL environment variables, NCCL log files and Flight Recorder dumps of a job."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from stepsplit.collectors.guard import warn_lost

# Environment variables that enable NCCL's logs, by NCCL version.

STARTUP_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH"
"""Subsystems that log when communicators are created: a few hundred lines per rank."""

CALL_SUBSYSTEMS = f"{STARTUP_SUBSYSTEMS},COLL,TUNING"
"""Also a line per call, which can reach 10 GB per hour."""

_TIMESTAMPS = (2, 26)

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


# torch's Flight Recorders: one entry per collective, with group, sequence number and sizes.

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions that dump NCCL's recorder, and the one of gloo and other backends.

They are private and differ between torch releases; a build without NCCL has only the second.
"""

_ENTRIES = re.compile(r'"entries"\s*:\s*\[\s*')

_OTHER_GROUPS = 1000
"""Added to the group numbers of the second recorder: both number the process's groups from 0."""


def dump_flight_json(rank: int, since_unix_ns: int) -> bytes | None:
    """The Flight Recorder dumps of this process as one JSON; None if there are no entries.

    Warns if a dump begins after since_unix_ns, because then its first entries were dropped, and if
    a job with NCCL has no entries of NCCL.
    """
    dumps, first_entries = [], []
    for name in _RECORDERS:
        text = _call_recorder(name)
        first = _find_first_entry(text)
        if first is not None and first not in first_entries:
            _warn_of_lost_entries(rank, text, first, since_unix_ns)
            dumps.append(text)
            first_entries.append(first)
    if _trains_with_nccl() and not any(_is_of_nccl(first) for first in first_entries):
        reason = "it is empty; set TORCH_FR_BUFFER_SIZE=20000 before the job starts"
        warn_lost(
            rank, f"NCCL's Flight Recorder: {reason} (TORCH_NCCL_TRACE_BUFFER_SIZE, old name)"
        )
    if not dumps:
        return None
    return (dumps[0] if len(dumps) == 1 else _merge_dumps(*dumps)).encode()


def read_flight_json() -> str:
    """As dump_flight_json, without its warnings; "" if there are no entries."""
    dumps = list(dict.fromkeys(text for name in _RECORDERS if (text := _call_recorder(name))))
    dumps = [text for text in dumps if _find_first_entry(text) is not None]
    if not dumps:
        return ""
    return dumps[0] if len(dumps) == 1 else _merge_dumps(*dumps)


def _call_recorder(name: str) -> str:
    """The dump as text; "" if this torch does not have the recorder."""
    try:
        from torch._C import _distributed_c10d
    except ImportError:
        return ""
    dump = getattr(_distributed_c10d, name, None)
    text = dump() if dump is not None else ""
    return text if isinstance(text, str) else bytes(text).decode("utf-8", "replace")


def _find_first_entry(dump: str) -> dict[str, Any] | None:
    """The oldest entry, without decoding the others on the training's thread."""
    begin = _ENTRIES.search(dump)
    if begin is None or not dump.startswith("{", begin.end()):
        return None
    entry: dict[str, Any] = json.JSONDecoder().raw_decode(dump, begin.end())[0]
    return entry


def _warn_of_lost_entries(
    rank: int, dump: str, first: Mapping[str, Any], since_unix_ns: int
) -> None:
    if first.get("record_id", 0) > 0 and first.get("time_created_ns", 0) > since_unix_ns:
        n_entries = dump.count('"record_id"')
        lost = f"all but the last {n_entries} collectives of its Flight Recorder"
        warn_lost(rank, f"{lost}; set a larger TORCH_FR_BUFFER_SIZE before the job starts")


def _is_of_nccl(entry: Mapping[str, Any]) -> bool:
    return str(entry.get("profiling_name", "")).startswith("nccl")


def _trains_with_nccl() -> bool:
    """Whether this process has a group of several ranks on NCCL (or RCCL) and uses a GPU."""
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    world = getattr(distributed.distributed_c10d, "_world", None)
    backends = [distributed.get_backend(), *getattr(world, "pg_backend_config", {}).values()]
    nccl = any("nccl" in str(backend).lower() for backend in backends)
    return nccl and torch.cuda.is_initialized() and distributed.get_world_size() > 1


def _merge_dumps(one: str, other: str) -> str:
    """The entries and groups of both dumps; only the smaller one is decoded."""
    large, small = (one, other) if len(one) >= len(other) else (other, one)
    body = json.loads(small)
    entries = [_renumber_group(entry) for entry in body["entries"]]
    statuses = {
        str(int(number) + _OTHER_GROUPS): status
        for number, status in body.get("pg_status", {}).items()
    }
    large = _insert(large, '"entries"', "[", json.dumps(entries))
    large = _insert(large, '"pg_config"', "{", json.dumps(body.get("pg_config", {})))
    return _insert(large, '"pg_status"', "{", json.dumps(statuses))


def _renumber_group(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"pg_id": entry.get("pg_id", 0) + _OTHER_GROUPS}


def _insert(dump: str, key: str, bracket: str, more: str) -> str:
    """The dump with `more` at the beginning of the list or object of a key, if it has the key."""
    content, at = more[1:-1], dump.find(key) if bracket == "[" else dump.rfind(key)
    begin = dump.find(bracket, at) + 1 if at >= 0 else 0
    if not begin or not content:
        return dump
    empty = dump[begin:].lstrip()[:1] in ("]", "}")
    return dump[:begin] + content + ("" if empty else ",") + dump[begin:]


# NCCL's RAS: a thread in each process of a job, from NCCL 2.24 on. Any of them answers for the
# whole job, on a port of its host, even while it hangs: lines of text, and a document at the end.

RAS_ADDRESS = "localhost:28028"
"""Where NCCL listens unless NCCL_RAS_ADDR says otherwise."""

_CONNECT_S = 1.0

_RAS_TIMEOUT_S = 5
"""How long NCCL may wait for the other processes of the job."""

_MAX_RAS_BYTES = 64 << 20


def ask_ras(environment: Mapping[str, str]) -> str:
    """What NCCL's RAS says of the job of a process with this environment; "" if none answers.

    It is JSON where NCCL has that format, else the text of "verbose status".
    """
    if environment.get("NCCL_RAS_ENABLE", "1") == "0":
        return ""
    host, _, port = environment.get("NCCL_RAS_ADDR", RAS_ADDRESS).rpartition(":")
    with suppress(OSError, ValueError):
        address = (host.strip("[]") or "localhost", int(port))
        with socket.create_connection(address, _CONNECT_S) as connection:
            return _talk_to_ras(connection)
    return ""


def _talk_to_ras(connection: socket.socket) -> str:
    """Raises OSError if the other side is not NCCL's RAS."""
    connection.settimeout(_CONNECT_S)
    with connection.makefile("rwb") as stream:

        def ask(line: str) -> str:
            stream.write(f"{line}\n".encode())
            stream.flush()
            return stream.readline(_MAX_LINE).decode(errors="replace").strip()

        if not ask("CLIENT PROTOCOL 2").upper().startswith("SERVER PROTOCOL"):
            raise OSError("another server")
        ask(f"TIMEOUT {_RAS_TIMEOUT_S}")
        # An older NCCL refuses this, and stays with its text.
        ask("SET FORMAT json")
        connection.settimeout(3 * _RAS_TIMEOUT_S)
        stream.write(b"VERBOSE STATUS\n")
        stream.flush()
        return stream.read(_MAX_RAS_BYTES).decode(errors="replace")


_MAX_LINE = 1024
