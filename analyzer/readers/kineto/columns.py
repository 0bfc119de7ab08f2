"""Trace entries -> rows of columns, block by block, in the order of the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.readers.kineto.entries import Entries, exact_times
from stepsplit.analyzer.readers.kineto.schema import Complete, device_args
from stepsplit.analyzer.readers.kineto.timestamps import exact_ns, exact_ns_of_decimal
from stepsplit.analyzer.readers.rules import Rules
from stepsplit.analyzer.readers.rules_file import BUILT_IN
from stepsplit.analyzer.trace import Category, Int32, Int64, Lane, UInt8

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
_LAST_WORDS = {
    "runtime": Category.RUNTIME,
    "driver": Category.RUNTIME,
    "memcpy": Category.MEMCPY,
    "memset": Category.MEMSET,
}
"""What is common to "cuda_runtime", "xpu_driver", "gpu_memcpy" and "Runtime" of 2020."""
PARAM_COMMS = "record_param_comms"
_PLACED = np.zeros(len(Category), dtype=np.bool_)
_PLACED[[Category.RUNTIME, Category.KERNEL, Category.MEMCPY, Category.MEMSET]] = True
_CARRIES = np.zeros(len(Category), dtype=np.bool_)
_CARRIES[[Category.KERNEL, Category.MEMCPY]] = True
_COLUMNS = (np.int64, np.int64, np.uint8, np.int32, np.int32, np.int64)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many entries were read, were beyond reading, and stated a negative duration."""

    entries: int = 0
    lost: int = 0
    negative: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.entries + other.entries, self.lost + other.lost, self.negative + other.negative
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """The complete events of a trace or a part of it, in its order; columns as of Events.

    noted_row and noted_args are the events that communicate, and the text of their arguments.
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
    counts: Counts

    def __len__(self) -> int:
        return len(self.start_ns)


_LaneKey = tuple[int | str, int | str, int, int]


class _Numbers(dict[str, int]):
    """A number for each distinct name, in the order of their coming; noted are those to keep."""

    def __init__(self, rules: Rules) -> None:
        self.noted: list[bool] = []
        self._texts, self._asked, self._rules = list[str](), set[int](), rules

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        self.noted.append(name == PARAM_COMMS or name.startswith("c10d::"))
        self._texts.append(name)
        return number

    def note_of_device(self, numbers: Iterable[int]) -> None:
        """Notes which of these names of kernels and copies communicate; each is asked once."""
        for number in set(numbers) - self._asked:
            self.noted[number] |= self._rules.communicates(self._texts[number])
            self._asked.add(number)


class _Lanes(dict[_LaneKey, int]):
    """A number for each distinct lane."""

    def __missing__(self, key: _LaneKey) -> int:
        self[key] = number = len(self)
        return number


class _Categories(dict[str, int]):
    """What a category's name of any age means."""

    def __missing__(self, name: str) -> int:
        told = name.lower()
        by_end = _LAST_WORDS.get(told.rpartition("_")[2], Category.OTHER)
        self[name] = code = int(CATEGORIES.get(told, by_end))
        return code


def rows_of(blocks: Iterable[Entries], rules: Rules = BUILT_IN) -> Rows:
    """The complete events of the blocks."""
    builder = _Builder(rules)
    for block in blocks:
        builder.add(block)
    return builder.rows()


class _Builder:
    """Rows as blocks of entries arrive; columns grow in place, so that no row is there twice."""

    def __init__(self, rules: Rules) -> None:
        self._names, self._lanes, self._categories = _Numbers(rules), _Lanes(), _Categories()
        self._columns = tuple(bytearray() for _ in _COLUMNS)
        self._noted_rows: list[int] = []
        self._noted_args: list[bytes] = []
        self._rows = 0
        self._counts = Counts()

    def add(self, found: Entries) -> None:
        """Adds the complete events of a block."""
        events = [e for e in found.entries if type(e) is Complete and e.ts is not None]
        start = exact_ns([e.ts for e in events if e.ts is not None])
        dur = exact_ns([e.dur for e in events])
        beyond = 0
        if start is None or dur is None:
            events, start, dur, beyond = _exactly(events, found)
        self._counts += Counts(
            len(found.entries) - beyond, found.lost + beyond, int((dur < 0).sum())
        )
        self._append(events, start, np.maximum(dur, 0))

    def _append(self, events: Sequence[Complete], start: Int64, dur: Int64) -> None:
        names, lanes, categories = self._names, self._lanes, self._categories
        name_id = np.array([names[e.name] for e in events], dtype=np.int32)
        category = np.array([categories[e.cat] for e in events], dtype=np.uint8)
        lane = np.array([lanes[e.pid, e.tid, -1, -1] for e in events], dtype=np.int32)
        correlation = np.full(len(events), -1, dtype=np.int64)
        names.note_of_device(np.unique(name_id[_CARRIES[category]]).tolist())
        to_note = np.array(names.noted, dtype=np.bool_)[name_id]
        placed = np.flatnonzero(_PLACED[category]).tolist()
        found = device_args([events[row].args for row in placed])
        correlation[placed] = [args.correlation for args in found]
        for row, args in zip(placed, found, strict=True):
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

    def rows(self) -> Rows:
        """All that were added."""
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


def _exactly(
    events: Sequence[Complete], found: Entries
) -> tuple[list[Complete], Int64, Int64, int]:
    """The events with their times by every digit, and how many outgrow 64 bits and are left out."""
    times = [(exact_ns_of_decimal(ts), exact_ns_of_decimal(dur)) for ts, dur in exact_times(found)]
    kept = [i for i, (start, dur) in enumerate(times) if start is not None and dur is not None]
    start = np.array([times[i][0] for i in kept], dtype=np.int64)
    dur = np.array([times[i][1] for i in kept], dtype=np.int64)
    return [events[i] for i in kept], start, dur, len(times) - len(kept)
