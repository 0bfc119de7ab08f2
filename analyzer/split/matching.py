"""Calls of different ranks that belong to the same collective or message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import first_rows, group_ids, group_max, group_min
from stepsplit.analyzer.split.call_identity import SYMMETRIC_CODES, build_call_rows, identify_calls
from stepsplit.analyzer.split.clock import Alignment
from stepsplit.analyzer.split.protocols import find_call_roles, find_carriers
from stepsplit.analyzer.split.world_group import UNNAMED, find_replayed, find_unnamed
from stepsplit.analyzer.trace import (
    OP_CODE,
    Bool,
    Group,
    Int32,
    Int64,
    Note,
    RankTrace,
    UInt8,
    compute_start_offsets_ns,
)


class MatchedCalls(Struct, frozen=True):
    """The calls of all ranks in one table, ordered by (trace, call); columns of one length.

    trace indexes the traces and call the Calls of that trace; group indexes groups (-1: unknown).
    shared is one number for all rows of a collective or message, -1 if only one rank has it; key is
    the same if every member's call is recorded, else -1. leads marks a rank's first row of a call,
    which may consist of several kernels, counts the first that moves its data. together: it ends on
    all members at once. carrier is the row of the kernel that moves the data of its call, another
    one for a barrier. arrives: the start of the row is its rank's arrival; waits: it waits for the
    arrivals of all. A kernel that only sends or writes does not wait, one that only receives, and a
    copy behind a barrier, do not arrive. start_ns is the arrival (on gloo: of the call) and end_ns
    the end, on the rank's own clock.
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
    counts: Bool
    together: Bool
    carrier: Int64
    arrives: Bool
    waits: Bool
    groups: tuple[Group, ...]
    notes: tuple[Note, ...]

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def is_message(self) -> Bool:
        return self.op >= OP_CODE["send"]

    def slice_trace(self, trace: int) -> slice:
        """The rows of one trace, in the order of its calls."""
        # Of the column's type: otherwise each call would convert all of the column.
        edges = np.array([trace, trace + 1], dtype=self.trace.dtype)
        return slice(*np.searchsorted(self.trace, edges).tolist())


def match(traces: Sequence[RankTrace], alignment: Alignment | None = None) -> MatchedCalls:
    """Builds the table of all calls and matches them across ranks.

    Calls that only time can distinguish are compared on the wall clocks of the hosts, or on the
    clocks of an alignment.
    """
    groups, group = _merge_groups(traces)
    column = [trace.calls for trace in traces]
    roles = [find_call_roles(trace) for trace in traces]
    first = np.cumsum([0, *(len(calls) for calls in column)])
    # A rank arrives when its kernel starts; on gloo when the host calls, as workers may be late.
    arrived = []
    for trace, calls in zip(traces, column, strict=True):
        start = trace.events.start_ns[calls.event]
        if not trace.on_device:
            start = np.where(calls.issued_ns >= 0, np.minimum(calls.issued_ns, start), start)
        arrived.append(start)
    rows = MatchedCalls(
        trace=np.repeat(np.arange(len(traces), dtype=np.int32), [len(calls) for calls in column]),
        call=np.concatenate([np.arange(len(calls), dtype=np.int32) for calls in column]),
        group=np.concatenate(group),
        op=np.concatenate([calls.op for calls in column]),
        key=np.empty(0, dtype=np.int64),
        shared=np.empty(0, dtype=np.int64),
        leads=np.empty(0, dtype=np.bool_),
        counts=np.empty(0, dtype=np.bool_),
        together=np.concatenate([one.mask("together") for one in roles]),
        carrier=np.concatenate(
            [
                find_carriers(trace, one) + offset
                for trace, one, offset in zip(traces, roles, first, strict=False)
            ]
        ),
        arrives=~np.concatenate([one.mask("protocol") for one in roles]),
        waits=~np.concatenate([one.mask("halves") for one in roles]),
        start_ns=np.concatenate(arrived),
        end_ns=np.concatenate([trace.events.ends_of(trace.calls.event) for trace in traces]),
        message_bytes=np.concatenate([calls.message_bytes for calls in column]),
        groups=groups,
        notes=_build_notes(groups, traces),
    )
    matched = _assign_keys(rows, traces, alignment)
    writes = np.concatenate([one.mask("writes") for one in roles])
    # Of a larger group it waits for what the ranks beyond send over the network.
    reach = np.array([one.reach for one in roles], dtype=np.int64)[rows.trace]
    members = np.array([*(len(group.ranks) for group in groups), 0], dtype=np.int64)[rows.group]
    return replace(matched, waits=matched.waits & ~(writes & (members <= reach)))


def _merge_groups(traces: Sequence[RankTrace]) -> tuple[tuple[Group, ...], list[Int32]]:
    """(all groups, index of the group of each trace's calls).

    A group is identified by its ranks, and by its name if a rank has several groups of the same
    ranks.
    """
    several = {
        ranks
        for trace in traces
        for ranks, count in Counter(group.ranks for group in trace.groups).items()
        if count > 1
    }
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
    return tuple(groups), columns


