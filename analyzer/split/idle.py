"""Idle time: what the host did while the device was idle."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, intersect, list_distinct
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.split.attribute import BucketBands
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    Bool,
    Category,
    Events,
    Int32,
    Int64,
    RankTrace,
    UInt8,
)

# Causes of idle time on a rank's device.

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class IdleCause(Struct, frozen=True):
    """Idle time of one window with one cause: its duration, and the number of gaps it occurs in.

    idle_ns over all causes of a window add up to its idle time. op is the name of the responsible
    event, "" if unknown.

    Host-bound causes, by what delayed the launch of the event that ended the gap:
      data_loading    the host waited for its next batch
      allocation      the host allocated or freed device memory or pinned memory
      synchronize     the host had waited for the device and launched late; the part of the gap up
                      to the duration of that wait. op is the waiting op (aten::item) or call
      launch_bound    the host was busy in ops and launches, or in the autograd engine between them
      python          the host ran Python code outside of ops and calls; op is the function or
                      annotation

    Causes with a launch in time, by what followed it:
      launch_latency  normal delay from one event to the next, or from a launch to its start
      dependency      longer: the stream waited for an event, or a graph for its own order
      late_start      longer, cause unknown: another process used the device, or events are missing;
                      op is the event that started late

    On a CPU run, other is an op that is not compute, or an open message. unknown: no evidence.
    """

    window: int
    cause: str
    op: str
    idle_ns: int
    count: int


def find_idle_parts(trace: RankTrace, band: BucketBands) -> IdleParts:
    """The parts of a rank's idle time, each with its cause; gap is a row of the band.

    band is on the rank's own clock. The time from a gap's start to the return of the call that
    launched the next event is attributed to the host, the rest to the device.
    """
    rows = np.flatnonzero(band.bucket == Bucket.IDLE)
    gaps = Intervals(band.start_ns[rows], band.end_ns[rows])
    parts = explain_gaps(trace, gaps)
    _check(gaps, parts)
    return replace(parts, gap=rows[parts.gap])


def sum_idle_causes(events: Events, window: Int32, parts: IdleParts) -> tuple[IdleCause, ...]:
    """Sums the parts by window, cause and op; by window, longest first. window is that of each gap,
    count the number of gaps."""
    ops = {"": 0}
    op_of = [ops.setdefault(_ADDRESS.sub("", name), len(ops)) for name in events.names]
    op = np.array([*op_of, 0])[np.where(parts.row >= 0, events.name_id[parts.row], -1)]
    key = (window[parts.gap].astype(np.int64) * len(CAUSES) + parts.cause) * len(ops) + op
    kinds, kind = np.unique(key, return_inverse=True)
    ns = np.zeros(len(kinds), dtype=np.int64)
    np.add.at(ns, kind, parts.end_ns - parts.start_ns)
    in_gaps = np.unique(kind * (len(window) + 1) + parts.gap) // (len(window) + 1)
    count = np.bincount(in_gaps, minlength=len(kinds))
    names = tuple(ops)
    rows = [
        IdleCause(one // len(ops) // len(CAUSES), CAUSES[one // len(ops) % len(CAUSES)],
                  names[one % len(ops)], idle_ns, gaps)
        for one, idle_ns, gaps in zip(kinds.tolist(), ns.tolist(), count.tolist(), strict=True)
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda c: (c.window, -c.idle_ns, c.cause, c.op)))


def _check(gaps: Intervals, parts: IdleParts) -> None:
    """Asserts that every instant of every gap has one cause."""
    covered_ns = np.zeros(len(gaps), dtype=np.int64)
    np.add.at(covered_ns, parts.gap, parts.end_ns - parts.start_ns)
    length = gaps.end_ns - gaps.start_ns
    assert np.array_equal(covered_ns, length), (
        f"{covered_ns.sum()} of {length.sum()} idle ns have a cause"
    )


# The cause of each part of a gap (see IdleCause).

CAUSES = (
    "data_loading",
    "allocation",
    "synchronize",
    "launch_bound",
    "python",
    "launch_latency",
    "dependency",
    "late_start",
    "other",
    "unknown",
)

_CODE = {cause: code for code, cause in enumerate(CAUSES)}

_QUEUED_NS, _LAUNCHED_NS = 30_000, 100_000
"""The longest normal delay from one event to the next, and from a launch to its start.

