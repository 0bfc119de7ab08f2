"""Trace entries -> Events, columns sorted by start."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from stepsplit.analyzer.readers.kineto import Args, TraceEvent, args_of, decimal_times
from stepsplit.analyzer.readers.timestamps import exact_ns, exact_ns_of_decimals
from stepsplit.analyzer.trace import Category, Events, Int64, Lane

CATEGORIES = {
    "cpu_op": Category.OP,
    "operator": Category.OP,
    "user_annotation": Category.ANNOTATION,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "python_function": Category.PYTHON,
}
_WITH_CORRELATION = frozenset({Category.RUNTIME, Category.KERNEL, Category.MEMCPY, Category.MEMSET})
_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Sorted:
    """The durations of a trace as Events, with the entry and the arguments behind each row."""

    events: Events
    t0_unix_ns: int
    entries: tuple[TraceEvent, ...]
    args: tuple[Args | None, ...]


def to_events(entries: Sequence[TraceEvent], text: bytes, base_ns: int) -> Sorted:
    """The entries that have a duration, as columns sorted by start.

    t0_unix_ns is the earliest start; base_ns is what the trace counts its times from.
    """
    chosen = [i for i, e in enumerate(entries) if e.ph == "X" and e.ts is not None]
    start, dur = _times(entries, chosen, text)
    order = np.argsort(start, kind="stable")
    kept = [entries[chosen[i]] for i in order.tolist()]
    categories = [CATEGORIES.get(e.cat.lower(), Category.OTHER) for e in kept]
    args = [
        args_of(e) if c in _WITH_CORRELATION else None
        for e, c in zip(kept, categories, strict=True)
    ]
    name_id, names = _coded([entry.name for entry in kept])
    lane, lanes = _coded([_lane_key(e, a) for e, a in zip(kept, args, strict=True)])
    t0 = int(start[order[0]]) if len(kept) else 0
    events = Events(
        start_ns=start[order] - t0,
        dur_ns=np.maximum(dur[order], 0),
        category=np.array(categories, dtype=np.uint8),
        name_id=np.array(name_id, dtype=np.int32),
        lane=np.array(lane, dtype=np.int32),
        correlation=np.array([-1 if a is None else a.correlation for a in args], dtype=np.int64),
        names=names,
        lanes=tuple(Lane(str(pid), str(tid), *place) for pid, tid, *place in lanes),
    )
    return Sorted(events, base_ns + t0, tuple(kept), tuple(args))


def _times(entries: Sequence[TraceEvent], chosen: list[int], text: bytes) -> tuple[Int64, Int64]:
    start = exact_ns([entries[i].ts or 0 for i in chosen])
    dur = exact_ns([entries[i].dur for i in chosen])
    if start is not None and dur is not None:
        return start, dur
    times = decimal_times(text)
    start_exact = exact_ns_of_decimals([times[i].ts for i in chosen])
    dur_exact = exact_ns_of_decimals([times[i].dur for i in chosen])
    return np.array(start_exact, dtype=np.int64), np.array(dur_exact, dtype=np.int64)


def _lane_key(entry: TraceEvent, args: Args | None) -> tuple[int | str, int | str, int, int]:
    if args is None or args.stream < 0:
        return entry.pid, entry.tid, -1, -1
    return entry.pid, entry.tid, args.device, args.stream


def _coded(values: Sequence[_T]) -> tuple[list[int], tuple[_T, ...]]:
    """Each value's number, and the distinct values in the order of their numbers."""
    numbers: dict[_T, int] = {}
    codes = [numbers.setdefault(value, len(numbers)) for value in values]
    return codes, tuple(numbers)
