"""Converts trace entries to columns, block by block in file order, and sorts them at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Raw, Struct

from stepsplit.analyzer.arrays import list_distinct
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto import schema
from stepsplit.analyzer.readers.kineto.collective_launches import DEVICE_COPY
from stepsplit.analyzer.readers.kineto.json_stream import Entries
from stepsplit.analyzer.trace import (
    ALL_STREAMS,
    DEVICE_CATEGORIES,
    GRID,
    HOST,
    MAX_NAME_LENGTH,
    Category,
    Events,
    EventWaits,
    Int32,
    Int64,
    Lane,
    Shapes,
    UInt8,
    build_event_waits,
)

# Rows of the parts of a trace -> Events, sorted by start.

_T = TypeVar("_T", bound=Hashable)

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The sorted events of a trace and its earliest start in Unix time.

    noted_row (sorted) are the communication events and the waits, noted_args the text of their
    arguments.
    """

    events: Events
    t0_unix_ns: int
    noted_row: Int64
    noted_args: tuple[bytes, ...]
    counts: EntryCounts
    shapes: Shapes

    @property
    def on_device(self) -> bool:
        """Whether there are accelerator events."""
        return bool(self.events.is_category(*DEVICE_CATEGORIES).any())

    def decode_args(self, row: int) -> schema.Args | None:
        """The arguments of a communication event; None for other events."""
        at = int(np.searchsorted(self.noted_row, row))
        if at == len(self.noted_row) or self.noted_row[at] != row:
            return None
        return schema.decode_comm_args(self.noted_args[at])

    def find_communication(self, rules: Rules) -> Int64:
        """The noted rows of kernels and copies that communicate; others are copies of which only
        the size is noted."""
        events, noted = self.events, self.noted_row
        of_device = events.is_category(Category.KERNEL, Category.MEMCPY)[noted]
        copies = np.flatnonzero(events.is_category(Category.MEMCPY)[noted])
        name_id = events.name_id[noted[copies]]
        for number in np.unique(name_id).tolist():
            if not rules.is_communication(events.names[number]):
                named = [
                    _COLLECTIVE in self.noted_args[i] for i in copies[name_id == number].tolist()
                ]
                of_device[copies[name_id == number]] = named
        return noted[of_device]


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
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    counts = sum((part.counts for part in parts), EntryCounts())
    shapes = _collect_shapes(parts, place, events)
    return SortedRows(events, base_ns + t0, *_collect_noted(parts, place), counts, shapes)


def _join_tables(tables: Sequence[tuple[_T, ...]]) -> tuple[tuple[_T, ...], list[Int32]]:
    """The distinct values of all tables, and for each table the indices of its values."""
    place = {value: i for i, value in enumerate(dict.fromkeys(v for t in tables for v in t))}
    return tuple(place), [np.array([place[v] for v in t], dtype=np.int32) for t in tables]


def _map_ids(columns: Iterable[Int32], ids: Iterable[Int32]) -> Int32:
    return _concatenate([new[old] for old, new in zip(columns, ids, strict=True)])


