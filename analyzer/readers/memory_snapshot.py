"""Reads memory recordings: torch's allocator snapshot, or a memory timeline."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from operator import sub
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import HEAD_BYTES, UnpackedStream, open_unpacked
from stepsplit.analyzer.readers.pickle import is_pickle, load_plain_value, read_whole
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Int64, Lack, Note

# A snapshot is the allocator's state, optionally with the trace of events that led to it. The trace
# is a ring buffer (max_entries) that may have lost its beginning, so it is evaluated backwards from
# the final state, which is exact. Events contain requested sizes, not allocated ones: a block that
# was freed before the end counts as the requested size, rounded up to the allocator's unit. The
# block may have been up to 1 MiB larger (a remainder too small to split off), so a peak may be
# slightly underestimated.

ALLOCATOR_UNIT_BYTES = 512
"""kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp."""

# Python's stack of an allocation is kept, those of C++ and of the forward are not.
_UNUSED_KEYS = frozenset({"cpp_frames", "forward_frames", "external_annotations"})

MOST_STACKS, _MOST_FRAMES, _MOST_FRAME_CHARACTERS = 32, 24, 240
"""Stacks that are kept of a device, their innermost frames, and characters of each."""

_LIBRARY = re.compile(r"-packages/|/lib/(?=python3\.\d+/)")
"""Before the path of a file in an installed package or in the standard library."""

_HOME = re.compile(r"\A(?:[A-Za-z]:)?/(?:(?:home|Users)/[^/]+|root)/")

_MOST_PATH_PARTS = 2
"""The name of a file and of its folder."""

# map and unmap are those of expandable segments.
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

_FREES = frozenset({"free_requested", "free_completed"})

_MAX_BYTES = 1 << 60
"""A sum of sizes beyond is damage: it would come near the end of int64."""

_Kind = TypeVar("_Kind", bound=Struct)

Size = Annotated[int, Meta(ge=0, le=1 << 50)]


class _History(Struct):
    real_size: Size


class _Block(Struct):
    """A part of a segment; torch 1.13 and 2.0 keep the requested size in history."""

    size: Size
    state: str
    address: int = -1
    requested_size: Size | None = None
    history: tuple[_History, ...] = ()
    frames: Any = None


class _Segment(Struct):
    total_size: Size
    address: int = -1
    device: Annotated[int, Meta(ge=-1, le=1 << 16)] = 0
    blocks: tuple[_Block, ...] = ()


class _Event(Struct):
    """An event of the allocator; time_us since torch 2.1."""

    action: str
    addr: int = -1
    size: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    time_us: Annotated[int, Meta(ge=-1, le=1 << 52)] = -1
    frames: Any = None


class _Snapshot(Struct):
    segments: list[Any]
    device_traces: list[list[Any]] = []
    allocator_settings: Any = None


def is_memory_snapshot(head: bytes) -> bool:
    """Whether the bytes are the beginning of an allocator snapshot or a memory timeline."""
    if is_pickle(head):
        return b"device_traces" in head or (b"segment_type" in head and b"total_size" in head)
    return _RAW.match(head) is not None or _SUMMED.match(head) is not None


def read_memory(source: Source) -> MemoryRecord:
    """Reads the memory recording in the file.

    Invalid segments and events are skipped and counted. Raises DataError if the file is not a
    memory recording, or is a truncated pickle, which lacks the final state.
    """
    with open_unpacked(source) as content:
        first = content.read(HEAD_BYTES)
        if not is_pickle(first):
            return read_timeline(first, content, source.where)
        text = first + read_whole(content, source.where)
    value = load_plain_value(text, source.where, _UNUSED_KEYS)
    try:
        # torch.cuda.memory_snapshot returns only the list of segments.
        snapshot = msgspec.convert(
            {"segments": value} if isinstance(value, list) else value, _Snapshot
        )
    except msgspec.ValidationError as error:
        raise DataError(source.where, f"not a memory snapshot ({error})", RECORD_AGAIN) from None
    segments = _convert_values(snapshot.segments, _Segment)
    traces = [_convert_values(trace, _Event) for trace in snapshot.device_traces]
    n_entries = len(snapshot.segments) + sum(len(trace) for trace in snapshot.device_traces)
    # An entry of a later torch may lack what is needed here; the others still add up.
    n_odd = n_entries - len(segments) - sum(len(trace) for trace in traces)
    events = {number: trace for number, trace in enumerate(traces) if trace}
    numbers = sorted({segment.device for segment in segments} | events.keys())
    devices = tuple(
        _build_device_memory(
            number, [s for s in segments if s.device == number], events.get(number, ())
        )
        for number in numbers
    )
    lost = [d.device for d in devices if d.device in events and not len(d.curve)]
    notes = []
    if n_odd:
        notes.append(Note("memory_odd", f"{n_odd} invalid entries of the snapshot are skipped"))
    if lost:
        message = f"the trace of device {lost[0]} is inconsistent with its state: peaks are unknown"
        notes.append(Note("memory_trace_odd", message))
    settings = snapshot.allocator_settings
    if isinstance(settings, dict) and settings.get("trace_alloc_overflowed") is True:
        kept = sum(map(len, events.values()))
        message = (
            f"the history of allocations overflowed: its last {kept:,} events are known, and peaks"
            " before them are missing; record with larger max_entries"
        )
        notes.append(Note("memory_overflowed", message, lack=Lack.MEMORY))
    return MemoryRecord(source.where, "snapshot", devices, (), tuple(notes))


def _convert_values(values: Sequence[object], kind: type[_Kind]) -> list[_Kind]:
    """The values that can be converted to the type."""
    converted = []
    for value in values:
        try:
            converted.append(msgspec.convert(value, kind))
        except msgspec.ValidationError:
            continue
    return converted


def _build_device_memory(
    number: int, segments: Sequence[_Segment], events: Sequence[_Event]
) -> DeviceMemory:
    """The final state of the device and, backwards from it, its curve."""
    placed: list[tuple[int, _Block]] = []
    for segment in segments:
        # Old snapshots have no addresses of blocks: then their sizes are added up.
        begins = accumulate((block.size for block in segment.blocks), initial=segment.address)
        for begin, block in zip(begins, segment.blocks, strict=False):
            placed.append((begin if block.address < 0 else block.address, block))
    active = [(place, block) for place, block in placed if block.state.startswith("active")]
    allocated = [(place, block) for place, block in active if block.state == "active_allocated"]
    reserved_bytes = sum(segment.total_size for segment in segments)
    requested = [
        block.requested_size
        if block.requested_size is not None
        else (block.history[0].real_size if block.history else -1)
        for _, block in active
    ]
    # Without free_requested events, a block counts until free_completed.
    actions = {event.action for event in events}
    free_action = "free_completed" if actions & _FREES == {"free_completed"} else "free_requested"
    live = active if free_action == "free_completed" else allocated
    # The change of the allocated bytes by each event, from the last to the first. The last
    # allocation at the address of a block of the final state is that block, whose size is known.
    left = {place: block.size for place, block in live}
    changes = []
    # What lived until the number of the event that freed it, by address.
    until: dict[int, tuple[int, int]] = {}
    lives: list[_Life] = []
    for number_of_event in range(len(events) - 1, -1, -1):
        event = events[number_of_event]
        rounded = -(-event.size // ALLOCATOR_UNIT_BYTES) * ALLOCATOR_UNIT_BYTES
        if event.action == "alloc":
            if event.addr in until:
                end, size = until.pop(event.addr)
            else:
                end, size = len(events), left.pop(event.addr, rounded)
            lives.append(_Life(number_of_event, end, size, event.frames))
            changes.append(size)
        else:
            changes.append(-rounded if event.action == free_action else 0)
            if event.action == free_action:
                until[event.addr] = number_of_event, rounded
    # Allocated before the first event: of what is left at the end its block has the stack.
    lives += [_Life(-1, end, size, None) for end, size in until.values()]
    frames_of = {place: block.frames for place, block in live}
    lives += [_Life(-1, len(events), size, frames_of[place]) for place, size in left.items()]
    curve = _build_curve(
        events,
        _accumulate_backwards(sum(block.size for _, block in live), changes),
        _accumulate_backwards(
            reserved_bytes, [_RESERVES.get(e.action, 0) * e.size for e in reversed(events)]
        ),
    )
    return DeviceMemory(
        device=number,
        allocated_bytes=sum(block.size for _, block in allocated),
        reserved_bytes=reserved_bytes,
        active_bytes=sum(block.size for _, block in active),
        requested_bytes=-1 if -1 in requested else sum(requested),
        segments=len(segments),
        peak_allocated_bytes=int(curve.allocated_bytes.max(initial=-1)),
        peak_reserved_bytes=int(curve.reserved_bytes.max(initial=-1)),
        curve=curve,
        stacks=_sum_stacks(lives, int(curve.allocated_bytes.argmax())) if len(curve) else (),
    )


class _Life(Struct, frozen=True):
    """An allocation, live after event `begin` (-1: before the first) until event `end`."""

    begin: int
    end: int
    size_bytes: int
    frames: Any


def _sum_stacks(lives: Sequence[_Life], peak: int) -> tuple[AllocationStack, ...]:
    """What lived after so many events by its stack, largest first; () if no stack is known."""
    sums: dict[tuple[tuple[str, object, object], ...], list[int]] = {}
    for one in lives:
        if not one.begin < peak <= one.end:
            continue
        stack = list[tuple[str, object, object]]()
        for frame in one.frames[:_MOST_FRAMES] if isinstance(one.frames, (list, tuple)) else ():
            if not isinstance(frame, dict):
                continue
            key = frame.get("filename"), frame.get("line"), frame.get("name")
            if all(isinstance(part, (str, int)) for part in key):
                stack.append((str(key[0]), key[1], key[2]))
        own = sums.setdefault(tuple(stack), [0, 0])
        own[0] += one.size_bytes
        own[1] += 1
    if not any(sums):
        return ()
    # Paths of the stacks that are kept, and of the others, which tell more of the folder of all.
    files = _shorten_paths({file for stack in sums for file, _, _ in stack})
    by_text: dict[tuple[str, ...], list[int]] = {}
    for frames, (size_bytes, count) in sums.items():
        lines = (" ".join(f"{files[file]}:{line} {name}".split()) for file, line, name in frames)
        own = by_text.setdefault(tuple(text[:_MOST_FRAME_CHARACTERS] for text in lines), [0, 0])
        own[0] += size_bytes
        own[1] += count
    largest = sorted(by_text.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(AllocationStack(stack, *own) for stack, own in largest[:MOST_STACKS])


def _shorten_paths(paths: Collection[str]) -> dict[str, str]:
    """What is shown of each file: of a library its path in it; of others its folder, if not that of
    all of them, and its name: not where the program lies, which may say whose it is."""
    short, others, folders = dict[str, str](), dict[str, list[str]](), list[list[str]]()
    for path in paths:
        unified = path.replace("\\", "/")
        library = _LIBRARY.split(unified)
        if len(library) > 1:
            short[path] = library[-1]
        else:
            others[path] = _HOME.sub("", unified).split("/")
            # "??" and "<string>" are in no folder.
            folders += [others[path][:-1]] if "/" in unified else []
    levels = zip(*folders, strict=False)
    common = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
    return short | {
        path: "/".join((parts[common:] if len(parts) > 1 else parts)[-_MOST_PATH_PARTS:])
        for path, parts in others.items()
    }


def _accumulate_backwards(end: int, last_to_first: Sequence[int]) -> list[int]:
    """The value before the first change and after each one, given the final value."""
    return list(accumulate(last_to_first, sub, initial=end))[::-1]


def _build_curve(
    events: Sequence[_Event], allocated: Sequence[int], reserved: Sequence[int]
) -> MemoryCurve:
    """The curve; empty if there are no events or the values are implausible."""
    sizes = (*allocated, *reserved)
    if not events or min(sizes) < 0 or max(sizes) > _MAX_BYTES:
        # As of a recording without events.
        empty = np.empty(0, dtype=np.int64)
        return MemoryCurve(empty, empty, empty)
    times_us = [event.time_us for event in events]
    times_ns = [time_us * 1000 if time_us >= 0 else -1 for time_us in (times_us[0], *times_us)]
    return MemoryCurve(*(np.array(c, dtype=np.int64) for c in (times_ns, allocated, reserved)))


# The memory timeline of torch.profiler, by category of tensor.
#
# Raw (".raw.json.gz"): a list of [time_ns, action, change_bytes, category], time -1 for earlier
# allocations. Else [[time_us, ...], [[0, bytes of each category], ...]]: cumulative sums.

CATEGORIES = (
    "parameter",
    "optimizer_state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd_detail",
    "unknown",
)
"""In the order of torch's index; "unknown" are tensors that torch cannot classify."""

