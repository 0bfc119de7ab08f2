"""The memory timeline that torch.profiler exports -> MemoryRecord, by category of tensor.

Raw (".raw.json.gz"): a list of [time_ns, action, change_bytes, category], with time -1 for what was
there before. Else [[time_us, ...], [[0, bytes of each category], ...]]: the same, added up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.memory.record import (
    CategoryMemory,
    DeviceMemory,
    MemoryCurve,
    MemoryRecord,
)
from stepsplit.analyzer.readers.pickles.machine import read_whole
from stepsplit.analyzer.readers.unpack import Unpacked
from stepsplit.analyzer.trace import Int64, Note

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
"""By torch's index; "unknown" is what its profiler could not tell."""

_ROW = re.compile(rb"\[\s*(-1|[0-8]?\d{1,18})\s*,\s*([1-4])\s*,\s*(-?\d{1,15})\s*,\s*([0-7])\s*\]")
_RAW = re.compile(rb"\s*\[\s*" + _ROW.pattern)
_ADDED_UP = re.compile(rb"\s*\[\s*\[\s*1\d{15}\s*[,\]]")
_LONGEST_ROW = 256
_MOST_BYTES = 1 << 60


def recognizes(head: bytes) -> bool:
    """Whether the bytes begin as a memory timeline does, raw or added up."""
    return _RAW.match(head) is not None or _ADDED_UP.match(head) is not None


def read_timeline(first: bytes, content: Unpacked, where: str) -> MemoryRecord:
    """The timeline that begins with the first bytes and goes on in the content.

    Odd rows are left out and counted. Raises DataError for what is no timeline.
    """
    if _RAW.match(first) is None:
        times_ns, held = _added_up(first + read_whole(content, where), where)
        return _to_record(where, times_ns, held.sum(axis=1), held.T, ())
    rows, odd, torn = _rows(first, content)
    if float(np.abs(rows[:, 2].astype(np.float64)).sum()) > _MOST_BYTES:
        raise DataError(where, "sizes that no device has", RECORD_AGAIN)
    times_ns, changes = _in_time(rows[:, 0]), rows[:, 2]
    kinds = (np.where(rows[:, 3] == kind, changes, 0) for kind in range(len(CATEGORIES)))
    held_by_kind = (np.cumsum(own) for own in kinds)
    return _to_record(where, times_ns, np.cumsum(changes), held_by_kind, _notes(odd, torn))


def _in_time(times_ns: Int64) -> Int64:
    """The times, where what was there before is as old as the first event."""
    known = times_ns[times_ns >= 0]
    return np.where(times_ns < 0, known[0], times_ns) if len(known) else times_ns


def _notes(odd: int, torn: bool) -> tuple[Note, ...]:
    notes = []
    if odd:
        notes.append(Note("memory_odd", f"{odd} odd rows of the timeline are left out"))
    if torn:
        notes.append(Note("memory_torn", "the timeline is cut off: its end lacks"))
    return tuple(notes)


def _rows(first: bytes, content: Unpacked) -> tuple[Int64, int, bool]:
    """The rows, how many were odd, and whether the list lacks its end."""
    blocks, ends, rest, last = [], 0, first, first
    for block in _blocks(content):
        text = rest + block
        whole = text.rfind(b"]") + 1
        blocks.append(_numbers(text[:whole]))
        ends += text.count(b"]", 0, whole)
        rest = text[whole:][-_LONGEST_ROW:]
        last = (last + block)[-_LONGEST_ROW:]
    rows = np.concatenate(blocks)
    closed = re.search(rb"\]\s*\]\s*$", last) is not None
    return rows, ends - len(rows) - closed, not closed or bool(content.torn)


def _blocks(content: Unpacked) -> Iterator[bytes]:
    """The rest of the content, then nothing once, so that what was read before is looked at."""
    while block := content.read(1 << 20):
        yield block
    yield b""


def _numbers(text: bytes) -> Int64:
    """The rows in the text: time_ns, action, change_bytes, category. Shape (rows, 4)."""
    found = _ROW.findall(text)
    return np.array(found, dtype="S20").reshape(-1, 4).astype(np.int64)


def _added_up(text: bytes, where: str) -> tuple[Int64, Int64]:
    """When, and what each category held: shapes (times,) and (times, categories)."""
    try:
        times_us, sizes = msgspec.json.decode(text, type=tuple[list[int], list[list[int]]])
        held = np.array(sizes, dtype=np.int64)[:, 1:]
        times_ns = np.array(times_us, dtype=np.int64) * 1000
    except (msgspec.DecodeError, ValueError, OverflowError, IndexError) as error:
        raise DataError(where, f"not a whole memory timeline ({error})", RECORD_AGAIN) from None
    if held.shape != (len(times_ns), len(CATEGORIES)) or not len(held):
        raise DataError(where, "a memory timeline of another shape", RECORD_AGAIN)
    if float(np.abs(held.astype(np.float64)).sum(axis=1).max()) > _MOST_BYTES:
        raise DataError(where, "sizes that no device has", RECORD_AGAIN)
    return times_ns, held


def _to_record(
    where: str, times_ns: Int64, total: Int64, held: Iterable[Int64], notes: tuple[Note, ...]
) -> MemoryRecord:
    """The record of what was held at each time, in all and by each category."""
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
        for name, own in zip(CATEGORIES, held, strict=True)
    )
    return MemoryRecord(where, "timeline", (device,), categories, notes)
