"""Idle time: what the host did while the device was idle."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import Intervals, intersect, join_tables, select_rows, sort_distinct
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.split.attribute import BucketBands
from stepsplit.analyzer.split.gap_launches import (
    NEVER,
    find_gap_launches,
    find_host_waits,
    find_waiting_calls,
)
from stepsplit.analyzer.split.host_threads import (
    ALLOCATES,
    HostActivity,
    LaunchThreads,
    build_launch_threads,
    find_host_threads,
    pick_first,
)
from stepsplit.analyzer.trace import Events, Int32, Int64, RankTrace, UInt8

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class IdleCause(Struct, frozen=True):
    """Idle time of one window with one cause: its duration, and the number of gaps it occurs in.

    idle_ns over all causes of a window add up to its idle time. op is the name of the responsible
    event, "" if unknown.

    Host-bound causes, by what delayed the launch of the event that ended the gap:
      data_loading    the host waited for its next batch
      compilation     torch.compile compiled
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
    if trace.on_device:
        found = list(_explain_device_gaps(trace.events, gaps))
    else:
        # On a CPU run the training thread itself does the work.
        threads = find_host_threads(trace.events)
        launchers = build_launch_threads(trace.events, threads, threads.main)
        found = [_attribute_to_threads(gaps, np.arange(len(gaps)), launchers, "other")]
    parts = join_tables(*found)
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
    in_gaps = sort_distinct(kind * (len(window) + 1) + parts.gap) // (len(window) + 1)
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
    "compilation",
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


_CAUSE_OF_ACTIVITY = {
    HostActivity.LOADING: "data_loading",
    HostActivity.COMPILING: "compilation",
    HostActivity.ALLOCATING: "allocation",
    HostActivity.SYNCHRONIZING: "synchronize",
    HostActivity.NO_OP: "python",
    HostActivity.UNKNOWN: "unknown",
}


class IdleParts(Struct, frozen=True):
    """Parts of gaps, each with its cause (index of CAUSES) and the row that names it, -1 for
    none."""

    gap: Int64
    start_ns: Int64
    end_ns: Int64
    cause: UInt8
    row: Int64


def _explain_device_gaps(events: Events, gaps: Intervals) -> Iterable[IdleParts]:
    """The parts of these gaps, which fill them; unordered."""
    threads = find_host_threads(events)

    @cache  # one thread often has all three kinds of gaps below
    def build_launchers(thread: int) -> LaunchThreads:
        return build_launch_threads(events, threads, thread)

    starts, waiting = find_gap_launches(events, gaps, threads), find_waiting_calls(events)
    host_end = np.clip(starts.returned_ns, gaps.start_ns, gaps.end_ns)
    launch_known = starts.returned_ns < NEVER
    hosts = launch_known & (host_end > gaps.start_ns)
    # What the host does after the last event of the device has delayed no launch.
    last = hosts & (starts.row < 0)
    if last.any():
        launchers = build_launchers(threads.main)
        tail = Intervals(gaps.start_ns[last], gaps.end_ns[last])
        yield _attribute_to_threads(tail, np.flatnonzero(last), launchers, "launch_bound")
    hosts &= ~last
    allocating = events.match_names(ALLOCATES)
    for number in np.unique(starts.thread[hosts]).tolist():
        rows = np.flatnonzero(hosts & (starts.thread == number))
        host = Intervals(gaps.start_ns[rows], host_end[rows])
        launcher_events = np.isin(threads.of_lane[events.lane], threads.list_launchers(number))
        waits = find_host_waits(
            events, host.start_ns, starts.launch[rows], launcher_events, waiting
        )
        launchers = build_launchers(number)
        waited_end = np.minimum(host.start_ns + waits.waited_ns, host.end_ns)
        waited = Intervals(host.start_ns, waited_end)
        parts = _attribute_to_threads(waited, rows, launchers, "launch_bound")
        # The delay by a wait counts to it, except for parts with a more specific cause.
        wait = waits.row[np.searchsorted(rows, parts.gap)]
        named = (_CODE["data_loading"], _CODE["compilation"], _CODE["allocation"])
        specific = np.isin(parts.cause, named)
        cause = np.where(allocating[wait], _CODE["allocation"], _CODE["synchronize"])
        row = np.full(len(wait), -1, dtype=np.int64)
        for thread in launchers.threads:
            row = pick_first(row, thread.find_enclosing_op(wait))
        yield replace(
            parts,
            cause=np.where(specific, parts.cause, cause).astype(np.uint8),
            row=np.where(specific, parts.row, row),
        )
        yield _attribute_to_threads(
            Intervals(waited_end, host.end_ns), rows, launchers, "launch_bound"
        )
    # From the launch (or the previous event, if later) to the start.
    rows = np.flatnonzero(~launch_known | (host_end < gaps.end_ns))
    start, end = np.where(launch_known, host_end, gaps.start_ns)[rows], gaps.end_ns[rows]
    soon = (end - start <= _QUEUED_NS) | (end - starts.returned_ns[rows] <= _LAUNCHED_NS)
    cases = [~launch_known[rows], soon, starts.ordered[rows]]
    codes = [_CODE["unknown"], _CODE["launch_latency"], _CODE["dependency"]]
    cause = np.select(cases, codes, _CODE["late_start"]).astype(np.uint8)
    names = [np.full(len(rows), -1), starts.launch[rows]]
    device = IdleParts(rows, start, end, cause, np.select(cases[:2], names, starts.row[rows]))
    late = np.isin(cause, (_CODE["dependency"], _CODE["late_start"]))
    yield select_rows(device, ~late)
    for number in np.unique(starts.thread[rows[late]]).tolist():
        mine = late & (starts.thread[rows] == number)
        yield _find_loading(select_rows(device, mine), build_launchers(number))


def _find_loading(late: IdleParts, launchers: LaunchThreads) -> IdleParts:
    """Late starts, those of data loading where the host waits for its batch until just before what
    was launched starts: a graph may be launched whole before its input has come."""
    whole = _attribute_to_threads(
        Intervals(late.start_ns, late.end_ns), np.arange(len(late.gap)), launchers, "launch_bound"
    )
    is_loading = whole.cause == _CODE["data_loading"]
    until_ns = np.full(len(late.gap), _WHOLE_RANGE_NS[0])
    np.maximum.at(until_ns, whole.gap[is_loading], whole.end_ns[is_loading])
    is_loading &= (late.end_ns - until_ns <= _LAUNCHED_NS)[whole.gap]
    return replace(
        whole,
        gap=late.gap[whole.gap],
        cause=np.where(is_loading, whole.cause, late.cause[whole.gap]).astype(np.uint8),
        row=np.where(is_loading, whole.row, late.row[whole.gap]),
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
