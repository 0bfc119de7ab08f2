"""Which calls of different ranks are the same collective or message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.split.unnamed import world_of_unnamed
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Group, Int32, Int64, RankTrace, UInt8

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose members all bring the same size, and whose kernels end together."""
MAX_SHIFT = 64
"""By how many calls windows without sequence numbers may begin apart."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The calls of all ranks in one table, in the order of (trace, call); columns of one length.

    trace indexes the traces and call that trace's Calls; group indexes groups (-1 unknown). shared
    is one number for all rows of one collective or message, -1 where a rank has it alone; key is
    the same where every member's call is there, else -1.
    start_ns is the arrival (on gloo, of the call) and end_ns the end, on the rank's own clock.
    """

    trace: Int32
    call: Int32
    group: Int32
    op: UInt8
    key: Int64
    shared: Int64
    start_ns: Int64
    end_ns: Int64
    message_bytes: Int64
    groups: tuple[Group, ...]

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def is_message(self) -> Bool:
        return self.op >= OP_CODE["send"]

    def of_trace(self, trace: int) -> slice:
        """The rows of one trace, in the order of its calls."""
        return slice(*np.searchsorted(self.trace, [trace, trace + 1]).tolist())


def match(traces: Sequence[RankTrace]) -> Matched:
    """The table of all calls, each joined with its counterparts on the other ranks."""
    groups, group = _global_groups(traces)
    column = [trace.calls for trace in traces]
    rows = Matched(
        trace=np.repeat(np.arange(len(traces), dtype=np.int32), [len(calls) for calls in column]),
        call=np.concatenate([np.arange(len(calls), dtype=np.int32) for calls in column]),
        group=np.concatenate(group),
        op=np.concatenate([calls.op for calls in column]),
        key=np.empty(0, dtype=np.int64),
        shared=np.empty(0, dtype=np.int64),
        start_ns=np.concatenate([_arrival_ns(trace) for trace in traces]),
        end_ns=np.concatenate([trace.events.end_ns[trace.calls.event] for trace in traces]),
        message_bytes=np.concatenate([calls.message_bytes for calls in column]),
        groups=groups,
    )
    return _with_keys(rows, traces)


def _arrival_ns(trace: RankTrace) -> Int64:
    """When each call's rank arrived: its kernel's start, or on gloo the host's call."""
    start = trace.events.start_ns[trace.calls.event]
    if trace.on_device:
        return start
    issued = trace.calls.issued_ns
    return np.where(issued >= 0, np.minimum(issued, start), start)


def _global_groups(traces: Sequence[RankTrace]) -> tuple[tuple[Group, ...], list[Int32]]:
    """All groups, and each trace's calls' index into them. A group is its name and its ranks."""
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    groups: list[Group] = []
    columns = []
    for trace in traces:
        local = []
        for group in trace.groups:
            key = (group.name, group.ranks)
            if key not in numbers:
                numbers[key] = len(groups)
                groups.append(group)
            local.append(numbers[key])
        lookup = np.array([*local, -1], dtype=np.int32)
        columns.append(lookup[trace.calls.group_id])
    return _with_unnamed(traces, groups, columns)


def _with_unnamed(
    traces: Sequence[RankTrace], groups: list[Group], columns: list[Int32]
) -> tuple[tuple[Group, ...], list[Int32]]:
    """The same, with calls of no named group given to the world where they are its collectives."""
    world = world_of_unnamed(traces)
    if world is None:
        return tuple(groups), columns
    given = [
        np.where((column < 0) & (trace.calls.peer < 0), len(groups), column).astype(np.int32)
        for trace, column in zip(traces, columns, strict=True)
    ]
    return (*groups, world), given


def _with_keys(rows: Matched, traces: Sequence[RankTrace]) -> Matched:
    identities = _collective_identities(rows, traces) + _message_identities(rows, traces)
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, identity in identities:
        members[identity].append(row)
    key, shared = (np.full(len(rows), -1, dtype=np.int64) for _ in range(2))
    for number, same in enumerate(members.values()):
        if _is_one_call(rows, same):
            shared[same] = number
            key[same] = number if _is_complete(rows, same) else -1
    return replace(rows, key=key, shared=shared)


