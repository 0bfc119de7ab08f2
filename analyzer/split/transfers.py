"""Arrivals, waits and transfers of every call, on the reference clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import group_ids, group_max, group_min, group_rows
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.ops import SYMMETRIC_OPS
from stepsplit.analyzer.split.clock import Alignment, Clock
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.protocols import find_call_roles
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Int32, Int64, RankTrace, UInt8

# Each call of a rank split into wait and transfer, with the rank that it waited for.


class Pieces(Struct, frozen=True):
    """The calls of one rank cut into pieces of one bucket each, on the rank's own clock.

    Columns of one length: call indexes the rank's Calls; life_end_ns is the end of the whole call,
    or when the rank resumed if that was earlier; owner is the rank waited for, -1 if none or
    unknown.
    """

    call: Int32
    bucket: UInt8
    start_ns: Int64
    end_ns: Int64
    life_end_ns: Int64
    owner: Int32


class RankCallTimes(Struct, frozen=True):
    """The times of one rank's calls on its own clock, columns of one length.

    Data moves from moves_ns, the last arrival, to moved_ns; matched: whether the arrivals of all
    members were recorded.
    """

    start_ns: Int64
    moves_ns: Int64
    moved_ns: Int64
    end_ns: Int64
    matched: Bool

    def __len__(self) -> int:
        return len(self.start_ns)


def map_call_times(
    trace: RankTrace, rows: slice, arrivals: Arrivals, clock: Clock
) -> RankCallTimes:
    """The times of the calls of one rank (rows) on its own clock."""
    start = trace.events.start_ns[trace.calls.event]
    end = trace.events.ends_of(trace.calls.event)
    if not trace.on_device:
        start = clock.map_to_own_ns(arrivals.start_ns[rows])
    moves = np.clip(clock.map_to_own_ns(arrivals.moves_ns[rows]), start, end)
    moved = np.clip(clock.map_to_own_ns(arrivals.moved_ns[rows]), moves, end)
    return RankCallTimes(start, moves, moved, end, ~arrivals.estimated[rows])


def split_calls(
    trace: RankTrace, times: RankCallTimes, last_rank: Int32, layout: RankLayout
) -> Pieces:
    """Splits each call of one rank into wait, transfer, and wait after the transfer.

    last_rank is the rank that arrived last at each call.
    """
    start, moves, moved, end = times.start_ns, times.moves_ns, times.moved_ns, times.end_ns
    # The rank each call waits for; the last rank itself can only wait for the peer of a message.
    peer = np.where(trace.calls.is_message, trace.calls.peer, -1)
    last = _find_last_of_kernel(
        trace,
        moves,
        np.where((last_rank == trace.rank) | (last_rank < 0), peer, last_rank).astype(np.int32),
    )
    waits = _classify_waits(trace, last, layout)
    moving = np.where(trace.calls.is_message, Bucket.P2P, Bucket.COLLECTIVE)
    call = np.arange(len(start), dtype=np.int32)
    no_owner = np.full(len(start), -1, dtype=np.int32)
    parts = [
        (waits, start, moves, last),
        (moving, moves, moved, no_owner),
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


def _find_last_of_kernel(trace: RankTrace, moves: Int64, last: Int32) -> Int32:
    """The rank that each call waits for; all messages of one kernel wait for the last peer."""
    order, first = group_rows(group_ids(trace.calls.event))
    if len(first) == len(order):
        return last
    owner = last.copy()
    for part in np.split(order, first[1:]):
        if len(part) > 1:
            owner[part] = last[part[int(moves[part].argmax())]]
    return owner


def _classify_waits(trace: RankTrace, last: Int32, layout: RankLayout) -> UInt8:
    """Waiting for another pipeline stage is bubble, for the same stage or a rank without one skew.

    A message with an unknown peer counts as bubble on a rank in a pipeline.
    """
    stage_of, owners = layout.stage_of, np.unique(last)
    own_stage = stage_of.get(trace.rank)
    elsewhere = owners[
        [
            own_stage is not None and stage_of.get(rank, own_stage) != own_stage
            for rank in owners.tolist()
        ]
    ]
    unknown = trace.calls.is_message & (last < 0) & (trace.rank in stage_of)
    return np.where(np.isin(last, elsewhere) | unknown, Bucket.BUBBLE, Bucket.SKEW).astype(np.uint8)


# Transfer time of each call, from all of its members; the rest of the call is waiting.

_FROM_ROOT = [OP_CODE[op] for op in ("broadcast", "scatter")]

_MAY_LEAVE = [OP_CODE[op] for op in OPS if op not in (*SYMMETRIC_OPS, "recv")]
"""Ops whose members may end before another arrives. A receive only appears to, by clock errors."""


class Arrivals(Struct, frozen=True):
    """The transfer interval of each call, on the common clock; columns of one length.

    Data moves from moves_ns to moved_ns; the rest of the call is waiting. last is the rank that
    arrived last, -1 if unknown; estimated marks calls without all members recorded.
    """

    start_ns: Int64
    end_ns: Int64
    moves_ns: Int64
    moved_ns: Int64
    last: Int32
    estimated: Bool


def compute_arrivals(
    traces: Sequence[RankTrace],
    matched: MatchedCalls,
    alignment: Alignment,
    model: TransferModel | None = None,
) -> Arrivals:
    """Computes the transfer interval of each call, and its last rank."""
    start, end = matched.start_ns.copy(), matched.end_ns.copy()
    for i, clock in enumerate(alignment.clocks):
        rows = matched.slice_trace(i)
        start[rows], end[rows] = (
            clock.map_to_common_ns(start[rows]),
            clock.map_to_common_ns(end[rows]),
        )
    ranks = np.array([trace.rank for trace in traces], dtype=np.int32)
    last_arrival = _find_last_arrivals(matched, start, end, ranks)
    moved = estimate_message_transfers(
        traces, matched, last_arrival.at_ns, end, ~last_arrival.left_early
    )
    guess = estimate_missing_transfers(traces, matched, last_arrival.at_ns, end, model)
    waited = guess >= 0
    moves = np.where(waited, end - guess, last_arrival.at_ns)
    moves[~matched.waits] = start[~matched.waits]
    # The missing rank of each incomplete call, -1 if none or several are missing.
    present = ranks
    here = set(present.tolist())
    lacking = [set(group.ranks) - here for group in matched.groups]
    only = [next(iter(ranks)) if len(ranks) == 1 else -1 for ranks in lacking]
    of_group = np.array([*only, -1], dtype=np.int32)[matched.group]
    last = np.where(
        waited, np.where(matched.key < 0, of_group, -1).astype(np.int32), last_arrival.rank
    ).astype(np.int32)
    last[~matched.waits] = -1
    return Arrivals(start, end, np.maximum(moves, start), moved, last, matched.key < 0)


class _LastArrivals(Struct, frozen=True):
    """For each row, the last arrival that it had to wait for; -1 without a counterpart.

    rank is the rank that arrived last. left_early: some member ended before another arrived, so the
    transfer time cannot be measured.
    """

    at_ns: Int64
    rank: Int32
    left_early: Bool


def _find_last_arrivals(
    matched: MatchedCalls, start: Int64, end: Int64, ranks: Int32
) -> _LastArrivals:
    members = _Members.build(matched, start)
    # The row of the last member of each row's call; the row itself without a counterpart.
    last, shared = np.arange(len(matched)), np.flatnonzero(matched.shared >= 0)
    last[shared] = members.order[members.after[matched.shared[shared]] - 1]
    may_leave = (matched.shared >= 0) & np.isin(matched.op, _MAY_LEAVE) & ~matched.together
    may_leave &= matched.waits
    left = np.zeros(len(members.after) + 1, dtype=np.bool_)
    left[matched.shared[may_leave & (end <= start[last])]] = True
    left_early: Bool = left[matched.shared] & (matched.shared >= 0)
    rows = np.flatnonzero(left_early)
    last[rows] = _find_awaited_before_exit(matched, members, rows, start, end)
    who = np.where(matched.shared >= 0, ranks[matched.trace[last]], -1).astype(np.int32)
    return _LastArrivals(start[last], who, left_early)


class _Members(Struct, frozen=True):
    """The first rows of the members, by call and arrival; after[call] is the end of its rows."""

    order: Int64
    after: Int64

    @classmethod
    def build(cls, matched: MatchedCalls, start: Int64) -> _Members:
        known = np.flatnonzero((matched.shared >= 0) & matched.leads)
        order = known[np.lexsort((start[known], matched.shared[known]))]
        calls = np.arange(int(matched.shared.max(initial=-1)) + 1)
        return cls(order, np.searchsorted(matched.shared[order], calls, side="right"))


def _find_awaited_before_exit(
    matched: MatchedCalls, members: _Members, rows: Int64, start: Int64, end: Int64
) -> list[int]:
    """For rows of calls that a member left early, the last arrival before that.

    With a root (broadcast, scatter) all wait for the root only. A member that arrives after the
    first has left is not the root, and no rank waited for it.
    """
    first_end = group_min(matched.shared, end, len(members.after))
    last = []
    for row in rows.tolist():
        call = int(matched.shared[row])
        member_rows = members.order[members.after[call - 1] if call else 0 : members.after[call]]
        limit = first_end[call] if matched.op[row] in _FROM_ROOT else end[row]
        place = int(np.searchsorted(start[member_rows], limit, side="right")) - 1
        last.append(int(member_rows[max(place, 0)]))
    return last


# Estimated transfer times: messages within longer kernels, and calls with a missing member.

LOW_PERCENTILE = 10
"""Percentile of the times of one link and size that is taken as the time on an idle link."""

_NOISE_NS, _MORE = 20_000, 0.5
"""A call with a missing member waited for it if it exceeds the usual time by more than this."""

_NONE = np.iinfo(np.int64).max


class ModelledTransfer(Struct, frozen=True):
    """The time that a call moves data by a model, and the longest that it can, in ns."""

    usual_ns: float
    longest_ns: float


TransferModel = Callable[[str, int, tuple[int, ...]], ModelledTransfer | None]
"""(op, message bytes as nccl-tests counts them, ranks) -> its transfer; None if unknown."""


def estimate_message_transfers(
    traces: Sequence[RankTrace], matched: MatchedCalls, moves_ns: Int64, end_ns: Int64, usable: Bool
) -> Int64:
    """The end of each transfer: the end of a collective, possibly earlier for a message.

    The kernel of a message ends with it, unless it contains another message that starts later. Such
    a message, and any on gloo, whose ranges end with the caller's wait, gets the low percentile of
    the times of its link and size, at most up to the earlier end of the two. Messages that one end
    left before the other arrived are neither measured nor shortened.
    """
    moved = end_ns.copy()
    rows = np.flatnonzero(matched.is_message & (matched.key >= 0) & usable)
    count = int(matched.key.max(initial=-1)) + 1
    key = matched.key[rows]
    earlier = group_min(np.where(matched.is_message, matched.key, -1), end_ns, count)[key]
    # Whether each message is the last of its kernel to start its transfer.
    event = np.concatenate([trace.calls.event for trace in traces])[rows]
    on_device = np.array([trace.on_device for trace in traces])[matched.trace[rows]]
    kernel = group_ids(matched.trace[rows], event)
    last = group_max(kernel, moves_ns[rows], int(kernel.max(initial=-1)) + 1)
    closed: Bool = on_device & (moves_ns[rows] >= last[kernel])
    exact = group_min(np.where(closed, key, -1), end_ns[rows], count)[key]
    exact_known = exact < _NONE
    took = np.maximum(np.where(exact_known, exact, earlier) - moves_ns[rows], 0)
    low = _compute_percentile(_number_links(matched, rows), took)
    moved[rows] = moves_ns[rows] + np.where(exact_known, took, np.minimum(took, low))
    return moved


def _number_links(matched: MatchedCalls, rows: Int64) -> Int64:
    """A number for each sender, receiver and size; both ends of a message have the same."""
    count = int(matched.key.max(initial=-1)) + 1
    ends = np.zeros((count, 2), dtype=np.int64)
    receives = (matched.op[rows] == OP_CODE["recv"]).astype(np.int64)
    ends[matched.key[rows], receives] = matched.trace[rows]
    pair = ends[matched.key[rows]]
    return group_ids(pair[:, 0], pair[:, 1], matched.message_bytes[rows])


def _compute_percentile(label: Int64, values: Int64, percentile: int = LOW_PERCENTILE) -> Int64:
    """For each row, the percentile of the values with its label (an actual value)."""
    result = np.zeros(len(values), dtype=np.int64)
    order, first = group_rows(label)
    for part in np.split(order, first[1:]) if len(order) else []:
        result[part] = np.percentile(values[part], percentile, method="lower")
    return result


def estimate_missing_transfers(
    traces: Sequence[RankTrace],
    matched: MatchedCalls,
    came_ns: Int64,
    end_ns: Int64,
    model: TransferModel | None = None,
) -> Int64:
    """The estimated transfer time of calls that waited for a missing member, else -1.

    It is the time of complete calls of the same op, size and number of members, else the fastest
    call of the rank itself, counted from the last recorded arrival; if that took longer than such a
    call can, it waited as well, and the time is the model's. For calls of unknown size and copies
    between devices it cannot be known whether they waited.
    """
    incomplete = (matched.key < 0) & _is_comparable(traces, matched)
    took = np.maximum(end_ns - came_ns, 0)
    # A barrier of a call is compared with others, not with the kernels that move the data.
    is_part = matched.carrier != np.arange(len(matched))
    typical = _find_typical_ns(matched, took, is_part)
    rows = np.flatnonzero(incomplete)
    label = group_ids(
        matched.trace[rows], matched.group[rows], matched.op[rows], matched.message_bytes[rows],
        is_part[rows],
    )  # fmt: skip
    fastest = group_min(label, took[rows], int(label.max(initial=-1)) + 1)[label]
    if model is not None:
        # The fastest times of these calls, by label, or the model's where they are longer than it
        # can be.
        usual, longest = (np.full(int(label.max(initial=-1)) + 1, _NONE) for _ in range(2))
        for at in np.unique(label, return_index=True)[1].tolist():
            row = int(rows[at])
            group = int(matched.group[row])
            if group < 0 or matched.is_message[row] or is_part[row]:
                continue
            ranks = tuple(matched.groups[group].ranks)
            found = model(OPS[matched.op[row]], int(matched.message_bytes[row]), ranks)
            if found is not None:
                usual[label[at]], longest[label[at]] = found.usual_ns, found.longest_ns
        fastest = np.where(fastest > longest[label], usual[label], fastest)
    known = np.where(typical[rows] < _NONE, typical[rows], fastest)
    alone = matched.shared[rows] < 0
    long = took[rows] > known * (1 + _MORE) + _NOISE_NS
    transfer_ns = np.full(len(matched), -1, dtype=np.int64)
    transfer_ns[rows] = np.where(alone | long, np.minimum(known, took[rows]), -1)
    return transfer_ns


def _is_comparable(traces: Sequence[RankTrace], matched: MatchedCalls) -> Bool:
    """Calls whose size is known; the messages of a pipeline have one size even if it is unknown.

    Kernels that may send or receive alone are as different as these two.
    """
    copies = np.concatenate([t.events.category[t.calls.event] == Category.MEMCPY for t in traces])
    halves = np.concatenate([find_call_roles(trace).mask("halves") for trace in traces])
    comparable: Bool = (matched.is_message | (matched.message_bytes >= 0)) & ~copies & ~halves
    return comparable


def _find_typical_ns(matched: MatchedCalls, took: Int64, is_part: Bool) -> Int64:
    """The median time of complete calls of the same op, size and number of members, or of their
    barriers."""
    sizes = np.array([len(group.ranks) for group in matched.groups] + [0], dtype=np.int64)
    members = np.where(matched.is_message, 2, sizes[matched.group])
    op = np.minimum(matched.op, OP_CODE["send"])
    label = group_ids(op, matched.message_bytes, members, is_part)
    complete = np.flatnonzero((matched.key >= 0) & (matched.message_bytes >= 0))
    typical = np.full(int(label.max(initial=-1)) + 1, _NONE)
    typical[label[complete]] = _compute_percentile(label[complete], took[complete], 50)
    return typical[label]
