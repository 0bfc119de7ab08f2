"""What each call of a rank did while it was open: move data, or wait, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.arrays import Intervals, labels_of, runs_of
from stepsplit.analyzer.split.calls.arrivals import Arrivals
from stepsplit.analyzer.split.clocks.clock import Clock
from stepsplit.analyzer.split.mesh.layout import Layout
from stepsplit.analyzer.trace import Int32, Int64, RankTrace, UInt8

COLLECTIVE, P2P, SKEW, BUBBLE = 1, 2, 3, 4
"""Places of the communication buckets in buckets.BUCKETS."""
LAG_NS, LONG_NS, TIMES = 5_000_000, 500_000, 4
"""How long after its waiter has resumed a gloo worker may still be busy with a call; a gap of
compute is such a wait if it is long, and many times longer than the lag."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The calls of one rank in pieces of one bucket each, on its own clock; columns of one length.

    call indexes the rank's Calls; life_end_ns is the end of the whole call; owner is the rank that
    was waited for, -1 for nobody or unknown.
    """

    call: Int32
    bucket: UInt8
    start_ns: Int64
    end_ns: Int64
    life_end_ns: Int64
    owner: Int32


def pieces_of(
    trace: RankTrace, rows: slice, arrivals: Arrivals, clock: Clock, layout: Layout
) -> Pieces:
    """The calls of one rank, whose rows these are: before data moves, while it does, and after."""
    start = trace.events.start_ns[trace.calls.event]
    end = trace.events.end_ns[trace.calls.event]
    if not trace.on_device:
        start = clock.own_ns(arrivals.start_ns[rows])
    moves = np.clip(clock.own_ns(arrivals.moves_ns[rows]), start, end)
    moved = np.clip(clock.own_ns(arrivals.moved_ns[rows]), moves, end)
    last = _last_of_kernel(trace, moves, _waited_for(trace, arrivals.last[rows]))
    waits = _wait_bucket(trace, last, layout)
    moving = np.where(trace.calls.is_message, P2P, COLLECTIVE)
    call = np.arange(len(start), dtype=np.int32)
    nobody = np.full(len(start), -1, dtype=np.int32)
    parts = [
        (waits, start, moves, last),
        (moving, moves, moved, nobody),
        (waits, moved, end, last),
    ]
    return Pieces(
        call=np.tile(call, 3),
        bucket=np.concatenate([part[0] for part in parts]).astype(np.uint8),
        start_ns=np.concatenate([part[1] for part in parts]),
        end_ns=np.concatenate([part[2] for part in parts]),
        life_end_ns=np.tile(end, 3),
        owner=np.concatenate([part[3] for part in parts]),
    )


def _last_of_kernel(trace: RankTrace, moves: Int64, last: Int32) -> Int32:
    """Who each call waits for; all messages of one kernel wait for the peer that comes last."""
    order, first = runs_of(labels_of(trace.calls.event))
    if len(first) == len(order):
        return last
    found = last.copy()
    for part in np.split(order, first[1:]):
        if len(part) > 1:
            found[part] = last[part[int(moves[part].argmax())]]
    return found


def without_lag(pieces: Pieces, compute: Intervals) -> Pieces:
    """The pieces of a gloo run, ended where their waiter went on.

    A worker's range ends up to LAG_NS after the thread that waited has resumed. So a call ends with
    the longest gap of compute that closes within that time before it, if it is long enough.
    """
    end = pieces.life_end_ns
    gap_start, gap_end = compute.end_ns[:-1], compute.start_ns[1:]
    first = np.searchsorted(gap_end, end - LAG_NS, side="left").tolist()
    after = np.searchsorted(gap_end, end, side="left").tolist()
    resumed = end.copy()
    for row, (low, high) in enumerate(zip(first, after, strict=True)):
        if high > low:
            longest = low + int((gap_end[low:high] - gap_start[low:high]).argmax())
            lag = int(end[row] - gap_end[longest])
            if gap_end[longest] - gap_start[longest] > max(LONG_NS, TIMES * lag):
                resumed[row] = gap_end[longest]
    return replace(
        pieces,
        start_ns=np.minimum(pieces.start_ns, resumed),
        end_ns=np.minimum(pieces.end_ns, resumed),
        life_end_ns=resumed,
    )


def _waited_for(trace: RankTrace, last: Int32) -> Int32:
    """Who each call waits for; a rank that came last itself waits for the other end, if at all."""
    peer = np.where(trace.calls.is_message, trace.calls.peer, -1)
    return np.where((last == trace.rank) | (last < 0), peer, last).astype(np.int32)


def _wait_bucket(trace: RankTrace, last: Int32, layout: Layout) -> UInt8:
    """Waiting for another pipeline stage is bubble, for one's own stage skew.

    A message whose peer nobody knows is the pipeline's where there is one.
    """
    mine = layout.stage(trace.rank)
    others = np.unique(last)
    elsewhere = others[[rank >= 0 and layout.stage(rank) != mine for rank in others.tolist()]]
    unknown = trace.calls.is_message & (last < 0) & (trace.rank in layout.stage_of)
    return np.where(np.isin(last, elsewhere) | unknown, BUBBLE, SKEW).astype(np.uint8)
