"""Which communication held up each gap of compute.

A gap is an interval without compute. Only communication that the rank was waiting for can have held
it up: that which the recording shows to be awaited, else that which had ended when compute resumed,
up to the accuracy of the timestamps. What is still open later held up nothing. On a CPU run the
range of a call may end long after the call itself, because a worker thread writes it; there the
arrival of the last member counts as well.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import (
    Intervals,
    group_min,
    is_inside,
    join_tables,
    select_rows,
    union,
)
from stepsplit.analyzer.split.event_waits import HELD_NS, Awaited, find_awaited
from stepsplit.analyzer.split.transfers import Pieces, RankCallTimes
from stepsplit.analyzer.trace import Bool, Category, Events, Int64, RankTrace, UInt8

# The gaps of compute that communication held up.

AMBIGUOUS_NS = (5_000, 20_000)
"""Times from resumption to the end of communication for which the rule may err. Communication that
was certainly awaited may end up to the upper limit after compute resumed."""

_BEFORE_ALL, _AFTER_ALL = np.iinfo(np.int64).min // 2, np.iinfo(np.int64).max // 2


class HeldGaps(Struct, frozen=True):
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
        return select_rows(replace(pieces, start_ns=start, end_ns=end), blocking)


def find_held_gaps(trace: RankTrace, times: RankCallTimes, compute: Intervals) -> HeldGaps:
    """The gap of compute that each call of the rank held up."""
    gaps = _Gaps.build(compute)
    # The first gap that each call held up by its end: every call holds up at most one.
    pairs = _Candidates.list(gaps, times)
    awaited = _find_evidence(trace, gaps, pairs)
    holds = (awaited == Awaited.YES) | ((awaited == Awaited.UNKNOWN) & (pairs.over_ns <= HELD_NS))
    gap = np.full(len(times), -1, dtype=np.int64)
    gap[pairs.call[holds][::-1]] = pairs.gap[holds][::-1]
    unsure = (pairs.over_ns >= AMBIGUOUS_NS[0]) & (pairs.over_ns <= AMBIGUOUS_NS[1])
    held = HeldGaps(
        gap=gap,
        start_ns=gaps.begin_ns[gap],
        end_ns=times.end_ns,
        resumed_ns=np.where(gap >= 0, np.minimum(times.end_ns, gaps.resume_ns[gap]), times.end_ns),
        call_end_ns=times.end_ns,
        estimated=np.zeros(len(gap), dtype=np.bool_),
        ambiguous=_merge_gaps(gaps, times, pairs.call[unsure], pairs.gap[unsure]),
    )
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


class _LateHolds(Struct, frozen=True):
    """Calls whose range ends after compute resumed, each with a gap that it may have held up.

    until_ns: when the host went on. certain: the host waited for this call.
    """

    call: Int64
    gap: Int64
    until_ns: Int64
    certain: Bool


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
    guessed = _select_nearest(gaps, times, by_end, join_tables(by_last, by_lag))
    late = _select_longest(gaps, times, by_end, join_tables(by_wait, guessed))
    unsure = join_tables(unsure, unsure_lag)
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
    return select_rows(late, late_ns <= nearest[late.gap])


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
    return select_rows(late, order[longest])


def _apply_late(
    trace: RankTrace, gaps: _Gaps, times: RankCallTimes, by_end: HeldGaps, late: _LateHolds
) -> HeldGaps:
    """A call whose range ends late was over when the host went on, unless the host had been inside
    of the op that issued it."""
    begin = np.maximum(gaps.begin_ns[late.gap], times.start_ns[late.call])
    # For each call, when the op that issued it returned; the smallest time if unknown.
    events, issued = trace.events, trace.calls.issued_ns
    ops = union(*_select_spans(events, _mask_comm_ops(events)))
    at = np.searchsorted(ops.start_ns, issued, side="right") - 1
    known = (issued >= 0) & (at >= 0)
    inside = (
        np.where(known, np.append(ops.end_ns, _BEFORE_ALL)[at], _BEFORE_ALL)[late.call]
        > (begin + late.until_ns) // 2
    )
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
