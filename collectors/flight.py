"""What the Flight Recorder of torch saw: one entry a collective, with group, sequence and sizes."""

import gzip
import json
from pathlib import Path
from typing import Any

from stepsplit.collectors.guard import warn_lost
from stepsplit.collectors.run_spec import write_whole


def flight_path(folder: Path, rank: int) -> Path:
    """Where a rank's record goes."""
    return folder / f"rank{rank}_flight.json.gz"


def write_flight(folder: Path, rank: int, since_unix_ns: int) -> Path | None:
    """The rank's dump as a file; None where this torch keeps no record or the record is empty.

    Warns where the record begins after since_unix_ns: then it has dropped what it saw first.
    """
    dump = flight_json()
    entries: list[dict[str, Any]] = json.loads(dump).get("entries") or [] if dump else []
    if dump is None or not entries:
        return None
    if entries[0].get("record_id", 0) > 0 and entries[0]["time_created_ns"] > since_unix_ns:
        kept = f"all but the last {len(entries)} collectives of its Flight Recorder"
        warn_lost(rank, f"{kept}: set TORCH_FR_BUFFER_SIZE higher before the job starts")
    # mtime 0: the same record is the same file.
    return write_whole(flight_path(folder, rank), gzip.compress(dump, compresslevel=6, mtime=0))


def flight_json() -> bytes | None:
    """The record of this process as JSON; None where this torch keeps none."""
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
