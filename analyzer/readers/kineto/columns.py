"""Converts trace entries to columns, block by block in file order, and sorts them at the end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from operator import add
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Raw, Struct, structs

from stepsplit.analyzer.arrays import list_distinct
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto import schema
from stepsplit.analyzer.readers.kineto.block_events import (
    OLD_OP,
    BlockEvents,
    DecodedEvents,
    Numbers,
    ScannedEvents,
)
from stepsplit.analyzer.readers.kineto.collective_launches import DEVICE_COPY
from stepsplit.analyzer.readers.kineto.json_stream import Entries, decode_entry
from stepsplit.analyzer.readers.kineto.scanned_block import ScannedBlock
from stepsplit.analyzer.trace import (
    ALL_STREAMS,
    DEVICE_CATEGORIES,
    HOST,
    MODULE_MARK,
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


class SortedRows(Struct, frozen=True):
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

_HAS_STREAM = np.zeros(len(Category), dtype=np.bool_)

_HAS_STREAM[[Category.RUNTIME, Category.KERNEL, Category.MEMCPY, Category.MEMSET]] = True

_MAY_COMMUNICATE = np.zeros(len(Category), dtype=np.bool_)

_MAY_COMMUNICATE[[Category.KERNEL, Category.MEMCPY]] = True

_COLUMNS = (np.int64, np.int64, np.uint8, np.int32, np.int32, np.int64)


class EntryCounts(Struct, frozen=True):
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
        return EntryCounts(*map(add, structs.astuple(self), structs.astuple(other)))


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


_COLLECTIVE, _MODULE = b'"Collective name"', re.compile(b'"module_fqn"')

_NO_PLACE = -1, -1
"""Device and stream of a thread."""


def build_rows(blocks: Iterable[Entries], rules: Rules = BUILT_IN) -> Rows:
    """The complete events of the blocks."""
    builder = _Builder(rules)
    for block in blocks:
        builder.add(block)
    return builder.build()


class _Builder:
    """Builds Rows from blocks of entries; columns grow in place, so no row is in memory twice."""

    def __init__(self, rules: Rules) -> None:
        self._numbers = Numbers(rules)
        self._columns = tuple(bytearray() for _ in _COLUMNS)
        self._shaped_rows, self._shape_ids = bytearray(), bytearray()
        self._noted_rows: list[int] = []
        self._noted_args: list[bytes] = []
        self._tracks: list[schema.Track] = []
        self._rows = 0
        self._counts = EntryCounts()

    def add(self, block: Entries) -> None:
        """Adds the complete events of a block, and the names of its tracks."""
        if block.scanned is not None:
            self._add_scanned(block.scanned)
            return
        events = [entry for entry in block.entries if type(entry) is schema.Complete]
        if schema.TrackMetadata in map(type, block.entries):
            self._add_tracks([e for e in block.entries if type(e) is schema.TrackMetadata])
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
        self._append(DecodedEvents(events, start, dur, self._numbers))

    def _add_scanned(self, block: ScannedBlock) -> None:
        entries = [decode_entry(bytes(block.text[begin:end])) for begin, end in block.metadata]
        self._add_tracks([entry for entry in entries if isinstance(entry, schema.TrackMetadata)])
        events = ScannedEvents(block, self._numbers)
        self._counts += EntryCounts(block.entries, negative=int((events.dur_ns < 0).sum()))
        if not len(events.dur_ns):
            self._counts += EntryCounts(asynchronous=block.asynchronous, paired=block.paired)
        self._append(events)

    def _add_tracks(self, entries: Sequence[schema.TrackMetadata]) -> None:
        tracks = map(schema.decode_track, entries)
        self._tracks += [track for track in tracks if track is not None]

    def _append(self, events: BlockEvents) -> None:
        names, name_id, category = self._numbers.names, events.name_id, events.category
        is_range = np.array(names.is_range, dtype=np.bool_).reshape(-1, 2)[name_id]
        # Gives ops that are ranges by their name the category of annotations, in place.
        is_old = category == OLD_OP
        category[is_old] = Category.OP
        category[(category == Category.OP) & np.where(is_old, *is_range.T[::-1])] = (
            Category.ANNOTATION
        )
        lane, correlation = events.lane, np.full(len(name_id), -1, dtype=np.int64)
        names.note_of_device(name_id[_MAY_COMMUNICATE[category]])
        to_note = np.array(names.noted, dtype=np.bool_)[name_id] | (category == Category.SYNC)
        with_stream = np.flatnonzero(_HAS_STREAM[category])
        device = events.read_device_args(with_stream, category[with_stream] == Category.KERNEL)
        correlation[with_stream] = device.correlation
        lane[with_stream] = device.lane
        to_note[with_stream[device.communicates]] = True
        # The sizes of copies between buffers of devices tell what NCCL's copy engines do.
        copied = np.where(category == Category.MEMCPY, name_id, -1)
        for number in list_distinct(copied[copied >= 0]).tolist():
            if DEVICE_COPY.search(names.texts[number]):
                to_note |= copied == number
        noted = np.flatnonzero(to_note).tolist()
        self._noted_rows += [self._rows + row for row in noted]
        self._noted_args += [events.copy_args(row) for row in noted]
        self._add_shapes(with_stream, device.grid)
        ops = np.flatnonzero(category == Category.OP)
        correlation[ops] = np.maximum(events.read_sequences(ops), -1)
        if (shapes := events.read_shapes(ops)) is not None:
            self._add_shapes(ops, shapes)
        dur_ns = np.maximum(events.dur_ns, 0)
        self._append_rows(events.start_ns, dur_ns, category, name_id, lane, correlation)
        self._add_modules(events, with_stream[category[with_stream] == Category.KERNEL], lane)

    def _add_modules(self, events: BlockEvents, kernels: Int64, lane: Int32) -> None:
        """A range on the device for each kernel that says its module, as those of CUDA graphs do,
        which no range of the host says."""
        # Most traces have none, and the arguments of all kernels take time to read.
        if not len(kernels) or not events.may_state(_MODULE, kernels):
            return
        stated = schema.decode_module_args([Raw(events.copy_args(row)) for row in kernels.tolist()])
        has_path = np.array([bool(one.path) for one in stated], dtype=np.bool_)
        names = [self._numbers.names[f"{MODULE_MARK}{one.path}"] for one in stated if one.path]
        rows = kernels[has_path]
        self._append_rows(
            events.start_ns[rows],
            np.maximum(events.dur_ns[rows], 0),
            np.full(len(rows), int(Category.GPU_ANNOTATION), dtype=np.uint8),
            np.array(names, dtype=np.int32),
            lane[rows],
            np.full(len(rows), -1, dtype=np.int64),
        )

    def _append_rows(self, *parts: npt.NDArray[Any]) -> None:
        """Appends to each column, in the order of _COLUMNS."""
        for column, part in zip(self._columns, parts, strict=True):
            column += part.tobytes()
        self._rows += len(parts[0])

    def _add_shapes(self, rows: Int64, text_id: Int32) -> None:
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
            names=self._numbers.names.texts,
            lanes=tuple(
                Lane(str(pid), str(tid), *(place or _NO_PLACE))
                for pid, tid, *place in self._numbers.lanes
            ),
            noted_row=np.array(self._noted_rows, dtype=np.int64),
            noted_args=tuple(self._noted_args),
            counts=self._counts,
            shaped=ShapedRows(shaped_row, shape_id, tuple(self._numbers.shapes.texts)),
            tracks=tuple(self._tracks),
        )


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
