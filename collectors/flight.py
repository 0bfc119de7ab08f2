"""What the Flight Recorder of torch saw: one entry a collective, with group, sequence and sizes."""

import gzip
import json
from pathlib import Path

from stepsplit.collectors.run_spec import write_whole


def write_flight(folder: Path, rank: int) -> Path | None:
    """The rank's dump as a file; None where this torch keeps no record or the record is empty."""
    dump = flight_json()
    if dump is None:
        return None
    # mtime 0: the same record is the same file.
    content = gzip.compress(dump, compresslevel=6, mtime=0)
    return write_whole(folder / f"rank{rank}_flight.json.gz", content)


def flight_json() -> bytes | None:
    """The record of this process as JSON; None where there is none."""
    try:
        from torch._C import _distributed_c10d
    except ImportError:
        return None
    # Private and on the move between releases of torch: look, do not assume.
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    text = dump()
    content: bytes = text.encode() if isinstance(text, str) else bytes(text)
    return content if content and json.loads(content).get("entries") else None
