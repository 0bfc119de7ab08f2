"""The tables of an Nsight Systems SQLite export, of whichever version -> Events by process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from stepsplit.analyzer.readers.nsys.database import Database
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Category, Events, Int64, Lane, UInt8

_STREAM = (1 << 40) - 1
_KERNEL_NAMES = ("demangledName", "shortName", "mangledName")
_COPIES = ("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH",
           "PtoP", "HtoD", "DtoH", "DtoD")  # fmt: skip
_DTOD, _PTOP = _COPIES.index("DtoD"), _COPIES.index("PtoP")
_MEMORY = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device", "Managed")
_KERNEL, _GRAPH, _MEMCPY, _MEMSET = _ON_DEVICE = tuple(
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET")
)
_PLACE = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")


@dataclass(frozen=True, slots=True)
class Process:
    """What one process of the export did.

    Its events count from start_ns after the session's start; row has an entry an event: the number
    of a range in NVTX_EVENTS, -1 for everything else.
    """

    key: int
    start_ns: int
    events: Events
    row: Int64


@dataclass(frozen=True, slots=True)
class _Part:
    """What one table holds: columns start, end, process or thread, device, stream, correlation."""

    category: Category
    place: Int64
    name: Int64
    names: tuple[str, ...]
    row: Int64


@dataclass(frozen=True, slots=True)
class _Activity:
    """What all processes did: the parts one below the other, name indexing all their names."""

    place: Int64
    process: Int64
    category: UInt8
    name: Int64
    row: Int64
    names: tuple[str, ...]


def processes_of(db: Database) -> tuple[Process, ...]:
    """The processes that used a device, by their keys: the ids of nsys without the thread."""
    parts = [_kernels(db), _graphs(db), _copies(db), _sets(db)]
    parts += [_launches(db, table) for table in ("RUNTIME", "DRIVER")]
    known = all(db.has(table, "globalPid") for table in _ON_DEVICE if table in db.columns)
    every = _together([*parts, _ranges(db)], known)
    used = np.unique(every.process[np.isin(every.category, DEVICE_CATEGORIES)])
    return tuple(_process(every, key) for key in used.tolist())


def process_key(global_id: Int64) -> Int64:
    """The part of nsys's serialized ids that is the same for all threads of a process."""
    return global_id & ~0xFFFFFF


def _together(parts: Sequence[_Part], known: bool) -> _Activity:
    """All parts; as of one process where it is not known which ran the kernels."""
    first = np.cumsum([0, *(len(part.names) for part in parts)])
    place = np.concatenate([part.place for part in parts])
    return _Activity(
        place=place,
        process=process_key(place[:, 2]) if known else np.zeros(len(place), dtype=np.int64),
        category=np.repeat([p.category for p in parts], [len(p.place) for p in parts]),
        name=np.concatenate([p.name + n for p, n in zip(parts, first, strict=False)]),
        row=np.concatenate([part.row for part in parts]),
        names=tuple(chain.from_iterable(part.names for part in parts)),
    )


def _process(every: _Activity, key: int) -> Process:
    rows = np.flatnonzero(every.process == key)
    rows = rows[np.argsort(every.place[rows, 0], kind="stable")]
    start, end, place, device, stream, correlation = every.place[rows].T
    category = every.category[rows].astype(np.uint8)
    names, name_id = np.unique(every.name[rows], return_inverse=True)
    on_device = np.isin(category, DEVICE_CATEGORIES)
    keys = np.where(
        on_device, 1 << 62 | (device & 0xFFFF) << 40 | stream & _STREAM, place & 0xFFFFFF
    )
    lanes, lane = np.unique(keys, return_inverse=True)
    pid = int(place[0]) >> 24 & 0xFFFFFF
    events = Events(
        start_ns=start - start[0],
        dur_ns=np.maximum(end - start, 0),
        category=category,
        name_id=name_id.astype(np.int32),
        lane=lane.astype(np.int32),
        correlation=np.where(correlation > 0, correlation, -1),
        names=tuple(every.names[name] for name in names.tolist()),
        lanes=tuple(_lane(pid, place) for place in lanes.tolist()),
    )
    return Process(key, int(start[0]), events, every.row[rows])


def _lane(pid: int, place: int) -> Lane:
    """The lane behind a number: a stream of a device, or a thread."""
    if place < 1 << 62:
        return Lane(str(pid), str(place), -1, -1)
    return Lane(str(pid), "", place >> 40 & 0xFFFF, place & _STREAM)