Measured: 1 to 2 us and 2 to 5 us on NVIDIA, up to 30 us and 85 us on MI300X.
"""

_WHOLE_RANGE_NS = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)


class HostActivity(IntEnum):
    """The activity of a host thread; of several concurrent ones the first in this order."""

    LOADING = 0
    ALLOCATING = 1
    SYNCHRONIZING = 2
    WORKING = 3
    NO_OP = 4
    UNKNOWN = 5


_CAUSE_OF_ACTIVITY = {
    HostActivity.LOADING: "data_loading",
    HostActivity.ALLOCATING: "allocation",
    HostActivity.SYNCHRONIZING: "synchronize",
    HostActivity.NO_OP: "python",
    HostActivity.UNKNOWN: "unknown",
}


@dataclass(frozen=True, slots=True)
class IdleParts:
    """Parts of gaps, each with its cause (index of CAUSES) and the row that names it, -1 for
    none."""

    gap: Int64
    start_ns: Int64
    end_ns: Int64
    cause: UInt8
    row: Int64


def explain_gaps(trace: RankTrace, gaps: Intervals) -> IdleParts:
    """The parts of these gaps, which fill them; unordered."""
    parts = list(
        (_explain_device_gaps if trace.on_device else _explain_host_gaps)(trace.events, gaps)
    )
    columns = (np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(IdleParts))
    return IdleParts(*columns)


def _explain_host_gaps(events: Events, gaps: Intervals) -> Iterable[IdleParts]:
    """On a CPU run: the activity of the training thread."""
    threads = find_host_threads(events)
    launchers = build_launch_threads(events, threads, threads.main)
    yield _attribute_to_threads(gaps, np.arange(len(gaps)), launchers, "other")


def _explain_device_gaps(events: Events, gaps: Intervals) -> Iterable[IdleParts]:
    threads = find_host_threads(events)
    starts, waiting = find_gap_launches(events, gaps, threads), find_waiting_calls(events)
    host_end = np.clip(starts.returned_ns, gaps.start_ns, gaps.end_ns)
    launch_known = starts.returned_ns < NEVER
    hosts = launch_known & (host_end > gaps.start_ns)
    for thread in np.unique(starts.thread[hosts]).tolist():
        rows = np.flatnonzero(hosts & (starts.thread == thread))
        host = Intervals(gaps.start_ns[rows], host_end[rows])
        launcher_events = np.isin(threads.of_lane[events.lane], threads.list_launchers(thread))
        waits = find_host_waits(
            events, host.start_ns, starts.launch[rows], launcher_events, waiting
        )
        launchers = build_launch_threads(events, threads, thread)
        waited_end = np.minimum(host.start_ns + waits.waited_ns, host.end_ns)
        waited = Intervals(host.start_ns, waited_end)
        parts = _attribute_to_threads(waited, rows, launchers, "launch_bound")
        yield _attribute_waits(events, parts, waits, rows, launchers)
        yield _attribute_to_threads(
            Intervals(waited_end, host.end_ns), rows, launchers, "launch_bound"
        )
    yield _attribute_to_launch(gaps, host_end, starts)


def _attribute_waits(
    events: Events, parts: IdleParts, waits: HostWaits, gaps: Int64, launchers: LaunchThreads
) -> IdleParts:
    """Attributes the delay by a wait to it, except parts with a more specific cause."""
    of_gap = np.searchsorted(gaps, parts.gap)
    wait = waits.row[of_gap]
    allocates = events.match_names(ALLOCATES)[wait]
    specific = np.isin(parts.cause, (_CODE["data_loading"], _CODE["allocation"]))
    cause = np.where(allocates, _CODE["allocation"], _CODE["synchronize"])
    row = np.full(len(wait), -1, dtype=np.int64)
    for thread in launchers.threads:
        row = pick_first(row, thread.find_enclosing_op(wait))
    return replace(
        parts,
        cause=np.where(specific, parts.cause, cause).astype(np.uint8),
        row=np.where(specific, parts.row, row),
    )


def _attribute_to_threads(
    times: Intervals, gaps: Int64, launchers: LaunchThreads, busy: str
) -> IdleParts:
    """Attributes these times to the activity of the threads; busy is the cause for work."""
    edges = np.concatenate(([_WHOLE_RANGE_NS[0]], launchers.edges_ns, [_WHOLE_RANGE_NS[1]]))
    cut = intersect(times, Intervals(edges[:-1], edges[1:]))
    doing, row = launchers.classify_at(cut.start_ns)
    cause = np.array(
        [_CODE[_CAUSE_OF_ACTIVITY.get(d, busy)] for d in HostActivity], dtype=np.uint8
    )[doing]
    return IdleParts(gaps[cut.left], cut.start_ns, cut.end_ns, cause, row)


def _attribute_to_launch(gaps: Intervals, host_end_ns: Int64, starts: GapLaunches) -> IdleParts:
    """Attributes the time from the launch (or the previous event, if later) to the start."""
    launch_known = starts.returned_ns < NEVER
    rows = np.flatnonzero(~launch_known | (host_end_ns < gaps.end_ns))
    start, end = np.where(launch_known, host_end_ns, gaps.start_ns)[rows], gaps.end_ns[rows]
    soon = (end - start <= _QUEUED_NS) | (end - starts.returned_ns[rows] <= _LAUNCHED_NS)
    cases = [~launch_known[rows], soon, starts.ordered[rows]]
    codes = [_CODE["unknown"], _CODE["launch_latency"], _CODE["dependency"]]
    cause = np.select(cases, codes, _CODE["late_start"]).astype(np.uint8)
    names = [np.full(len(rows), -1), starts.launch[rows]]
    return IdleParts(rows, start, end, cause, np.select(cases[:2], names, starts.row[rows]))


# The launch of the event after each gap, and the preceding wait of the host.

NEVER = np.iinfo(np.int64).max

_BLOCKING_COPY = re.compile(
    r"^(?:cuda|hip)Memcpy(?:WithStream|DtoH|HtoD)?$|^cuMemcpy[DH]to[DH]_v2$"
)

_TO_HOST = re.compile(r"HtoD|DtoH|Host")

_ORDERS = re.compile(r"StreamWaitEvent|GraphLaunch")


class GapLaunches(Struct, frozen=True):
    """For each gap the device event that ended it, and its launch; columns of one length.

    row and launch index the events, -1 for none. returned_ns is when the launching call returned
    (an earlier bound if only later launches are recorded, NEVER if unknown); thread is the
    launching host thread; ordered: an event wait or a graph preceded the start.
    """

    row: Int64
    launch: Int64
    returned_ns: Int64
    thread: Int64
    ordered: Bool


class HostWaits(Struct, frozen=True):
    """For each gap, the host's last wait for the device, -1 if it caused no delay."""

    row: Int64
    waited_ns: Int64


