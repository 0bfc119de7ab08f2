"""Idle time: what the host did while the device was idle."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np

from stepsplit.analyzer.arrays import Intervals, distinct, meet
from stepsplit.analyzer.split.attribute import IDLE, BucketBands
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


@dataclass(frozen=True, slots=True)
class IdleCause:
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


def idle_causes(trace: RankTrace, band: BucketBands) -> tuple[IdleCause, ...]:
    """The causes of a rank's idle time, one row per window, cause and op; by window, longest first.

    band is on the rank's own clock. The time from a gap's start to the return of the call that
    launched the next event is attributed to the host, the rest to the device.
    """
    idle = band.bucket == IDLE
    window, gaps = band.window[idle], Intervals(band.start_ns[idle], band.end_ns[idle])
    parts = explained(trace, gaps)
    _check(gaps, parts)
    return _summed(trace.events, window, parts)


def _summed(events: Events, window: Int32, parts: IdleParts) -> tuple[IdleCause, ...]:
    """Sums the parts by window, cause and op; count is the number of gaps."""
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
    found = [
        IdleCause(one // len(ops) // len(CAUSES), CAUSES[one // len(ops) % len(CAUSES)],
                  names[one % len(ops)], idle_ns, gaps)
        for one, idle_ns, gaps in zip(kinds.tolist(), ns.tolist(), count.tolist(), strict=True)
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda c: (c.window, -c.idle_ns, c.cause, c.op)))


def _check(gaps: Intervals, parts: IdleParts) -> None:
    """Asserts that every instant of every gap has one cause."""
    held = np.zeros(len(gaps), dtype=np.int64)
    np.add.at(held, parts.gap, parts.end_ns - parts.start_ns)
    length = gaps.end_ns - gaps.start_ns
    assert np.array_equal(held, length), f"{held.sum()} of {length.sum()} idle ns have a cause"


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

_EVER = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)


class Doing(IntEnum):
    """The activity of a host thread; of several concurrent ones the first in this order."""

    LOADING = 0
    ALLOCATING = 1
    SYNCHRONIZING = 2
    WORKING = 3
    NO_OP = 4
    UNTOLD = 5


_OF_DOING = {
    Doing.LOADING: "data_loading",
    Doing.ALLOCATING: "allocation",
    Doing.SYNCHRONIZING: "synchronize",
    Doing.NO_OP: "python",
    Doing.UNTOLD: "unknown",
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


def explained(trace: RankTrace, gaps: Intervals) -> IdleParts:
    """The parts of these gaps, which fill them; unordered."""
    parts = list((_of_device if trace.on_device else _of_host)(trace.events, gaps))
    columns = (np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(IdleParts))
    return IdleParts(*columns)


def _of_host(events: Events, gaps: Intervals) -> Iterable[IdleParts]:
    """On a CPU run: the activity of the training thread."""
    threads = threads_of(events)
    team = team_of(events, threads, threads.main)
    yield _of_team(gaps, np.arange(len(gaps)), team, "other")


def _of_device(events: Events, gaps: Intervals) -> Iterable[IdleParts]:
    threads = threads_of(events)
    starts, waiting = starts_of(events, gaps, threads), waiting_calls(events)
    host_end = np.clip(starts.returned_ns, gaps.start_ns, gaps.end_ns)
    told = starts.returned_ns < NEVER
    hosts = told & (host_end > gaps.start_ns)
    for thread in np.unique(starts.thread[hosts]).tolist():
        rows = np.flatnonzero(hosts & (starts.thread == thread))
        host = Intervals(gaps.start_ns[rows], host_end[rows])
        of_team = np.isin(threads.of_lane[events.lane], threads.team(thread))
        waits = waits_of(events, host.start_ns, starts.launch[rows], of_team, waiting)
        team = team_of(events, threads, thread)
        waited_end = np.minimum(host.start_ns + waits.waited_ns, host.end_ns)
        waited = Intervals(host.start_ns, waited_end)
        found = _of_team(waited, rows, team, "launch_bound")
        yield _waited(events, found, waits, rows, team)
        yield _of_team(Intervals(waited_end, host.end_ns), rows, team, "launch_bound")
    yield _of_start(gaps, host_end, starts)


def _waited(
    events: Events, found: IdleParts, waits: HostWaits, gaps: Int64, team: Team
) -> IdleParts:
    """Attributes the delay by a wait to it, except parts with a more specific cause."""
    of_gap = np.searchsorted(gaps, found.gap)
    wait = waits.row[of_gap]
    allocates = named(events, ALLOCATES)[wait]
    told = np.isin(found.cause, (_CODE["data_loading"], _CODE["allocation"]))
    cause = np.where(allocates, _CODE["allocation"], _CODE["synchronize"])
    row = np.full(len(wait), -1, dtype=np.int64)
    for thread in team.threads:
        row = first(row, thread.around(wait))
    return replace(
        found,
        cause=np.where(told, found.cause, cause).astype(np.uint8),
        row=np.where(told, found.row, row),
    )


def _of_team(times: Intervals, gaps: Int64, team: Team, busy: str) -> IdleParts:
    """Attributes these times to the activity of the threads; busy is the cause for work."""
    edges = np.concatenate(([_EVER[0]], team.edges_ns, [_EVER[1]]))
    cut = meet(times, Intervals(edges[:-1], edges[1:]))
    doing, row = team.doing_at(cut.start_ns)
    cause = np.array([_CODE[_OF_DOING.get(d, busy)] for d in Doing], dtype=np.uint8)[doing]
    return IdleParts(gaps[cut.left], cut.start_ns, cut.end_ns, cause, row)


def _of_start(gaps: Intervals, host_end_ns: Int64, starts: Starts) -> IdleParts:
    """Attributes the time from the launch (or the previous event, if later) to the start."""
    told = starts.returned_ns < NEVER
    rows = np.flatnonzero(~told | (host_end_ns < gaps.end_ns))
    start, end = np.where(told, host_end_ns, gaps.start_ns)[rows], gaps.end_ns[rows]
    soon = (end - start <= _QUEUED_NS) | (end - starts.returned_ns[rows] <= _LAUNCHED_NS)
    cases = [~told[rows], soon, starts.ordered[rows]]
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


@dataclass(frozen=True, slots=True)
class Starts:
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


@dataclass(frozen=True, slots=True)
class HostWaits:
    """For each gap, the host's last wait for the device, -1 if it caused no delay."""

    row: Int64
    waited_ns: Int64


