"""What each call did while it was open: move data, or wait, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.split.align import Alignment
from stepsplit.analyzer.split.intervals import Intervals
from stepsplit.analyzer.split.layout import Layout
from stepsplit.analyzer.split.match import TOGETHER, Matched
from stepsplit.analyzer.trace import OP_CODE, Bool, Category, Int32, Int64, RankTrace, UInt8

COLLECTIVE, P2P, SKEW, BUBBLE = 1, 2, 3, 4
"""Places of the communication buckets in buckets.BUCKETS."""
LAG_NS, LONG_NS, TIMES = 5_000_000, 500_000, 4
"""How long after its waiter has resumed a gloo worker may still be busy with a call; a gap of
compute is such a wait if it is long, and many times longer than the lag."""
LOW_PERCENTILE = 10
"""Of the times that messages of one link and size took, the one that a free link needs."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When the data of each call moved, on the common clock; columns of one length.

    Data moves from moves_ns to moved_ns, the rest of the call is waiting. last is the rank that
    came last, -1 where nobody knows; estimated marks calls whose counterparts are not there.
    """

    start_ns: Int64
    end_ns: Int64
    moves_ns: Int64
    moved_ns: Int64
    last: Int32
    estimated: Bool


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


def arrivals_of(traces: Sequence[RankTrace], matched: Matched, alignment: Alignment) -> Arrivals:
    """When data moved in each call, and who came last."""
    lead = np.array(alignment.lead_ns, dtype=np.int64)[matched.trace]
    start, end = matched.start_ns + lead, matched.end_ns + lead
    arrived, last = _last_arrivals(traces, matched, start)
    eager = _left_early(matched, arrived, end)
    left_early = np.isin(matched.key, matched.key[eager])
    moves = np.where(eager, start, arrived)
    moved = np.where(left_early, end, _moved(matched, moves, end, ~left_early))
    unknown = _fastest_like(traces, matched, end - start)
    moves = np.where(unknown < 0, moves, end - unknown)
    return Arrivals(start, end, np.maximum(moves, start), moved, last, matched.key < 0)


def _last_arrivals(
    traces: Sequence[RankTrace], matched: Matched, start: Int64
) -> tuple[Int64, Int32]:
    """When the last member of each call arrived, and its rank; a call alone is its own last."""
    ranks = np.array([trace.rank for trace in traces], dtype=np.int32)
    arrived, last = start.copy(), _absent(matched, ranks)
    for rows in _together(matched):
        arrival = _arrival_of_each(matched, start, rows)
        arrived[rows] = arrival.max()
        last[rows] = ranks[matched.trace[rows[int(arrival.argmax())]]]
    return arrived, last


def _absent(matched: Matched, present: Int32) -> Int32:
    """The rank that each unmatched call lacks, -1 where it lacks none or several."""
    lacking = [set(group.ranks) - set(present.tolist()) for group in matched.groups]
    only = [next(iter(ranks)) if len(ranks) == 1 else -1 for ranks in lacking]
    of_group = np.array([*only, -1], dtype=np.int32)[matched.group]
    return np.where(matched.key < 0, of_group, -1).astype(np.int32)


def _left_early(matched: Matched, moves: Int64, end: Int64) -> Bool:
    """Which calls ended before the last arrived: roots and small eager sends did not wait."""
    together = np.isin(matched.op, [OP_CODE[op] for op in TOGETHER])
    return np.asarray(~together & (matched.key >= 0) & (end <= moves))


def _together(matched: Matched) -> list[Int64]:
    """The rows of each collective and message whose members are all there."""
    order = np.argsort(matched.key, kind="stable")
    order = order[matched.key[order] >= 0]
    bounds = np.flatnonzero(np.diff(matched.key[order])) + 1
    return [rows for rows in np.split(order, bounds) if len(rows)]


def _arrival_of_each(matched: Matched, start: Int64, rows: Int64) -> Int64:
    """Each row's rank's arrival: the first of its kernels, where one call is several."""
    first: dict[int, int] = {}
    for trace, at in zip(matched.trace[rows].tolist(), start[rows].tolist(), strict=True):
        first[trace] = min(at, first.get(trace, at))
    return np.array([first[trace] for trace in matched.trace[rows].tolist()], dtype=np.int64)


def _moved(matched: Matched, moves: Int64, end: Int64, telling: Bool) -> Int64:
    """When the data of each call had moved: a collective's at its end, a message's earlier.

    A message moves for the low percentile of those of its link and size, at most to the earlier of
    its ends; only telling ones, of which no end left before the other came, count and are cut.
    """
    moved = end.copy()
    rows = np.flatnonzero(matched.is_message & (matched.key >= 0) & telling)
    earlier_end = np.full(int(matched.key.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(earlier_end, matched.key[rows], end[rows])
    took = np.maximum(earlier_end[matched.key[rows]] - moves[rows], 0)
    links = _links(matched, rows)
    for link in np.unique(links):
        same = links == link
        low = int(np.percentile(took[same], LOW_PERCENTILE, method="lower"))
        moved[rows[same]] = moves[rows[same]] + np.minimum(took[same], low)
    return moved


def _links(matched: Matched, rows: Int64) -> Int64:
    """A number for each row's pair of ends and size; both ends of a message have the same."""
    key = matched.key[rows]
    ends = {k: [0, 0] for k in key.tolist()}
    for k, trace, op in zip(
        key.tolist(), matched.trace[rows].tolist(), matched.op[rows].tolist(), strict=True
    ):
        ends[k][op == OP_CODE["recv"]] = trace
    size = matched.message_bytes[rows].tolist()
    labels = [(*ends[k], s) for k, s in zip(key.tolist(), size, strict=True)]
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return np.array([numbers[label] for label in labels], dtype=np.int64)


def _fastest_like(traces: Sequence[RankTrace], matched: Matched, took: Int64) -> Int64:
    """For calls without counterparts, how long the rank's fastest of their size took; else -1.

    The messages of a pipeline are of one size even where it is not known. Of another call of
    unknown size, and of a copy between devices, nobody can say that it waited: -1.
    """
    copies = np.concatenate([t.events.category[t.calls.event] == Category.MEMCPY for t in traces])
    alike = matched.is_message | (matched.message_bytes >= 0)
    rows = np.flatnonzero((matched.key < 0) & alike & ~copies)
    columns = (matched.trace, matched.group, matched.op, matched.message_bytes)
    _, kind = np.unique(np.stack([c[rows] for c in columns], axis=1), axis=0, return_inverse=True)
    fastest = np.full(int(kind.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(fastest, kind, took[rows])
    found = np.full(len(matched), -1, dtype=np.int64)
    found[rows] = fastest[kind]
    return found


def pieces_of(
    index: int, trace: RankTrace, matched: Matched, arrivals: Arrivals, lead_ns: int, layout: Layout
) -> Pieces:
    """The calls of one rank in pieces: before data moves, while it does, and after."""
    rows = matched.of_trace(index)
    start, end = arrivals.start_ns[rows] - lead_ns, arrivals.end_ns[rows] - lead_ns
    moves = np.clip(arrivals.moves_ns[rows] - lead_ns, start, end)
    moved = np.clip(arrivals.moved_ns[rows] - lead_ns, moves, end)
    last = _waited_for(trace, arrivals.last[rows])
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
    other = [mine if rank < 0 else layout.stage(rank) for rank in last.tolist()]
    unknown = trace.calls.is_message & (last < 0) & (trace.rank in layout.stage_of)
    bubble = (np.array(other, dtype=np.int64) != mine) | unknown
    return np.where(bubble, BUBBLE, SKEW).astype(np.uint8)