def find_gap_launches(events: Events, gaps: Intervals, threads: HostThreads) -> GapLaunches:
    """The earliest device event that starts at or after the end of each gap, on any stream."""
    device = np.flatnonzero(events.is_category(*DEVICE_CATEGORIES))
    launches = events.find_launches(device)
    at = np.searchsorted(events.start_ns[device], gaps.end_ns, side="left")
    ended, at = at < len(device), np.minimum(at, len(device) - 1)
    launch = np.where(ended, launches[at], -1)
    bound = np.where(ended, _bound_launch_times(events, device, launches)[at], NEVER)
    queued = np.where(bound <= gaps.start_ns, bound, NEVER)
    of_launch = threads.of_lane[events.lane[launch]]
    return GapLaunches(
        row=np.where(ended, device[at], -1),
        launch=launch,
        returned_ns=np.where(launch >= 0, events.ends_of(launch), queued),
        thread=np.where(launch >= 0, of_launch, threads.main),
        ordered=_find_ordered(events, launch, list_distinct(launches[launches >= 0])),
    )


def _bound_launch_times(events: Events, device: Int64, launches: Int64) -> Int64:
    """An upper bound of each launch time: a stream keeps the order of launches.

    The first events of a stream without a recorded launch were launched before the recording.
    """
    calls = events.start_ns[events.is_category(Category.RUNTIME)]
    bound = np.where(launches >= 0, events.start_ns[launches], NEVER)
    for lane in list_distinct(events.lane[device[launches < 0]]).tolist():
        here = np.flatnonzero(events.lane[device] == lane)
        recorded = np.flatnonzero(launches[here] >= 0)
        bound[here] = np.minimum.accumulate(bound[here][::-1])[::-1]
        if len(recorded):
            earlier = here[: recorded[0]]
            bound[earlier] = np.minimum(bound[earlier], calls[0])
    return bound


