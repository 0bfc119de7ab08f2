"""How the device came to its next event: which call launched it, and what the host waited for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, distinct
from stepsplit.analyzer.split.idle.teams import Threads
from stepsplit.analyzer.split.idle.threads import ALLOCATES, SYNCHRONIZES, named
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Bool, Category, Events, Int64

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
    (an earlier bound where only later launches are recorded, NEVER where nothing tells); thread is
    the host's that launched; ordered tells whether an event or a graph stood before the start.
    """

    row: Int64
    launch: Int64
    returned_ns: Int64
    thread: Int64
    ordered: Bool


@dataclass(frozen=True, slots=True)
class Waits:
    """For each gap the host's last wait for the device before it, -1 for none that made it late."""

    row: Int64
    waited_ns: Int64


def starts_of(events: Events, gaps: Intervals, threads: Threads) -> Starts:
    """The earliest device event that starts at or after each gap's end, on any stream."""
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
    """Before when each was launched at the latest: a stream keeps the order of launches.

    What ran first on a stream, and whose launch is not recorded, came before the recording.
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
    """Whether the launching call is a graph's, or the stream was told to wait right before it."""
    found = events.of(Category.RUNTIME) & named(events, _ORDERS)
    orders = np.flatnonzero(found)
    when = events.start_ns[launch]
    order = np.searchsorted(events.start_ns[orders], when, side="right")
    earlier = np.searchsorted(events.start_ns[launches], when, side="left")
    told_ns = _before(events.start_ns[orders], order)
    return np.asarray((launch >= 0) & (told_ns > _before(events.start_ns[launches], earlier)))


def _before(starts_ns: Int64, count: Int64) -> Int64:
    """The last of the first so many starts."""
    padded = np.concatenate(([np.iinfo(np.int64).min], starts_ns))
    return np.asarray(padded[count], dtype=np.int64)


def waits_of(
    events: Events, gap_start_ns: Int64, launch: Int64, of_team: Bool, waits: Int64
) -> Waits:
    """The last wait that began before each gap, if nothing was launched between it and launch.

    of_team are the events of the threads that launch in turns, waits those of waiting_calls.
    """
    calls = waits[of_team[waits]]
    launches = events.launches_of(np.flatnonzero(events.of(*DEVICE_CATEGORIES)))
    launches = distinct(launches[launches >= 0])
    launches = launches[of_team[launches]]
    last = np.searchsorted(events.start_ns[calls], gap_start_ns, side="left") - 1
    if not len(calls):
        nobody = np.full(len(gap_start_ns), -1, dtype=np.int64)
        return Waits(nobody, np.zeros(len(gap_start_ns), dtype=np.int64))
    row = calls[last]
    since = np.searchsorted(events.start_ns[launches], events.end_ns[row], side="left")
    until = np.searchsorted(events.start_ns[launches], events.start_ns[launch], side="left")
    late = (last >= 0) & (until <= since)
    return Waits(np.where(late, row, -1), np.where(late, events.dur_ns[row], 0))


def waiting_calls(events: Events) -> Int64:
    """The calls in which a host waits for the device: synchronizing, allocating, blocking copies.

    A copy blocks if its memory is pageable, or if the call returned when the copy was done.
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
