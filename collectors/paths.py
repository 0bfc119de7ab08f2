"""How the folder of a recording is called, and in it the files of a rank."""

from __future__ import annotations

import os
from itertools import count
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


def fresh(folder: Path) -> Path:
    """The folder, or where it is there already the first of FOLDER-2, FOLDER-3, ... that is not."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in count(1))
    return next(name for name in names if not name.exists())
