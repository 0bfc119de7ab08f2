"""What the kernels of a rank waited for: event waits, synchronizations, the order on a stream."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from enum import IntEnum
from heapq import heappop, heappush
from typing import Literal

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.trace import (
    ALL_STREAMS,
    HOST,
    Bool,
    Category,
    Events,
    EventWaits,
    Int64,
    RankTrace,
    UInt8,
)

# Whether a kernel waited for a communication kernel, by the recorded calls of the runtime.

HELD_NS = 10_000
"""Communication that ends at most this long after compute resumed held it up: a kernel may be
launched while the one that it depends on still ends, and timestamps are rounded."""

_WAITS_FOR_EVENT = re.compile(r"StreamWait(?:Event|Value)")

_MAY_ORDER = re.compile(
    r"StreamWait|[Ss]ynchronize|Event(?:Query|Wait)|QueueFinish|Graph|Host"
    r"|Memcpy|Malloc|Free|Alloc|Register|Map"
)
"""Calls after which a kernel may have to wait for work on another stream."""

_LAUNCHES = re.compile(r"Launch|\b(?>\w*?Mem(?:cpy|set))\w*Async")

_GRAPH_LAUNCH, _QUERY = re.compile(r"GraphLaunch"), re.compile(r"EventQuery")

_NEVER, _NO_WAIT = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Awaited(IntEnum):
    """Whether the recording shows that a kernel waited for a communication kernel.

    YES: by the order on their stream, by an identified wait, or because an event wait was issued
    right before the kernel's launch. NO: waits were recorded, and none made the kernel wait.
    UNKNOWN: the recording lacks waits or launches, or does not say what was awaited.
    """

    NO = 0
    UNKNOWN = 1
    YES = 2


def find_awaited(trace: RankTrace, kernels: Int64, comms: Int64) -> UInt8:
    """For each pair of events, an Awaited: whether the kernel waited for the communication."""
    events = trace.events
    on_one_stream = events.lane[kernels] == events.lane[comms]
    awaited = np.where(on_one_stream, Awaited.YES, Awaited.UNKNOWN).astype(np.uint8)
    calls = _find_runtime_calls(trace)
    if not calls.recorded or not len(kernels):
        return awaited
    launches = _Launches.find(events, kernels, comms)
    # Without a call that may order streams between the two launches, the kernel could not wait.
    since, until = (
        np.searchsorted(calls.may_order_ns, edge, side="right")
        for edge in (launches.comm_ns, launches.kernel_ns)
    )
    awaited[launches.known & (until <= since)] = Awaited.NO
    waited = _waits_right_before(events, calls.waits, launches)
    if len(calls.identified.at_ns):
        history = _follow_waits(calls.identified)
        reached: dict[tuple[int, int], _Reached] = {}
        columns = (
            launches.kernel_stream, launches.kernel_ns, launches.comm_stream, launches.comm_ns,
        )  # fmt: skip
        pairs = zip(*(column.tolist() for column in columns), strict=True)
        for i, (kernel_stream, at_ns, comm_stream, launch_ns) in enumerate(pairs):
            kernel = (kernel_stream, at_ns)
            if kernel not in reached:
                reached[kernel] = history.find(*kernel)
            waited[i] |= launch_ns <= max(
                reached[kernel].get(stream, _NEVER) for stream in (comm_stream, ALL_STREAMS)
            )
    awaited[launches.known & waited | on_one_stream] = Awaited.YES
    return awaited


class _RuntimeCalls(Struct, frozen=True):
    """The calls of a trace after which a kernel may have to wait.

    recorded: whether the trace has event waits at all; identified: the waits whose event is known;
    may_order_ns: the sorted starts of the other calls; waits: the rows of event waits among them.
    """

    recorded: bool
    identified: _Waits
    may_order_ns: Int64
    waits: Int64


def _find_runtime_calls(trace: RankTrace) -> _RuntimeCalls:
    events = trace.events
    runtime = events.is_category(Category.RUNTIME)
    waits = runtime & events.match_names(_WAITS_FOR_EVENT)
    queries = events.correlation[runtime & events.match_names(_QUERY)]
    identified = _Waits.build(events, runtime, trace.waits, queries)
    may_order = runtime & events.match_names(_MAY_ORDER)
    may_order &= ~np.isin(events.correlation, trace.waits.correlation) | np.isin(
        events.correlation, queries
    )
    return _RuntimeCalls(
        recorded=bool(waits.any() or (identified.stream != HOST).any()),
        identified=identified,
        may_order_ns=events.start_ns[may_order],
        waits=np.flatnonzero(waits & may_order),
    )


class _Launches(Struct, frozen=True):
    """The launches of pairs of a kernel and a communication: when, the streams, and the host thread
    of the kernel's. known: both were recorded, and neither is a graph."""

    known: Bool
    kernel_ns: Int64
    comm_ns: Int64
    kernel_lane: Int64
    kernel_stream: Int64
    comm_stream: Int64

    @classmethod
    def find(cls, events: Events, kernels: Int64, comms: Int64) -> _Launches:
        kernel, comm = np.split(events.find_launches(np.concatenate((kernels, comms))), 2)
        graph = events.match_names(_GRAPH_LAUNCH)
        stream = np.array([lane.stream for lane in events.lanes], dtype=np.int64)[events.lane]
        return cls(
            known=(kernel >= 0) & (comm >= 0) & ~graph[kernel] & ~graph[comm],
            kernel_ns=events.start_ns[kernel],
            comm_ns=events.start_ns[comm],
            kernel_lane=events.lane[kernel].astype(np.int64),
            kernel_stream=stream[kernels],
            comm_stream=stream[comms],
        )