# time_ns, action, change_bytes, category, within the ranges that torch can write
_ROW = re.compile(rb"\[\s*(-1|[0-8]?\d{1,18})\s*,\s*([1-4])\s*,\s*(-?\d{1,15})\s*,\s*([0-7])\s*\]")

_RAW = re.compile(rb"\A\s*\[\s*" + _ROW.pattern)

# Its first time is in microseconds of Unix time: 16 digits that begin with 1 until 2033.
_SUMMED = re.compile(rb"\A\s*\[\s*\[\s*1\d{15}\s*[,\]]")

_MAX_ROW_BYTES = 256
"""Longer than four integers of 64 bits and their spaces; chosen, not measured."""


def read_timeline(first: bytes, content: UnpackedStream, where: str) -> MemoryRecord:
    """Reads the timeline from the first bytes and the rest of the content.

    Invalid rows are skipped and counted. Raises DataError if it is not a timeline.
    """
    if _RAW.match(first) is None:
        times_ns, category_bytes = _decode_summed(first + read_whole(content, where), where)
        return _build_timeline_record(
            where, times_ns, category_bytes.sum(axis=1), category_bytes.T, ()
        )
    rows, n_odd, torn = _read_rows(first, content)
    # As floats: the sum of damaged sizes may not fit into 64 bits.
    if float(np.abs(rows[:, 2].astype(np.float64)).sum()) > _MAX_BYTES:
        raise DataError(where, "implausible sizes", RECORD_AGAIN)
    times_ns, changes = rows[:, 0], rows[:, 2]
    if len(known := times_ns[times_ns >= 0]):
        # Allocations before the recording have no time: they get that of the first event.
        times_ns = np.where(times_ns < 0, known[0], times_ns)
    kinds = (np.where(rows[:, 3] == kind, changes, 0) for kind in range(len(CATEGORIES)))
    category_curves = (np.cumsum(own) for own in kinds)
    notes = []
    if n_odd:
        notes.append(Note("memory_odd", f"{n_odd} invalid rows of the timeline are skipped"))
    if torn:
        notes.append(Note("memory_torn", "the timeline is cut off: its end is missing"))
    return _build_timeline_record(
        where, times_ns, np.cumsum(changes), category_curves, tuple(notes)
    )


