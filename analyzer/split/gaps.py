"""Which communication held up each gap of compute.

A gap is an interval without compute. Only communication that the rank was waiting for can have held
it up: that which the recording shows to be awaited, else that which had ended when compute resumed,
up to the accuracy of the timestamps. What is still open later held up nothing. On a CPU run the
range of a call may end long after the call itself, because a worker thread writes it; there the
arrival of the last member counts as well.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Literal, Self

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, group_min, is_inside, union
from stepsplit.analyzer.split.transfers import Pieces, RankCallTimes
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

# What the kernels of a rank waited for: event waits, synchronizations, the order on a stream.


# Whether a kernel waited for a communication kernel, by the recorded calls of the runtime.

_WAITS_FOR_EVENT = re.compile(r"StreamWait(?:Event|Value)")

_MAY_ORDER = re.compile(
    r"StreamWait|[Ss]ynchronize|Event(?:Query|Wait)|QueueFinish|Graph|Host"
    r"|Memcpy|Malloc|Free|Alloc|Register|Map"
)
"""Calls after which a kernel may have to wait for work on another stream."""

_LAUNCHES = re.compile(r"Launch|\b(?>\w*?Mem(?:cpy|set))\w*Async")

_GRAPH_LAUNCH, _QUERY = re.compile(r"GraphLaunch"), re.compile(r"EventQuery")

_NEVER = np.iinfo(np.int64).min


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
    awaited = np.full(len(kernels), Awaited.UNKNOWN, dtype=np.uint8)
    calls = _find_runtime_calls(trace)
    if calls.recorded and len(kernels):
        launches = _Launches.find(events, kernels, comms)
        awaited[launches.known & ~_any_between(calls.may_order_ns, launches)] = Awaited.NO
        waited = _waits_right_before(events, calls.waits, launches)
        waited |= _find_identified(calls.identified, launches)
        awaited[launches.known & waited] = Awaited.YES
    awaited[events.lane[kernels] == events.lane[comms]] = Awaited.YES
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


def _any_between(calls_ns: Int64, launches: _Launches) -> Bool:
    """Whether one of the calls was made between the two launches of each pair."""
    since = np.searchsorted(calls_ns, launches.comm_ns, side="right")
    return np.asarray(np.searchsorted(calls_ns, launches.kernel_ns, side="right") > since)


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


def _find_identified(waits: _Waits, launches: _Launches) -> Bool:
    """For each pair, whether identified waits made the kernel wait for the communication."""
    found = np.zeros(len(launches.known), dtype=np.bool_)
    if not len(waits.at_ns):
        return found
    history = _follow_waits(waits)
    reached: dict[tuple[int, int], _Reached] = {}
    pairs = (launches.kernel_stream, launches.kernel_ns, launches.comm_stream, launches.comm_ns)
    for i, (kernel_stream, at_ns, comm_stream, launch_ns) in enumerate(
        zip(*(column.tolist() for column in pairs), strict=True)
    ):
        kernel = (kernel_stream, at_ns)
        if kernel not in reached:
            reached[kernel] = history.find(*kernel)
        found[i] = launch_ns <= max(
            reached[kernel].get(stream, _NEVER) for stream in (comm_stream, ALL_STREAMS)
        )
    return found


class _WaitHistory:
    """What each stream, and the host, had waited for after each of its waits."""

    def __init__(self) -> None:
        self._after: dict[int, list[_Reached]] = defaultdict(list)
        self._at_ns: dict[int, list[int]] = defaultdict(list)

    def add(self, waiter: int, at_ns: int, reached: _Reached) -> None:
        """Adds a wait; the waits of a stream in order of time."""
        self._after[waiter].append(_merge(self._find_own(waiter, at_ns), reached))
        self._at_ns[waiter].append(at_ns)

    def find(self, stream: int, at_ns: int) -> _Reached:
        """What work launched on the stream at this time had to wait for."""
        own = self._find_own(stream, at_ns)
        return own if stream == HOST else _merge(own, self._find_own(HOST, at_ns))

    def _find_own(self, waiter: int, at_ns: int) -> _Reached:
        count = bisect_right(self._at_ns[waiter], at_ns)
        return self._after[waiter][count - 1] if count else {}


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


HELD_NS = 10_000
"""Communication that ends at most this long after compute resumed held it up: a kernel may be
launched while the one that it depends on still ends, and timestamps are rounded."""

AMBIGUOUS_NS = (5_000, 20_000)
"""Times from resumption to the end of communication for which the rule may err. Communication that
was certainly awaited may end up to the upper limit after compute resumed."""

_BEFORE_ALL, _AFTER_ALL = np.iinfo(np.int64).min // 2, np.iinfo(np.int64).max // 2


@dataclass(frozen=True, slots=True)
class HeldGaps:
    """The gap that each call of a rank held up; all but ambiguous by call.

    Attributes:
        gap: The compute interval that ended the gap, -1 if the call held up none.
        start_ns: When the gap began.
        end_ns: When the call no longer held up the rank.
        resumed_ns: When the call ended, or compute resumed if that was earlier.
        call_end_ns: When the call ended; earlier than recorded if its range ended late.
        estimated: Whether only the last arrival, or a long gap, shows that the call was awaited.
        ambiguous: The gaps for which the rule may err.
    """

    gap: Int64
    start_ns: Int64
    end_ns: Int64
    resumed_ns: Int64
    call_end_ns: Int64
    estimated: Bool
    ambiguous: Intervals

    def end_calls(self, pieces: Pieces) -> Pieces:
        """The pieces without what was recorded after the end of their call, which ends for the rank
        when it resumes."""
        end = self.call_end_ns[pieces.call]
        return replace(
            pieces,
            start_ns=np.minimum(pieces.start_ns, end),
            end_ns=np.minimum(pieces.end_ns, end),
            life_end_ns=self.resumed_ns[pieces.call],
        )

    def select_blocking(self, pieces: Pieces) -> Pieces:
        """The part of each piece that held up the rank."""
        start = np.maximum(pieces.start_ns, self.start_ns[pieces.call])
        end = np.minimum(pieces.end_ns, self.end_ns[pieces.call])
        blocking = (self.gap[pieces.call] >= 0) & (end > start)
        return replace(pieces, start_ns=start, end_ns=end).select(blocking)


def find_held_gaps(trace: RankTrace, times: RankCallTimes, compute: Intervals) -> HeldGaps:
    """The gap of compute that each call of the rank held up."""
    gaps = _Gaps.build(compute)
    held = _find_by_end(trace, gaps, times)
    return held if trace.on_device else _find_by_arrival(trace, gaps, times, held)


class _Gaps(Struct, frozen=True):
    """The gaps between the compute intervals of a rank, before the first and after the last.

    Gap i begins when interval i - 1 ends, and resumes when interval i starts.
    """

    begin_ns: Int64
    resume_ns: Int64

    @classmethod
    def build(cls, compute: Intervals) -> _Gaps:
        return cls(
            np.concatenate(([_BEFORE_ALL], compute.end_ns)),
            np.concatenate((compute.start_ns, [_AFTER_ALL])),
        )

    def find_resuming(self, when_ns: Int64) -> Int64:
        """The first gap that resumes at or after each instant."""
        return np.searchsorted(self.resume_ns, when_ns, side="left")


# By the end of each call, and by what the recording shows that the next kernel waited for.


class _Candidates(Struct, frozen=True):
    """Pairs of a call and a gap that it may have held up, by call and time; over_ns is how long
    after the gap's end the call ended."""

    call: Int64
    gap: Int64
    over_ns: Int64

    @classmethod
    def list(cls, gaps: _Gaps, times: RankCallTimes) -> _Candidates:
        """The gap in which each call ended, and those that ended shortly before that."""
        first = gaps.find_resuming(times.end_ns - AMBIGUOUS_NS[1])
        first = np.maximum(first, gaps.find_resuming(times.start_ns + 1))
        last = gaps.find_resuming(times.end_ns)
        count = np.maximum(last - first + 1, 0)
        call = np.repeat(np.arange(len(count)), count)
        gap = first[call] + np.arange(len(call)) - np.repeat(np.cumsum(count) - count, count)
        began = gaps.begin_ns[gap] < times.end_ns[call]
        call, gap = call[began], gap[began]
        return cls(call, gap, times.end_ns[call] - gaps.resume_ns[gap])


