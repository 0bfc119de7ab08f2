"""torch's Flight Recorders: one entry per collective, with group, sequence number and sizes."""

from __future__ import annotations

import json
import re
from typing import Any

from stepsplit.collectors.guard import warn_lost

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
            if first.get("record_id", 0) > 0 and first.get("time_created_ns", 0) > since_unix_ns:
                # The recorder is a ring: what came before its first entry was overwritten.
                n_entries = text.count('"record_id"')
                lost = f"all but the last {n_entries} collectives of its Flight Recorder"
                warn_lost(rank, f"{lost}; set a larger TORCH_FR_BUFFER_SIZE before the job starts")
            dumps.append(text)
            first_entries.append(first)
    names = [str(first.get("profiling_name", "")) for first in first_entries]
    if _trains_with_nccl() and not any(name.startswith("nccl") for name in names):
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
    # A dump of a long job is tens of megabytes, and this is the training's process.
    large, small = (one, other) if len(one) >= len(other) else (other, one)
    body = json.loads(small)
    entries = [
        entry | {"pg_id": entry.get("pg_id", 0) + _OTHER_GROUPS} for entry in body["entries"]
    ]
    statuses = {
        str(int(number) + _OTHER_GROUPS): status
        for number, status in body.get("pg_status", {}).items()
    }
    large = _insert(large, '"entries"', "[", json.dumps(entries))
    large = _insert(large, '"pg_config"', "{", json.dumps(body.get("pg_config", {})))
    return _insert(large, '"pg_status"', "{", json.dumps(statuses))


def _insert(dump: str, key: str, bracket: str, more: str) -> str:
    """The dump with `more` at the beginning of the list or object of a key, if it has the key."""
    # The objects come after the entries, whose texts may be like their keys.
    content, at = more[1:-1], dump.find(key) if bracket == "[" else dump.rfind(key)
    begin = dump.find(bracket, at) + 1 if at >= 0 else 0
    if not begin or not content:
        return dump
    empty = dump[begin:].lstrip()[:1] in ("]", "}")
    return dump[:begin] + content + ("" if empty else ",") + dump[begin:]