def _read_rows(first: bytes, content: UnpackedStream) -> tuple[Int64, int, bool]:
    """The rows, the number of invalid ones, and whether the list is truncated."""
    blocks, ends, rest, last = [], 0, first, first
    for block in _read_blocks(content):
        text = rest + block
        whole = text.rfind(b"]") + 1
        # A row ends with a bracket: up to the last one the text is parsed, the rest with the next.
        found = _ROW.findall(text[:whole])
        blocks.append(np.array(found, dtype="S20").reshape(-1, 4).astype(np.int64))
        ends += text.count(b"]", 0, whole)
        rest = text[whole:][-_MAX_ROW_BYTES:]
        last = (last + block)[-_MAX_ROW_BYTES:]
    rows = np.concatenate(blocks)
    closed = re.search(rb"\]\s*\]\s*$", last) is not None
    return rows, ends - len(rows) - closed, not closed or bool(content.torn)


def _read_blocks(content: UnpackedStream) -> Iterator[bytes]:
    """The rest of the content, then b"" once, so that bytes read before are processed too."""
    while block := content.read(1 << 20):
        yield block
    yield b""


def _decode_summed(text: bytes, where: str) -> tuple[Int64, Int64]:
    """The times, and the bytes of each category: shapes (times,) and (times, categories)."""
    try:
        times_us, sizes = msgspec.json.decode(text, type=tuple[list[int], list[list[int]]])
        category_bytes = np.array(sizes, dtype=np.int64)[:, 1:]
        times_ns = np.array(times_us, dtype=np.int64) * 1000
    except (msgspec.DecodeError, ValueError, OverflowError, IndexError) as error:
        raise DataError(where, f"not a complete memory timeline ({error})", RECORD_AGAIN) from None
    if category_bytes.shape != (len(times_ns), len(CATEGORIES)) or not len(category_bytes):
        raise DataError(where, "a memory timeline of unexpected shape", RECORD_AGAIN)
    if float(np.abs(category_bytes.astype(np.float64)).sum(axis=1).max()) > _MAX_BYTES:
        raise DataError(where, "implausible sizes", RECORD_AGAIN)
    return times_ns, category_bytes


