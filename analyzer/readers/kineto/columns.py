"""Converts trace entries to columns, block by block in file order, and sorts them at the end."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.json_stream import Entries, decode_exact_times
from stepsplit.analyzer.readers.kineto.schema import (
    Args,
    Complete,
    convert_decimal_to_ns,
    convert_to_ns,
    decode_comm_args,
    decode_device_args,
)
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Category, Events, Int32, Int64, Lane, UInt8

# Rows of the parts of a trace -> Events, sorted by start.

_T = TypeVar("_T", bound=Hashable)

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The sorted events of a trace and its earliest start in Unix time.

    noted_row (sorted) are the communication events, noted_args the text of their arguments.
    """

    events: Events
    t0_unix_ns: int
    noted_row: Int64
    noted_args: tuple[bytes, ...]
    counts: EntryCounts

    @property
    def on_device(self) -> bool:
        """Whether there are accelerator events."""
        return bool(self.events.is_category(*DEVICE_CATEGORIES).any())

    def decode_args(self, row: int) -> Args | None:
        """The arguments of a communication event; None for other events."""
        at = int(np.searchsorted(self.noted_row, row))
        if at == len(self.noted_row) or self.noted_row[at] != row:
            return None
        return decode_comm_args(self.noted_args[at])


def sort_rows(parts: Sequence[Rows], base_ns: int) -> SortedRows:
    """The rows of all parts, sorted by start; base_ns is the time base of the trace."""
    start = _concatenate([part.start_ns for part in parts])
    order = np.argsort(start, kind="stable")
    t0 = int(start[order[0]]) if len(order) else 0
    names, name_ids = _join_tables([part.names for part in parts])
    lanes, lane_ids = _join_tables([part.lanes for part in parts])
    events = Events(
        start_ns=start[order] - t0,
        dur_ns=_concatenate([part.dur_ns for part in parts])[order],
        category=_concatenate([part.category for part in parts])[order],
        name_id=_map_ids([part.name_id for part in parts], name_ids)[order],
        lane=_map_ids([part.lane for part in parts], lane_ids)[order],
        correlation=_concatenate([part.correlation for part in parts])[order],
        names=names,
        lanes=lanes,
    )
    counts = sum((part.counts for part in parts), EntryCounts())
    return SortedRows(events, base_ns + t0, *_collect_noted(parts, order), counts)


def _join_tables(tables: Sequence[tuple[_T, ...]]) -> tuple[tuple[_T, ...], list[Int32]]:
    """The distinct values of all tables, and for each table the indices of its values."""
    place = {value: i for i, value in enumerate(dict.fromkeys(v for t in tables for v in t))}
    return tuple(place), [np.array([place[v] for v in t], dtype=np.int32) for t in tables]


def _map_ids(columns: Iterable[Int32], ids: Iterable[Int32]) -> Int32:
    return _concatenate([new[old] for old, new in zip(columns, ids, strict=True)])


