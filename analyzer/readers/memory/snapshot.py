"""A file of recorded memory -> MemoryRecord: torch's pickled allocator snapshot, or a timeline.

A snapshot is the allocator's state, with the trace of events that led to it where one was recorded.
The trace is a ring (max_entries) that may have lost its beginning, so it is walked backwards from
the state at its end, which is exact. The trace tells what was asked for, not what was given: a
block that is gone by the end is taken to have held that, rounded up to the allocator's unit. It may
have held up to a MiB more (a rest too small to split off), so a peak may be told a little too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import sub
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.memory import timeline as memory_timeline
from stepsplit.analyzer.readers.memory.record import (
    DeviceMemory,
    MemoryCurve,
    MemoryRecord,
    empty_curve,
)
from stepsplit.analyzer.readers.pickles import machine as pickles
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.unpack import HEAD_BYTES, unpacked
from stepsplit.analyzer.trace import Note

ALLOCATOR_UNIT_BYTES = 512
_NEVER_READ = frozenset(
    {"frames", "cpp_frames", "forward_frames", "allocator_settings", "external_annotations"}
)
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_FREES = frozenset({"free_requested", "free_completed"})
_MOST_BYTES = 1 << 60
_Kind = TypeVar("_Kind", bound=Struct)

Size = Annotated[int, Meta(ge=0, le=1 << 50)]


class _History(Struct):
    real_size: Size


class _Block(Struct):
    """A part of a segment; history is where torch 1.13 and 2.0 keep the requested size."""

    size: Size
    state: str
    address: int = -1
    requested_size: Size | None = None
    history: tuple[_History, ...] = ()


class _Segment(Struct):
    total_size: Size
    address: int = -1
    device: Annotated[int, Meta(ge=-1, le=1 << 16)] = 0
    blocks: tuple[_Block, ...] = ()


class _Event(Struct):
    """An act of the allocator; time_us since torch 2.1."""

    action: str
    addr: int = -1
    size: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    time_us: Annotated[int, Meta(ge=-1, le=1 << 52)] = -1


class _Snapshot(Struct):
    segments: list[Any]
    device_traces: list[list[Any]] = []


def recognizes(head: bytes) -> bool:
    """Whether the bytes begin as an allocator snapshot or a memory timeline does."""
    if pickles.recognizes(head):
        return b"device_traces" in head or (b"segment_type" in head and b"total_size" in head)
    return memory_timeline.recognizes(head)


def read_memory(source: Source) -> MemoryRecord:
    """The memory that the file recorded.

    Odd segments and events are left out and counted. Raises DataError for what is no such record,
    and for a pickle that is cut: its state at the end would be missing.
    """
    with unpacked(source) as content:
        first = content.read(HEAD_BYTES)
        if not pickles.recognizes(first):
            return memory_timeline.read_timeline(first, content, source.where)
        text = first + pickles.read_whole(content, source.where)
    snapshot = _snapshot(pickles.plain_value(text, source.where, _NEVER_READ), source.where)
    return _to_record(source.where, snapshot)


def _snapshot(value: object, where: str) -> _Snapshot:
    """The snapshot that plain values are; torch.cuda.memory_snapshot is its segments alone."""
    try:
        return msgspec.convert({"segments": value} if isinstance(value, list) else value, _Snapshot)
    except msgspec.ValidationError as error:
        raise DataError(where, f"no memory snapshot ({error})", RECORD_AGAIN) from None


def _to_record(where: str, snapshot: _Snapshot) -> MemoryRecord:
    segments = _plain(snapshot.segments, _Segment)
    traces = [_plain(trace, _Event) for trace in snapshot.device_traces]
    told = len(snapshot.segments) + sum(len(trace) for trace in snapshot.device_traces)
    odd = told - len(segments) - sum(len(trace) for trace in traces)
    events = {number: trace for number, trace in enumerate(traces) if trace}
    numbers = sorted({segment.device for segment in segments} | events.keys())
    devices = tuple(
        _device(number, [s for s in segments if s.device == number], events.get(number, ()))
        for number in numbers
    )
    lost = [d.device for d in devices if d.device in events and not len(d.curve)]
    return MemoryRecord(where, "snapshot", devices, (), _notes(odd, lost))


def _notes(odd: int, lost: Sequence[int]) -> tuple[Note, ...]:
    notes = []
    if odd:
        notes.append(Note("memory_odd", f"{odd} odd entries of the snapshot are left out"))
    if lost:
        text = f"the trace of device {lost[0]} does not lead to its state: no peaks are told"
        notes.append(Note("memory_trace_odd", text))
    return tuple(notes)


def _plain(values: Sequence[object], kind: type[_Kind]) -> list[_Kind]:
    """The values that are of the kind."""
    found = []
    for value in values:
        try:
            found.append(msgspec.convert(value, kind))
        except msgspec.ValidationError:
            continue
    return found


def _device(number: int, segments: Sequence[_Segment], events: Sequence[_Event]) -> DeviceMemory:
    """The device's state at the end and, walked backwards from there, its curve."""
    placed = [pair for segment in segments for pair in _placed(segment)]
    active = [(place, block) for place, block in placed if block.state.startswith("active")]
    allocated = [(place, block) for place, block in active if block.state == "active_allocated"]
    reserved_bytes = sum(segment.total_size for segment in segments)
    # A trace may leave the requests out; then a block counts until it is free for reuse.
    acts = {event.action for event in events}
    gone = "free_completed" if acts & _FREES == {"free_completed"} else "free_requested"
    live = active if gone == "free_completed" else allocated
    curve = _curve(
        events,
        _backwards(
            sum(block.size for _, block in live),
            _allocated_by(events, {place: block.size for place, block in live}, gone),
        ),
        _backwards(reserved_bytes, [_RESERVES.get(e.action, 0) * e.size for e in events]),
    )
    return DeviceMemory(
        device=number,
        allocated_bytes=sum(block.size for _, block in allocated),
        reserved_bytes=reserved_bytes,
        active_bytes=sum(block.size for _, block in active),
        requested_bytes=_sum_of(_requested(block) for _, block in active),
        segments=len(segments),
        peak_allocated_bytes=int(curve.allocated_bytes.max(initial=-1)),
        peak_reserved_bytes=int(curve.reserved_bytes.max(initial=-1)),
        curve=curve,
    )