def _build_timeline_record(
    where: str,
    times_ns: Int64,
    total: Int64,
    category_bytes: Iterable[Int64],
    notes: tuple[Note, ...],
) -> MemoryRecord:
    """The record of total bytes and bytes of each category over time."""
    peak = int(total.argmax())
    device = DeviceMemory(
        device=-1,
        allocated_bytes=int(total[-1]),
        reserved_bytes=-1,
        active_bytes=-1,
        requested_bytes=-1,
        segments=-1,
        peak_allocated_bytes=int(total[peak]),
        peak_reserved_bytes=-1,
        curve=MemoryCurve(times_ns, total, np.full(len(total), -1, dtype=np.int64)),
    )
    categories = tuple(
        CategoryMemory(name, int(own.max()), int(own[peak]))
        for name, own in zip(CATEGORIES, category_bytes, strict=True)
    )
    return MemoryRecord(where, "timeline", (device,), categories, notes)


class MemoryCurve(Struct, frozen=True):
    """Memory after each event, in the order of the events; -1 is unknown.

    The first row of a snapshot is the state before its first event. Columns of shape (n,).

    Attributes:
        time_ns: Unix time in ns.
        allocated_bytes: Bytes of live tensors.
        reserved_bytes: Bytes that the allocator has reserved on the device.
    """

    time_ns: Int64
    allocated_bytes: Int64
    reserved_bytes: Int64

    def __len__(self) -> int:
        return len(self.time_ns)