def starts_of(events: Events, gaps: Intervals, threads: Threads) -> Starts:
    """The earliest device event that starts at or after the end of each gap, on any stream."""
    device = np.flatnonzero(events.of(*DEVICE_CATEGORIES))
    launches = events.launches_of(device)
    at = np.searchsorted(events.start_ns[device], gaps.end_ns, side="left")
    ended, at = at < len(device), np.minimum(at, len(device) - 1)
    launch = np.where(ended, launches[at], -1)
    bound = np.where(ended, _launched_before(events, device, launches)[at], NEVER)
    queued = np.where(bound <= gaps.start_ns, bound, NEVER)
    of_launch = threads.of_lane[events.lane[launch]]
    return Starts(
        row=np.where(ended, device[at], -1),
        launch=launch,
        returned_ns=np.where(launch >= 0, events.end_ns[launch], queued),
        thread=np.where(launch >= 0, of_launch, threads.main),
        ordered=_ordered(events, launch, distinct(launches[launches >= 0])),
    )


def _launched_before(events: Events, device: Int64, launches: Int64) -> Int64:
    """An upper bound of each launch time: a stream keeps the order of launches.

    The first events of a stream without a recorded launch were launched before the recording.
    """
    calls = events.start_ns[events.of(Category.RUNTIME)]
    bound = np.where(launches >= 0, events.start_ns[launches], NEVER)
    for lane in distinct(events.lane[device[launches < 0]]).tolist():
        here = np.flatnonzero(events.lane[device] == lane)
        recorded = np.flatnonzero(launches[here] >= 0)
        bound[here] = np.minimum.accumulate(bound[here][::-1])[::-1]
        if len(recorded):
            earlier = here[: recorded[0]]
            bound[earlier] = np.minimum(bound[earlier], calls[0])
    return bound


def _ordered(events: Events, launch: Int64, launches: Int64) -> Bool:
    """Whether the launching call is a graph launch, or directly follows a stream wait."""
    found = events.of(Category.RUNTIME) & named(events, _ORDERS)
    orders = np.flatnonzero(found)
    when = events.start_ns[launch]
    order = np.searchsorted(events.start_ns[orders], when, side="right")
    earlier = np.searchsorted(events.start_ns[launches], when, side="left")
    told_ns = _before(events.start_ns[orders], order)
    return np.asarray((launch >= 0) & (told_ns > _before(events.start_ns[launches], earlier)))


def _before(starts_ns: Int64, count: Int64) -> Int64:
    """The last of the first count starts."""
    padded = np.concatenate(([np.iinfo(np.int64).min], starts_ns))
    return np.asarray(padded[count], dtype=np.int64)