def _find_ordered(events: Events, launch: Int64, launches: Int64) -> Bool:
    """Whether the launching call is a graph launch, or directly follows a stream wait."""
    ordering = events.is_category(Category.RUNTIME) & events.match_names(_ORDERS)
    orders = np.flatnonzero(ordering)
    when = events.start_ns[launch]
    order = np.searchsorted(events.start_ns[orders], when, side="right")
    earlier = np.searchsorted(events.start_ns[launches], when, side="left")
    ordered_ns = _take_last_before(events.start_ns[orders], order)
    return np.asarray(
        (launch >= 0) & (ordered_ns > _take_last_before(events.start_ns[launches], earlier))
    )


def _take_last_before(starts_ns: Int64, count: Int64) -> Int64:
    """The last of the first count starts."""
    padded = np.concatenate(([np.iinfo(np.int64).min], starts_ns))
    return np.asarray(padded[count], dtype=np.int64)


def find_host_waits(
    events: Events, gap_start_ns: Int64, launch: Int64, launcher_events: Bool, waits: Int64
) -> HostWaits:
    """The last wait that started before each gap, if there was no other launch before launch.

    of_team marks the events of the cooperating launch threads, waits are those of waiting_calls.
    """
    calls = waits[launcher_events[waits]]
    launches = events.find_launches(np.flatnonzero(events.is_category(*DEVICE_CATEGORIES)))
    launches = list_distinct(launches[launches >= 0])
    launches = launches[launcher_events[launches]]
    last = np.searchsorted(events.start_ns[calls], gap_start_ns, side="left") - 1
    if not len(calls):
        no_wait = np.full(len(gap_start_ns), -1, dtype=np.int64)
        return HostWaits(no_wait, np.zeros(len(gap_start_ns), dtype=np.int64))
    row = calls[last]
    since = np.searchsorted(events.start_ns[launches], events.ends_of(row), side="left")
    until = np.searchsorted(events.start_ns[launches], events.start_ns[launch], side="left")
    late = (last >= 0) & (until <= since)
    return HostWaits(np.where(late, row, -1), np.where(late, events.dur_ns[row], 0))


def find_waiting_calls(events: Events) -> Int64:
    """The calls in which a host waits for the device: synchronization, allocation, blocking copies.

    A copy blocks if its memory is pageable, or if the call returned after the copy ended.
    """
    calls = events.is_category(Category.RUNTIME)
    waits = calls & (
        events.match_names(SYNCHRONIZES)
        | events.match_names(ALLOCATES)
        | events.match_names(_BLOCKING_COPY)
    )
    copies = np.flatnonzero(events.is_category(Category.MEMCPY) & events.match_names(_TO_HOST))
    launches = events.find_launches(copies)
    pageable = events.name_mask(tuple("Pageable" in name for name in events.names))[copies]
    blocked = (launches >= 0) & (pageable | (events.ends_of(copies) <= events.ends_of(launches)))
    waits[launches[blocked]] = True
    return np.flatnonzero(waits)