class AllocationStack(Struct, frozen=True):
    """What was allocated by one line of the program and lived at the peak of a device.

    Attributes:
        stack: File, line and function of each frame, the innermost first; () if unknown: most often
            it was allocated before the recording began.
        size_bytes: Their bytes.
        count: Their number.
    """

    stack: tuple[str, ...]
    size_bytes: int
    count: int


class DeviceMemory(Struct, frozen=True):
    """Memory of one device at the end of the recording, and its peaks; -1 is unknown.

    Attributes:
        device: Device number.
        allocated_bytes: Bytes of live tensors.
        reserved_bytes: Bytes that the allocator has reserved on the device.
        active_bytes: Allocated bytes, and freed ones that are still in use by a stream.
        requested_bytes: Bytes that were requested for the active blocks.
        segments: Number of segments of the allocator.
        peak_allocated_bytes: Maximum of the curve, that is within the recorded time.
        peak_reserved_bytes: Maximum of the curve, that is within the recorded time.
        curve: Memory over time; empty if no events were recorded.
        stacks: What lived at the peak of allocated bytes by its stack, largest first; () without
            stacks. Default: ().
    """

    device: int
    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int
    requested_bytes: int
    segments: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    curve: MemoryCurve
    stacks: tuple[AllocationStack, ...] = ()


class CategoryMemory(Struct, frozen=True):
    """Memory of one category of tensors in a memory timeline.

    Attributes:
        name: The category, such as "parameter" or "activation".
        peak_bytes: The category's own peak.
        at_peak_bytes: Its bytes at the peak of the device; they add up to peak_allocated_bytes.
    """

    name: str
    peak_bytes: int
    at_peak_bytes: int


class MemoryRecord(Struct, frozen=True):
    """The memory of one process, recorded by the caching allocator or torch.profiler.

    Attributes:
        source: The file.
        kind: "snapshot" (allocator) or "timeline" (torch.profiler).
        devices: The memory of each device.
        categories: The memory by category of tensor; () for a snapshot.
        notes: Limitations of the recording.
    """

    source: str
    kind: Literal["snapshot", "timeline"]
    devices: tuple[DeviceMemory, ...]
    categories: tuple[CategoryMemory, ...]
    notes: tuple[Note, ...] = ()
