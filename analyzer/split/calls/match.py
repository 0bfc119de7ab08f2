"""Which calls of different ranks are the same collective or message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.arrays import firsts_of, labels_of, least_of, most_of
from stepsplit.analyzer.split.calls.identity import call_rows, identities
from stepsplit.analyzer.split.calls.unnamed import NAME as UNNAMED
from stepsplit.analyzer.split.calls.unnamed import world_of_unnamed
from stepsplit.analyzer.split.clocks.clock import Alignment
from stepsplit.analyzer.trace import (
    OP_CODE,
    Bool,
    Group,
    Int32,
    Int64,
    Note,
    RankTrace,
    UInt8,
    wall_lead_ns,
)

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose members all bring the same size, and whose kernels end together."""
_TOGETHER_CODES = [OP_CODE[op] for op in TOGETHER]


@dataclass(frozen=True, slots=True)
class Matched:
    """The calls of all ranks in one table, in the order of (trace, call); columns of one length.

    trace indexes the traces and call that trace's Calls; group indexes groups (-1 unknown). shared
    is one number for all rows of one collective or message, -1 where a rank has it alone; key is
    the same where every member's call is there, else -1. leads marks the first of a rank's rows of
    one call, which may be several kernels.
    start_ns is the arrival (on gloo, of the call) and end_ns the end, on the rank's own clock.
    """

    trace: Int32
    call: Int32
    group: Int32
    op: UInt8
    key: Int64
    shared: Int64
    leads: Bool
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


def match(traces: Sequence[RankTrace], alignment: Alignment | None = None) -> Matched:
    """The table of all calls, each joined with its counterparts on the other ranks.

    What only time can tell is told by the wall clocks of hosts, or by those of an alignment.
    """
    groups, group = _global_groups(traces)
    column = [trace.calls for trace in traces]
    rows = Matched(
        trace=np.repeat(np.arange(len(traces), dtype=np.int32), [len(calls) for calls in column]),
        call=np.concatenate([np.arange(len(calls), dtype=np.int32) for calls in column]),
        group=np.concatenate(group),
        op=np.concatenate([calls.op for calls in column]),
        key=np.empty(0, dtype=np.int64),
        shared=np.empty(0, dtype=np.int64),
        leads=np.empty(0, dtype=np.bool_),
        start_ns=np.concatenate([_arrival_ns(trace) for trace in traces]),
        end_ns=np.concatenate([trace.events.end_ns[trace.calls.event] for trace in traces]),
        message_bytes=np.concatenate([calls.message_bytes for calls in column]),
        groups=groups,
        notes=_notes(groups),
    )
    return _with_keys(rows, traces, alignment)


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


def _with_keys(rows: Matched, traces: Sequence[RankTrace], alignment: Alignment | None) -> Matched:
    start, end = (_by_clocks(rows, traces, alignment, at) for at in (rows.start_ns, rows.end_ns))
    calls = call_rows(traces, rows.trace, rows.group, start, end, _clocks(traces, alignment))
    collective = np.flatnonzero(~rows.is_message & (rows.group >= 0))
    found = identities(calls, collective, np.flatnonzero(rows.is_message & (calls.peer >= 0)))
    label, count = found.label, int(found.label.max(initial=-1)) + 1
    members = _members(rows, label, count)
    one_call = (members >= 2) & _agreed(rows, label, count)
    complete = one_call & (members == _expected(rows, label, count))
    known = np.where(label >= 0, label, 0)
    shared = np.where((label >= 0) & _at(one_call, known), label, -1)
    key = np.where((label >= 0) & _at(complete, known), label, -1)
    leads = _first_kernels(rows, shared)
    return replace(rows, key=key, shared=shared, leads=leads, notes=(*rows.notes, *found.notes))


def _first_kernels(rows: Matched, shared: Int64) -> Bool:
    """Which rows are the first of their rank in a call; a row of no call is one."""
    leads = shared < 0
    known = np.flatnonzero(~leads)
    in_time = known[np.argsort(rows.start_ns[known], kind="stable")]
    first = firsts_of(labels_of(shared[in_time], rows.trace[in_time]))
    leads[in_time[first]] = True
    return leads


def _at(of_label: Bool, label: Int64) -> Bool:
    return of_label[label] if len(of_label) else np.zeros(len(label), dtype=np.bool_)


def _by_clocks(
    rows: Matched, traces: Sequence[RankTrace], alignment: Alignment | None, own_ns: Int64
) -> Int64:
    """Own times by the wall clocks, or on the clock that an alignment gives all ranks."""
    if alignment is None:
        return own_ns + wall_lead_ns(traces)[rows.trace]
    parts = [clock.common_ns(own_ns[rows.of_trace(i)]) for i, clock in enumerate(alignment.clocks)]
    return np.concatenate(parts)


def _clocks(traces: Sequence[RankTrace], alignment: Alignment | None) -> list[str]:
    """Whose clock each trace is by: its host's, or the common one where it is joined to that."""
    if alignment is None:
        return [trace.host for trace in traces]
    joined = [clock.sigma_ns is not None for clock in alignment.clocks]
    return ["common" if one else trace.host for one, trace in zip(joined, traces, strict=True)]


def _members(rows: Matched, label: Int64, count: int) -> Int64:
    """How many ranks made each call; of a message, how many ends of it are there."""
    known = np.flatnonzero(label >= 0)
    who = np.where(rows.is_message[known], known, rows.trace[known])
    first = firsts_of(labels_of(label[known], who))
    return np.bincount(label[known][first], minlength=count)


def _agreed(rows: Matched, label: Int64, count: int) -> Bool:
    """Whether the members agree on what the call is; sizes differ only where ops allow it."""
    op = np.minimum(rows.op, OP_CODE["send"]).astype(np.int64)
    same_op = least_of(label, op, count) == most_of(label, op, count)
    size = rows.message_bytes
    sized = np.where(size >= 0, label, -1)
    same_size = least_of(sized, size, count) >= most_of(sized, size, count)
    free = most_of(label, (~np.isin(rows.op, _TOGETHER_CODES)).astype(np.int64), count) > 0
    agreed: Bool = same_op & (same_size | free) & _two_ends(rows, label, count)
    return agreed


def _two_ends(rows: Matched, label: Int64, count: int) -> Bool:
    """Whether a message is between two ranks."""
    trace = rows.trace.astype(np.int64)
    apart: Bool = most_of(label, trace, count) > least_of(label, trace, count)
    return apart


def _expected(rows: Matched, label: Int64, count: int) -> Int64:
    """How many members each call has when all are there."""
    sizes = np.array([len(group.ranks) for group in rows.groups] + [0], dtype=np.int64)
    return most_of(label, np.where(rows.is_message, 2, sizes[rows.group]), count)


def _notes(groups: Sequence[Group]) -> tuple[Note, ...]:
    text = "collectives of no named group are taken for those of all ranks, which ran the same ones"
    return (Note("groups_inferred", text),) if any(g.name == UNNAMED for g in groups) else ()
