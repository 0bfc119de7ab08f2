"""Which calls of different ranks are the same collective or message."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.split.identity import call_rows, identities
from stepsplit.analyzer.split.unnamed import NAME as UNNAMED
from stepsplit.analyzer.split.unnamed import world_of_unnamed
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Group, Int32, Int64, Note, RankTrace, UInt8

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose members all bring the same size, and whose kernels end together."""


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
    notes: tuple[Note, ...]

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
        notes=_notes(groups),
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
    """All groups, and each trace's calls' index into them.

    A group is its ranks; where a rank is in several of the same ranks, its name too.
    """
    several = {ranks for trace in traces for ranks in _repeated(trace.groups)}
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    groups: list[Group] = []
    columns = []
    for trace in traces:
        local = []
        for group in trace.groups:
            key = (group.name if group.ranks in several else "", group.ranks)
            if key not in numbers:
                numbers[key] = len(groups)
                groups.append(group)
            local.append(numbers[key])
        lookup = np.array([*local, -1], dtype=np.int32)
        columns.append(lookup[trace.calls.group_id])
    return _with_unnamed(traces, groups, columns)


def _repeated(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    counts = Counter(group.ranks for group in groups)
    return [ranks for ranks, count in counts.items() if count > 1]


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
    calls = call_rows(traces, rows.trace, rows.group, rows.start_ns, rows.end_ns)
    collective = np.flatnonzero(~rows.is_message & (rows.group >= 0))
    found = identities(calls, collective, np.flatnonzero(rows.is_message & (calls.peer >= 0)))
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, name in found.named:
        members[name].append(row)
    key, shared = (np.full(len(rows), -1, dtype=np.int64) for _ in range(2))
    for number, same in enumerate(members.values()):
        if _is_one_call(rows, same):
            shared[same] = number
            key[same] = number if _is_complete(rows, same) else -1
    return replace(rows, key=key, shared=shared, notes=(*rows.notes, *found.notes))


def _notes(groups: Sequence[Group]) -> tuple[Note, ...]:
    text = "collectives of no named group are taken for those of all ranks, which ran the same ones"
    return (Note("groups_inferred", text),) if any(g.name == UNNAMED for g in groups) else ()


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