def waits_of(
    events: Events, gap_start_ns: Int64, launch: Int64, of_team: Bool, waits: Int64
) -> HostWaits:
    """The last wait that started before each gap, if there was no other launch before launch.

    of_team marks the events of the cooperating launch threads, waits are those of waiting_calls.
    """
    calls = waits[of_team[waits]]
    launches = events.launches_of(np.flatnonzero(events.of(*DEVICE_CATEGORIES)))
    launches = distinct(launches[launches >= 0])
    launches = launches[of_team[launches]]
    last = np.searchsorted(events.start_ns[calls], gap_start_ns, side="left") - 1
    if not len(calls):
        nobody = np.full(len(gap_start_ns), -1, dtype=np.int64)
        return HostWaits(nobody, np.zeros(len(gap_start_ns), dtype=np.int64))
    row = calls[last]
    since = np.searchsorted(events.start_ns[launches], events.end_ns[row], side="left")
    until = np.searchsorted(events.start_ns[launches], events.start_ns[launch], side="left")
    late = (last >= 0) & (until <= since)
    return HostWaits(np.where(late, row, -1), np.where(late, events.dur_ns[row], 0))


def waiting_calls(events: Events) -> Int64:
    """The calls in which a host waits for the device: synchronization, allocation, blocking copies.

    A copy blocks if its memory is pageable, or if the call returned after the copy ended.
    """
    calls = events.of(Category.RUNTIME)
    waits = calls & (
        named(events, SYNCHRONIZES) | named(events, ALLOCATES) | named(events, _BLOCKING_COPY)
    )
    copies = np.flatnonzero(events.of(Category.MEMCPY) & named(events, _TO_HOST))
    launches = events.launches_of(copies)
    pageable = events.name_mask(tuple("Pageable" in name for name in events.names))[copies]
    blocked = (launches >= 0) & (pageable | (events.end_ns[copies] <= events.end_ns[launches]))
    waits[launches[blocked]] = True
    return np.flatnonzero(waits)


# Activity of the launching thread and the threads that it alternates with.

_BACKWARD = re.compile(r"^(?:torch::)?autograd::|Backward\d*$")

