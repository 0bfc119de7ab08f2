"""How long data needs to move: of messages within longer kernels, of calls that lack a member."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepsplit.analyzer.arrays import labels_of, least_of, most_of, runs_of
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.trace import OP_CODE, Bool, Category, Int64, RankTrace

LOW_PERCENTILE = 10
"""Of the times that messages of one link and size took, the one that a free link needs."""
_NOISE_NS, _MORE = 20_000, 0.5
"""A call that lacks a member waited for it if it took longer than its like by more than this."""
_NONE = np.iinfo(np.int64).max


def message_transfers(
    traces: Sequence[RankTrace], matched: Matched, moves_ns: Int64, end_ns: Int64, telling: Bool
) -> Int64:
    """When the data of each call had moved: a collective's at its end, a message's maybe earlier.

    The kernel of a message ends with it, unless it holds another that begins to move later. Such a
    message, and any on gloo, whose ranges end with the caller's wait, moves for the low percentile
    of those of its link and size, at most to the earlier of its ends. Only telling ones, of which
    no end left before the other came, count and are cut.
    """
    moved = end_ns.copy()
    rows = np.flatnonzero(matched.is_message & (matched.key >= 0) & telling)
    count = int(matched.key.max(initial=-1)) + 1
    key = matched.key[rows]
    earlier = least_of(np.where(matched.is_message, matched.key, -1), end_ns, count)[key]
    closed = _ends_its_kernel(traces, matched, rows, moves_ns)
    exact = least_of(np.where(closed, key, -1), end_ns[rows], count)[key]
    told = exact < _NONE
    took = np.maximum(np.where(told, exact, earlier) - moves_ns[rows], 0)
    low = _percentile_of(_links(matched, rows), took)
    moved[rows] = moves_ns[rows] + np.where(told, took, np.minimum(took, low))
    return moved


def _ends_its_kernel(
    traces: Sequence[RankTrace], matched: Matched, rows: Int64, moves_ns: Int64
) -> Bool:
    """Of these messages, which are the last of their kernel to begin to move."""
    event = np.concatenate([trace.calls.event for trace in traces])[rows]
    on_device = np.array([trace.on_device for trace in traces])[matched.trace[rows]]
    kernel = labels_of(matched.trace[rows], event)
    last = most_of(kernel, moves_ns[rows], int(kernel.max(initial=-1)) + 1)
    ends: Bool = on_device & (moves_ns[rows] >= last[kernel])
    return ends


def _links(matched: Matched, rows: Int64) -> Int64:
    """A number for each row's sender, receiver and size; both ends of a message have the same."""
    count = int(matched.key.max(initial=-1)) + 1
    ends = np.zeros((count, 2), dtype=np.int64)
    receives = (matched.op[rows] == OP_CODE["recv"]).astype(np.int64)
    ends[matched.key[rows], receives] = matched.trace[rows]
    pair = ends[matched.key[rows]]
    return labels_of(pair[:, 0], pair[:, 1], matched.message_bytes[rows])


def _percentile_of(label: Int64, values: Int64, percentile: int = LOW_PERCENTILE) -> Int64:
    """For each row the percentile of its label's values, one that occurs."""
    found = np.zeros(len(values), dtype=np.int64)
    order, first = runs_of(label)
    for part in np.split(order, first[1:]) if len(order) else []:
        found[part] = np.percentile(values[part], percentile, method="lower")
    return found


def guessed_transfers(
    traces: Sequence[RankTrace], matched: Matched, came_ns: Int64, end_ns: Int64
) -> Int64:
    """For calls that lack a member and waited for it, how long their data moved; else -1.

    Complete calls of the same op, size and number of members tell it; else the fastest of the rank
    itself, counted from the last member that is there. Of another call of unknown size, and of a
    copy between devices, nobody can say that it waited.
    """
    incomplete = (matched.key < 0) & _comparable(traces, matched)
    took = np.maximum(end_ns - came_ns, 0)
    like = _like_elsewhere(matched, took)
    rows = np.flatnonzero(incomplete)
    known = np.where(like[rows] < _NONE, like[rows], _fastest_here(matched, rows, took))
    alone = matched.shared[rows] < 0
    long = took[rows] > known * (1 + _MORE) + _NOISE_NS
    found = np.full(len(matched), -1, dtype=np.int64)
    found[rows] = np.where(alone | long, np.minimum(known, took[rows]), -1)
    return found


def _comparable(traces: Sequence[RankTrace], matched: Matched) -> Bool:
    """The messages of a pipeline are of one size even where it is not known."""
    copies = np.concatenate([t.events.category[t.calls.event] == Category.MEMCPY for t in traces])
    comparable: Bool = (matched.is_message | (matched.message_bytes >= 0)) & ~copies
    return comparable


def _like_elsewhere(matched: Matched, took: Int64) -> Int64:
    """The median time of complete calls of the same op, size and number of members."""
    sizes = np.array([len(group.ranks) for group in matched.groups] + [0], dtype=np.int64)
    members = np.where(matched.is_message, 2, sizes[matched.group])
    label = labels_of(np.minimum(matched.op, OP_CODE["send"]), matched.message_bytes, members)
    complete = np.flatnonzero((matched.key >= 0) & (matched.message_bytes >= 0))
    typical = np.full(int(label.max(initial=-1)) + 1, _NONE)
    typical[label[complete]] = _percentile_of(label[complete], took[complete], 50)
    return typical[label]


def _fastest_here(matched: Matched, rows: Int64, took: Int64) -> Int64:
    label = labels_of(
        matched.trace[rows], matched.group[rows], matched.op[rows], matched.message_bytes[rows]
    )
    return least_of(label, took[rows], int(label.max(initial=-1)) + 1)[label]
