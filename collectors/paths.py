"""How the files of a rank are called in the folder of a recording."""

from __future__ import annotations

import os
from pathlib import Path


def trace_path(folder: Path, rank: int) -> Path:
    """torch.profiler's trace of a rank."""
    return folder / f"rank{rank}_trace.json.gz"


def flight_path(folder: Path, rank: int) -> Path:
    """The Flight Recorder's dump of a rank."""
    return folder / f"rank{rank}_flight.json.gz"


def record_path(folder: Path, rank: int) -> Path:
    """What a rank tells of its own recording."""
    return folder / f"rank{rank}_record.json"


def raw_path(out: Path) -> Path:
    """Where the raw content of a packed file goes first, beside it and hidden."""
    return out.with_name(f".{out.name.removesuffix('.gz')}.{os.getpid()}.raw")
