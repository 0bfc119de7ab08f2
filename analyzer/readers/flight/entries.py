"""One entry of a Flight Recorder dump: a collective or message as the host called it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stepsplit.analyzer.readers.communication import (
    MOST_CALL_BYTES,
    element_bytes,
    known_bytes,
    op_named,
)
from stepsplit.analyzer.readers.flight.format import RawEntry

_MOST_DIMS = 64


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of code that a stack goes through."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One collective or message as the host called it; -1 and "" are unknown.

    created_unix_ns is the time of the call; started and completed are when the watchdog noticed,
    maybe much later. dur_ns is the device's own where torch timed it, else what the watchdog saw.
    state is "scheduled", "started" or "completed"; gloo's stays "scheduled", and there as with NCCL
    retired tells that nobody waits for the call any more. The stack is innermost first.
    """

    group_name: str
    group_description: str
    group_number: int
    seq: int
    name: str
    created_unix_ns: int
    dtype: str
    input_bytes: int
    output_bytes: int
    state: str
    is_p2p: bool
    started_unix_ns: int
    completed_unix_ns: int
    dur_ns: int
    retired: bool
    timeout_ns: int
    thread_name: str
    stack: tuple[Frame, ...]


def to_entry(raw: RawEntry) -> FlightEntry:
    """The entry under the names of today."""
    name, description = _group_of(raw)
    is_p2p = op_of(raw.profiling_name) in ("send", "recv") if raw.is_p2p is None else raw.is_p2p
    seq = raw.p2p_seq_id if is_p2p else raw.collective_seq_id
    created_us = raw.time_created_us
    started, completed = raw.time_discovered_started_ns, raw.time_discovered_completed_ns
    return FlightEntry(
        group_name=name,
        group_description=description,
        group_number=raw.pg_id,
        seq=raw.seq_id if seq < 0 else seq,
        name=raw.profiling_name,
        created_unix_ns=raw.time_created_ns if created_us < 0 else created_us * 1000,
        dtype=raw.input_dtypes[0] if raw.input_dtypes else "",
        input_bytes=_bytes(raw.input_sizes, raw.input_dtypes),
        output_bytes=_bytes(raw.output_sizes, raw.output_dtypes or raw.input_dtypes),
        state=raw.state,
        is_p2p=is_p2p,
        started_unix_ns=started or -1,
        completed_unix_ns=completed or -1,
        dur_ns=_dur_ns(raw.duration_ms, started or -1, completed or -1),
        retired=raw.retired,
        timeout_ns=raw.timeout_ms * 1_000_000 if raw.timeout_ms >= 0 else -1,
        thread_name=raw.thread_name,
        stack=tuple(_frame(one.name, one.filename, one.line) for one in raw.frames),
    )


def _group_of(raw: RawEntry) -> tuple[str, str]:
    """The group's name and description; a dump without names has the group's number."""
    match raw.process_group:
        case str(name):
            return name, raw.pg_desc
        case (name, description, *_):
            return name, description
        case (name,):
            return name, raw.pg_desc
    return raw.pg_name or (str(raw.pg_id) if raw.pg_id >= 0 else ""), raw.pg_desc


def op_of(name: str) -> str:
    """The op of a name such as "nccl:all_reduce" or "nccl:recv 0<-1"."""
    return op_named(name.partition(":")[2] or name)


def _dur_ns(duration_ms: float | None, started_ns: int, completed_ns: int) -> int:
    if duration_ms is not None:
        return round(duration_ms * 1e6)
    return completed_ns - started_ns if completed_ns > started_ns > 0 else -1


@lru_cache(maxsize=4096)
def _frame(function: str, file: str, line: int) -> Frame:
    """The frame, one object for all the stacks that go through it."""
    return Frame(function, file, line)


def _bytes(sizes: Any, dtypes: Sequence[str]) -> int:
    """The size of tensors of these shapes; one tensor's shape may come without a list around it."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return -1
    shapes = [sizes] if all(isinstance(dim, int) for dim in sizes) else sizes
    kinds = dtypes if len(dtypes) == len(shapes) else [*dtypes[:1]] * len(shapes)
    widths = [element_bytes(kind) for kind in kinds]
    counts = [_elements(shape) for shape in shapes]
    if not widths or min(widths + counts) < 0:
        return -1
    return known_bytes(sum(c * width for c, width in zip(counts, widths, strict=True)))


def _elements(shape: Any) -> int:
    """The elements of a tensor; -1 for what is no shape."""
    if not isinstance(shape, (list, tuple)) or len(shape) > _MOST_DIMS:
        return -1
    whole = all(isinstance(dim, int) and 0 <= dim <= MOST_CALL_BYTES for dim in shape)
    return math.prod(shape) if whole else -1
