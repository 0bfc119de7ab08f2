"""Activity of the host threads that launch work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import list_distinct
from stepsplit.analyzer.trace import COMPILES, Bool, Category, Events, Int64, UInt8


class HostActivity(IntEnum):
    """The activity of a host thread; of several concurrent ones the first in this order."""

    LOADING = 0
    COMPILING = 1
    ALLOCATING = 2
    SYNCHRONIZING = 3
    WORKING = 4
    NO_OP = 5
    UNKNOWN = 6


_BACKWARD = re.compile(r"^(?:torch::)?autograd::|Backward\d*$")

_RUNS_BACKWARD = re.compile(r"^(?!.*\.py\().*backward", re.IGNORECASE)


class LaunchThreads(Struct, frozen=True):
    """A launching thread and those that it alternates with, such as the threads of backward.

    backward are the members that run gradients, others the rest.
    """

    events: Events
    threads: tuple[HostThread, ...]
    backward: tuple[HostThread, ...]
    others: tuple[HostThread, ...]

    def classify_at(self, when_ns: Int64) -> tuple[UInt8, Int64]:
        """The activity of the launching thread at each instant, or of the next one if it is idle.

        Returns the activity and the row that names it, -1 for none. Outside of ops it is Python,
        unless there is evidence for something else: only if ops would have been recorded.
        """
        doing, row = self.threads[0].doing_at(when_ns)
        for member in self.threads[1:]:
            free = np.flatnonzero(doing == HostActivity.NO_OP)
            doing[free], row[free] = member.doing_at(when_ns[free])
        free = np.flatnonzero(doing == HostActivity.NO_OP)
        when_ns = when_ns[free]
        frames = [[t.python.find_innermost_at(when_ns), t.annotations.find_innermost_at(when_ns)]
                  for t in self.threads]  # fmt: skip
        frame = pick_first(*(rows for of_thread in frames for rows in of_thread))
        # The autograd engine works between its ops, if its threads started the last event and will
        # start the next one; Python that it runs is recognized by its own frames.
        before_ours, after_ours = _find_neighbors(self.backward, when_ns)
        before, after = _find_neighbors(self.others, when_ns)
        in_backward = (before_ours > before) & (after_ours < after)
        for thread in self.backward:
            in_backward &= thread.python.find_innermost_at(when_ns) < 0
        # A gloo range is a waiting message; without any op, work between them is not recorded.
        framed, events = frame >= 0, self.events
        is_message = framed & events.match_prefix("gloo:")[frame]
        works = in_backward | is_message | (not any(len(thread.ops) for thread in self.threads))
        # Backward may run on threads that are missing from the trace.
        hidden = framed & events.match_names(_RUNS_BACKWARD)[frame] & (not self.backward)
        begins_ns = np.concatenate([thread.begins_ns for thread in self.threads])
        begun = begins_ns.min(initial=np.iinfo(np.int64).max)
        last = max(thread.last_ns for thread in self.threads)
        is_recorded = (begun <= when_ns) & (when_ns < last)
        activity = np.select(
            [~is_recorded | hidden, works],
            (HostActivity.UNKNOWN, HostActivity.WORKING),
            HostActivity.NO_OP,
        )
        doing[free], row[free] = activity.astype(np.uint8), frame
        return doing, row

    @property
    def edges_ns(self) -> Int64:
        """The start and end times of all events, ascending."""
        edges_ns = np.concatenate([thread.edges_ns for thread in self.threads])
        edges_ns.sort(kind="stable")
        return edges_ns


class HostThreads(Struct, frozen=True):
    """The threads of a host: the thread of each lane, the main (stepping) one, those of
    backward."""

    of_lane: Int64
    main: int
    backward: tuple[int, ...]

    def list_launchers(self, thread: int) -> tuple[int, ...]:
        """The numbers of the thread and of those that it alternates with."""
        return (thread, *self.backward) if thread == self.main else (thread, self.main)


def find_host_threads(events: Events) -> HostThreads:
    """The threads of the host; the calls of a thread may be on separate lanes."""
    number: dict[tuple[str, str], int] = {}
    of_lane = np.array(
        [number.setdefault((lane.pid, lane.tid), len(number)) for lane in events.lanes],
        dtype=np.int64,
    )
    ops = events.is_category(Category.OP)
    lanes = list_distinct(events.lane[ops & events.match_names(_BACKWARD)])
    gradients = np.isin(of_lane, of_lane[lanes])
    # The main thread steps the profiler, else has the most time in ops or calls. One that runs
    # gradients is chosen last.
    main = -1
    for mask in (
        events.match_prefix(STEP) & (ops | events.is_category(Category.ANNOTATION)),
        ops & ~gradients[events.lane],
        ops,
        events.is_category(Category.RUNTIME),
    ):
        if mask.any():
            weights = events.dur_ns[mask] + 1
            main = int(np.bincount(of_lane[events.lane[mask]], weights).argmax())
            break
    return HostThreads(of_lane, main, tuple(sorted({*of_lane[gradients].tolist()} - {main})))


def build_launch_threads(events: Events, threads: HostThreads, thread: int) -> LaunchThreads:
    """The launching thread and those that it alternates with, itself first."""
    numbers = threads.list_launchers(thread)
    members = [HostThread.build(events, np.flatnonzero(threads.of_lane == one)) for one in numbers]
    backward = tuple(t for n, t in zip(numbers, members, strict=True) if n in threads.backward)
    others = tuple(t for n, t in zip(numbers, members, strict=True) if n not in threads.backward)
    return LaunchThreads(events, tuple(members), backward, others)


def _find_neighbors(threads: Sequence[HostThread], when_ns: Int64) -> tuple[Int64, Int64]:
    """The last start of an event on the threads before each instant, and the next one after it."""
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    begins = np.concatenate([[least], *(t.begins_ns for t in threads), [most]])
    begins.sort(kind="stable")
    after = np.searchsorted(begins, when_ns, side="right")
    return begins[after - 1], begins[after]


# Activity of a single host thread.

STEP, _OPTIMIZER = "ProfilerStep#", "Optimizer."

_LOADS = re.compile(r"enumerate\(Data|data[ _-]?load|(?:load|get|fetch|next)_batch", re.IGNORECASE)

_LOADS_IN_PYTHON = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): __next__$")

SYNCHRONIZES = re.compile(r"[Ss]ynchronize|^urQueueFinish$|^urEventWait$")

ALLOCATES = re.compile(
    r"^(?:cuda|hip)(?:Ext)?(?:Host|Mem)?(?:Malloc|Free|Alloc|Register|Unregister)"
    r"|^(?:cu|hip)Mem(?:Alloc|Free|Create|Release|Map|Unmap|SetAccess|Host)"
)
"""Runtime or driver calls that wait for the device, and that allocate or free memory."""


class NestedEvents(Struct, frozen=True):
    """Nested events of one thread; columns in order of start, outer first.

    key orders them by depth, then by start; by_key is that order.
    """

    row: Int64
    start_ns: Int64
    end_ns: Int64
    sorted_end_ns: Int64
    key: Int64
    by_key: Int64

    def find_innermost_at(self, when_ns: Int64) -> Int64:
        """The row of the innermost open event at each instant, -1 for none."""
        begun = np.searchsorted(self.start_ns, when_ns, side="right")
        depth = begun - np.searchsorted(self.sorted_end_ns, when_ns, side="right") - 1
        if not len(self.row):
            return np.full(len(when_ns), -1, dtype=np.int64)
        wanted = depth * (len(self.row) + 1) + begun - 1
        at = self.by_key[np.maximum(np.searchsorted(self.key, wanted, side="right") - 1, 0)]
        open_there = (self.start_ns[at] <= when_ns) & (when_ns < self.end_ns[at])
        return np.where((depth >= 0) & open_there, self.row[at], -1)


class HostThread(Struct, frozen=True):
    """The events of one thread by kind; the rows of a kind do not overlap.

    ops are the outermost ones; work also includes the optimizer's. begins_ns are the starts of all
    events, last_ns is the last end.
    """

    events: Events
    lanes: Int64
    begins_ns: Int64
    last_ns: int
    loading: Int64
    compiling: Int64
    allocating: Int64
    synchronizing: Int64
    ops: Int64
    work: Int64
    calls: Int64
    annotations: NestedEvents
    python: NestedEvents

    @classmethod
    def build(cls, events: Events, lanes: Int64) -> HostThread:
        """The thread with these lanes; in older traces, optimizer marks are ops."""
        here = np.isin(events.lane, lanes)
        ops = here & events.is_category(Category.OP)
        calls = here & events.is_category(Category.RUNTIME)
        notes = here & events.is_category(Category.ANNOTATION)
        labeled = (ops | notes) & ~events.match_prefix(STEP)
        optimizer = labeled & events.match_prefix(_OPTIMIZER)
        python = here & events.is_category(Category.PYTHON)
        loading = labeled & events.match_names(_LOADS)
        if not loading.any():
            loading = python & events.match_names(_LOADS_IN_PYTHON)
        recorded = np.flatnonzero(ops | calls | notes | python)
        ops &= labeled & ~optimizer & ~loading
        return cls(
            events=events,
            lanes=lanes,
            begins_ns=events.start_ns[recorded],
            last_ns=int(events.ends_of(recorded).max(initial=0)),
            loading=_find_outermost(events, loading),
            compiling=_find_outermost(events, labeled & events.match_names(COMPILES)),
            allocating=_find_outermost(events, calls & events.match_names(ALLOCATES)),
            synchronizing=_find_outermost(events, calls & events.match_names(SYNCHRONIZES)),
            ops=_find_outermost(events, ops),
            work=_find_outermost(events, ops | optimizer),
            calls=_find_outermost(events, calls),
            annotations=build_nested(events, (notes & labeled) | optimizer),
            python=build_nested(events, python),
        )

    def doing_at(self, when_ns: Int64) -> tuple[UInt8, Int64]:
        """The activity of the thread at each instant, and the row that names it."""
        loading, compiling, allocating, synchronizing, ops, work, calls = (
            _find_open_at(self.events, rows, when_ns)
            for rows in (self.loading, self.compiling, self.allocating, self.synchronizing,
                         self.ops, self.work, self.calls)
        )  # fmt: skip
        called = pick_first(self.annotations.find_innermost_at(when_ns), calls)
        doing = (
            HostActivity.LOADING,
            HostActivity.COMPILING,
            HostActivity.ALLOCATING,
            HostActivity.SYNCHRONIZING,
            HostActivity.WORKING,
        )
        cases = [loading >= 0, compiling >= 0, allocating >= 0, synchronizing >= 0,
                 (ops >= 0) | (calls >= 0)]  # fmt: skip
        names = [loading, compiling, pick_first(ops, allocating), pick_first(ops, synchronizing),
                 np.where(ops >= 0, work, called)]  # fmt: skip
        state = np.select(cases, doing, HostActivity.NO_OP)
        return state.astype(np.uint8), np.select(cases, names, -1)

    def find_enclosing_op(self, calls: Int64) -> Int64:
        """The op that contains each of these calls of this thread, else the call itself.

        -1 for a call of another thread, and for -1.
        """
        own = (calls >= 0) & np.isin(self.events.lane[calls], self.lanes)
        op = _find_open_at(self.events, self.ops, self.events.start_ns[calls])
        return np.where(own, pick_first(op, calls), -1)

    @property
    def edges_ns(self) -> Int64:
        """The start and end times of all events, unordered."""
        rows = (self.loading, self.compiling, self.allocating, self.synchronizing, self.ops,
                self.work, self.calls)  # fmt: skip
        event_rows = np.concatenate([*rows, self.annotations.row, self.python.row])
        return np.concatenate((self.events.start_ns[event_rows], self.events.ends_of(event_rows)))


def _find_outermost(events: Events, mask: Bool) -> Int64:
    """The chosen events that start after all earlier chosen ones have ended, in order."""
    rows = _sort_outer_first(events, mask)
    reach = np.maximum.accumulate(events.ends_of(rows))
    return rows[np.concatenate(([True], events.start_ns[rows[1:]] >= reach[:-1]))[: len(rows)]]


def build_nested(events: Events, mask: Bool) -> NestedEvents:
    """The chosen events of one thread as nested ranges."""
    rows = _sort_outer_first(events, mask)
    start, end = events.start_ns[rows], events.ends_of(rows)
    ends, order = np.sort(end), np.arange(len(rows))
    key = (order - np.searchsorted(ends, start, side="right")) * (len(rows) + 1) + order
    by_key = np.argsort(key)
    return NestedEvents(rows, start, end, ends, key[by_key], by_key)


def _sort_outer_first(events: Events, mask: Bool) -> Int64:
    """The chosen events in order of start, as they are; of those that start together, the longer
    first."""
    rows = np.flatnonzero(mask & (events.dur_ns > 0))
    start = events.start_ns[rows]
    same = np.flatnonzero(start[1:] == start[:-1])
    tied = np.union1d(same, same + 1)
    rows[tied] = rows[tied][np.lexsort((-events.dur_ns[rows[tied]], start[tied]))]
    return rows


def _find_open_at(events: Events, rows: Int64, when_ns: Int64) -> Int64:
    if not len(rows):
        return np.full(len(when_ns), -1, dtype=np.int64)
    at = np.searchsorted(events.start_ns[rows], when_ns, side="right") - 1
    inside = (at >= 0) & (when_ns < events.ends_of(rows[at]))
    return np.where(inside, rows[at], -1)


def pick_first(*choices: Int64) -> Int64:
    """For each element, the first choice that is a row."""
    picked = choices[0]
    for choice in choices[1:]:
        picked = np.where(picked >= 0, picked, choice)
    return picked
