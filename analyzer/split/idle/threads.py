"""What a thread of the host does at an instant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from stepsplit.analyzer.trace import Bool, Category, Events, Int64, UInt8

STEP, _OPTIMIZER = "ProfilerStep#", "Optimizer."
_LOADS = re.compile(r"enumerate\(Data|data[ _-]?load|(?:load|get|fetch|next)_batch", re.IGNORECASE)
_LOADS_IN_PYTHON = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): __next__$")
SYNCHRONIZES = re.compile(r"[Ss]ynchronize|^urQueueFinish$|^urEventWait$")
ALLOCATES = re.compile(
    r"^(?:cuda|hip)(?:Ext)?(?:Host|Mem)?(?:Malloc|Free|Alloc|Register|Unregister)"
    r"|^(?:cu|hip)Mem(?:Alloc|Free|Create|Release|Map|Unmap|SetAccess|Host)"
)
"""Calls of a runtime or driver that wait for the device, and that take or give back memory."""


class Doing(IntEnum):
    """What a thread does, as far as the trace tells; of several the first."""

    LOADING = 0
    ALLOCATING = 1
    SYNCHRONIZING = 2
    WORKING = 3
    NO_OP = 4
    UNTOLD = 5


@dataclass(frozen=True, slots=True)
class Nested:
    """Events of one thread that lie in one another; columns in order of start, outer first.

    key orders them by depth, then by start; by_key is that order.
    """

    row: Int64
    start_ns: Int64
    end_ns: Int64
    sorted_end_ns: Int64
    key: Int64
    by_key: Int64

    def innermost_at(self, when_ns: Int64) -> Int64:
        """The row of the innermost event open at each instant, -1 for none."""
        begun = np.searchsorted(self.start_ns, when_ns, side="right")
        depth = begun - np.searchsorted(self.sorted_end_ns, when_ns, side="right") - 1
        if not len(self.row):
            return np.full(len(when_ns), -1, dtype=np.int64)
        wanted = depth * (len(self.row) + 1) + begun - 1
        at = self.by_key[np.maximum(np.searchsorted(self.key, wanted, side="right") - 1, 0)]
        open_there = (self.start_ns[at] <= when_ns) & (when_ns < self.end_ns[at])
        return np.where((depth >= 0) & open_there, self.row[at], -1)


@dataclass(frozen=True, slots=True)
class Thread:
    """The events of one thread by what they tell; rows that do not overlap one another.

    ops are the outermost; work is the same under the optimizer's mark, where there is one.
    begins_ns is when anything of it begins, last_ns when the last of it ends.
    """

    events: Events
    lanes: Int64
    begins_ns: Int64
    last_ns: int
    loading: Int64
    allocating: Int64
    synchronizing: Int64
    ops: Int64
    work: Int64
    calls: Int64
    annotations: Nested
    python: Nested

    def doing_at(self, when_ns: Int64) -> tuple[UInt8, Int64]:
        """What the thread does at each instant, and the row that names it."""
        loading, allocating, synchronizing, ops, work, calls = (
            _open_at(self.events, rows, when_ns)
            for rows in (self.loading, self.allocating, self.synchronizing, self.ops, self.work,
                         self.calls)
        )  # fmt: skip
        called = first(self.annotations.innermost_at(when_ns), calls)
        doing = Doing.LOADING, Doing.ALLOCATING, Doing.SYNCHRONIZING, Doing.WORKING
        cases = [loading >= 0, allocating >= 0, synchronizing >= 0, (ops >= 0) | (calls >= 0)]
        names = [loading, first(ops, allocating), first(ops, synchronizing),
                 np.where(ops >= 0, work, called)]  # fmt: skip
        state = np.select(cases, doing, Doing.NO_OP)
        return state.astype(np.uint8), np.select(cases, names, -1)

    def around(self, calls: Int64) -> Int64:
        """The op within which each of these calls of this thread was made, else the call itself.

        -1 for a call of another thread, and for -1.
        """
        mine = (calls >= 0) & np.isin(self.events.lane[calls], self.lanes)
        op = _open_at(self.events, self.ops, self.events.start_ns[calls])
        return np.where(mine, first(op, calls), -1)

    def frame_at(self, when_ns: Int64) -> Int64:
        """The row of the Python function, else of the annotation, open at each instant; or -1."""
        return first(self.python.innermost_at(when_ns), self.annotations.innermost_at(when_ns))

    @property
    def edges_ns(self) -> Int64:
        """When anything that is told begins or ends, in no order."""
        rows = (self.loading, self.allocating, self.synchronizing, self.ops, self.work, self.calls)
        told = np.concatenate([*rows, self.annotations.row, self.python.row])
        return np.concatenate((self.events.start_ns[told], self.events.end_ns[told]))


def thread_at(events: Events, lanes: Int64) -> Thread:
    """What the thread with these lanes does; a mark of the optimizer is older traces' op."""
    here = np.isin(events.lane, lanes)
    ops, calls = here & events.of(Category.OP), here & events.of(Category.RUNTIME)
    notes = here & events.of(Category.ANNOTATION)
    told = (ops | notes) & ~events.named(STEP)
    optimizer = told & events.named(_OPTIMIZER)
    python = here & events.of(Category.PYTHON)
    loading = told & named(events, _LOADS)
    if not loading.any():
        loading = python & named(events, _LOADS_IN_PYTHON)
    recorded = np.flatnonzero(ops | calls | notes | python)
    ops &= told & ~optimizer & ~loading
    return Thread(
        events=events,
        lanes=lanes,
        begins_ns=events.start_ns[recorded],
        last_ns=int(events.end_ns[recorded].max(initial=0)),
        loading=_outermost(events, loading),
        allocating=_outermost(events, calls & named(events, ALLOCATES)),
        synchronizing=_outermost(events, calls & named(events, SYNCHRONIZES)),
        ops=_outermost(events, ops),
        work=_outermost(events, ops | optimizer),
        calls=_outermost(events, calls),
        annotations=_nested(events, (notes & told) | optimizer),
        python=_nested(events, python),
    )


