"""What makes rows of different ranks the same call: a sequence number, else a place in an order."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import labels_of, place_within, runs_of
from stepsplit.analyzer.split.calls.shifts import Pairing, Sequence, paired
from stepsplit.analyzer.trace import OP_CODE, Bool, Int32, Int64, Note, RankTrace, UInt8

_NUMBERED, _ORDERED, _MESSAGE = range(3)


@dataclass(frozen=True, slots=True)
class CallRows:
    """The calls of all ranks; columns of one length. Times are by the clocks known so far.

    trace indexes the traces; those of one clock, such as a host's, have the same name in clocks, ""
    where it is not known. group is -1 where unknown.
    """

    trace: Int32
    group: Int32
    op: UInt8
    seq: Int64
    rank: Int64
    peer: Int64
    size_bytes: Int64
    start_ns: Int64
    end_ns: Int64
    clocks: tuple[str, ...]

    def share_a_clock(self, one: Int64, other: Int64) -> bool:
        """Whether the rows, each of one trace, are by one clock."""
        clocks = {self.clocks[int(self.trace[rows[0]])] for rows in (one, other)}
        return len(clocks) == 1 and clocks != {""}


@dataclass(frozen=True, slots=True)
class Identities:
    """One label for all rows of a call, -1 for a row that is like no other; what was ambiguous."""

    label: Int64
    notes: tuple[Note, ...]


def call_rows(
    traces: Listed[RankTrace],
    trace: Int32,
    group: Int32,
    start_ns: Int64,
    end_ns: Int64,
    clocks: Listed[str],
) -> CallRows:
    """The columns that identities need, from those of the whole table; clocks has one a trace."""
    calls = [one.calls for one in traces]
    return CallRows(
        trace=trace,
        group=group,
        op=np.concatenate([c.op for c in calls]),
        seq=np.concatenate([c.seq for c in calls]),
        rank=np.array([one.rank for one in traces], dtype=np.int64)[trace],
        peer=np.concatenate([c.peer for c in calls]).astype(np.int64),
        size_bytes=np.concatenate([c.message_bytes for c in calls]),
        start_ns=start_ns,
        end_ns=end_ns,
        clocks=tuple(clocks),
    )


def identities(rows: CallRows, collective: Int64, message: Int64) -> Identities:
    """The labels of the collectives and messages among the rows, each given by its row numbers."""
    way = np.full(len(rows.trace), -1, dtype=np.int64)
    place, channel = (np.full(len(rows.trace), -1, dtype=np.int64) for _ in range(2))
    numbered = _numbered(rows, collective)
    known = collective[numbered]
    way[known], place[known], channel[known] = _NUMBERED, rows.seq[known], rows.group[known]
    plain = collective[~numbered]
    ambiguous = _place_in_order(rows, plain, place)
    way[plain], channel[plain] = _ORDERED, rows.group[plain]
    if len(message):
        channel[message] = _channels(rows, message)
        ambiguous |= _place_messages(rows, message, channel, place)
        way[message] = _MESSAGE
    label = np.where(place != -1, labels_of(way, channel, place), -1)
    text = "ranks repeat the same calls without sequence numbers, and their clocks do not tell "
    note = Note("order_ambiguous", text + "which is which: the pairing closest in time is taken")
    return Identities(label, (note,) if ambiguous else ())


def _numbered(rows: CallRows, collective: Int64) -> Bool:
    """Which collectives are told by their sequence number alone.

    A replayed graph repeats its numbers: a group with such a call goes by order.
    """
    seq = rows.seq[collective]
    label = labels_of(rows.group[collective], rows.trace[collective])
    order = np.lexsort((rows.start_ns[collective], label))
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = (seq[order][1:] != seq[order][:-1]) | (label[order][1:] != label[order][:-1])
    first = order[fresh]
    again = place_within(labels_of(label[first], seq[first])) > 0
    replayed = np.unique(rows.group[collective[first[again & (seq[first] >= 0)]]])
    return (seq >= 0) & ~np.isin(rows.group[collective], replayed)


def _place_in_order(rows: CallRows, plain: Int64, place: Int64) -> bool:
    """Writes the place of each call in its group's order; says whether some were ambiguous."""
    ambiguous = False
    order, first = runs_of(rows.group[plain].astype(np.int64))
    for of_group in np.split(plain[order], first[1:]) if len(plain) else []:
        by_trace = _in_time(rows, of_group, rows.trace[of_group].astype(np.int64))
        longest = max(by_trace, key=len)
        place[longest] = np.arange(len(longest))
        whole = _sequence(rows, longest)
        for one in by_trace:
            if one is not longest:
                together = rows.share_a_clock(one, longest)
                found = paired(_sequence(rows, one), whole, one_clock=together)
                place[one] = found.place
                ambiguous |= found.ambiguous and not together
    return ambiguous