def _waits_right_before(events: Events, waits: Int64, launches: _Launches) -> Bool:
    """Whether an event wait is the last call before the kernel's launch on its thread, and later
    than the launch of the communication."""
    launching = events.is_category(Category.RUNTIME) & events.match_names(_LAUNCHES)
    found = np.zeros(len(launches.known), dtype=np.bool_)
    for lane in np.unique(launches.kernel_lane).tolist():
        rows = np.flatnonzero(launches.kernel_lane == lane)
        at = launches.kernel_ns[rows]
        here = events.lane == lane
        waited = _find_last_start(events.start_ns[waits[here[waits]]], at, "right")
        launched = _find_last_start(events.start_ns[launching & here], at, "left")
        found[rows] = (waited >= launched) & (waited >= launches.comm_ns[rows])
    return found


def _find_last_start(starts_ns: Int64, at_ns: Int64, side: Literal["left", "right"]) -> Int64:
    """The last of these sorted starts before each instant; with side "right" also at it."""
    padded = np.concatenate(([_NEVER], starts_ns))
    return np.asarray(padded[np.searchsorted(starts_ns, at_ns, side=side)])


# Waits whose event is known: up to which launch of each stream every stream has waited.


class _Waits(Struct, frozen=True):
    """Waits whose event is known, in order of time; columns of equal length.

    stream waits (HOST: the host) for everything that was launched on on_stream (or ALL_STREAMS)
    until recorded_ns.
    """

    at_ns: Int64
    stream: Int64
    on_stream: Int64
    recorded_ns: Int64

    @classmethod
    def build(cls, events: Events, runtime: Bool, waits: EventWaits, queries: Int64) -> _Waits:
        """The waits of a trace; queries are the correlations of calls that only ask."""
        calls = np.flatnonzero(runtime & (events.correlation >= 0))
        calls = calls[np.argsort(events.correlation[calls], kind="stable")]
        if not len(calls):
            return cls(*(np.zeros(0, dtype=np.int64),) * 4)

        def find_ns(correlation: Int64) -> Int64:
            """When the call was made; for an unrecorded one, the call before it."""
            at = np.searchsorted(events.correlation[calls], correlation, side="right") - 1
            return np.where(at >= 0, events.start_ns[calls[at]], _NEVER)

        at_ns = find_ns(waits.correlation)
        order = np.argsort(at_ns, kind="stable")
        order = order[~np.isin(waits.correlation[order], queries)]
        return cls(
            at_ns[order], waits.stream[order], waits.on_stream[order],
            find_ns(waits.recorded)[order],
        )  # fmt: skip


_Reached = Mapping[int, int]
"""By stream, the launch up to which its work is known to have ended, as a time of the host."""


class _WaitHistory:
    """What each stream, and the host, had waited for after each of its waits."""

    def __init__(self) -> None:
        self.reached: dict[int, list[_Reached]] = defaultdict(list)
        self.at_ns: dict[int, list[int]] = defaultdict(list)

    def add(self, waiter: int, at_ns: int, reached: _Reached) -> None:
        """Adds a wait; the waits of a stream in order of time."""
        self.reached[waiter].append(_merge(self._find_own(waiter, at_ns), reached))
        self.at_ns[waiter].append(at_ns)

    def find(self, stream: int, at_ns: int) -> _Reached:
        """What work launched on the stream at this time had to wait for."""
        own = self._find_own(stream, at_ns)
        return own if stream == HOST else _merge(own, self._find_own(HOST, at_ns))

    def _find_own(self, waiter: int, at_ns: int) -> _Reached:
        count = bisect_right(self.at_ns[waiter], at_ns)
        return self.reached[waiter][count - 1] if count else {}


def _follow_waits(waits: _Waits) -> _WaitHistory:
    """Follows all waits; who waits for a stream also waits for what that stream waited for."""
    history = _WaitHistory()
    columns = (waits.at_ns, waits.stream, waits.on_stream, waits.recorded_ns)
    for at_ns, waiter, on_stream, recorded_ns in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        awaited = {} if on_stream == ALL_STREAMS else history.find(on_stream, recorded_ns)
        history.add(waiter, at_ns, _merge(awaited, {on_stream: recorded_ns}))
    return history


def _merge(one: _Reached, other: _Reached) -> _Reached:
    return {at: max(one.get(at, _NEVER), other.get(at, _NEVER)) for at in (*one, *other)}


# The first kernel that waited for a message.