def _placed(segment: _Segment) -> Iterator[tuple[int, _Block]]:
    """The segment's blocks with their addresses, which old snapshots leave to be added up."""
    begins = accumulate((block.size for block in segment.blocks), initial=segment.address)
    for begin, block in zip(begins, segment.blocks, strict=False):
        yield (begin if block.address < 0 else block.address), block


def _requested(block: _Block) -> int:
    if block.requested_size is not None:
        return block.requested_size
    return block.history[0].real_size if block.history else -1


def _sum_of(sizes: Iterable[int]) -> int:
    """The sum; -1 where one is unknown."""
    known = list(sizes)
    return -1 if -1 in known else sum(known)


def _allocated_by(events: Sequence[_Event], live: Mapping[int, int], gone: str) -> list[int]:
    """What each event adds to the allocated bytes; live is the size of the blocks left, by place.

    The last allocation at a live block's place is that block.
    """
    left = dict(live)
    changes = []
    for event in reversed(events):
        rounded = -(-event.size // ALLOCATOR_UNIT_BYTES) * ALLOCATOR_UNIT_BYTES
        if event.action == "alloc":
            changes.append(left.pop(event.addr, rounded))
        else:
            changes.append(-rounded if event.action == gone else 0)
    return changes[::-1]


def _backwards(end: int, changes: Sequence[int]) -> list[int]:
    """The value before the first change and after each, from the value after the last."""
    return list(accumulate(reversed(changes), sub, initial=end))[::-1]


def _curve(
    events: Sequence[_Event], allocated: Sequence[int], reserved: Sequence[int]
) -> MemoryCurve:
    """The curve, empty where there are no events or no device could have held these values."""
    held = (*allocated, *reserved)
    if not events or min(held) < 0 or max(held) > _MOST_BYTES:
        return empty_curve()
    times_us = [event.time_us for event in events]
    times_ns = [time_us * 1000 if time_us >= 0 else -1 for time_us in (times_us[0], *times_us)]
    return MemoryCurve(*(np.array(c, dtype=np.int64) for c in (times_ns, allocated, reserved)))
