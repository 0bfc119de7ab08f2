"""Identity of calls across ranks: by sequence number, else by position in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import group_ids, group_max, group_rows, number_within_group
from stepsplit.analyzer.ops import SYMMETRIC_OPS
from stepsplit.analyzer.split.sequence_pairing import (
    CallSequence,
    Pairing,
    is_clearly_closer,
    measure_mean_scatter_ns,
    pair_sequences,
    subtract_paired_ends,
)
from stepsplit.analyzer.trace import OP_CODE, Bool, Int32, Int64, Note, RankTrace, UInt8

SYMMETRIC_CODES = [OP_CODE[op] for op in SYMMETRIC_OPS]

_NUMBERED, _ORDERED, _MESSAGE = range(3)

_MOST_STREAMS = 4
"""With more streams for messages between two ranks, these are paired in the order of all."""


class CallRows(Struct, frozen=True):
    """The calls of all ranks, times on the clocks known so far; columns of one length.

    trace indexes the traces. clocks names the clock of each trace: equal names mean one clock, such
    as a host's; "" is unknown. group is -1 if unknown; lane is the stream, 0 of all without one.
    """

    trace: Int32
    group: Int32
    op: UInt8
    seq: Int64
    rank: Int64
    peer: Int64
    lane: Int64
    size_bytes: Int64
    start_ns: Int64
    end_ns: Int64
    clocks: tuple[str, ...]

    def share_a_clock(self, first: Int64, second: Int64) -> bool:
        """Whether two sets of rows, each from one trace, use one clock."""
        clocks = {self.clocks[int(self.trace[rows[0]])] for rows in (first, second)}
        return len(clocks) == 1 and clocks != {""}


class Identities(Struct, frozen=True):
    """One label for all rows of a call, -1 for a row without a counterpart; notes on
    ambiguities."""

    label: Int64
    notes: tuple[Note, ...]


def build_call_rows(
    traces: Sequence[RankTrace],
    trace: Int32,
    group: Int32,
    start_ns: Int64,
    end_ns: Int64,
    clocks: Sequence[str],
) -> CallRows:
    """Builds the columns for identities from those of the whole table; clocks has one per trace."""
    calls = [one.calls for one in traces]
    return CallRows(
        trace=trace,
        group=group,
        op=np.concatenate([c.op for c in calls]),
        seq=np.concatenate([c.seq for c in calls]),
        rank=np.array([one.rank for one in traces], dtype=np.int64)[trace],
        peer=np.concatenate([c.peer for c in calls]).astype(np.int64),
        lane=np.concatenate(
            [one.events.lane[one.calls.event] * np.int64(one.on_device) for one in traces]
        ),
        size_bytes=np.concatenate([c.message_bytes for c in calls]),
        start_ns=start_ns,
        end_ns=end_ns,
        clocks=tuple(clocks),
    )


def identify_calls(rows: CallRows, collective: Int64, message: Int64) -> Identities:
    """Labels the collectives and messages, each given by row numbers."""
    way = np.full(len(rows.trace), -1, dtype=np.int64)
    place, channel = (np.full(len(rows.trace), -1, dtype=np.int64) for _ in range(2))
    numbered = _is_numbered(rows, collective)
    known = collective[numbered]
    way[known], place[known], channel[known] = _NUMBERED, rows.seq[known], rows.group[known]
    plain = collective[~numbered]
    # Writes the position of each call in its group's order; returns whether any was ambiguous.
    ambiguous = False
    order, first = group_rows(rows.group[plain].astype(np.int64))
    for of_group in np.split(plain[order], first[1:]) if len(plain) else []:
        by_trace = _sort_by_time(rows, of_group, rows.trace[of_group].astype(np.int64))
        longest = max(by_trace, key=len)
        place[longest] = np.arange(len(longest))
        whole = _build_sequence(rows, longest)
        for trace_rows in by_trace:
            if trace_rows is not longest:
                same_clock = rows.share_a_clock(trace_rows, longest)
                pairing = pair_sequences(
                    _build_sequence(rows, trace_rows), whole, one_clock=same_clock
                )
                place[trace_rows] = pairing.place
                ambiguous |= pairing.ambiguous and not same_clock
    way[plain], channel[plain] = _ORDERED, rows.group[plain]
    if len(message):
        # A number for each (group, source, destination) of the messages.
        sends = rows.op[message] == OP_CODE["send"]
        own_rank, peer_rank = rows.rank[message], rows.peer[message]
        source, target = np.where(sends, own_rank, peer_rank), np.where(sends, peer_rank, own_rank)
        channel[message] = group_ids(rows.group[message], source, target)
        ambiguous |= _place_messages(rows, message, channel, place)
        way[message] = _MESSAGE
    label = np.where(place != -1, group_ids(way, channel, place), -1)
    text = "calls repeat without sequence numbers, and the clocks are not accurate enough to match "
    note = Note("order_ambiguous", text + "them across ranks: the pairing closest in time is used")
    return Identities(label, (note,) if ambiguous else ())


def _is_numbered(rows: CallRows, collective: Int64) -> Bool:
    """Whether each collective is identified by its sequence number alone.

    A replayed CUDA graph repeats its numbers: a group with such a call is matched by order, and so
    is one of which a rank has no numbers.
    """
    seq = rows.seq[collective]
    label = group_ids(rows.group[collective], rows.trace[collective])
    highest = group_max(label, seq, int(label.max(initial=-1)) + 1)
    bare = np.unique(rows.group[collective[highest[label] < 0]])
    order = np.lexsort((rows.start_ns[collective], label))
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = (seq[order][1:] != seq[order][:-1]) | (label[order][1:] != label[order][:-1])
    first = order[fresh]
    again = number_within_group(group_ids(label[first], seq[first])) > 0
    replayed = np.unique(rows.group[collective[first[again & (seq[first] >= 0)]]])
    by_order = np.concatenate([replayed, bare])
    return (seq >= 0) & ~np.isin(rows.group[collective], by_order)


def _sort_by_time(rows: CallRows, chosen: Int64, label: Int64) -> list[Int64]:
    """The chosen rows of each label, in order of time."""
    if not len(chosen):
        return []
    ordered = np.lexsort((rows.start_ns[chosen], label))
    bounds = np.flatnonzero(np.diff(label[ordered])) + 1
    return np.split(chosen[ordered], bounds)


def _build_sequence(rows: CallRows, chosen: Int64) -> CallSequence:
    """What identifies calls in order: sizes only of ops of which all members pass the same."""
    alike = np.isin(rows.op[chosen], SYMMETRIC_CODES)
    size = np.where(alike, rows.size_bytes[chosen], -1)
    kind = (rows.op[chosen].astype(np.int64), size, rows.seq[chosen])
    return CallSequence(np.stack(kind, axis=1), rows.end_ns[chosen])


def _place_messages(rows: CallRows, message: Int64, channel: Int64, place: Int64) -> bool:
    """Matches each receive with the n-th send of its channel, of which those of several
    communicators become several; returns whether any was ambiguous.

    Recordings that start on different messages are shifted against each other first.
    """
    ambiguous = False
    sends = (rows.op[message] == OP_CODE["send"]).astype(np.int64)
    count = int(channel.max(initial=-1)) + 1
    for ends in _pair_ends(rows, message, channel[message], sends):
        for sent, received in _pair_streams(rows, *ends):
            channel[sent], channel[received], count = count, count, count + 1
            place[sent] = np.arange(len(sent))
            pairing = _pair_receives(rows, sent, received)
            place[received] = np.where(
                pairing.place >= 0, pairing.place, len(sent) + np.arange(len(received))
            )
            ambiguous |= pairing.ambiguous and not rows.share_a_clock(sent, received)
    return ambiguous


def _pair_ends(
    rows: CallRows, message: Int64, channel: Int64, sends: Int64
) -> list[tuple[Int64, Int64]]:
    """(sends, receives) of each channel with both, in order of time."""
    both: dict[int, dict[int, Int64]] = {}
    order, first = group_rows(channel * 2 + sends)
    for part in np.split(order, first[1:]):
        in_time = part[np.argsort(rows.start_ns[message[part]], kind="stable")]
        both.setdefault(int(channel[part[0]]), {})[int(sends[part[0]])] = message[in_time]
    return [(ends[1], ends[0]) for ends in both.values() if len(ends) == 2]


def _pair_streams(rows: CallRows, sent: Int64, received: Int64) -> list[tuple[Int64, Int64]]:
    """The sends and receives between two ranks by communicator.

    NCCL pairs messages in their order on a communicator, which has a stream on each rank; torch may
    have several between two ranks of one group. Streams belong together if they have as many
    messages of equal sizes, which end together, and the order of all messages is not as good.
    """
    streams = [
        [ends[rows.lane[ends] == lane] for lane in np.unique(rows.lane[ends]).tolist()]
        for ends in (sent, received)
    ]
    if not 2 <= len(streams[0]) == len(streams[1]) <= _MOST_STREAMS:
        return [(sent, received)]
    by_order = subtract_paired_ends(_list_sizes(rows, sent), _list_sizes(rows, received))
    order_scatter_ns = measure_mean_scatter_ns([by_order])
    if not is_clearly_closer(0.0, order_scatter_ns):
        return [(sent, received)]
    sends, receives = ([_list_sizes(rows, own) for own in side] for side in streams)
    apart_ns = [[subtract_paired_ends(one, other) for other in receives] for one in sends]
    # The clocks of the ranks may be apart, by as much for all streams.
    orders = list(permutations(range(len(sends))))
    scatter_ns = [
        measure_mean_scatter_ns([apart_ns[one][at] for one, at in enumerate(order)])
        for order in orders
    ]
    if not is_clearly_closer(min(scatter_ns), order_scatter_ns):
        return [(sent, received)]
    best = orders[int(np.argmin(scatter_ns))]
    return [(one, streams[1][at]) for one, at in zip(streams[0], best, strict=True)]


def _list_sizes(rows: CallRows, chosen: Int64) -> CallSequence:
    return CallSequence(rows.size_bytes[chosen][:, np.newaxis], rows.end_ns[chosen])


def _pair_receives(rows: CallRows, sent: Int64, received: Int64) -> Pairing:
    """Matches the receives with the sends.

    Recordings usually start on the same message. Another pairing is used only if its times fit
    clearly better, or if receives would otherwise end before their sends start.
    """
    likely = len(sent) == len(received) and not _is_out_of_order(rows, sent, received)
    return pair_sequences(
        _list_sizes(rows, received),
        _list_sizes(rows, sent),
        one_clock=rows.share_a_clock(sent, received),
        likely=0 if likely else None,
    )


def _is_out_of_order(rows: CallRows, sent: Int64, received: Int64) -> bool:
    """Whether some receive would end before its send starts, on one clock."""
    early = rows.end_ns[received] < rows.start_ns[sent]
    return rows.share_a_clock(sent, received) and bool(early.any())
