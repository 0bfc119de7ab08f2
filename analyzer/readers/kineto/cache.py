"""Traces as read before, in Parquet files under the user's cache folder.

A cached trace is used only where the source's place, size, time of change, and first and last MiB
are those that were read, and by the version of the reader that wrote it. Whatever cannot be read
is as good as absent. STEPSPLIT_CACHE names another folder, or is "off".
"""

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
from msgspec import Raw, Struct

from stepsplit.analyzer.readers.kineto.columns import Counts
from stepsplit.analyzer.readers.kineto.rows import Sorted
from stepsplit.analyzer.readers.kineto.schema import KinetoHeader
from stepsplit.analyzer.readers.kineto.trace import KinetoFile
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Events, Lane, Note

READER = "stepsplit.events/1"
"""Changes with what the reader makes of a trace: then caches are made again."""
LEAST_BYTES = 16 << 20
"""Smaller files are read about as fast as their cache."""
MOST_BYTES = 16 << 30
"""The files that were not used for the longest time go when the folder outgrows this."""
_EDGE_BYTES = 1 << 20
_SCHEMA = pa.schema(
    {"start_ns": pa.int64(), "dur_ns": pa.int64(), "category": pa.uint8(), "name_id": pa.int32(),
     "lane": pa.int32(), "correlation": pa.int64()}
)  # fmt: skip
_GROUP_ROWS = 1 << 17
_ABOUT = b"stepsplit"
_MOST_ABOUT_BYTES = 32 << 20
"""More than this is too much for a Parquet file's header."""
_UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException, msgspec.MsgspecError)


class _About(Struct):
    """What is told beside the columns."""

    stamp: str
    t0_unix_ns: int
    header: KinetoHeader
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    noted_row: list[int]
    noted_args: tuple[Raw, ...]
    counts: Counts
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


def load(source: Source, path: Path) -> KinetoFile | None:
    """The trace as it was read before; None where that is not known or no longer true."""
    cached = _place(source)
    if cached is None or not cached.is_file():
        return None
    try:
        file = pq.ParquetFile(cached, page_checksum_verification=True, memory_map=True)
        about = msgspec.json.decode(file.schema_arrow.metadata[_ABOUT], type=_About)
        if about.stamp != _stamp(source, path):
            return None
        os.utime(cached)
        return KinetoFile(about.header, _rows(file, about), about.notes)
    except _UNREADABLE:
        return None


def save(source: Source, path: Path, read: KinetoFile) -> None:
    """Keeps what was read; where that cannot be, nothing is kept."""
    cached = _place(source)
    if cached is None:
        return
    rows = read.rows
    about = _About(
        stamp=_stamp(source, path),
        t0_unix_ns=rows.t0_unix_ns,
        header=read.header,
        names=rows.events.names,
        lanes=rows.events.lanes,
        noted_row=rows.noted_row.tolist(),
        noted_args=tuple(map(Raw, rows.noted_args)),
        counts=rows.counts,
        notes=read.notes,
    )
    header = msgspec.json.encode(about)
    if len(header) > _MOST_ABOUT_BYTES:
        return
    try:
        _write(cached, rows.events, header)
        _prune(cached.parent)
    except _UNREADABLE:
        return


def _place(source: Source) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    return folder / f"{hashlib.sha256(source.where.encode()).hexdigest()[:32]}.parquet"


def _stamp(source: Source, path: Path) -> str:
    """Which content, read by which reader."""
    edges = hashlib.sha256()
    with path.open("rb") as file:
        edges.update(file.read(_EDGE_BYTES))
        file.seek(max(path.stat().st_size - _EDGE_BYTES, 0))
        edges.update(file.read(_EDGE_BYTES))
    return f"{READER}|{source.stamp}|{edges.hexdigest()}"


def _rows(file: pq.ParquetFile, about: _About) -> Sorted:
    start, dur, category, name_id, lane, correlation = _columns(file)
    events = Events(start, dur, category, name_id, lane, correlation, about.names, about.lanes)
    rows = np.array(about.noted_row, dtype=np.int64)
    texts = tuple(map(bytes, about.noted_args))
    return Sorted(events, about.t0_unix_ns, rows, texts, about.counts)


def _columns(file: pq.ParquetFile) -> list[npt.NDArray[Any]]:
    """The columns, filled group by group; to_numpy would import pandas first."""
    kinds = [np.dtype(str(kind)) for kind in _SCHEMA.types]
    columns = [np.empty(file.metadata.num_rows, dtype=kind) for kind in kinds]
    at = 0
    for group in range(file.num_row_groups):
        part = file.read_row_group(group, columns=_SCHEMA.names, use_threads=False).combine_chunks()
        for column, values in zip(columns, part.columns, strict=True):
            for chunk in values.chunks:
                size = column.dtype.itemsize
                column[at : at + len(chunk)] = np.frombuffer(
                    chunk.buffers()[1], column.dtype, len(chunk), chunk.offset * size
                )
        at += len(part)
    return columns


def _write(path: Path, events: Events, header: bytes) -> None:
    """Writes the file so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    schema = _SCHEMA.with_metadata({_ABOUT: header})
    try:
        with draft.open("wb") as file:
            pq.write_table(
                _table(events, schema), file, compression="none", use_dictionary=False,
                write_statistics=False, write_page_checksum=True, row_group_size=_GROUP_ROWS,
            )  # fmt: skip
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _table(events: Events, schema: pa.Schema) -> pa.Table:
    """The columns without a copy; pa.array would import pandas first."""
    columns = [np.ascontiguousarray(getattr(events, name)) for name in schema.names]
    arrays = [
        pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])
        for kind, column in zip(schema.types, columns, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _prune(folder: Path) -> None:
    kept = sorted(folder.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    total = 0
    for file in kept:
        total += file.stat().st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)
