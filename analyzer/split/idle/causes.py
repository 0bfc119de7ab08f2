"""Why a rank's device was idle."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.split.attribute import IDLE, Band
from stepsplit.analyzer.split.idle.gaps import CAUSES, Parts, explained
from stepsplit.analyzer.trace import Events, Int32, RankTrace

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class IdleCause:
    """Idle time of one window that has one cause: how long, and in how many gaps it occurs.

    idle_ns of all causes of a window add up to its idle. op names what ran, "" where nothing tells.
    causes, by what held up the launch of the event that ended the gap:
    data_loading    the host waited for its next batch
    allocation      it took or gave back memory of the device or pinned memory
    synchronize     it had waited for the device, so it launched late: as much of the gap as it had
                    waited, for without the wait it would have been that much earlier; op is the op
                    that waited (aten::item), or the call
    launch_bound    it was busy in ops and launches, or between those of backward's engine
    python          it ran no op and no call, where the trace would show them; op is the Python
                    function, else the annotation
    and where the launch was in time, by what followed it:
    launch_latency  what a device takes from one event to the next, or from a launch to its start
    dependency      longer, for the stream waited for an event, or a graph for its own order
    late_start      longer, and nothing tells why: the device was another process's, or the trace
                    lacks events; op is what started late
    On a CPU run other is an op that is no compute, or an open message. unknown: nothing tells.
    """

    window: int
    cause: str
    op: str
    idle_ns: int
    count: int


def idle_causes(trace: RankTrace, band: Band) -> tuple[IdleCause, ...]:
    """Why the rank idled, a row a window, cause and op; by window, the longest first.

    band is on the rank's own clock, as the trace is. An instant between a gap's start and the
    return of the call that launched the event after it is the host's, the rest is the device's.
    """
    idle = band.bucket == IDLE
    window, gaps = band.window[idle], Intervals(band.start_ns[idle], band.end_ns[idle])
    parts = explained(trace, gaps)
    _check(gaps, parts)
    return _summed(trace.events, window, parts)


def _summed(events: Events, window: Int32, parts: Parts) -> tuple[IdleCause, ...]:
    """The parts by window, cause and op; a count is of gaps."""
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


def _check(gaps: Intervals, parts: Parts) -> None:
    """Every instant of every gap has one cause."""
    held = np.zeros(len(gaps), dtype=np.int64)
    np.add.at(held, parts.gap, parts.end_ns - parts.start_ns)
    length = gaps.end_ns - gaps.start_ns
    assert np.array_equal(held, length), f"{held.sum()} ns explained of {length.sum()}"
