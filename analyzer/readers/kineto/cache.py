"""The cache of read traces: event tables as Parquet, keyed by the file and the reader."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.columns import EntryCounts, SortedRows
from stepsplit.analyzer.readers.kineto.schema import KinetoHeader
from stepsplit.analyzer.readers.kineto.trace_file import KinetoFile
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import (
    Calls,
    CallsWithGroups,
    Events,
    EventWaits,
    Group,
    Lane,
    Note,
    Shapes,
)
from stepsplit.collectors.run_spec import whole_file

# Cached traces are Parquet files in the user's cache folder.
#
# A cached trace is used only if the source's path, size, modification time, and first and last MiB
# are unchanged, and if the reader version and the kernel rules are the same. An unreadable cache
# file is ignored. STEPSPLIT_CACHE sets another folder, or disables the cache with "off".

READER = "stepsplit.events/7"
"""Version of the reader's output; a change invalidates all cache files."""

MOST_BYTES = 16 << 30
"""Maximum size of the cache folder; the least recently used files are removed first."""

_EDGE_BYTES = 1 << 20

_MAX_METADATA_BYTES = 64 << 20
"""Maximum size of the metadata in a Parquet file."""

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

_WAITS = ("correlation", "stream", "on_stream", "recorded")

_UNREADABLE = (OSError, ValueError, KeyError, msgspec.MsgspecError)


class _Calls(Struct):
    """Calls as bytes per column, and their process groups."""

    columns: dict[str, bytes]
    dtypes: tuple[str, ...]
    groups: tuple[Group, ...]


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
    calls: _Calls | None
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
        calls, waits = _unpack_calls(metadata.calls), _unpack_waits(metadata.waits)
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
        calls=None if read.calls is None else _pack_calls(read.calls),
        notes=read.notes,
        shapes=rows.shapes.texts,
        waits=tuple(getattr(read.waits, name).tobytes() for name in _WAITS),
    )


def _pack_calls(calls: CallsWithGroups) -> _Calls:
    columns = {name: getattr(calls.calls, name).tobytes() for name in _CALLS}
    return _Calls(columns, calls.calls.dtypes, calls.groups)


def _unpack_calls(packed: _Calls | None) -> CallsWithGroups | None:
    if packed is None:
        return None
    columns = {name: np.frombuffer(packed.columns[name], kind) for name, kind in _CALLS.items()}
    return CallsWithGroups(Calls(**columns, dtypes=packed.dtypes), packed.groups)


def _unpack_waits(packed: tuple[bytes, ...]) -> EventWaits:
    columns = (np.frombuffer(column, np.int64) for column in packed)
    return EventWaits(**dict(zip(_WAITS, columns, strict=True)))


def _find_cache_path(source: Source) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    return folder / f"{hashlib.sha256(source.identity.encode()).hexdigest()[:32]}.parquet"


def _build_stamp(source: Source, path: Path, rules: Rules) -> str:
    """A key of the file content, the reader version and the kernel rules."""
    edges = hashlib.sha256()
    with path.open("rb") as file:
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


# Events as a Parquet file, with other data as bytes in its metadata.
#
# Only pyarrow buffers are used: its conversions from and to numpy would import pandas.

_SCHEMA = pa.schema(
    {"start_ns": pa.int64(), "dur_ns": pa.int64(), "category": pa.uint8(), "name_id": pa.int32(),
     "lane": pa.int32(), "correlation": pa.int64(), "shape": pa.int32()}
)  # fmt: skip

_GROUP_ROWS = 1 << 17

_ABOUT = b"stepsplit"


class EventsFile:
    """An open file of events. Raises OSError or ValueError if it is invalid or damaged."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True, memory_map=True)
        except pa.ArrowException as error:
            raise ValueError(str(error)) from None

    @property
    def about(self) -> bytes:
        """The metadata as bytes; empty if the file was not written by stepsplit."""
        found: bytes = (self._file.metadata.metadata or {}).get(_ABOUT, b"")
        return found

    def read_events(
        self, names: tuple[str, ...], lanes: tuple[Lane, ...], texts: tuple[str, ...]
    ) -> tuple[Events, Shapes]:
        """Reads the events and their shapes, with the given names, lanes and texts of shapes."""
        try:
            start, dur, category, name_id, lane, correlation, shape = self._read_columns()
        except pa.ArrowException as error:
            raise ValueError(str(error)) from None
        shaped = np.flatnonzero(shape >= 0)
        events = Events(start, dur, category, name_id, lane, correlation, names, lanes)
        return events, Shapes(shaped, shape[shaped], texts)

    def _read_columns(self) -> list[npt.NDArray[Any]]:
        """Reads the columns by row group, so that no column is in memory twice."""
        kinds = [np.dtype(str(kind)) for kind in _SCHEMA.types]
        columns = [np.empty(self._file.metadata.num_rows, dtype=kind) for kind in kinds]
        offset = 0
        for group in range(self._file.num_row_groups):
            part = self._file.read_row_group(group, columns=_SCHEMA.names, use_threads=False)
            for column, values in zip(columns, part.columns, strict=True):
                _fill(column[offset : offset + len(part)], values)
            offset += len(part)
        return columns


def _fill(column: npt.NDArray[Any], values: pa.ChunkedArray) -> None:
    filled = 0
    for chunk in values.chunks:
        offset = chunk.offset * column.dtype.itemsize
        chunk_values = np.frombuffer(chunk.buffers()[1], column.dtype, len(chunk), offset)
        column[filled : filled + len(chunk)] = chunk_values
        filled += len(chunk)


def write_events(path: Path, events: Events, shapes: Shapes, about: bytes) -> None:
    """Writes the file atomically. Most shapes are unknown, so that runs of them take no space."""
    with (
        whole_file(path) as file,
        pq.ParquetWriter(
            file, _SCHEMA, compression="none", use_dictionary=["shape"], write_statistics=False,
            write_page_checksum=True, store_schema=False,
        ) as writer,
    ):  # fmt: skip
        writer.write_table(_build_table(events, shapes), row_group_size=_GROUP_ROWS)
        writer.add_key_value_metadata({_ABOUT: about})


def _build_table(events: Events, shapes: Shapes) -> pa.Table:
    shape = np.full(len(events), -1, dtype=np.int32)
    shape[shapes.event] = shapes.text_id
    columns = [np.ascontiguousarray(getattr(events, name)) for name in _SCHEMA.names[:-1]]
    columns.append(shape)
    arrays = [
        pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])
        for kind, column in zip(_SCHEMA.types, columns, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)