_RUNS_BACKWARD = re.compile(r"^(?!.*\.py\().*backward", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Team:
    """A launching thread and those that it alternates with, such as the threads of backward.

    backward are the members that run gradients, others the rest.
    """

    events: Events
    threads: tuple[Thread, ...]
    backward: tuple[Thread, ...]
    others: tuple[Thread, ...]

    def doing_at(self, when_ns: Int64) -> tuple[UInt8, Int64]:
        """The activity of the launching thread at each instant, or of the next one if it is idle.

        Returns the activity and the row that names it, -1 for none.
        """
        doing, row = self.threads[0].doing_at(when_ns)
        for other in self.threads[1:]:
            free = np.flatnonzero(doing == Doing.NO_OP)
            doing[free], row[free] = other.doing_at(when_ns[free])
        free = np.flatnonzero(doing == Doing.NO_OP)
        frame = first(*(thread.frame_at(when_ns[free]) for thread in self.threads))
        doing[free], row[free] = self._without_op(when_ns[free], frame), frame
        return doing, row

    def _without_op(self, when_ns: Int64, frame: Int64) -> UInt8:
        """The activity outside of ops: Python, unless there is evidence for something else.

        It counts as Python only if ops would have been recorded. The autograd engine works between
        its ops, possibly on threads missing from the trace; a gloo range is a waiting message.
        """
        name = self.events.name_id[frame]
        pattern = np.array([_RUNS_BACKWARD.search(n) is not None for n in self.events.names])
        message = np.array([n.startswith("gloo:") for n in self.events.names])
        blind = not any(len(thread.ops) for thread in self.threads)
        hidden = (frame >= 0) & pattern[name] & (not self.backward)
        works = self._in_backward(when_ns) | ((frame >= 0) & message[name]) | blind
        cases = [~self._recorded(when_ns) | hidden, works]
        found = np.select(cases, (Doing.UNTOLD, Doing.WORKING), Doing.NO_OP)
        return found.astype(np.uint8)

    def _in_backward(self, when_ns: Int64) -> Bool:
        """Whether backward's threads started the last event and will start the next one.

        Python run by them is recognized by its own frames.
        """
        before_ours, after_ours = _neighbors(self.backward, when_ns)
        before, after = _neighbors(self.others, when_ns)
        python = [thread.python.innermost_at(when_ns) for thread in self.backward]
        runs_python = first(*python) >= 0 if python else np.zeros(len(when_ns), dtype=np.bool_)
        return np.asarray((before_ours > before) & (after_ours < after) & ~runs_python)

    def _recorded(self, when_ns: Int64) -> Bool:
        """Whether the instant is inside the recorded time of the threads."""
        begins_ns = np.concatenate([thread.begins_ns for thread in self.threads])
        begun = begins_ns.min(initial=np.iinfo(np.int64).max)
        last = max(thread.last_ns for thread in self.threads)
        return np.asarray((begun <= when_ns) & (when_ns < last))

    @property
    def edges_ns(self) -> Int64:
        """The start and end times of all events, ascending."""
        return np.sort(np.concatenate([thread.edges_ns for thread in self.threads]), kind="stable")


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of a host: the thread of each lane, the main (stepping) one, those of
    backward."""

    of_lane: Int64
    main: int
    backward: tuple[int, ...]

    def team(self, thread: int) -> tuple[int, ...]:
        """The numbers of the thread and of those that it alternates with."""
        return (thread, *self.backward) if thread == self.main else (thread, self.main)


def threads_of(events: Events) -> Threads:
    """The threads of the host; the calls of a thread may be on separate lanes."""
    number: dict[tuple[str, str], int] = {}
    of_lane = np.array(
        [number.setdefault((lane.pid, lane.tid), len(number)) for lane in events.lanes],
        dtype=np.int64,
    )
    lanes = distinct(events.lane[events.of(Category.OP) & named(events, _BACKWARD)])
    gradients = np.isin(of_lane, of_lane[lanes])
    main = _main(events, of_lane, gradients)
    return Threads(of_lane, main, tuple(sorted({*of_lane[gradients].tolist()} - {main})))


def team_of(events: Events, threads: Threads, thread: int) -> Team:
    """The launching thread and those that it alternates with, itself first."""
    numbers = threads.team(thread)
    found = [thread_at(events, np.flatnonzero(threads.of_lane == one)) for one in numbers]
    backward = tuple(t for n, t in zip(numbers, found, strict=True) if n in threads.backward)
    others = tuple(t for n, t in zip(numbers, found, strict=True) if n not in threads.backward)
    return Team(events, tuple(found), backward, others)


def _main(events: Events, of_lane: Int64, gradients: Bool) -> int:
    """The thread that steps the profiler, else the one with the most time in ops or calls.

    A thread that runs gradients is chosen last.
    """
    ops = events.of(Category.OP)
    for mask in (
        events.named(STEP) & (ops | events.of(Category.ANNOTATION)),
        ops & ~gradients[events.lane],
        ops,
        events.of(Category.RUNTIME),
    ):
        if mask.any():
            weights = events.dur_ns[mask] + 1
            return int(np.bincount(of_lane[events.lane[mask]], weights).argmax())
    return -1


def _neighbors(threads: Sequence[Thread], when_ns: Int64) -> tuple[Int64, Int64]:
    """The last start of an event on the threads before each instant, and the next one after it."""
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    begins = np.sort(np.concatenate([[least], *(t.begins_ns for t in threads), [most]]))
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


@dataclass(frozen=True, slots=True)
class Nested:
    """Nested events of one thread; columns in order of start, outer first.

    key orders them by depth, then by start; by_key is that order.
    """

    row: Int64
    start_ns: Int64
    end_ns: Int64
    sorted_end_ns: Int64
    key: Int64
    by_key: Int64

    def innermost_at(self, when_ns: Int64) -> Int64:
        """The row of the innermost open event at each instant, -1 for none."""
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
    annotations: Nested
    python: Nested

    def doing_at(self, when_ns: Int64) -> tuple[UInt8, Int64]:
        """The activity of the thread at each instant, and the row that names it."""
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
        """The op that contains each of these calls of this thread, else the call itself.

        -1 for a call of another thread, and for -1.
        """
        mine = (calls >= 0) & np.isin(self.events.lane[calls], self.lanes)
        op = _open_at(self.events, self.ops, self.events.start_ns[calls])
        return np.where(mine, first(op, calls), -1)

    def frame_at(self, when_ns: Int64) -> Int64:
        """The row of the open Python function, else of the annotation, at each instant; -1 for
        none."""
        return first(self.python.innermost_at(when_ns), self.annotations.innermost_at(when_ns))

    @property
    def edges_ns(self) -> Int64:
        """The start and end times of all events, unordered."""
        rows = (self.loading, self.allocating, self.synchronizing, self.ops, self.work, self.calls)
        told = np.concatenate([*rows, self.annotations.row, self.python.row])
        return np.concatenate((self.events.start_ns[told], self.events.end_ns[told]))


def thread_at(events: Events, lanes: Int64) -> Thread:
    """The thread with these lanes; in older traces, optimizer marks are ops."""
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
    """The chosen events that start after all earlier chosen ones have ended, in order."""
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
    """Which events have a name that the pattern matches."""
    return events.name_mask(tuple(pattern.search(name) is not None for name in events.names))


def first(*choices: Int64) -> Int64:
    """For each element, the first choice that is a row."""
    found = choices[0]
    for other in choices[1:]:
        found = np.where(found >= 0, found, other)
    return found