def _find_by_end(trace: RankTrace, gaps: _Gaps, times: RankCallTimes) -> HeldGaps:
    """The first gap that each call held up by its end: every call holds up at most one."""
    pairs = _Candidates.list(gaps, times)
    awaited = _find_evidence(trace, gaps, pairs)
    holds = (awaited == Awaited.YES) | ((awaited == Awaited.UNKNOWN) & (pairs.over_ns <= HELD_NS))
    gap = np.full(len(times), -1, dtype=np.int64)
    gap[pairs.call[holds][::-1]] = pairs.gap[holds][::-1]
    unsure = (pairs.over_ns >= AMBIGUOUS_NS[0]) & (pairs.over_ns <= AMBIGUOUS_NS[1])
    return HeldGaps(
        gap=gap,
        start_ns=gaps.begin_ns[gap],
        end_ns=times.end_ns,
        resumed_ns=np.where(gap >= 0, np.minimum(times.end_ns, gaps.resume_ns[gap]), times.end_ns),
        call_end_ns=times.end_ns,
        estimated=np.zeros(len(gap), dtype=np.bool_),
        ambiguous=_merge_gaps(gaps, times, pairs.call[unsure], pairs.gap[unsure]),
    )


def _merge_gaps(gaps: _Gaps, times: RankCallTimes, call: Int64, gap: Int64) -> Intervals:
    """These gaps; what precedes all compute counts from the start of the call."""
    begin = np.where(gap > 0, gaps.begin_ns[gap], times.start_ns[call])
    return union(begin, gaps.resume_ns[gap])