def _in_time(rows: CallRows, chosen: Int64, label: Int64) -> list[Int64]:
    """The chosen rows of each label, in order of time."""
    if not len(chosen):
        return []
    ordered = np.lexsort((rows.start_ns[chosen], label))
    bounds = np.flatnonzero(np.diff(label[ordered])) + 1
    return np.split(chosen[ordered], bounds)


def _sequence(rows: CallRows, chosen: Int64) -> Sequence:
    kind = (rows.op[chosen].astype(np.int64), rows.size_bytes[chosen], rows.seq[chosen])
    return Sequence(np.stack(kind, axis=1), rows.end_ns[chosen])


def _channels(rows: CallRows, message: Int64) -> Int64:
    """A number for each (group, source, destination) that messages take."""
    sends = rows.op[message] == OP_CODE["send"]
    mine, theirs = rows.rank[message], rows.peer[message]
    source, target = np.where(sends, mine, theirs), np.where(sends, theirs, mine)
    return labels_of(rows.group[message], source, target)


def _place_messages(rows: CallRows, message: Int64, channel: Int64, place: Int64) -> bool:
    """A receive matches the n-th send of its channel, once windows that begin apart are shifted."""
    ambiguous = False
    sends = (rows.op[message] == OP_CODE["send"]).astype(np.int64)
    for ends in _pairs_of_ends(rows, message, channel[message], sends):
        sent, received = ends
        place[sent] = np.arange(len(sent))
        found = _received(rows, sent, received)
        place[received] = np.where(
            found.place >= 0, found.place, len(sent) + np.arange(len(received))
        )
        ambiguous |= found.ambiguous and not rows.share_a_clock(sent, received)
    return ambiguous


def _pairs_of_ends(
    rows: CallRows, message: Int64, channel: Int64, sends: Int64
) -> list[tuple[Int64, Int64]]:
    """(sends, receives) of each channel that has both, in order of time."""
    both: dict[int, dict[int, Int64]] = {}
    order, first = runs_of(channel * 2 + sends)
    for part in np.split(order, first[1:]):
        in_time = part[np.argsort(rows.start_ns[message[part]], kind="stable")]
        both.setdefault(int(channel[part[0]]), {})[int(sends[part[0]])] = message[in_time]
    return [(ends[1], ends[0]) for ends in both.values() if len(ends) == 2]


def _received(rows: CallRows, sent: Int64, received: Int64) -> Pairing:
    """Which send each receive belongs to.

    Windows that begin on the same message are the rule, so that only times which fit another
    pairing plainly better, or receives that would end before their sends began, speak against it.
    """
    likely = len(sent) == len(received) and not _out_of_order(rows, sent, received)
    one = Sequence(rows.size_bytes[received][:, np.newaxis], rows.end_ns[received])
    other = Sequence(rows.size_bytes[sent][:, np.newaxis], rows.end_ns[sent])
    together = rows.share_a_clock(sent, received)
    return paired(one, other, one_clock=together, likely=0 if likely else None)


def _out_of_order(rows: CallRows, sent: Int64, received: Int64) -> bool:
    """Whether, on one clock, some receive would end before its send began."""
    early = rows.end_ns[received] < rows.start_ns[sent]
    return rows.share_a_clock(sent, received) and bool(early.any())
