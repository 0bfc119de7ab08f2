"""The names of the files of a recording, and of the notes of a watch."""

from __future__ import annotations

import os
import re
from itertools import count
from pathlib import Path

from stepsplit.collectors.formats.run_spec import RUN_FILE


def build_trace_path(folder: Path, rank: int) -> Path:
    """torch.profiler's trace of a rank."""
    return folder / f"rank{rank}_trace.json.gz"


def build_flight_path(folder: Path, rank: int) -> Path:
    """The Flight Recorder's dump of a rank."""
    return folder / f"rank{rank}_flight.json.gz"


def build_record_path(folder: Path, rank: int) -> Path:
    """The record of a rank."""
    return folder / f"rank{rank}_record.json"


def build_raw_path(out: Path) -> Path:
    """The hidden file, in the same folder, in which the raw content of a packed file begins."""
    return out.with_name(f".{out.name.removesuffix('.gz')}.{os.getpid()}.raw")


def find_free_folder(folder: Path) -> Path:
    """The folder, or if it exists the first of FOLDER-2, FOLDER-3, ... that does not exist."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in count(1))
    return next(name for name in names if not name.exists())


RANKS = "ranks"
"""Folder of the notes in that of a watch."""


def is_watch(place: str | Path) -> bool:
    """Whether the place is the folder of a watch."""
    return Path(place).is_dir() and bool(list_note_files(Path(place)))


def list_note_files(folder: Path) -> list[Path]:
    """The files of notes of all ranks in the folder of a watch, by rank."""
    files = [path for path in (folder / RANKS).glob("rank*.jsonl") if path.stem[4:].isdecimal()]
    return sorted(files, key=lambda path: int(path.stem[4:]))


def list_recorded(folder: Path) -> list[Path]:
    """The files of a recording in the folder, without its logs and memory snapshots."""
    return sorted(path for path in folder.glob("r*.json*") if is_recorded_name(path.name))


def is_recorded_name(name: str) -> bool:
    """Whether stepsplit's recordings have files of this name."""
    return name == RUN_FILE or _RANK_FILE.fullmatch(name) is not None


def is_trace_name(name: str) -> bool:
    """Whether traces have this name: stepsplit's, torch's tensorboard handler's, Nsight's."""
    found = _RANK_FILE.fullmatch(name)
    return (found is not None and found["kind"] == "trace") or name.endswith(_TRACE_ENDINGS)


_RANK_FILE = re.compile(r"rank\d{1,7}_(?P<kind>trace|flight|record)\.json(?:\.(?:gz|zst|xz|bz2))?")

_TRACE_ENDINGS = (".pt.trace.json", ".pt.trace.json.gz", ".pt.trace.json.zst", ".sqlite")
