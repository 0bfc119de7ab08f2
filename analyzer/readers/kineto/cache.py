"""Traces as read before, in Parquet files under the user's cache folder.

A cached trace is used only where the source's place, size, time of change, and first and last MiB
are those that were read, and by the version of the reader and the rules that made it. Whatever
cannot be read is as good as absent. STEPSPLIT_CACHE names another folder, or is "off".
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from stepsplit.analyzer.readers.calls import FoundCalls
from stepsplit.analyzer.readers.kineto.columns import Counts
from stepsplit.analyzer.readers.kineto.rows import Sorted
from stepsplit.analyzer.readers.kineto.schema import KinetoHeader
from stepsplit.analyzer.readers.kineto.trace import KinetoFile
from stepsplit.analyzer.readers.rules import Rules
from stepsplit.analyzer.readers.rules_file import BUILT_IN
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Calls, Group, Lane, Note

READER = "stepsplit.events/2"
"""Changes with what the reader makes of a trace: then caches are made again."""
LEAST_BYTES = 16 << 20
"""Smaller files are read about as fast as their cache."""
MOST_BYTES = 16 << 30
"""The files that were not used for the longest time go when the folder outgrows this."""
_EDGE_BYTES = 1 << 20
_MOST_ABOUT_BYTES = 64 << 20
"""More than this is too much for a Parquet file's header."""
_CALLS = {
    "event": np.int64,
    "issued_ns": np.int64,
    "group_id": np.int32,
    "seq": np.int64,
    "op": np.uint8,
    "dtype": np.int32,
    "peer": np.int32,
    "input_bytes": np.int64,
    "message_bytes": np.int64,
}
_UNREADABLE = (OSError, ValueError, KeyError, msgspec.MsgspecError)


class _Calls(Struct):
    """Calls as bytes, column by column, and the groups that they are on."""

    columns: dict[str, bytes]
    dtypes: tuple[str, ...]
    groups: tuple[Group, ...]


class _About(Struct):
    """What is told beside the columns."""

    stamp: str
    t0_unix_ns: int
    header: KinetoHeader
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    noted_row: bytes
    noted_args: tuple[bytes, ...]
    counts: Counts
    calls: _Calls | None
    notes: tuple[Note, ...]


def cache_folder() -> Path | None:
    """Where cached traces lie; None where the user wants none."""
    named = os.environ.get("STEPSPLIT_CACHE", "")
    if named == "off":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(home, "stepsplit", "traces")


def worth_caching(path: Path) -> bool:
    """Whether reading the file takes longer than reading its cache."""
    return path.stat().st_size >= LEAST_BYTES


def has(source: Source) -> bool:
    """Whether something is cached of the file, be it still true or not."""
    cached = _place(source)
    return cached is not None and cached.is_file()


def load(source: Source, path: Path, rules: Rules = BUILT_IN) -> KinetoFile | None:
    """The trace as it was read before; None where that is not known or no longer true."""
    # pyarrow takes as long to import as a small trace to read.
    from stepsplit.analyzer.readers.kineto.parquet import EventsFile

    cached = _place(source)
    if cached is None or not cached.is_file():
        return None
    try:
        file = EventsFile(cached)
        about = msgspec.msgpack.decode(file.about, type=_About)
        if about.stamp != _stamp(source, path, rules):
            return None
        events = file.events(about.names, about.lanes)
        os.utime(cached)
        noted = np.frombuffer(about.noted_row, dtype=np.int64)
        rows = Sorted(events, about.t0_unix_ns, noted, about.noted_args, about.counts)
        return KinetoFile(about.header, rows, _unpacked(about.calls), about.notes)
    except _UNREADABLE:
        return None


def save(source: Source, path: Path, read: KinetoFile, rules: Rules = BUILT_IN) -> None:
    """Keeps what was read; where that cannot be, nothing is kept."""
    from stepsplit.analyzer.readers.kineto.parquet import write_events

    cached = _place(source)
    if cached is None:
        return
    about = msgspec.msgpack.encode(_about(_stamp(source, path, rules), read))
    if len(about) > _MOST_ABOUT_BYTES:
        return
    try:
        write_events(cached, read.rows.events, about)
        _prune(cached.parent)
    except _UNREADABLE:
        return


def _about(stamp: str, read: KinetoFile) -> _About:
    rows = read.rows
    return _About(
        stamp=stamp,
        t0_unix_ns=rows.t0_unix_ns,
        header=read.header,
        names=rows.events.names,
        lanes=rows.events.lanes,
        noted_row=rows.noted_row.tobytes(),
        noted_args=rows.noted_args,
        counts=rows.counts,
        calls=None if read.calls is None else _packed(read.calls),
        notes=read.notes,
    )


def _packed(found: FoundCalls) -> _Calls:
    columns = {name: getattr(found.calls, name).tobytes() for name in _CALLS}
    return _Calls(columns, found.calls.dtypes, found.groups)


def _unpacked(found: _Calls | None) -> FoundCalls | None:
    if found is None:
        return None
    columns = {name: np.frombuffer(found.columns[name], kind) for name, kind in _CALLS.items()}
    return FoundCalls(Calls(**columns, dtypes=found.dtypes), found.groups)


def _place(source: Source) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    return folder / f"{hashlib.sha256(source.identity.encode()).hexdigest()[:32]}.parquet"


def _stamp(source: Source, path: Path, rules: Rules) -> str:
    """Which content, read by which reader under which rules."""
    edges = hashlib.sha256()
    with path.open("rb") as file:
        edges.update(file.read(_EDGE_BYTES))
        file.seek(max(path.stat().st_size - _EDGE_BYTES, 0))
        edges.update(file.read(_EDGE_BYTES))
    return f"{READER}|{rules.reading_key}|{source.stamp}|{edges.hexdigest()}"


def _prune(folder: Path) -> None:
    kept = sorted(folder.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    total = 0
    for file in kept:
        total += file.stat().st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)