def _concatenate(parts: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    """The concatenated parts, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _collect_noted(parts: Sequence[Rows], place: Int64) -> tuple[Int64, tuple[bytes, ...]]:
    """The communication events as positions in the sorted order, and their arguments.

    place is the position of each row of the parts.
    """
    before = np.cumsum([0, *map(len, parts)])
    rows = np.concatenate([p.noted_row + n for p, n in zip(parts, before, strict=False)])
    texts = [text for part in parts for text in part.noted_args]
    by_place = np.argsort(place[rows])
    return place[rows][by_place], tuple(texts[i] for i in by_place.tolist())


def _collect_shapes(parts: Sequence[Rows], place: Int64, events: Events) -> Shapes:
    """The shapes of all events: a kernel has those of the op that launched it, if recorded."""
    texts, ids = _join_tables([part.shaped.texts for part in parts])
    text_id = _map_ids([part.shaped.text_id for part in parts], ids)
    before = np.cumsum([0, *map(len, parts)])
    event = place[_concatenate([p.shaped.row + n for p, n in zip(parts, before, strict=False)])]
    by_event = np.argsort(event, kind="stable")
    shapes = Shapes(event[by_event], text_id[by_event], texts)
    kernels = np.flatnonzero(events.category == Category.KERNEL)
    of_kernel = events.category[shapes.event] == Category.KERNEL
    if not len(kernels) or of_kernel.all():
        return shapes
    op = _find_launching_ops(events, shapes.event[~of_kernel], kernels)
    by_op = shapes.text_id[~of_kernel][op]
    text_id = np.where(op >= 0, by_op, shapes.find_ids(kernels))
    column = np.full(len(events), -1, dtype=np.int32)
    column[shapes.event] = shapes.text_id
    column[kernels] = text_id
    shaped = np.flatnonzero(column >= 0)
    return Shapes(shaped, column[shaped], texts)


_MAX_SIBLINGS = 16
"""Maximum number of ops that ended before a launch in the op that contains it."""


def _find_launching_ops(events: Events, ops: Int64, kernels: Int64) -> Int32:
    """The index of the innermost of these ops around the launch of each kernel; -1 for none."""
    found = np.full(len(kernels), -1, dtype=np.int32)
    launch = events.find_launches(kernels)
    for lane in np.unique(events.lane[ops]).tolist():
        own_ops = np.flatnonzero(events.lane[ops] == lane)
        own = np.flatnonzero((launch >= 0) & (events.lane[launch] == lane))
        start, end = events.start_ns[ops[own_ops]], events.ends_of(ops[own_ops])
        when = events.start_ns[launch[own]]
        last = np.searchsorted(start, when, side="right") - 1
        for op in range(_MAX_SIBLINGS):
            at = np.maximum(last - op, 0)
            within = (last >= op) & (end[at] >= when) & (found[own] < 0)
            found[own[within]] = own_ops[at[within]]
    return found


# Kineto's cuda_sync events -> the waits whose event is known.

_STREAM_WAIT, _EVENT_SYNC, _STREAM_SYNC, _DEVICE_SYNC = (
    "Stream Wait Event", "Event Sync", "Stream Sync", "Context Sync"
)  # fmt: skip


def collect_event_waits(rows: SortedRows) -> EventWaits:
    """The waits for events and the synchronizations of a trace that say what they wait for."""
    events = rows.events
    syncs = np.flatnonzero(events.is_category(Category.SYNC)[rows.noted_row]).tolist()
    waits = (
        _build_event_wait(
            events.name_of(int(rows.noted_row[i])), schema.decode_sync_args(rows.noted_args[i])
        )
        for i in syncs
    )
    return build_event_waits([wait for wait in waits if wait is not None])


def _build_event_wait(name: str, args: schema.SyncArgs) -> tuple[int, int, int, int] | None:
    """(correlation, waiting stream, awaited stream, correlation of the record), None if unknown."""
    if args.correlation < 0:
        return None
    if name == _DEVICE_SYNC:
        return args.correlation, HOST, ALL_STREAMS, args.correlation
    if name == _STREAM_SYNC and args.stream >= 0:
        return args.correlation, HOST, args.stream, args.correlation
    if name not in (_STREAM_WAIT, _EVENT_SYNC) or min(args.on_stream, args.recorded) < 0:
        return None
    if name == _STREAM_WAIT and args.stream < 0:
        return None
    waiter = args.stream if name == _STREAM_WAIT else HOST
    return args.correlation, waiter, args.on_stream, args.recorded


# Trace entries -> rows of columns, block by block, in the order of the file.

_OLD_OP = len(Category)
"""The category Operator of torch before 1.10: ops, and ranges that the host marked."""

CATEGORIES = {
    "cpu_op": Category.OP,
    "operator": _OLD_OP,
    "user_annotation": Category.ANNOTATION,
    "kernel": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,
    "hpu_op": Category.KERNEL,
    "privateuse1": Category.KERNEL,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "python_function": Category.PYTHON,
    "cuda_sync": Category.SYNC,
}

SUFFIX_CATEGORIES = {
    "runtime": Category.RUNTIME,
    "driver": Category.RUNTIME,
    "memcpy": Category.MEMCPY,
    "memset": Category.MEMSET,
}
"""Suffixes of categories such as "cuda_runtime", "xpu_driver", "gpu_memcpy", "Runtime" (2020)."""

PARAM_COMMS = "record_param_comms"

_RANGE_PREFIXES = (
    "ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#", "DataParallel.",
    "DistributedDataParallel.",
)  # fmt: skip
"""Ranges that some versions of torch and torch_npu write as ops."""

_BARE_OPS = (PARAM_COMMS, "detach", "detach_")
"""Ops without a namespace in their name, apart from the autograd nodes."""

_HAS_STREAM = np.zeros(len(Category), dtype=np.bool_)

_HAS_STREAM[[Category.RUNTIME, Category.KERNEL, Category.MEMCPY, Category.MEMSET]] = True

_MAY_COMMUNICATE = np.zeros(len(Category), dtype=np.bool_)

_MAY_COMMUNICATE[[Category.KERNEL, Category.MEMCPY]] = True

_COLUMNS = (np.int64, np.int64, np.uint8, np.int32, np.int32, np.int64)

_DIMS, _COLLECTIVE = b'"Input Dims"', b'"Collective name"'

_SHORT_TYPE = b'"c10::'
"""How the names of types in "Input type" begin, except those of float, double and integers."""

_SHORT_DTYPES = (
    (b"c10::Float8", b"fp8"),
    (b"c10::BFloat16", b"bf16"),
    (b"c10::Half", b"fp16"),
)

_DTYPE_MARK = b"\0"

_SAMPLES = 32
"""Number of ops of a block that are searched for shapes."""


@dataclass(frozen=True, slots=True)
class EntryCounts:
    """Number of entries read, unreadable entries, and entries with a negative duration.

    asynchronous (phases b, n, e) and paired (B, E) are entries that are not read as events, of
    blocks without any event that is.
    """

    entries: int = 0
    lost: int = 0
    negative: int = 0
    asynchronous: int = 0
    paired: int = 0

    def __add__(self, other: EntryCounts) -> EntryCounts:
        names = [field.name for field in fields(self)]
        return EntryCounts(*(getattr(self, name) + getattr(other, name) for name in names))


class ShapedRows(Struct, frozen=True):
    """The rows with input shapes or a launch grid; text_id indexes texts."""

    row: Int64
    text_id: Int32
    texts: tuple[str, ...]


class Rows(Struct, frozen=True):
    """The complete events of a trace or a part of it in file order; columns as in Events.

    noted_row are the communication events and the waits, noted_args the text of their arguments;
    tracks are the names of processes and threads.
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
    shaped: ShapedRows
    tracks: tuple[schema.Track, ...] = ()

    def __len__(self) -> int:
        return len(self.start_ns)


_LaneKey = tuple[int | str, int | str] | tuple[int | str, int | str, int, int]
"""A thread, or with device and stream a stream."""

_NO_PLACE = -1, -1
"""Device and stream of a thread."""


class _Numbers(dict[str, int]):
    """Numbers distinct names in order of appearance.

    noted: whether a name is communication; is_range: whether an event of the category of ops, or
    of the old one, is a range by its name.
    """

    def __init__(self, rules: Rules) -> None:
        self.noted: list[bool] = []
        self.is_range: list[tuple[bool, bool]] = []
        self._texts, self._asked, self._rules = list[str](), set[int](), rules

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        self.noted.append(name == PARAM_COMMS or name.startswith(("c10d::", "gloo:")))
        is_range = name.startswith(_RANGE_PREFIXES)
        is_op = "::" in name or "Backward" in name or name in _BARE_OPS
        self.is_range.append((is_range, is_range or not is_op))
        self._texts.append(name[:MAX_NAME_LENGTH])
        return number

    @property
    def texts(self) -> tuple[str, ...]:
        """The names, cut to the length that rules look at."""
        return tuple(self._texts)

    def note_of_device(self, numbers: Int32) -> None:
        """Marks which of these kernel and copy names are communication, once per name."""
        for number in set(list_distinct(numbers).tolist()) - self._asked:
            self.noted[number] |= self._rules.is_communication(self._texts[number])
            self._asked.add(number)


class _Lanes(dict[_LaneKey, int]):
    """Numbers distinct lanes."""

    def __missing__(self, key: _LaneKey) -> int:
        self[key] = number = len(self)
        return number


class _ShapeTexts(dict[tuple[int, ...] | bytes, int]):
    """Numbers distinct launch grids and input shapes; -1 for text without numbers: no tensors."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def __missing__(self, shape: tuple[int, ...] | bytes) -> int:
        if isinstance(shape, bytes):
            dims, _, dtype = shape.partition(_DTYPE_MARK)
            text = dims[dims.find(b"[") : dims.rfind(b"]") + 1].decode(errors="replace")
            text = f"{''.join(text.split()).replace(',', ', ')} {dtype.decode()}".rstrip()
        else:
            text = f"{GRID}{list(shape)}"
        known = any(map(str.isdecimal, text))
        self[shape] = number = self._numbers.setdefault(text, len(self.texts)) if known else -1
        if number == len(self.texts):
            self.texts.append(text)
        return number


class CategoryCodes(dict[str, int]):
    """Category codes by name, including the names of old torch versions."""

    def __missing__(self, name: str) -> int:
        lowered = name.lower()
        by_end = SUFFIX_CATEGORIES.get(lowered.rpartition("_")[2], Category.OTHER)
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
        self._names, self._lanes, self._categories = _Numbers(rules), _Lanes(), CategoryCodes()
        self._columns = tuple(bytearray() for _ in _COLUMNS)
        self._shapes = _ShapeTexts()
        self._shaped_rows, self._shape_ids = bytearray(), bytearray()
        self._noted_rows: list[int] = []
        self._noted_args: list[bytes] = []
        self._tracks: list[schema.Track] = []
        self._rows = 0
        self._counts = EntryCounts()

    def add(self, block: Entries) -> None:
        """Adds the complete events of a block, and the names of its tracks."""
        events = [entry for entry in block.entries if type(entry) is schema.Complete]
        if schema.TrackMetadata in map(type, block.entries):
            names = [e for e in block.entries if type(e) is schema.TrackMetadata]
            self._tracks += [t for t in map(schema.decode_track, names) if t is not None]
        start, has_start = schema.read_microseconds([event.ts for event in events])
        dur, has_dur = schema.read_microseconds([event.dur for event in events])
        out_of_range = 0
        if not (is_known := has_start & has_dur).all():
            # Without a time it is an entry of another kind; with one that is no number it is lost.
            others = [events[row].ts for row in np.flatnonzero(has_dur & ~has_start).tolist()]
            untimed = sum(bytes(ts) == b"null" for ts in others)
            out_of_range = int((~is_known).sum()) - untimed
            events = [events[row] for row in np.flatnonzero(is_known).tolist()]
            start, dur = start[is_known], dur[is_known]
        self._counts += EntryCounts(
            len(block.entries) - out_of_range, block.lost + out_of_range, int((dur < 0).sum())
        )
        if not events:
            phases = Counter(schema.get_phase(entry) for entry in block.entries)
            self._counts += EntryCounts(
                asynchronous=sum(phases[phase] for phase in "bne"),
                paired=sum(phases[phase] for phase in "BE"),
            )
        self._append(events, start, np.maximum(dur, 0))

    def _append(self, events: Sequence[schema.Complete], start: Int64, dur: Int64) -> None:
        names, lanes, categories = self._names, self._lanes, self._categories
        name_id = np.array([names[e.name] for e in events], dtype=np.int32)
        category = np.array([categories[e.cat] for e in events], dtype=np.uint8)
        is_range = np.array(names.is_range, dtype=np.bool_).reshape(-1, 2)[name_id]
        # Gives ops that are ranges by their name the category of annotations, in place.
        is_old = category == _OLD_OP
        category[is_old] = Category.OP
        category[(category == Category.OP) & np.where(is_old, *is_range.T[::-1])] = (
            Category.ANNOTATION
        )
        lane = np.array([lanes[e.pid, e.tid] for e in events], dtype=np.int32)
        correlation = np.full(len(events), -1, dtype=np.int64)
        names.note_of_device(name_id[_MAY_COMMUNICATE[category]])
        to_note = np.array(names.noted, dtype=np.bool_)[name_id] | (category == Category.SYNC)
        with_stream = np.flatnonzero(_HAS_STREAM[category])
        placed = with_stream.tolist()
        decoded = schema.decode_device_args([events[row].args for row in placed])
        correlation[with_stream] = [args.correlation for args in decoded]
        on_stream = [pair for pair in zip(placed, decoded, strict=True) if pair[1].stream >= 0]
        lane[[row for row, _ in on_stream]] = [
            lanes[events[row].pid, events[row].tid, args.device, args.stream]
            for row, args in on_stream
        ]
        to_note[
            [
                row
                for row, args in zip(placed, decoded, strict=True)
                # Most events have no such argument, and the property takes longer.
                if args.collective is not schema.MISSING and args.communicates
            ]
        ] = True
        # The sizes of copies between buffers of devices tell what NCCL's copy engines do.
        copied = np.where(category == Category.MEMCPY, name_id, -1)
        for number in list_distinct(copied[copied >= 0]).tolist():
            if DEVICE_COPY.search(names.texts[number]):
                to_note |= copied == number
        self._note(events, np.flatnonzero(to_note).tolist())
        kernels = np.flatnonzero(category[with_stream] == Category.KERNEL)
        self._add_shapes(with_stream[kernels], [decoded[i].grid for i in kernels.tolist()])
        ops = np.flatnonzero(category == Category.OP)
        # Whether shapes were recorded: then most ops have them.
        samples = ops[:: len(ops) // _SAMPLES + 1].tolist()
        numbered = schema.decode_op_args([events[row].args for row in ops.tolist()])
        correlation[ops] = np.maximum([args.sequence for args in numbered], -1)
        if any(_DIMS in bytes(events[row].args) for row in samples):
            self._add_shapes(ops, [_cut_dims(events[row].args) for row in ops.tolist()])
        parts: tuple[npt.NDArray[Any], ...] = (start, dur, category, name_id, lane, correlation)
        for column, part in zip(self._columns, parts, strict=True):
            column += part.tobytes()
        self._rows += len(events)

    def _note(self, events: Sequence[schema.Complete], rows: Sequence[int]) -> None:
        self._noted_rows += [self._rows + row for row in rows]
        self._noted_args += [bytes(events[row].args) for row in rows]

    def _add_shapes(self, rows: Int64, shapes: Iterable[tuple[int, ...] | bytes]) -> None:
        numbers = self._shapes
        text_id = np.array([numbers[shape] for shape in shapes], dtype=np.int32)
        known = text_id >= 0
        self._shaped_rows += (rows + self._rows)[known].tobytes()
        self._shape_ids += text_id[known].tobytes()

    def build(self) -> Rows:
        """The rows added so far."""
        columns: Any = map(np.frombuffer, self._columns, _COLUMNS)
        start, dur, category, name_id, lane, correlation = columns
        shaped_row = np.frombuffer(self._shaped_rows, dtype=np.int64)
        shape_id = np.frombuffer(self._shape_ids, dtype=np.int32)
        return Rows(
            start_ns=start,
            dur_ns=dur,
            category=category,
            name_id=name_id,
            lane=lane,
            correlation=correlation,
            names=self._names.texts,
            lanes=tuple(
                Lane(str(pid), str(tid), *(place or _NO_PLACE)) for pid, tid, *place in self._lanes
            ),
            noted_row=np.array(self._noted_rows, dtype=np.int64),
            noted_args=tuple(self._noted_args),
            counts=self._counts,
            shaped=ShapedRows(shaped_row, shape_id, tuple(self._shapes.texts)),
            tracks=tuple(self._tracks),
        )


def _cut_dims(args: Raw) -> bytes:
    """The text between the name of the shapes and the next name, and a dtype of less than 32 bits;
    decoding it would take longer."""
    text = bytes(args)
    dims = text.rpartition(_DIMS)[2].partition(b'"')[0]
    if _SHORT_TYPE not in text:
        return dims
    dtype = next((dtype for name, dtype in _SHORT_DTYPES if name in text), b"")
    return dims + _DTYPE_MARK + dtype


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