def _assign_keys(
    rows: MatchedCalls, traces: Sequence[RankTrace], alignment: Alignment | None
) -> MatchedCalls:
    start, end = (
        _convert_by_clocks(rows, traces, alignment, at) for at in (rows.start_ns, rows.end_ns)
    )
    # The clock of each trace: that of its host, or that of all ranks that an alignment links.
    clocks, island = [trace.host for trace in traces], np.full(len(traces), -1)
    for i, clock in enumerate(alignment.clocks if alignment is not None else ()):
        island[i] = -1 if clock.island is None else clock.island
        if clock.sigma_ns is not None:
            clocks[i] = f"common {island[i]}"
    calls = build_call_rows(traces, rows.trace, rows.group, start, end, clocks)
    collective = np.flatnonzero(~rows.is_message & (rows.group >= 0))
    identified = identify_calls(
        calls, collective, np.flatnonzero(rows.is_message & (calls.peer >= 0))
    )
    label, count = identified.label, int(identified.label.max(initial=-1)) + 1
    # The number of ranks in each call; for a message, the number of recorded ends.
    labeled = np.flatnonzero(label >= 0)
    member = np.where(rows.is_message[labeled], labeled, rows.trace[labeled])
    distinct = first_rows(group_ids(label[labeled], member))
    members = np.bincount(label[labeled][distinct], minlength=count)
    one_call = (members >= 2) & _check_agreement(rows, label, count)
    # Times of ranks whose clocks nothing aligns are not compared: who came last is unknown.
    of_row = island[rows.trace]
    one_call &= group_min(label, of_row, count) == group_max(label, of_row, count)
    # The number of members of each call when complete.
    sizes = np.array([len(group.ranks) for group in rows.groups] + [0], dtype=np.int64)
    complete = one_call & (
        members == group_max(label, np.where(rows.is_message, 2, sizes[rows.group]), count)
    )
    known = np.where(label >= 0, label, 0)
    shared = np.where((label >= 0) & _take_by_label(one_call, known), label, -1)
    key = np.where((label >= 0) & _take_by_label(complete, known), label, -1)
    barrier = rows.carrier != np.arange(len(rows))
    leads = _find_first_kernels(rows, shared)
    # Copies between two barriers end one by one.
    copies = ~barrier & np.isin(shared, shared[barrier & (shared >= 0)])
    # Of a call in two halves the first one sends and the second one receives.
    in_halves = leads & ~rows.waits & np.isin(shared, shared[~leads & (shared >= 0)])
    return replace(
        rows,
        key=key,
        shared=shared,
        leads=leads,
        arrives=rows.arrives | leads,
        waits=~in_halves & ~copies,
        carrier=_join_halves(rows, shared, leads),
        counts=_find_first_kernels(rows, np.where(barrier, -1, shared)) & ~barrier,
        together=rows.together & ~copies,
        notes=(*rows.notes, *identified.notes),
    )


def _join_halves(rows: MatchedCalls, shared: Int64, leads: Bool) -> Int64:
    """The carriers, with the half of a call that receives carried by the one that sends."""
    receives = np.flatnonzero(~rows.waits & ~leads & (shared >= 0))
    if not len(receives):
        return rows.carrier
    sends = np.flatnonzero(leads & (shared >= 0))
    traces = int(rows.trace.max()) + 1
    key, wanted = (shared[at] * traces + rows.trace[at] for at in (sends, receives))
    order = np.argsort(key)
    carrier = rows.carrier.copy()
    carrier[receives] = sends[order[np.searchsorted(key[order], wanted)]]
    return carrier


def _find_first_kernels(rows: MatchedCalls, shared: Int64) -> Bool:
    """Whether each row is its rank's first in a call; true for a row without a call."""
    leads = shared < 0
    known = np.flatnonzero(~leads)
    in_time = known[np.argsort(rows.start_ns[known], kind="stable")]
    first = first_rows(group_ids(shared[in_time], rows.trace[in_time]))
    leads[in_time[first]] = True
    return leads


def _take_by_label(of_label: Bool, label: Int64) -> Bool:
    return of_label[label] if len(of_label) else np.zeros(len(label), dtype=np.bool_)


def _convert_by_clocks(
    rows: MatchedCalls, traces: Sequence[RankTrace], alignment: Alignment | None, own_ns: Int64
) -> Int64:
    """Converts own times to wall-clock times, or to the common clock of an alignment."""
    if alignment is None:
        return own_ns + compute_start_offsets_ns(traces)[rows.trace]
    parts = [
        clock.map_to_common_ns(own_ns[rows.slice_trace(i)])
        for i, clock in enumerate(alignment.clocks)
    ]
    return np.concatenate(parts)


def _check_agreement(rows: MatchedCalls, label: Int64, count: int) -> Bool:
    """Whether the members of a call have the same op, and the same size unless the op allows
    others."""
    op = np.minimum(rows.op, OP_CODE["send"]).astype(np.int64)
    same_op = group_min(label, op, count) == group_max(label, op, count)
    size = rows.message_bytes
    sized = np.where(size >= 0, label, -1)
    same_size = group_min(sized, size, count) >= group_max(sized, size, count)
    free = group_max(label, (~np.isin(rows.op, SYMMETRIC_CODES)).astype(np.int64), count) > 0
    trace = rows.trace.astype(np.int64)
    on_two_ranks = group_max(label, trace, count) > group_min(label, trace, count)
    agreed: Bool = same_op & (same_size | free) & on_two_ranks
    return agreed


def _build_notes(groups: Sequence[Group], traces: Sequence[RankTrace]) -> tuple[Note, ...]:
    text = "collectives without a process group were assigned to the group of all ranks"
    if any(group.name == UNNAMED for group in groups):
        return (Note("groups_inferred", text),)
    unnamed = [(trace, find_unnamed(trace)) for trace in traces if trace.on_device]
    most = max((len(events) for _, events in unnamed), default=0)
    if not most:
        return ()
    replayed = max(int(find_replayed(trace, events).sum()) for trace, events in unnamed)
    some = f" ({replayed:,} of them replayed in CUDA graphs)" if replayed else ""
    text = (
        f"up to {most:,} collectives per rank{some} carry no process group: their axis is unknown, "
        "and their time is not separated into waiting and transfer"
    )
    return (Note("groups_unknown", text),)
