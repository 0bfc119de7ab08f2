"""The launch of the event after each gap, and the preceding wait of the host."""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, list_distinct
from stepsplit.analyzer.split.host_threads import ALLOCATES, SYNCHRONIZES, HostThreads
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Bool, Category, Events, Int64

NEVER = np.iinfo(np.int64).max

_BLOCKING_COPY = re.compile(
    r"^(?:cuda|hip)Memcpy(?:WithStream|DtoH|HtoD)?$|^cuMemcpy[DH]to[DH]_v2$"
)

_TO_HOST = re.compile(r"HtoD|DtoH|Host")

_ORDERS = re.compile(r"StreamWaitEvent|GraphLaunch")


class GapLaunches(Struct, frozen=True):
    """For each gap the device event that ended it, and its launch; columns of one length.

    row and launch index the events, -1 for none. returned_ns is when the launching call returned
    (an earlier bound if only later launches are recorded, NEVER if unknown; the end of the gap
    where nothing follows it); thread is the launching host thread; ordered: an event wait or a
    graph preceded the start.
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
    # A stream keeps the order of launches: the next recorded launch bounds one that is not. The
    # first events of a stream without a recorded launch were launched before the recording.
    runtime = events.is_category(Category.RUNTIME)
    bound = np.where(launches >= 0, events.start_ns[launches], NEVER)
    for lane in list_distinct(events.lane[device[launches < 0]]).tolist():
        here = np.flatnonzero(events.lane[device] == lane)
        recorded = np.flatnonzero(launches[here] >= 0)
        bound[here] = np.minimum.accumulate(bound[here][::-1])[::-1]
        if len(recorded):
            earlier = here[: recorded[0]]
            bound[earlier] = np.minimum(bound[earlier], events.start_ns[runtime][0])
    bound = np.where(ended, bound[at], NEVER)
    queued = np.where(bound <= gaps.start_ns, bound, NEVER)
    # Ordered is a graph launch, or a launch that directly follows a stream wait.
    orders_ns = events.start_ns[runtime & events.match_names(_ORDERS)]
    launches_ns = events.start_ns[list_distinct(launches[launches >= 0])]
    when = events.start_ns[launch]
    before = [np.iinfo(np.int64).min]
    ordered = np.searchsorted(orders_ns, when, side="right")
    launched = np.searchsorted(launches_ns, when, side="left")
    ordered_ns = np.concatenate((before, orders_ns))[ordered]
    launched_ns = np.concatenate((before, launches_ns))[launched]
    return GapLaunches(
        row=np.where(ended, device[at], -1),
        launch=launch,
        returned_ns=np.select([launch >= 0, ended], [events.ends_of(launch), queued], gaps.end_ns),
        thread=np.where(launch >= 0, threads.of_lane[events.lane[launch]], threads.main),
        ordered=np.asarray((launch >= 0) & (ordered_ns > launched_ns)),
    )


def find_host_waits(
    events: Events, gap_start_ns: Int64, launch: Int64, launcher_events: Bool, waits: Int64
) -> HostWaits:
    """The last wait that started before each gap, if there was no other launch before launch.

    launcher_events marks the events of the threads that launch in turns, waits are the rows of
    find_waiting_calls.
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