def _find_evidence(trace: RankTrace, gaps: _Gaps, pairs: _Candidates) -> UInt8:
    """For each pair, an Awaited: whether the kernel after the gap waited for the call."""
    awaited = np.full(len(pairs.call), Awaited.UNKNOWN, dtype=np.uint8)
    if not trace.on_device:
        return awaited
    events = trace.events
    kernels = np.flatnonzero(trace.kinds.computes & (events.dur_ns > 0))
    resumed = np.flatnonzero(gaps.resume_ns[pairs.gap] < _AFTER_ALL)
    at = np.searchsorted(events.start_ns[kernels], gaps.resume_ns[pairs.gap[resumed]])
    comms = trace.calls.event[pairs.call[resumed]]
    awaited[resumed] = find_awaited(trace, kernels[at], comms)
    return awaited


# On a CPU run, by the host's waits and the arrival of the last member.

LAG_NS, LONG_NS, TIMES = 5_000_000, 500_000, 4
"""A call whose members had all arrived before the gap, or are unknown, held it up if its range ends
up to LAG_NS later, and the gap is longer than LONG_NS and than TIMES that lag."""

_LAG_MARGIN_NS = 50_000

_COMM_OPS = ("c10d::", "_c10d_functional::", "c10d_functional::")


@dataclass(frozen=True, slots=True)
class _LateHolds:
    """Calls whose range ends after compute resumed, each with a gap that it may have held up.

    until_ns: when the host went on. certain: the host waited for this call.
    """

    call: Int64
    gap: Int64
    until_ns: Int64
    certain: Bool

    @classmethod
    def join(cls, *parts: _LateHolds) -> Self:
        """The parts, one after the other."""
        columns = (np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls))
        return cls(*columns)

    def select(self, rows: Int64) -> _LateHolds:
        """Only these rows."""
        return _LateHolds(*(getattr(self, f.name)[rows] for f in fields(self)))


def _hold_until_compute(gaps: _Gaps, call: Int64, gap: Int64) -> _LateHolds:
    return _LateHolds(call, gap, gaps.resume_ns[gap], np.zeros(len(call), dtype=np.bool_))


def _find_by_arrival(
    trace: RankTrace, gaps: _Gaps, times: RankCallTimes, by_end: HeldGaps
) -> HeldGaps:
    """The gaps held up by the ends of calls, except for calls whose range ends late."""
    waits = _find_host_waits(trace, gaps)
    by_wait = _list_by_wait(gaps, times, waits)
    by_last, unsure = _list_by_last_arrival(trace, gaps, times, waits)
    by_lag, unsure_lag = _list_by_lag(trace, gaps, times, waits)
    guessed = _select_nearest(gaps, times, by_end, _LateHolds.join(by_last, by_lag))
    late = _select_longest(gaps, times, by_end, _LateHolds.join(by_wait, guessed))
    unsure = _LateHolds.join(unsure, unsure_lag)
    both = (by_end.ambiguous, _merge_gaps(gaps, times, unsure.call, unsure.gap))
    ambiguous = union(
        np.concatenate([part.start_ns for part in both]),
        np.concatenate([part.end_ns for part in both]),
    )
    return _apply_late(trace, gaps, times, replace(by_end, ambiguous=ambiguous), late)