def _is_one_call(rows: Matched, same: Sequence[int]) -> bool:
    """Whether several ranks agree on what the call is; sizes differ only where ops allow it."""
    if len(set(rows.trace[same].tolist())) < 2 or len(set(_kind_of_match(rows, same))) > 1:
        return False
    sizes = {size for size in rows.message_bytes[same].tolist() if size >= 0}
    return len(sizes) <= 1 or OPS[rows.op[same[0]]] not in TOGETHER


def _kind_of_match(rows: Matched, same: Sequence[int]) -> list[int]:
    """The op of each row; the two ends of a message are one."""
    return [min(op, OP_CODE["send"]) for op in rows.op[same].tolist()]


def _is_complete(rows: Matched, same: Sequence[int]) -> bool:
    if rows.is_message[same[0]]:
        return len(same) == 2
    return len(set(rows.trace[same].tolist())) == len(rows.groups[rows.group[same[0]]].ranks)


def _collective_identities(
    rows: Matched, traces: Sequence[RankTrace]
) -> list[tuple[int, Hashable]]:
    seq = np.concatenate([trace.calls.seq for trace in traces])
    known = ~rows.is_message & (rows.group >= 0)
    numbered = np.flatnonzero(known & (seq >= 0))
    found: list[tuple[int, Hashable]] = [
        (row, ("seq", group, number))
        for row, group, number in zip(
            numbered.tolist(), rows.group[numbered].tolist(), seq[numbered].tolist(), strict=True
        )
    ]
    plain = np.flatnonzero(known & (seq < 0))
    for group in np.unique(rows.group[plain]).tolist():
        found += _by_order(rows, plain[rows.group[plain] == group], group)
    return found


def _by_order(rows: Matched, of_group: Int64, group: int) -> list[tuple[int, Hashable]]:
    """The n-th call is the n-th, once windows that begin apart are shifted together."""
    by_trace = [of_group[rows.trace[of_group] == t] for t in np.unique(rows.trace[of_group])]
    by_trace = [r[np.argsort(rows.start_ns[r], kind="stable")] for r in by_trace]
    longest = max(by_trace, key=len)
    found: list[tuple[int, Hashable]] = []
    for one in by_trace:
        shift = _shift(_kind(rows, one), _kind(rows, longest))
        if shift is not None:
            found += [(row, ("order", group, n + shift)) for n, row in enumerate(one.tolist())]
    return found


def _kind(rows: Matched, chosen: Int64) -> Int64:
    return np.stack((rows.op[chosen].astype(np.int64), rows.message_bytes[chosen]), axis=1)


def _shift(one: Int64, other: Int64) -> int | None:
    """How far into other the sequence one begins: the smallest shift at which both agree."""
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        low, high = max(shift, 0), min(shift + len(one), len(other))
        if high > low and np.array_equal(one[low - shift : high - shift], other[low:high]):
            return shift
    return None


def _message_identities(rows: Matched, traces: Sequence[RankTrace]) -> list[tuple[int, Hashable]]:
    """A receive matches the n-th send of the same source, destination and group."""
    peer = np.concatenate([trace.calls.peer for trace in traces])
    order = np.lexsort((rows.start_ns, rows.trace))
    counts: dict[Hashable, int] = defaultdict(int)
    found: list[tuple[int, Hashable]] = []
    for row in order[rows.is_message[order] & (peer[order] >= 0)].tolist():
        mine, theirs, op = traces[rows.trace[row]].rank, int(peer[row]), OPS[rows.op[row]]
        channel = (mine, theirs) if op == "send" else (theirs, mine)
        place = ("message", int(rows.group[row]), *channel)
        found.append((row, (*place, counts[(op, *place)])))
        counts[(op, *place)] += 1
    return found
