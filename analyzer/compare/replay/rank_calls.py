"""The collectives and messages of one rank as device events, on gloo as calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import inside, labels_of, most_of, union
from stepsplit.analyzer.split.idle import SYNCHRONIZES, named
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.split.steps import on_main_stream
from stepsplit.analyzer.split.transfers import Arrivals
from stepsplit.analyzer.trace import Bool, Category, Int64, RankTrace

_SOON_ON_DEVICE_NS, _SOON_ON_HOST_NS = 20_000, 500_000
_TIMES = 4
"""What begins so soon behind a wait, or after such a part of it, waited for the same."""
_ALWAYS, _NEVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class RankCalls:
    """The events that carried out a rank's calls, in order of start; columns of one length.

    of_call says of each of the rank's calls which event it was. hangs_ns is the instant of the
    rank's own time line that an event's start hung on, behind is the event before it on the same
    stream, -1 for none. held: the rank did not go on before it ended.
    """

    call: Int64
    of_call: Int64
    start_ns: Int64
    end_ns: Int64
    hangs_ns: Int64
    behind: Int64
    held: Bool


def rank_calls(rank: RankSplit, arrivals: Arrivals, rows: slice) -> RankCalls:
    """The events of the rank, whose calls have those rows among all."""
    label = _events(rank.trace)
    count = int(label.max(initial=-1)) + 1
    start = -most_of(label, -arrivals.start_ns[rows], count)
    life = rank.clock.common_ns(rank.pieces.life_end_ns[: len(label)])
    end = most_of(label, np.maximum(life, arrivals.start_ns[rows]), count)
    order = np.lexsort((end, start))
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    of_call = place[label]
    call = np.zeros(count, dtype=np.int64)
    call[of_call[::-1]] = np.arange(len(label))[::-1]
    lane = _lanes(rank.trace, call)
    start, end = start[order], end[order]
    behind = _behind(lane, start, end)
    return RankCalls(
        call=call,
        of_call=of_call,
        start_ns=start,
        end_ns=end,
        hangs_ns=_hangs_ns(rank, call, start, np.where(behind >= 0, end[behind], _ALWAYS)),
        behind=behind,
        held=_held(rank, of_call, lane, start, end),
    )


def _lanes(trace: RankTrace, call: Int64) -> Int64:
    """The stream of each event; gloo has none, there every call has one of its own."""
    if not trace.on_device:
        return np.arange(len(call), dtype=np.int64)
    return trace.events.lane[trace.calls.event[call]].astype(np.int64)


def _events(trace: RankTrace) -> Int64:
    """A number for each call's event; on gloo every call is one of its own."""
    if not trace.on_device:
        return np.arange(len(trace.calls), dtype=np.int64)
    return labels_of(trace.calls.event)


def _held(rank: RankSplit, of_call: Int64, lane: Int64, start: Int64, end: Int64) -> Bool:
    """What the rank waited for: in each gap of compute the event that ended last, and those at
    whose end another one began on another stream. What else ended there did so by chance, as did
    on a device what ended while the host was late, unless that waited for the device."""
    gap = np.full(len(start), -1)
    gap[of_call[: len(rank.attribution.gap)]] = rank.attribution.gap
    rows = np.flatnonzero(gap >= 0)
    rows = rows[np.lexsort((end[rows], gap[rows]))]
    soon = _SOON_ON_DEVICE_NS if rank.trace.on_device else _SOON_ON_HOST_NS
    after = np.searchsorted(start, end[rows], side="left")
    begun = np.append(start, _NEVER)[after]
    elsewhere = np.append(lane, -1)[after] != lane[rows]
    begins = (begun - end[rows] <= soon) & elsewhere
    last = np.append(gap[rows][1:] != gap[rows][:-1], True)[: len(rows)]
    held = np.zeros(len(start), dtype=np.bool_)
    held[rows[begins | (last & _goes_on(rank, gap[rows], end[rows]))]] = True
    return held


def _goes_on(rank: RankSplit, gap: Int64, end: Int64) -> Bool:
    """Whether the rank went on because these ended: at once, or soon for so long a wait; or its
    host waited for the device."""
    if not rank.trace.on_device:
        return np.ones(len(end), dtype=np.bool_)
    own, compute = rank.clock.own_ns(end), rank.work.compute
    waited = own - np.append(_ALWAYS // 2, compute.end_ns)[gap]
    late = np.append(compute.start_ns, _NEVER)[gap] - own
    events = rank.trace.events
    waits = events.of(Category.RUNTIME) & named(events, SYNCHRONIZES)
    synchronizing = union(events.start_ns[waits], events.end_ns[waits])
    soon = np.maximum(_SOON_ON_DEVICE_NS, waited // _TIMES)
    return np.asarray((late <= soon) | inside(synchronizing, own))


def _behind(lane: Int64, start: Int64, end: Int64) -> Int64:
    """For each event the one before it on its stream that was over when it began, -1 for none."""
    order = np.argsort(lane, kind="stable")
    before, after = order[:-1], order[1:]
    follows = (lane[before] == lane[after]) & (end[before] <= start[after])
    behind = np.full(len(lane), -1)
    behind[after[follows]] = before[follows]
    return behind


def _hangs_ns(rank: RankSplit, call: Int64, start: Int64, free_ns: Int64) -> Int64:
    """The instant of the rank's own time line on which each event's start hung.

    A kernel hangs on the compute launched before it, if it started soon behind that and what its
    stream did last (free_ns), or while the rank computed. What started late in a gap of compute
    hangs on what the rank did until then, as does a call on gloo.
    """
    if not rank.trace.on_device:
        return start
    launched = rank.clock.common_ns(_launched_before(rank.trace, rank.trace.calls.event[call]))
    known = (launched > _ALWAYS // 2) & (launched <= start)
    soon = start - np.maximum(launched, free_ns) <= _SOON_ON_DEVICE_NS
    own = rank.clock.own_ns(start)
    compute = rank.work.compute
    last = np.searchsorted(compute.start_ns, own, side="left") - 1
    under = last >= 0
    under[under] = compute.end_ns[last[under]] > own[under]
    return np.where(known & (soon | under), launched, start)


def _launched_before(trace: RankTrace, event: Int64) -> Int64:
    """When the last compute kernel that was launched before each of these ended on the stream that
    computes most, on the rank's own clock; the smallest int64 where there is none."""
    events = trace.events
    kernels = events.of(Category.KERNEL)
    kernels[trace.calls.event] = False
    rows = np.flatnonzero(kernels)
    rows = rows[on_main_stream(trace, rows)]
    launched = events.launch_ns()
    rows = rows[launched[rows] >= 0]
    rows = rows[np.lexsort((events.start_ns[rows], launched[rows]))]
    last_end = np.concatenate(([_ALWAYS], np.maximum.accumulate(events.end_ns[rows])))
    known = launched[event] >= 0
    before = np.searchsorted(launched[rows], launched[event], side="left")
    return np.where(known, last_end[before], _ALWAYS)