def _concatenate(parts: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    """The concatenated parts, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _collect_noted(parts: Sequence[Rows], order: Int64) -> tuple[Int64, tuple[bytes, ...]]:
    """The communication events as positions in the sorted order, and their arguments."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    before = np.cumsum([0, *map(len, parts)])
    rows = np.concatenate([p.noted_row + n for p, n in zip(parts, before, strict=False)])
    texts = [text for part in parts for text in part.noted_args]
    by_place = np.argsort(place[rows])
    return place[rows][by_place], tuple(texts[i] for i in by_place.tolist())


# Trace entries -> rows of columns, block by block, in the order of the file.

CATEGORIES = {
    "cpu_op": Category.OP,
    "operator": Category.OP,
    "user_annotation": Category.ANNOTATION,
    "kernel": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,
    "hpu_op": Category.KERNEL,
    "privateuse1": Category.KERNEL,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "python_function": Category.PYTHON,
}

_SUFFIX_CATEGORIES = {
    "runtime": Category.RUNTIME,
    "driver": Category.RUNTIME,
    "memcpy": Category.MEMCPY,
    "memset": Category.MEMSET,
}
"""Suffixes of categories such as "cuda_runtime", "xpu_driver", "gpu_memcpy", "Runtime" (2020)."""

PARAM_COMMS = "record_param_comms"

_HAS_STREAM = np.zeros(len(Category), dtype=np.bool_)

_HAS_STREAM[[Category.RUNTIME, Category.KERNEL, Category.MEMCPY, Category.MEMSET]] = True

_MAY_COMMUNICATE = np.zeros(len(Category), dtype=np.bool_)

_MAY_COMMUNICATE[[Category.KERNEL, Category.MEMCPY]] = True

_COLUMNS = (np.int64, np.int64, np.uint8, np.int32, np.int32, np.int64)


@dataclass(frozen=True, slots=True)
class EntryCounts:
    """Number of entries read, unreadable entries, and entries with a negative duration."""

    entries: int = 0
    lost: int = 0
    negative: int = 0

    def __add__(self, other: EntryCounts) -> EntryCounts:
        return EntryCounts(
            self.entries + other.entries, self.lost + other.lost, self.negative + other.negative
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """The complete events of a trace or a part of it in file order; columns as in Events.

    noted_row are the communication events, noted_args the text of their arguments.
    """

    start_ns: Int64
    dur_ns: Int64
    category: UInt8
    name_id: Int32
    lane: Int32
    correlation: Int64
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    noted_row: Int64
    noted_args: tuple[bytes, ...]
    counts: EntryCounts

    def __len__(self) -> int:
        return len(self.start_ns)


_LaneKey = tuple[int | str, int | str, int, int]


class _Numbers(dict[str, int]):
    """Numbers distinct names in order of appearance; noted: whether a name is communication."""

    def __init__(self, rules: Rules) -> None:
        self.noted: list[bool] = []
        self._texts, self._asked, self._rules = list[str](), set[int](), rules

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        self.noted.append(name == PARAM_COMMS or name.startswith("c10d::"))
        self._texts.append(name)
        return number

    def note_of_device(self, numbers: Iterable[int]) -> None:
        """Marks which of these kernel and copy names are communication, once per name."""
        for number in set(numbers) - self._asked:
            self.noted[number] |= self._rules.is_communication(self._texts[number])
            self._asked.add(number)


class _Lanes(dict[_LaneKey, int]):
    """Numbers distinct lanes."""

    def __missing__(self, key: _LaneKey) -> int:
        self[key] = number = len(self)
        return number


class _Categories(dict[str, int]):
    """Category codes by name, including the names of old torch versions."""

    def __missing__(self, name: str) -> int:
        lowered = name.lower()
        by_end = _SUFFIX_CATEGORIES.get(lowered.rpartition("_")[2], Category.OTHER)
        self[name] = code = int(CATEGORIES.get(lowered, by_end))
        return code


def build_rows(blocks: Iterable[Entries], rules: Rules = BUILT_IN) -> Rows:
    """The complete events of the blocks."""
    builder = _Builder(rules)
    for block in blocks:
        builder.add(block)
    return builder.build()


class _Builder:
    """Builds Rows from blocks of entries; columns grow in place, so no row is in memory twice."""

    def __init__(self, rules: Rules) -> None:
        self._names, self._lanes, self._categories = _Numbers(rules), _Lanes(), _Categories()
        self._columns = tuple(bytearray() for _ in _COLUMNS)
        self._noted_rows: list[int] = []
        self._noted_args: list[bytes] = []
        self._rows = 0
        self._counts = EntryCounts()

    def add(self, block: Entries) -> None:
        """Adds the complete events of a block."""
        events = [e for e in block.entries if type(e) is Complete and e.ts is not None]
        start = convert_to_ns([e.ts for e in events if e.ts is not None])
        dur = convert_to_ns([e.dur for e in events])
        out_of_range = 0
        if start is None or dur is None:
            events, start, dur, out_of_range = _compute_exact_times(events, block)
        self._counts += EntryCounts(
            len(block.entries) - out_of_range, block.lost + out_of_range, int((dur < 0).sum())
        )
        self._append(events, start, np.maximum(dur, 0))

    def _append(self, events: Sequence[Complete], start: Int64, dur: Int64) -> None:
        names, lanes, categories = self._names, self._lanes, self._categories
        name_id = np.array([names[e.name] for e in events], dtype=np.int32)
        category = np.array([categories[e.cat] for e in events], dtype=np.uint8)
        lane = np.array([lanes[e.pid, e.tid, -1, -1] for e in events], dtype=np.int32)
        correlation = np.full(len(events), -1, dtype=np.int64)
        names.note_of_device(np.unique(name_id[_MAY_COMMUNICATE[category]]).tolist())
        to_note = np.array(names.noted, dtype=np.bool_)[name_id]
        placed = np.flatnonzero(_HAS_STREAM[category]).tolist()
        decoded = decode_device_args([events[row].args for row in placed])
        correlation[placed] = [args.correlation for args in decoded]
        for row, args in zip(placed, decoded, strict=True):
            if args.stream >= 0:
                event = events[row]
                lane[row] = lanes[event.pid, event.tid, args.device, args.stream]
            if args.communicates:
                to_note[row] = True
        self._note(events, np.flatnonzero(to_note).tolist())
        parts: tuple[npt.NDArray[Any], ...] = (start, dur, category, name_id, lane, correlation)
        for column, part in zip(self._columns, parts, strict=True):
            column += part.tobytes()
        self._rows += len(events)

    def _note(self, events: Sequence[Complete], rows: Sequence[int]) -> None:
        self._noted_rows += [self._rows + row for row in rows]
        self._noted_args += [bytes(events[row].args) for row in rows]

    def build(self) -> Rows:
        """The rows added so far."""
        columns: Any = map(np.frombuffer, self._columns, _COLUMNS)
        start, dur, category, name_id, lane, correlation = columns
        return Rows(
            start_ns=start,
            dur_ns=dur,
            category=category,
            name_id=name_id,
            lane=lane,
            correlation=correlation,
            names=tuple(self._names),
            lanes=tuple(Lane(str(pid), str(tid), *place) for pid, tid, *place in self._lanes),
            noted_row=np.array(self._noted_rows, dtype=np.int64),
            noted_args=tuple(self._noted_args),
            counts=self._counts,
        )


def _compute_exact_times(
    events: Sequence[Complete], entries: Entries
) -> tuple[list[Complete], Int64, Int64, int]:
    """The events with exact times, and the number of events dropped as out of 64-bit range."""
    times = [
        (convert_decimal_to_ns(ts), convert_decimal_to_ns(dur))
        for ts, dur in decode_exact_times(entries)
    ]
    valid = [i for i, (start, dur) in enumerate(times) if start is not None and dur is not None]
    start = np.array([times[i][0] for i in valid], dtype=np.int64)
    dur = np.array([times[i][1] for i in valid], dtype=np.int64)
    return [events[i] for i in valid], start, dur, len(times) - len(valid)


# The messages of a kernel without a description are those posted since the last launch.
#
# A batch of sends and receives (batch_isend_irecv, a coalescing block) posts its messages one by
# one, each with its description, and launches one kernel for all of them after the last post.


def posted_before(events: Events, posts: Int64, launches: Int64) -> list[list[int]]:
    """For each launch (a row, or -1) the posts on its thread since the previous launch."""
    batches: list[list[int]] = [[] for _ in range(len(launches))]
    known = np.flatnonzero(launches >= 0)
    for lane in np.unique(events.lane[launches[known]]).tolist():
        launches_on_lane = known[events.lane[launches[known]] == lane]
        launches_on_lane = launches_on_lane[
            np.argsort(events.start_ns[launches[launches_on_lane]], kind="stable")
        ]
        posts_on_lane = posts[events.lane[posts] == lane]
        at = events.start_ns[launches[launches_on_lane]]
        next_launch = np.searchsorted(at, events.start_ns[posts_on_lane], side="left")
        for post, number in zip(posts_on_lane.tolist(), next_launch.tolist(), strict=True):
            if number < len(launches_on_lane):
                batches[int(launches_on_lane[number])].append(post)
    return batches