def _kernels(db: Database) -> _Part:
    name = next((name for name in _KERNEL_NAMES if db.has(_KERNEL, name)), _KERNEL_NAMES[0])
    return _by_id(db, Category.KERNEL, db.ints(_KERNEL, (*_PLACE, name)))


def _graphs(db: Database) -> _Part:
    """CUDA graphs that were recorded as one; their kernels are not in the export."""
    return _alike(Category.KERNEL, db.ints(_GRAPH, _PLACE), "CUDA graph")


def _sets(db: Database) -> _Part:
    return _alike(Category.MEMSET, db.ints(_MEMSET, _PLACE), "Memset (Device)")


def _copies(db: Database) -> _Part:
    kinds = ("copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId")
    rows = db.ints(_MEMCPY, (*_PLACE, *kinds))
    kind, from_memory, to_memory, from_device, to_device = rows[:, len(_PLACE) :].T
    between = (kind == _DTOD) & (from_device >= 0) & (to_device >= 0) & (from_device != to_device)
    kind = np.where(between, _PTOP, kind).clip(-1, 255)
    code = (kind + 1) * 65536 + (from_memory.clip(-1, 254) + 1) * 256 + to_memory.clip(-1, 254) + 1
    codes, name = np.unique(code, return_inverse=True)
    names = tuple(
        _copy_name(c // 65536 - 1, c // 256 % 256 - 1, c % 256 - 1) for c in codes.tolist()
    )
    return _Part(Category.MEMCPY, rows[:, : len(_PLACE)], name, names, np.full(len(rows), -1))


def _copy_name(kind: int, from_memory: int, to_memory: int) -> str:
    """The copy in Kineto's spelling."""
    known = 0 <= from_memory < len(_MEMORY) and 0 <= to_memory < len(_MEMORY)
    memory = f" ({_MEMORY[from_memory]} -> {_MEMORY[to_memory]})" if known else ""
    return f"Memcpy {_COPIES[kind] if 0 <= kind < len(_COPIES) else _COPIES[0]}{memory}"


def _launches(db: Database, kind: str) -> _Part:
    table = f"CUPTI_ACTIVITY_KIND_{kind}"
    columns = ("start", "end", "globalTid", "deviceId", "streamId", "correlationId", "nameId")
    part = _by_id(db, Category.RUNTIME, db.ints(table, columns))
    names = tuple(name.partition("_v")[0] for name in part.names)
    return _Part(part.category, part.place, part.name, names, part.row)


def _ranges(db: Database) -> _Part:
    """The ranges of NVTX that have ended, named by their own text, else by a registered one."""
    table, columns = "NVTX_EVENTS", ("start", "end", "globalTid", "deviceId", "streamId")
    ended = range_condition(db)
    rows = db.ints(table, (*columns, "correlationId", "textId", "_rowid_"), ended)
    numbers: dict[str, int] = {}
    own = (numbers.setdefault(text, len(numbers)) for text in db.texts(table, "text", ended))
    code = np.fromiter(own, np.int64)
    if not len(code):
        numbers, code = {"": 0}, np.zeros(len(rows), dtype=np.int64)
    part = _by_id(db, Category.ANNOTATION, rows[:, :7])
    registered = code == numbers.get("", -1)
    name = np.where(registered, part.name + len(numbers), code)
    return _Part(part.category, part.place, name, (*numbers, *part.names), rows[:, 7])


def range_condition(db: Database) -> str:
    """Which rows of NVTX_EVENTS are ranges that have ended."""
    ended = "end >= start" if db.has("NVTX_EVENTS", "end") else "0"
    kinds = "eventType IN (59, 60, 70, 71)" if db.has("NVTX_EVENTS", "eventType") else "1"
    return f"{ended} AND {kinds}"


def _by_id(db: Database, category: Category, rows: Int64) -> _Part:
    """Rows whose last column is the id of their name."""
    ids, name = np.unique(rows[:, -1], return_inverse=True)
    return _Part(category, rows[:, :-1], name, db.strings(ids), np.full(len(rows), -1))


def _alike(category: Category, place: Int64, name: str) -> _Part:
    zeros = np.zeros(len(place), dtype=np.int64)
    return _Part(category, place, zeros, (name,), zeros - 1)