def _select_nearest(
    gaps: _Gaps, times: RankCallTimes, by_end: HeldGaps, late: _LateHolds
) -> _LateHolds:
    """Of the calls that may have held up a gap, the one that ended nearest to its end did."""
    ended = np.flatnonzero(by_end.gap >= 0)
    early_ns = gaps.resume_ns[by_end.gap[ended]] - by_end.resumed_ns[ended]
    late_ns = times.end_ns[late.call] - gaps.resume_ns[late.gap]
    gap = np.concatenate((by_end.gap[ended], late.gap))
    nearest = group_min(gap, np.concatenate((early_ns, late_ns)), len(gaps.resume_ns))
    return late.select(np.flatnonzero(late_ns <= nearest[late.gap]))


def _select_longest(
    gaps: _Gaps, times: RankCallTimes, by_end: HeldGaps, late: _LateHolds
) -> _LateHolds:
    """Of the gaps that a call may have held up, the one in which it was open longest."""
    begin = np.maximum(gaps.begin_ns[late.gap], times.start_ns[late.call])
    held_ns = np.where(late.certain, _AFTER_ALL, late.until_ns - begin)
    by_end_ns = by_end.resumed_ns - np.maximum(by_end.start_ns, times.start_ns)
    order = np.lexsort((held_ns, late.call))
    order = order[held_ns[order] > np.where(by_end.gap >= 0, by_end_ns, 0)[late.call[order]]]
    longest = np.append(np.diff(late.call[order]) != 0, True)[: len(order)]
    return late.select(order[longest])


def _apply_late(
    trace: RankTrace, gaps: _Gaps, times: RankCallTimes, by_end: HeldGaps, late: _LateHolds
) -> HeldGaps:
    """A call whose range ends late was over when the host went on, unless the host had been inside
    of the op that issued it."""
    begin = np.maximum(gaps.begin_ns[late.gap], times.start_ns[late.call])
    inside = _find_op_ends(trace)[late.call] > (begin + late.until_ns) // 2
    call_end = np.where(inside, times.end_ns[late.call], late.until_ns)
    estimated = by_end.estimated.copy()
    estimated[late.call] = ~late.certain & ~inside

    def put(column: Int64, values: Int64) -> Int64:
        changed = column.copy()
        changed[late.call] = values
        return changed

    return replace(
        by_end,
        gap=put(by_end.gap, late.gap),
        start_ns=put(by_end.start_ns, gaps.begin_ns[late.gap]),
        end_ns=put(by_end.end_ns, late.until_ns),
        resumed_ns=put(by_end.resumed_ns, late.until_ns),
        call_end_ns=put(by_end.call_end_ns, call_end),
        estimated=estimated,
    )


def _find_op_ends(trace: RankTrace) -> Int64:
    """For each call, when the op that issued it returned; the smallest time if unknown."""
    events, issued = trace.events, trace.calls.issued_ns
    ops = union(*_select_spans(events, _mask_comm_ops(events)))
    at = np.searchsorted(ops.start_ns, issued, side="right") - 1
    known = (issued >= 0) & (at >= 0)
    return np.where(known, np.append(ops.end_ns, _BEFORE_ALL)[at], _BEFORE_ALL)


def _mask_comm_ops(events: Events, prefixes: tuple[str, ...] = _COMM_OPS) -> Bool:
    """The ops that issue communication, without waits."""
    named = (name.startswith(prefixes) and "wait_tensor" not in name for name in events.names)
    return events.is_category(Category.OP) & events.name_mask(tuple(named))


def _select_spans(events: Events, mask: Bool) -> tuple[Int64, Int64]:
    return events.start_ns[mask], events.ends_of(mask)


class _HostWaits(Struct, frozen=True):
    """For each gap of a CPU run, the call for which the host waited (wait_tensor), -1 if none or
    unknown, and when that wait returned."""

    call: Int64
    until_ns: Int64


