"""What the Flight Recorder of torch saw: one entry a collective, with group, sequence and sizes."""

import json
from typing import Any

from stepsplit.collectors.guard import warn_lost


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
