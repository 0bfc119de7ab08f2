"""The timeline of a rank on a device of another speed: its host launches at its own pace.

A kernel starts when the work before it on the device has ended, but not before its launch. The host
needs the recorded time for everything except its waits for the device, which end with the device.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.buckets import BUCKETS, TRANSFERS, Bucket
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK
from stepsplit.analyzer.split.gap_launches import find_waiting_calls
from stepsplit.analyzer.split.host_threads import ALLOCATES
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import Category, EventKind, Float, Int64, RankTrace

QUEUED_GAP_NS = 1_000
"""Between two kernels that are both launched in time pass 1 to 2 us."""

USUAL_LATENCY_NS = 5_000
"""From a launch to the start of its kernel on an idle device, if the trace has no such pair."""

LEAST_QUEUE = 100
"""A host that is never more than a certain number of launches ahead of its device, at least so
many, waits for a place in the launch queue (1,024 on CUDA, fewer with large arguments)."""

LONGEST_LAUNCH_NS = 10_000
"""A launch takes 2 to 8 us; a longer call was waiting before."""

_ROUNDING_NS = 2_000


class DurationFactors(Struct, frozen=True):
    """The ratio of new to old durations: of each compute event (row indexes the events), of copies
    between host and device, and of exposed transfers."""

    row: Int64
    compute: Float
    copy: float
    transfer: float


def measure_changed_work(rank: RankSplit, factors: DurationFactors, cuts_ns: Int64) -> Int64:
    """By how much the work of a rank (columns of WORK) changes between consecutive cuts, in ns.

    cuts_ns are times on the rank's own clock; the first row, before the first cut, is 0. Exposed
    waits keep their recorded length here: the replay of all ranks decides about them.
    """
    segments = _cut_segments(rank, factors)
    new_ns = _simulate(segments, _find_launches(rank.trace, segments), _find_waits(rank.trace))
    delta = np.zeros((len(cuts_ns), len(WORK)), dtype=np.int64)
    edges = np.append(segments.start_ns, segments.end_ns[-1:])
    for column, name in enumerate(WORK):
        own = segments.bucket == BUCKETS.index(name)
        change = np.where(own, new_ns - (segments.end_ns - segments.start_ns), 0.0)
        if name == "idle":
            change = np.where(own, change, np.maximum(new_ns - segments.scaled_ns, 0.0))
        elif name in ("compute", "copy"):
            change = np.where(own, segments.scaled_ns - segments.dur_ns, 0.0)
        total = np.concatenate(([0.0], np.cumsum(change)))
        delta[:, column] = np.diff(np.rint(np.interp(cuts_ns, edges, total)), prepend=0.0)
    delta[:1] = 0
    return delta


class _Segments(Struct, frozen=True):
    """The windows of a rank, cut wherever a device event starts or ends; columns of equal length.

    scaled_ns is the new duration without waiting for the host.
    """

    start_ns: Int64
    end_ns: Int64
    bucket: Int64
    scaled_ns: Float

    @property
    def dur_ns(self) -> Int64:
        return self.end_ns - self.start_ns


def _cut_segments(rank: RankSplit, factors: DurationFactors) -> _Segments:
    band, events = rank.attribution.band, rank.trace.events
    device = _list_device_events(rank.trace)
    edges = (
        band.start_ns, band.end_ns, events.start_ns[device], events.ends_of(device),
        events.start_ns[factors.row], events.ends_of(factors.row),
    )  # fmt: skip
    at = np.unique(np.concatenate(edges))
    at = at[(at >= band.start_ns[0]) & (at <= band.end_ns[-1])]
    start, end = at[:-1], at[1:]
    bucket = band.bucket[np.searchsorted(band.start_ns, start, side="right") - 1].astype(np.int64)
    ratio = np.ones(len(start))
    computes = bucket == Bucket.COMPUTE
    # The mean factor of the compute events that run in each segment, 1 without any.
    first = np.searchsorted(start, rank.trace.events.start_ns[factors.row])
    last = np.searchsorted(start, rank.trace.events.ends_of(factors.row))
    count, total = np.zeros(len(start) + 1), np.zeros(len(start) + 1)
    for edge, sign in ((first, 1.0), (last, -1.0)):
        np.add.at(count, edge, sign)
        np.add.at(total, edge, sign * factors.compute)
    running, weighted = np.cumsum(count)[:-1], np.cumsum(total)[:-1]
    ratio[computes] = np.where(running > 0.5, weighted / np.maximum(running, 1), 1.0)[computes]
    ratio[bucket == Bucket.COPY] = factors.copy
    ratio[np.isin(bucket, TRANSFERS)] = factors.transfer
    return _Segments(start, end, bucket, (end - start) * ratio)


def _list_device_events(trace: RankTrace) -> Int64:
    return np.flatnonzero(
        trace.events.is_category(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
    )


class _Launches(Struct, frozen=True):
    """The launch before which each segment cannot start: when the call began (-1 for none) and the
    time from it to the start of the segment that is not waiting."""

    at_ns: Int64
    latency_ns: Int64
    in_gap: np.ndarray[tuple[int], np.dtype[np.bool_]]


def _find_launches(trace: RankTrace, segments: _Segments) -> _Launches:
    """in_gap marks idle segments that end with a kernel that was launched too late."""
    count = len(segments.start_ns)
    at, in_gap = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    device = _list_device_events(trace)
    waits = trace.kinds.is_kind(EventKind.COMMUNICATION)[device]
    device = device[~waits]
    launch = trace.events.find_launches(device)
    device, launch = device[launch >= 0], launch[launch >= 0]
    row = np.searchsorted(segments.start_ns, trace.events.start_ns[device])
    known = (row < count) & (
        segments.start_ns[np.minimum(row, count - 1)] == trace.events.start_ns[device]
    )
    row, launch = row[known], launch[known]
    np.maximum.at(at, row, _find_launch_ns(trace, launch))
    returned = np.full(count, -1, dtype=np.int64)
    np.maximum.at(returned, row, trace.events.ends_of(launch))
    idle_before = np.concatenate(([False], segments.bucket[:-1] == Bucket.IDLE))
    gap_start = np.concatenate((segments.start_ns[:1], segments.start_ns[:-1]))
    late = idle_before & (at >= 0) & (returned > gap_start)
    in_gap[:-1] = late[1:]
    observed = segments.start_ns - at
    usual = int(np.median(observed[late])) if late.any() else USUAL_LATENCY_NS
    return _Launches(at, np.where(late, observed, np.minimum(observed, usual)), in_gap)


class _Waits(Struct, frozen=True):
    """Calls in which the host waits for the device, by end: begin, end, and the end of the device's
    last event before that (before the begin if nothing was waited for)."""

    start_ns: Int64
    end_ns: Int64
    device_ns: Int64


def _find_waits(trace: RankTrace) -> _Waits:
    events = trace.events
    device = _list_device_events(trace)
    if not len(device):
        return _Waits(device, device, device)
    calls = find_waiting_calls(events)
    calls = calls[~events.match_names(ALLOCATES)[calls]]
    start, end = events.start_ns[calls], events.ends_of(calls)
    ready = _find_last_before(np.sort(events.ends_of(device)), end + _ROUNDING_NS)
    queued = _find_queue_waits(trace, device)
    columns = [
        np.concatenate(pair)
        for pair in zip(
            (start, end, ready), (queued.start_ns, queued.end_ns, queued.device_ns), strict=True
        )
    ]
    order = np.argsort(columns[1], kind="stable")
    return _Waits(*(column[order] for column in columns))


def _find_last_before(times_ns: Int64, when_ns: Int64) -> Int64:
    """The last of the sorted times at or before each instant; the instant itself if none is."""
    last = np.searchsorted(times_ns, when_ns, side="right") - 1
    return np.where(last >= 0, times_ns[last], when_ns)


def _find_queue_waits(trace: RankTrace, device: Int64) -> _Waits:
    """The waits for a place in the launch queue, which a kernel makes free when it starts.

    Before a launch the host is taken to need the usual time between two launches.
    """
    launches = trace.events.find_launches(device)
    at = _find_launch_ns(trace, np.unique(launches[launches >= 0]))
    starts = np.sort(trace.events.start_ns[device])
    ahead = np.arange(len(at)) - np.searchsorted(starts, at)
    depth = int(ahead.max(initial=0))
    waits = np.flatnonzero(ahead >= depth - 1)
    if depth < LEAST_QUEUE or len(waits) < _LEAST_WAITS:
        return _Waits(at[:0], at[:0], at[:0])
    waits = waits[waits > 0]
    usual = np.int64(np.median(np.diff(at)[ahead[1:] < depth - 1]))
    end = at[waits]
    return _Waits(np.minimum(at[waits - 1] + usual, end), end, _find_last_before(starts, end))


_LEAST_WAITS = 10
"""A queue that is full so often is taken to be limited."""


def _find_launch_ns(trace: RankTrace, launches: Int64) -> Int64:
    """When the host had a place in the queue for each of these launches."""
    dur = trace.events.dur_ns[launches]
    return trace.events.start_ns[launches] + np.maximum(dur - LONGEST_LAUNCH_NS, 0)


def _simulate(segments: _Segments, launches: _Launches, waits: _Waits) -> Float:
    """The new duration of each segment, with what it waits for the host at its end."""
    start, end = segments.start_ns.tolist(), segments.end_ns
    kept = np.minimum(segments.dur_ns, QUEUED_GAP_NS)
    base = np.where(launches.in_gap, kept, segments.scaled_ns).tolist()
    at, latency = launches.at_ns.tolist(), launches.latency_ns.tolist()
    wait_start, wait_end, wait_device = (
        column.tolist() for column in (waits.start_ns, waits.end_ns, waits.device_ns)
    )
    waited_row = np.searchsorted(end, waits.device_ns).tolist()
    new = np.zeros(len(start) + 1)
    now, host_shift, position = float(start[0]) if start else 0.0, 0.0, 0
    ended = [now] * (len(start) + 1)
    for i, launched in enumerate(at):
        if launched >= 0:
            while position < len(wait_end) and wait_end[position] <= launched:
                device = wait_device[position]
                row = min(waited_row[position], i - 1)
                at_device = ended[row] if row >= 0 else float(device)
                tail = wait_end[position] - max(device, wait_start[position])
                resumed = max(wait_start[position] + host_shift, at_device) + max(tail, 0)
                host_shift = resumed - wait_end[position]
                position += 1
            earliest = launched + host_shift + latency[i]
            if earliest > now:
                new[i - 1] += earliest - now
                now = earliest
        new[i] += base[i]
        now += base[i]
        ended[i] = now
    return new[:-1]
