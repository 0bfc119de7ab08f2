"""A store on disk for the events of a recording of many ranks, mapped into memory as needed.

The processes that read the files write the columns to temporary files, and all processes of the
analysis refer to them by file and offset. Memory then holds only what was used last: the pages are
clean, so that they are dropped and read again at no cost but the copy from the page cache.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from sys import intern
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.trace import (
    EventKinds,
    Events,
    Int32,
    Int64,
    Lane,
    LaunchCalls,
    RankTrace,
    Shapes,
    UInt8,
)
from stepsplit.collectors.safe_io.private_folder import is_private, open_private

LEAST_BYTES = 256 << 20
"""Recordings whose traces are smaller than this, unpacked, stay in memory."""

LEAST_FILES = 16
"""Recordings of fewer files stay in memory: the analysis uses the events of one rank as a whole."""

MAPPED_BYTES = 64 << 20
"""About so much of each file stays mapped; the rest is dropped."""

# As Arrow aligns its own arrays.
_ALIGNMENT = 64

_PREFIX, _LOCK = "stepsplit-events-", "in_use"

_Column = npt.NDArray[Any]


class EventStore:
    """A folder of events. It is removed with the last events that refer to it, or, if its process
    was killed, by the next store."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self._folder = _Folder(tempfile.mkdtemp(prefix=_PREFIX))

    @property
    def path(self) -> str:
        """The folder, by which another process of the analysis refers to the store."""
        return self._folder.path


def store_events(folder: str, events: Events) -> Events:
    """The events, with columns in the folder; the same events if the disk is full."""
    if isinstance(events, _StoredEvents):
        return events
    launches = events.launches
    columns = _write(folder, [*(getattr(events, name) for name in _EVENT_COLUMNS), launches.call])
    if columns is None:
        return events
    first = launches.first_correlation
    return _StoredEvents(columns, events.names, events.lanes, events.on_device, first)


def store_shapes(folder: str, shapes: Shapes) -> Shapes:
    """The shapes, with columns in the folder; the same shapes if the disk is full."""
    if not len(shapes) or isinstance(shapes, _StoredShapes):
        return shapes
    columns = _write(folder, [shapes.event, shapes.text_id])
    return shapes if columns is None else _StoredShapes(columns, shapes.texts)


def _store_kinds(folder: str, kinds: EventKinds) -> EventKinds:
    """The kinds, with columns in the folder; the same kinds if the disk is full."""
    if isinstance(kinds, _StoredKinds):
        return kinds
    columns = _write(folder, [kinds.kind, kinds.family])
    return kinds if columns is None else _StoredKinds(columns, kinds.families)


def store_trace(folder: str, trace: RankTrace) -> RankTrace:
    """The trace, with the columns of its events in the folder; as much of it as the disk holds."""
    return replace(
        trace,
        events=store_events(folder, trace.events),
        shapes=store_shapes(folder, trace.shapes),
        kinds=_store_kinds(folder, trace.kinds),
    )


# The records of trace.py with stored columns. Pickled, they are references to the store.

_EVENT_COLUMNS = ("start_ns", "dur_ns", "correlation", "name_id", "lane", "category")

_set: Callable[[object, str, object], None] = object.__setattr__


def _make_property(number: int) -> Any:
    """The column of this number, mapped on access."""
    return property(lambda record: record._columns.read(number))


class _StoredEvents(Events):
    __slots__ = ("_columns", "_first_correlation", "_on_device")

    _columns: _Columns
    _on_device: bool
    _first_correlation: int

    start_ns: Int64 = _make_property(0)
    dur_ns: Int64 = _make_property(1)
    correlation: Int64 = _make_property(2)
    name_id: Int32 = _make_property(3)
    lane: Int32 = _make_property(4)
    category: UInt8 = _make_property(5)

    def __init__(
        self,
        columns: _Columns,
        names: Sequence[str],
        lanes: tuple[Lane, ...],
        on_device: bool,
        first_correlation: int,
    ) -> None:
        _set(self, "_columns", columns)
        _set(self, "_on_device", on_device)
        _set(self, "_first_correlation", first_correlation)
        # The ranks of a job have most names in common.
        _set(self, "names", tuple(map(intern, names)))
        _set(self, "lanes", lanes)

    def __len__(self) -> int:
        return self._columns.lengths[0]

    @property
    def on_device(self) -> bool:
        return self._on_device

    @property
    def launches(self) -> LaunchCalls:
        return LaunchCalls(self._columns.read(6), self._first_correlation)

    def __reduce__(self) -> tuple[Any, ...]:
        own = self._columns, self.names, self.lanes, self._on_device, self._first_correlation
        return _StoredEvents, own


