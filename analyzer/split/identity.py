"""What makes rows of different ranks the same call: a sequence number, else a place in an order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.trace import OPS, Int32, Int64, Note, RankTrace, UInt8, wall_lead_ns

MAX_SHIFT = 64
"""By how many calls windows without sequence numbers may begin apart."""
Named = list[tuple[int, Hashable]]
"""Rows with the name of the call that each is; equal names are one call."""


@dataclass(frozen=True, slots=True)
class CallRows:
    """The calls of all ranks; columns of one length. Times are by the ranks' own wall clocks.

    trace indexes the traces, whose hosts are hosts; group is -1 where unknown.
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
    hosts: tuple[str, ...]

    def share_a_clock(self, one: Int64, other: Int64) -> bool:
        """Whether the rows, each of one trace, come from one named host."""
        hosts = {self.hosts[int(self.trace[rows[0]])] for rows in (one, other)}
        return len(hosts) == 1 and hosts != {""}


@dataclass(frozen=True, slots=True)
class Identities:
    """The named rows, and what was ambiguous."""

    named: Named
    notes: tuple[Note, ...]


def call_rows(
    traces: Sequence[RankTrace], trace: Int32, group: Int32, start_ns: Int64, end_ns: Int64
) -> CallRows:
    """The columns that identities need, from those of the whole table."""
    lead = wall_lead_ns(traces)[trace]
    calls = [one.calls for one in traces]
    return CallRows(
        trace=trace,
        group=group,
        op=np.concatenate([c.op for c in calls]),
        seq=np.concatenate([c.seq for c in calls]),
        rank=np.array([one.rank for one in traces], dtype=np.int64)[trace],
        peer=np.concatenate([c.peer for c in calls]).astype(np.int64),
        size_bytes=np.concatenate([c.message_bytes for c in calls]),
        start_ns=start_ns + lead,
        end_ns=end_ns + lead,
        hosts=tuple(one.host for one in traces),
    )


def identities(rows: CallRows, collective: Int64, message: Int64) -> Identities:
    """The names of the collectives and messages among the rows, each given by its row numbers."""
    named = _numbered(rows, collective[rows.seq[collective] >= 0])
    ambiguous = 0
    plain = collective[rows.seq[collective] < 0]
    for group in np.unique(rows.group[plain]).tolist():
        found, doubtful = _by_order(rows, plain[rows.group[plain] == group], group)
        named, ambiguous = named + found, ambiguous + doubtful
    named += _messages(rows, message)
    text = (
        "ranks of different hosts repeat the same collectives without sequence numbers: they are "
    )
    note = Note("order_ambiguous", text + "matched as if all windows began on the same one")
    return Identities(named, (note,) if ambiguous else ())


def _numbered(rows: CallRows, numbered: Int64) -> Named:
    """Calls by sequence number; one that comes again after others, as in a replay, is new."""
    named: Named = []
    latest: dict[tuple[int, int], int] = {}
    again: Counter[tuple[int, int, int]] = Counter()
    for row in numbered[np.lexsort((rows.start_ns[numbered], rows.trace[numbered]))].tolist():
        trace, group, seq = int(rows.trace[row]), int(rows.group[row]), int(rows.seq[row])
        again[trace, group, seq] += latest.get((trace, group)) != seq
        latest[trace, group] = seq
        named.append((row, ("seq", group, seq, again[trace, group, seq])))
    return named


def _by_order(rows: CallRows, of_group: Int64, group: int) -> tuple[Named, int]:
    """The n-th call is the n-th, once windows that begin apart are shifted together."""
    by_trace = [of_group[rows.trace[of_group] == t] for t in np.unique(rows.trace[of_group])]
    by_trace = [r[np.argsort(rows.start_ns[r], kind="stable")] for r in by_trace]
    longest = max(by_trace, key=len)
    named: Named = []
    ambiguous = 0
    for one in by_trace:
        shifts = [0] if one is longest else _shifts(_kind(rows, one), _kind(rows, longest))
        together = rows.share_a_clock(one, longest)
        if shifts:
            shift = (
                min(shifts, key=lambda s: _apart_ns(rows, one, longest, s))
                if together
                else shifts[0]
            )
            named += [(row, ("order", group, n + shift)) for n, row in enumerate(one.tolist())]
        ambiguous += len(shifts) > 1 and not together
    return named, ambiguous


def _kind(rows: CallRows, chosen: Int64) -> Int64:
    return np.stack((rows.op[chosen].astype(np.int64), rows.size_bytes[chosen]), axis=1)


def _shifts(one: Int64, other: Int64) -> list[int]:
    """How far into other the sequence one may begin, smallest first: all that meets agrees.

    At least half of the shorter must meet, or any two calls of a kind would do.
    """
    found = []
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        low, high = max(shift, 0), min(shift + len(one), len(other))
        enough = 2 * (high - low) >= min(len(one), len(other)) and high > low
        if enough and _agree(one[low - shift : high - shift], other[low:high]):
            found.append(shift)
    return found


def _agree(one: Int64, other: Int64) -> bool:
    """Whether the (op, size) of all calls are the same; a size that one does not know fits any."""
    unknown = (one[:, 1] < 0) | (other[:, 1] < 0)
    same = (one[:, 0] == other[:, 0]) & ((one[:, 1] == other[:, 1]) | unknown)
    return bool(same.all())


def _apart_ns(rows: CallRows, one: Int64, other: Int64, shift: int) -> int:
    """By how much the calls that a shift pairs end apart, on a clock that both read."""
    low, high = max(shift, 0), min(shift + len(one), len(other))
    ends = rows.end_ns[one[low - shift : high - shift]] - rows.end_ns[other[low:high]]
    return int(np.median(np.abs(ends)))


def _messages(rows: CallRows, message: Int64) -> Named:
    """A receive matches the n-th send of the same source, destination and group."""
    channels: dict[tuple[int, int, int], tuple[list[int], list[int]]] = defaultdict(
        lambda: ([], [])
    )
    for row in message[np.lexsort((rows.start_ns[message], rows.trace[message]))].tolist():
        mine, theirs, sends = int(rows.rank[row]), int(rows.peer[row]), OPS[rows.op[row]] == "send"
        ends = (mine, theirs) if sends else (theirs, mine)
        channels[int(rows.group[row]), *ends][0 if sends else 1].append(row)
    named: Named = []
    for place, (sent, received) in channels.items():
        shift = _first_received(rows, np.array(sent), np.array(received))
        named += [(row, ("message", *place, n)) for n, row in enumerate(sent)]
        named += [(row, ("message", *place, n + shift)) for n, row in enumerate(received)]
    return named


def _first_received(rows: CallRows, sent: Int64, received: Int64) -> int:
    """Which send the first receive belongs to, where one window lacks messages of the other.

    On a shared clock no receive ends before its send begins, and the closest such pairing is right.
    """
    missing = len(sent) - len(received)
    if not missing or not len(sent) or not len(received) or not rows.share_a_clock(sent, received):
        return 0

    def misfit(shift: int) -> tuple[int, int]:
        low, high = max(shift, 0), min(shift + len(received), len(sent))
        late = rows.end_ns[received[low - shift : high - shift]] - rows.start_ns[sent[low:high]]
        return int((late < 0).sum()), int(np.median(np.abs(late)))

    return min(range(min(missing, 0), max(missing, 0) + 1), key=misfit)
