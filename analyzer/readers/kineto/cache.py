"""The cache of read traces: event tables as Parquet, keyed by the file and the reader."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from stepsplit.analyzer.readers.events_file import (
    EventsFile,
    PackedCalls,
    pack_calls,
    pack_waits,
    unpack_calls,
    unpack_waits,
    write_events,
)
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.columns import EntryCounts, SortedRows
from stepsplit.analyzer.readers.kineto.schema import KinetoHeader
from stepsplit.analyzer.readers.kineto.trace_file import KinetoFile
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Lane, Note
from stepsplit.collectors.safe_io.private_folder import make_private_folder
from stepsplit.collectors.safe_io.regular_file import open_regular

# Cached traces are Parquet files in the user's cache folder.
#
# A cached trace is used only if the source's path, size, modification time, and first and last MiB
# are unchanged, and if the reader version and the kernel rules are the same. An unreadable cache
# file is ignored. STEPSPLIT_CACHE sets another folder, or disables the cache with "off". If others
# may write the folder, it is a folder of this user in it.

READER = "stepsplit.events/13"
"""Version of the reader's output; a change invalidates all cache files."""

MOST_BYTES = 16 << 30
"""Maximum size of the cache folder; the least recently used files are removed first."""

_EDGE_BYTES = 1 << 20
"""Of the begin and of the end of a file, hashed for its key: its size and time alone may also be
those of another recording that was copied over it."""

_MAX_METADATA_BYTES = 64 << 20
"""Maximum size of the metadata in a Parquet file."""

_UNREADABLE = (OSError, ValueError, KeyError, msgspec.MsgspecError)


class _CacheMetadata(Struct):
    """TrackMetadata of a cached trace, stored with its columns."""

    stamp: str
    t0_unix_ns: int
    header: KinetoHeader
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    noted_row: bytes
    noted_args: tuple[bytes, ...]
    counts: EntryCounts
    calls: PackedCalls | None
    notes: tuple[Note, ...]
    shapes: tuple[str, ...]
    waits: tuple[bytes, ...]


def cache_folder() -> Path | None:
    """The cache folder; None if the user has disabled the cache."""
    override = os.environ.get("STEPSPLIT_CACHE", "")
    if override == "off":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(override) if override else Path(home, "stepsplit", "traces")


def has(source: Source) -> bool:
    """Whether the cache has an entry for the file, valid or not."""
    cached = _find_cache_path(source)
    return cached is not None and cached.is_file()


def load(source: Source, path: Path, rules: Rules = BUILT_IN) -> KinetoFile | None:
    """The cached trace; None if it is missing or outdated."""
    cached = _find_cache_path(source)
    if cached is None or not cached.is_file():
        return None
    try:
        file = EventsFile(cached)
        metadata = msgspec.msgpack.decode(file.about, type=_CacheMetadata)
        if metadata.stamp != _build_stamp(source, path, rules):
            return None
        events, shapes = file.read_events(metadata.names, metadata.lanes, metadata.shapes)
        os.utime(cached)
        noted = np.frombuffer(metadata.noted_row, dtype=np.int64)
        rows = SortedRows(
            events, metadata.t0_unix_ns, noted, metadata.noted_args, metadata.counts, shapes
        )
        calls = None if metadata.calls is None else unpack_calls(metadata.calls)
        waits = unpack_waits(metadata.waits)
        return KinetoFile(metadata.header, rows, calls, metadata.notes, waits)
    except _UNREADABLE:
        return None


def save(source: Source, path: Path, read: KinetoFile, rules: Rules = BUILT_IN) -> None:
    """Saves the trace to the cache; errors are ignored."""
    cached = _find_cache_path(source)
    if cached is None:
        return
    metadata = msgspec.msgpack.encode(_build_metadata(_build_stamp(source, path, rules), read))
    if len(metadata) > _MAX_METADATA_BYTES:
        return
    try:
        write_events(cached, read.rows.events, read.rows.shapes, metadata)
        _prune(cached.parent)
    except _UNREADABLE:
        return


def _build_metadata(stamp: str, read: KinetoFile) -> _CacheMetadata:
    rows = read.rows
    return _CacheMetadata(
        stamp=stamp,
        t0_unix_ns=rows.t0_unix_ns,
        header=read.header,
        names=rows.events.names,
        lanes=rows.events.lanes,
        noted_row=rows.noted_row.tobytes(),
        noted_args=rows.noted_args,
        counts=rows.counts,
        calls=None if read.calls is None else pack_calls(read.calls),
        notes=read.notes,
        shapes=rows.shapes.texts,
        waits=pack_waits(read.waits),
    )


def _find_cache_path(source: Source) -> Path | None:
    folder = _make_own_folder()
    if folder is None:
        return None
    return folder / f"{hashlib.sha256(source.identity.encode()).hexdigest()[:32]}.parquet"


def _make_own_folder() -> Path | None:
    """A cache folder that no other user writes; None if there is none.

    Else what the analysis says would be another's, and files would be written through his links.
    """
    folder, named = cache_folder(), bool(os.environ.get("STEPSPLIT_CACHE"))
    if folder is None:
        return None
    for own in (folder, folder / f"stepsplit-{os.geteuid()}"):
        with suppress(OSError):
            return make_private_folder(own, named=named, shared_reading=True)
    return None


def _build_stamp(source: Source, path: Path, rules: Rules) -> str:
    """A key of the file content, the reader version and the kernel rules."""
    edges = hashlib.sha256()
    with open_regular(path) as file:
        edges.update(file.read(_EDGE_BYTES))
        file.seek(max(path.stat().st_size - _EDGE_BYTES, 0))
        edges.update(file.read(_EDGE_BYTES))
    return f"{READER}|{rules.reading_key}|{source.stamp}|{edges.hexdigest()}"


def _prune(folder: Path) -> None:
    by_age = sorted(
        folder.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns, reverse=True
    )
    total = 0
    for file in by_age:
        total += file.stat().st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)