def _outermost(events: Events, mask: Bool) -> Int64:
    """The chosen events that begin after all chosen earlier ones have ended, in order."""
    rows = _outer_first(events, mask)
    reach = np.maximum.accumulate(events.end_ns[rows])
    return rows[np.concatenate(([True], events.start_ns[rows[1:]] >= reach[:-1]))[: len(rows)]]


def _nested(events: Events, mask: Bool) -> Nested:
    rows = _outer_first(events, mask)
    start, end = events.start_ns[rows], events.end_ns[rows]
    ends, order = np.sort(end), np.arange(len(rows))
    key = (order - np.searchsorted(ends, start, side="right")) * (len(rows) + 1) + order
    by_key = np.argsort(key)
    return Nested(rows, start, end, ends, key[by_key], by_key)


def _outer_first(events: Events, mask: Bool) -> Int64:
    rows = np.flatnonzero(mask & (events.dur_ns > 0))
    return rows[np.lexsort((-events.dur_ns[rows], events.start_ns[rows]))]


def _open_at(events: Events, rows: Int64, when_ns: Int64) -> Int64:
    if not len(rows):
        return np.full(len(when_ns), -1, dtype=np.int64)
    at = np.searchsorted(events.start_ns[rows], when_ns, side="right") - 1
    inside = (at >= 0) & (when_ns < events.end_ns[rows[at]])
    return np.where(inside, rows[at], -1)


def named(events: Events, pattern: re.Pattern[str]) -> Bool:
    """Which events have a name in which the pattern is found."""
    return events.name_mask(tuple(pattern.search(name) is not None for name in events.names))


def first(*choices: Int64) -> Int64:
    """Of each place the first choice that is a row."""
    found = choices[0]
    for other in choices[1:]:
        found = np.where(found >= 0, found, other)
    return found