def find_first_waiting(trace: RankTrace, kernels: Int64, receives: Int64) -> Int64:
    """For each received message, the first of the kernels that waited for it; -1 if none is known.

    kernels are rows of events, receives of calls. If the events that are waited for are recorded,
    it is the first kernel behind a wait for this message; else the first one that starts after its
    end and is launched after it, directly behind a wait that is not for a collective launched
    directly before: as for a message whose receiver waits at once, or later for one posted early.
    """
    calls, events = _find_runtime_calls(trace), trace.events
    comms = trace.calls.event[receives]
    if not calls.recorded:
        return np.full(len(comms), -1)
    launches = _Launches.find(events, kernels, kernels)
    of_comm = _Launches.find(events, comms, comms)
    if (calls.identified.stream != HOST).any():
        # When one of the streams, or the host, first waited for each communication; else never.
        waiting, history = launches.known, _follow_waits(calls.identified)
        since_ns = np.full(len(comms), _NO_WAIT)
        for stream in np.unique(of_comm.comm_stream).tolist():
            mine = of_comm.comm_stream == stream
            for waiter in (*np.unique(launches.kernel_stream[waiting]).tolist(), HOST):
                reached = [
                    max(one.get(which, _NEVER) for which in (stream, ALL_STREAMS))
                    for one in history.reached[waiter]
                ]
                reached_ns = np.array(reached, dtype=np.int64)
                found = np.searchsorted(reached_ns, of_comm.comm_ns[mine], side="left")
                at_ns = np.array([*history.at_ns[waiter], _NO_WAIT], dtype=np.int64)
                since_ns[mine] = np.minimum(since_ns[mine], at_ns[found])
    else:
        n_waits = _count_waits_for_earlier(trace, calls.waits, launches.kernel_ns)
        waiting = launches.known & (n_waits > 0)
        since_ns = of_comm.comm_ns
    kernels, at_ns = kernels[waiting], launches.kernel_ns[waiting]
    order = np.lexsort((events.start_ns[kernels], at_ns))
    first = np.searchsorted(at_ns[order], since_ns, side="left")
    if not (calls.identified.stream != HOST).any():
        # Kernels of one stream start in the order of their launches.
        begun = np.maximum.accumulate(events.start_ns[kernels[order]])
        first = np.maximum(first, np.searchsorted(begun, events.ends_of(comms), side="left"))
        batch = np.searchsorted(np.sort(launches.kernel_ns[launches.known]), of_comm.comm_ns)
        starts_ns, ends_ns = events.start_ns[kernels[order]], events.ends_of(comms)
        first = _queue_behind_awaited(first, n_waits[waiting][order], starts_ns, ends_ns, batch)
    return np.where(of_comm.known, np.append(kernels[order], -1)[first], -1)


def _queue_behind_awaited(
    first: Int64, n_waits: Int64, starts_ns: Int64, ends_ns: Int64, batch: Int64
) -> Int64:
    """The places of the waiting kernels, which start at starts_ns, where none waits for messages of
    more batches than waits were issued before it; batch numbers those that were posted together.

    A message that was posted early may have arrived before the one that the host waits for. That
    one has just ended when the kernel starts, and all that was posted before it has, too; else it
    was posted first. Later ones are for the next kernel that waits. Where messages have fewer waits
    than batches, as rounds of a ring that are awaited together, waits do not tell them apart.
    """
    queued = first.copy()
    if len(np.unique(batch)) > n_waits.sum():
        return queued
    at_place: dict[int, list[int]] = defaultdict(list)
    for message, place in enumerate(first.tolist()):
        at_place[place].append(message)
    places = sorted(at_place)
    while places and (place := heappop(places)) < len(n_waits):
        waiting = np.array(at_place[place])
        _, of_batch = np.unique(batch[waiting], return_inverse=True)
        just_ended = of_batch[starts_ns[place] - ends_ns[waiting] <= HELD_NS]
        awaited = max(int(just_ended.max(initial=0)) + 1, int(n_waits[place]))
        left = waiting[of_batch >= awaited]
        queued[left] = place + 1
        if len(left) and place + 1 not in at_place:
            heappush(places, place + 1)
        at_place[place + 1] += left.tolist()
    return queued


def _count_waits_for_earlier(trace: RankTrace, waits: Int64, at_ns: Int64) -> Int64:
    """How many event waits were issued since the launch before each of these, on whatever thread,
    that are not for a collective launched there."""
    events = trace.events
    launching = events.is_category(Category.RUNTIME) & events.match_names(_LAUNCHES)
    collectives = events.find_launches(trace.calls.event[~trace.calls.is_message])
    launched = np.flatnonzero(launching)
    launched_ns = np.append(_NEVER, events.start_ns[launched])
    for_collective = np.append(False, np.isin(launched, collectives))
    before = np.searchsorted(launched_ns, at_ns, side="left") - 1
    since, until = (
        np.searchsorted(events.start_ns[waits], edge, side="right")
        for edge in (launched_ns[before], at_ns)
    )
    return np.asarray(until - since - for_collective[before])