# Activity of the launching thread and the threads that it alternates with.

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

        Returns the activity and the row that names it, -1 for none.
        """
        doing, row = self.threads[0].doing_at(when_ns)
        for member in self.threads[1:]:
            free = np.flatnonzero(doing == HostActivity.NO_OP)
            doing[free], row[free] = member.doing_at(when_ns[free])
        free = np.flatnonzero(doing == HostActivity.NO_OP)
        frame = pick_first(*(thread.find_frame_at(when_ns[free]) for thread in self.threads))
        doing[free], row[free] = self._classify_without_op(when_ns[free], frame), frame
        return doing, row

    def _classify_without_op(self, when_ns: Int64, frame: Int64) -> UInt8:
        """The activity outside of ops: Python, unless there is evidence for something else.

        It counts as Python only if ops would have been recorded. The autograd engine works between
        its ops, possibly on threads missing from the trace; a gloo range is a waiting message.
        """
        name = self.events.name_id[frame]
        pattern = np.array([_RUNS_BACKWARD.search(n) is not None for n in self.events.names])
        message = np.array([n.startswith("gloo:") for n in self.events.names])
        blind = not any(len(thread.ops) for thread in self.threads)
        hidden = (frame >= 0) & pattern[name] & (not self.backward)
        works = self._is_in_backward(when_ns) | ((frame >= 0) & message[name]) | blind
        cases = [~self._is_recorded(when_ns) | hidden, works]
        activity = np.select(
            cases, (HostActivity.UNKNOWN, HostActivity.WORKING), HostActivity.NO_OP
        )
        return activity.astype(np.uint8)

    def _is_in_backward(self, when_ns: Int64) -> Bool:
        """Whether backward's threads started the last event and will start the next one.

        Python run by them is recognized by its own frames.
        """
        before_ours, after_ours = _find_neighbors(self.backward, when_ns)
        before, after = _find_neighbors(self.others, when_ns)
        python = [thread.python.find_innermost_at(when_ns) for thread in self.backward]
        runs_python = pick_first(*python) >= 0 if python else np.zeros(len(when_ns), dtype=np.bool_)
        return np.asarray((before_ours > before) & (after_ours < after) & ~runs_python)

    def _is_recorded(self, when_ns: Int64) -> Bool:
        """Whether the instant is inside the recorded time of the threads."""
        begins_ns = np.concatenate([thread.begins_ns for thread in self.threads])
        begun = begins_ns.min(initial=np.iinfo(np.int64).max)
        last = max(thread.last_ns for thread in self.threads)
        return np.asarray((begun <= when_ns) & (when_ns < last))

    @property
    def edges_ns(self) -> Int64:
        """The start and end times of all events, ascending."""
        return np.sort(np.concatenate([thread.edges_ns for thread in self.threads]), kind="stable")


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
    lanes = list_distinct(
        events.lane[events.is_category(Category.OP) & events.match_names(_BACKWARD)]
    )
    gradients = np.isin(of_lane, of_lane[lanes])
    main = _find_main_thread(events, of_lane, gradients)
    return HostThreads(of_lane, main, tuple(sorted({*of_lane[gradients].tolist()} - {main})))


def build_launch_threads(events: Events, threads: HostThreads, thread: int) -> LaunchThreads:
    """The launching thread and those that it alternates with, itself first."""
    numbers = threads.list_launchers(thread)
    members = [build_thread(events, np.flatnonzero(threads.of_lane == one)) for one in numbers]
    backward = tuple(t for n, t in zip(numbers, members, strict=True) if n in threads.backward)
    others = tuple(t for n, t in zip(numbers, members, strict=True) if n not in threads.backward)
    return LaunchThreads(events, tuple(members), backward, others)


def _find_main_thread(events: Events, of_lane: Int64, gradients: Bool) -> int:
    """The thread that steps the profiler, else the one with the most time in ops or calls.

    A thread that runs gradients is chosen last.
    """
    ops = events.is_category(Category.OP)
    for mask in (
        events.match_prefix(STEP) & (ops | events.is_category(Category.ANNOTATION)),
        ops & ~gradients[events.lane],
        ops,
        events.is_category(Category.RUNTIME),
    ):
        if mask.any():
            weights = events.dur_ns[mask] + 1
            return int(np.bincount(of_lane[events.lane[mask]], weights).argmax())
    return -1


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
    allocating: Int64
    synchronizing: Int64
    ops: Int64
    work: Int64
    calls: Int64
    annotations: NestedEvents
    python: NestedEvents

    def doing_at(self, when_ns: Int64) -> tuple[UInt8, Int64]:
        """The activity of the thread at each instant, and the row that names it."""
        loading, allocating, synchronizing, ops, work, calls = (
            _find_open_at(self.events, rows, when_ns)
            for rows in (self.loading, self.allocating, self.synchronizing, self.ops, self.work,
                         self.calls)
        )  # fmt: skip
        called = pick_first(self.annotations.find_innermost_at(when_ns), calls)
        doing = (
            HostActivity.LOADING,
            HostActivity.ALLOCATING,
            HostActivity.SYNCHRONIZING,
            HostActivity.WORKING,
        )
        cases = [loading >= 0, allocating >= 0, synchronizing >= 0, (ops >= 0) | (calls >= 0)]
        names = [loading, pick_first(ops, allocating), pick_first(ops, synchronizing),
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

    def find_frame_at(self, when_ns: Int64) -> Int64:
        """The row of the open Python function, else of the annotation, at each instant; -1 for
        none."""
        return pick_first(
            self.python.find_innermost_at(when_ns), self.annotations.find_innermost_at(when_ns)
        )

    @property
    def edges_ns(self) -> Int64:
        """The start and end times of all events, unordered."""
        rows = (self.loading, self.allocating, self.synchronizing, self.ops, self.work, self.calls)
        event_rows = np.concatenate([*rows, self.annotations.row, self.python.row])
        return np.concatenate((self.events.start_ns[event_rows], self.events.ends_of(event_rows)))


def build_thread(events: Events, lanes: Int64) -> HostThread:
    """The thread with these lanes; in older traces, optimizer marks are ops."""
    here = np.isin(events.lane, lanes)
    ops, calls = here & events.is_category(Category.OP), here & events.is_category(Category.RUNTIME)
    notes = here & events.is_category(Category.ANNOTATION)
    labeled = (ops | notes) & ~events.match_prefix(STEP)
    optimizer = labeled & events.match_prefix(_OPTIMIZER)
    python = here & events.is_category(Category.PYTHON)
    loading = labeled & events.match_names(_LOADS)
    if not loading.any():
        loading = python & events.match_names(_LOADS_IN_PYTHON)
    recorded = np.flatnonzero(ops | calls | notes | python)
    ops &= labeled & ~optimizer & ~loading
    return HostThread(
        events=events,
        lanes=lanes,
        begins_ns=events.start_ns[recorded],
        last_ns=int(events.ends_of(recorded).max(initial=0)),
        loading=_find_outermost(events, loading),
        allocating=_find_outermost(events, calls & events.match_names(ALLOCATES)),
        synchronizing=_find_outermost(events, calls & events.match_names(SYNCHRONIZES)),
        ops=_find_outermost(events, ops),
        work=_find_outermost(events, ops | optimizer),
        calls=_find_outermost(events, calls),
        annotations=build_nested(events, (notes & labeled) | optimizer),
        python=build_nested(events, python),
    )


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