class _StoredShapes(Shapes):
    __slots__ = ("_columns",)

    _columns: _Columns

    event: Int64 = _make_property(0)
    text_id: Int32 = _make_property(1)

    def __init__(self, columns: _Columns, texts: Sequence[str]) -> None:
        _set(self, "_columns", columns)
        _set(self, "texts", tuple(map(intern, texts)))

    def __len__(self) -> int:
        return self._columns.lengths[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _StoredShapes, (self._columns, self.texts)


class _StoredKinds(EventKinds):
    __slots__ = ("_columns",)

    _columns: _Columns

    kind: UInt8 = _make_property(0)
    family: Int32 = _make_property(1)

    def __init__(self, columns: _Columns, families: tuple[str, ...]) -> None:
        _set(self, "_columns", columns)
        _set(self, "families", families)

    def __reduce__(self) -> tuple[Any, ...]:
        return _StoredKinds, (self._columns, self.families)


# Columns in files. Each process appends to a file of its own, and maps the files of all.


class _Place(Struct, frozen=True):
    """Where the columns of a record are in a file; the record is at [begin, end) in bytes."""

    file: _StoreFile
    offsets: tuple[int, ...]
    dtypes: tuple[str, ...]
    lengths: tuple[int, ...]
    begin: int
    end: int


class _Columns:
    """The columns of a record in a file. Its arrays are made once: hundreds are asked for per
    rank."""

    __slots__ = ("_arrays", "_content", "_place", "lengths")

    def __init__(self, place: _Place) -> None:
        self._place, self.lengths = place, place.lengths
        self._content: mmap.mmap | None = None
        self._arrays: tuple[_Column, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Columns, (self._place,)

    def read(self, number: int) -> _Column:
        """A column, read-only."""
        place = self._place
        content = place.file.map_record(place.begin, place.end)
        # The file has grown since, and was mapped anew: the arrays are of the old mapping.
        if content is not self._content:
            parts = zip(place.dtypes, place.lengths, place.offsets, strict=True)
            self._arrays = tuple(np.frombuffer(content, *part) for part in parts)
            self._content = content
        return self._arrays[number]


class _StoreFile:
    """A file of columns, mapped into memory; the folder stays while it is in use."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = _FOLDERS.get(str(Path(path).parent))
        self._content: mmap.mmap | None = None
        # Of the record that was used last, and about how much is mapped.
        self._last_begin, self._used_bytes = -1, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_store_file, (self._path,)

    def map_record(self, begin: int, end: int) -> mmap.mmap:
        """The content as far as it was written, with the record's bytes in it."""
        if self._content is None or len(self._content) < end:
            with open(self._path, "rb", opener=open_private) as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if begin != self._last_begin:
            self._last_begin = begin
            self._used_bytes += end - begin
            if self._used_bytes > MAPPED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
                # Drops all pages from this process; those that are used again are mapped again.
                self._used_bytes = end - begin
                self._content.madvise(mmap.MADV_DONTNEED)
        return self._content


def _open_store_file(path: str) -> _StoreFile:
    file = _FILES.get(path)
    if file is None:
        file = _FILES[path] = _StoreFile(path)
    return file


_FILES: weakref.WeakValueDictionary[str, _StoreFile] = weakref.WeakValueDictionary()


def _write(folder: str, columns: Sequence[_Column]) -> _Columns | None:
    """Appends the columns to this process's file in the folder; None if the disk is full."""
    path = Path(folder, f"{os.getpid()}.columns")
    try:
        with open(path, "ab", opener=open_private) as file:
            begin, offsets = file.seek(0, os.SEEK_END), []
            for column in columns:
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                offsets.append(file.tell())
                file.write(np.ascontiguousarray(column).data)
            end = file.tell()
    except OSError:
        return None
    dtypes = tuple(column.dtype.str for column in columns)
    lengths = tuple(map(len, columns))
    store_file = _open_store_file(str(path))
    return _Columns(_Place(store_file, tuple(offsets), dtypes, lengths, begin, end))


class _Folder:
    """A temporary folder that the process that made it removes with this object.

    It holds a file that stays locked while that process lives.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        _FOLDERS[path] = self
        new = Path(path, "new")
        lock = open(new, "xb", opener=open_private)  # noqa: SIM115 - open as long as the folder
        # Locked before it has its name: another process that cleans up never sees it unlocked.
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(Path(path, _LOCK))
        weakref.finalize(self, _remove_store, path, lock)


def _remove_store(path: str, lock: IO[bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _remove_abandoned(temporary: Path) -> None:
    """Removes the stores of this user's processes that were killed, whose file no process locks."""
    # Not those of others, nor a folder of this name that others have made or filled. A temporary
    # folder that others may write without the sticky bit is the user's choice.
    stores = (each for each in temporary.glob(f"{_PREFIX}*") if is_private(each, named=True))
    for folder in stores:
        with suppress(OSError), open(Path(folder, _LOCK), "rb", opener=open_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


_FOLDERS: weakref.WeakValueDictionary[str, _Folder] = weakref.WeakValueDictionary()