def _find_host_waits(trace: RankTrace, gaps: _Gaps) -> _HostWaits:
    """The last wait that returned in each gap; it is for the last functional collective issued."""
    events, issued = trace.events, trace.calls.issued_ns
    waits = np.flatnonzero(
        events.is_category(Category.OP)
        & events.name_mask(tuple("c10d_functional::wait_tensor" in name for name in events.names))
    )
    waits = waits[np.argsort(events.ends_of(waits), kind="stable")]
    functional = union(*_select_spans(events, _mask_comm_ops(events, _COMM_OPS[1:])))
    calls = np.flatnonzero((issued >= 0) & is_inside(functional, issued))
    calls = calls[np.argsort(issued[calls], kind="stable")]
    before = np.searchsorted(issued[calls], events.start_ns[waits], side="right") - 1
    awaited = np.append(np.append(calls, -1)[before], -1)
    last = np.searchsorted(events.ends_of(waits), gaps.resume_ns, side="right") - 1
    until = np.append(events.ends_of(waits), _BEFORE_ALL)[last]
    return _HostWaits(np.where(until > gaps.begin_ns, awaited[last], -1), until)


def _list_by_wait(gaps: _Gaps, times: RankCallTimes, waits: _HostWaits) -> _LateHolds:
    """The calls for which the host waited in a gap, and whose range ends after it."""
    gap = np.flatnonzero(waits.call >= 0)
    call = waits.call[gap]
    late = times.end_ns[call] > gaps.resume_ns[gap] + HELD_NS
    late &= times.moves_ns[call] <= waits.until_ns[gap]
    call, gap = call[late], gap[late]
    return _LateHolds(call, gap, waits.until_ns[gap], np.ones(len(call), dtype=np.bool_))


def _list_by_last_arrival(
    trace: RankTrace, gaps: _Gaps, times: RankCallTimes, waits: _HostWaits
) -> tuple[_LateHolds, _LateHolds]:
    """The open calls whose last member arrived in a gap, and those that small errors may change.

    The range of a message ends with the wait for it, so messages are never late.
    """
    came = times.moves_ns
    gap = gaps.find_resuming(came + 1)
    previous = np.maximum(gap - 1, 0)
    early_ns = np.maximum(gaps.begin_ns[gap] - came, 0)
    over_ns = np.where(gap > 0, came - gaps.resume_ns[previous], _AFTER_ALL)
    call = np.tile(np.arange(len(times)), 2)
    gap, away_ns = np.concatenate((gap, previous)), np.concatenate((early_ns, over_ns))
    first = np.concatenate((np.ones(len(times), dtype=np.bool_), early_ns > HELD_NS))
    late = (times.matched & ~trace.calls.is_message)[call] & (waits.call[gap] < 0)
    late &= times.end_ns[call] > gaps.resume_ns[gap] + HELD_NS
    holds = np.flatnonzero(late & first & (away_ns <= HELD_NS))
    unsure = np.flatnonzero(late & (away_ns >= AMBIGUOUS_NS[0]) & (away_ns <= AMBIGUOUS_NS[1]))
    return (
        _hold_until_compute(gaps, call[holds], gap[holds]),
        _hold_until_compute(gaps, call[unsure], gap[unsure]),
    )


def _list_by_lag(
    trace: RankTrace, gaps: _Gaps, times: RankCallTimes, waits: _HostWaits
) -> tuple[_LateHolds, _LateHolds]:
    """Calls whose range ends soon after a long gap in which no member arrived, and those that small
    errors may change."""
    first = np.searchsorted(gaps.resume_ns, times.end_ns - LAG_NS, side="left")
    after = np.searchsorted(gaps.resume_ns, times.end_ns - HELD_NS, side="left")
    rows = np.flatnonzero(~trace.calls.is_message & (after > first))
    length = np.where(waits.call < 0, gaps.resume_ns - gaps.begin_ns, 0)
    length[[0, -1]] = 0
    longest = [
        low + int(length[low:high].argmax())
        for low, high in zip(first[rows].tolist(), after[rows].tolist(), strict=True)
    ]
    gap = np.array(longest, dtype=np.int64)
    before = ~times.matched[rows] | (times.moves_ns[rows] < gaps.begin_ns[gap])
    lag = times.end_ns[rows] - gaps.resume_ns[gap]
    margin = length[gap] - np.maximum(LONG_NS, TIMES * lag)
    holds, unsure = before & (margin > 0), before & (np.abs(margin) <= _LAG_MARGIN_NS)
    return (
        _hold_until_compute(gaps, rows[holds], gap[holds]),
        _hold_until_compute(gaps, rows[unsure], gap[unsure]),
    )
