"""Matching of calls across ranks, and the clocks on which they are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepsplit.analyzer.arrays import (
    first_rows,
    group_ids,
    group_max,
    group_min,
    group_rows,
    number_within_group,
)
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
    find_earlier_calls,
)

# Mapping of a rank's clock to the common clock.


class Clock(Struct, frozen=True):
    """A rank's clock: t_reference = t - offset_ns - drift_ppm / 10^6 * (t - pivot).

    t is the rank's wall clock. Own times count from the t0 of the trace, common times from the t0
    of the run; wall_ns is the difference. offset_ns holds at pivot_ns, a wall time relative to the
    run's t0. drift_ppm is None if it cannot be distinguished from noise. sigma_ns (standard
    deviation of the offset) and residual_ns (median distance of the ends of calls) are None if no
    call links the clock.
    """

    rank: int
    host: str
    offset_ns: int
    wall_ns: int = 0
    pivot_ns: int = 0
    drift_ppm: float | None = None
    sigma_ns: int | None = None
    residual_ns: int | None = None

    @property
    def _rate(self) -> float:
        return (self.drift_ppm or 0.0) * 1e-6

    def map_to_common_ns(self, own_ns: Int64) -> Int64:
        """Maps own times to the common clock."""
        common: Int64 = own_ns + (self.wall_ns - self.offset_ns)
        if self._rate:
            since = own_ns + (self.wall_ns - self.pivot_ns)
            common = common - np.rint(since * self._rate).astype(np.int64)
        return common

    def map_to_own_ns(self, common_ns: Int64) -> Int64:
        """Maps common times to the rank's own clock."""
        own: Int64 = common_ns - (self.wall_ns - self.offset_ns)
        if self._rate:
            since = common_ns + (self.offset_ns - self.pivot_ns)
            own = own + np.rint(since * (self._rate / (1 - self._rate))).astype(np.int64)
        return own

    def map_instant_to_common_ns(self, own_ns: int) -> int:
        """Maps a single own time to the common clock."""
        return int(self.map_to_common_ns(np.array([own_ns], dtype=np.int64))[0])

    def compute_offset_at(self, common_ns: int) -> int:
        """How far this clock is ahead at a common time."""
        wall = int(self.map_to_own_ns(np.array([common_ns], dtype=np.int64))[0]) + self.wall_ns
        return wall - common_ns


class Alignment(Struct, frozen=True):
    """The clocks, one per trace; common times count from t0_unix_ns."""

    clocks: tuple[Clock, ...]
    t0_unix_ns: int
    notes: tuple[Note, ...]


# Calls of different ranks that belong to the same collective or message.

SYMMETRIC_OPS = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose members all pass the same size, and whose kernels end simultaneously."""

_SYMMETRIC_CODES = [OP_CODE[op] for op in SYMMETRIC_OPS]


@dataclass(frozen=True, slots=True)
class MatchedCalls:
    """The calls of all ranks in one table, ordered by (trace, call); columns of one length.

    trace indexes the traces and call the Calls of that trace; group indexes groups (-1: unknown).
    shared is one number for all rows of a collective or message, -1 if only one rank has it; key is
    the same if every member's call is recorded, else -1. leads marks a rank's first row of a call,
    which may consist of several kernels. start_ns is the arrival (on gloo: of the call) and end_ns
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
    rows = MatchedCalls(
        trace=np.repeat(np.arange(len(traces), dtype=np.int32), [len(calls) for calls in column]),
        call=np.concatenate([np.arange(len(calls), dtype=np.int32) for calls in column]),
        group=np.concatenate(group),
        op=np.concatenate([calls.op for calls in column]),
        key=np.empty(0, dtype=np.int64),
        shared=np.empty(0, dtype=np.int64),
        leads=np.empty(0, dtype=np.bool_),
        start_ns=np.concatenate([_compute_arrival_ns(trace) for trace in traces]),
        end_ns=np.concatenate([trace.events.ends_of(trace.calls.event) for trace in traces]),
        message_bytes=np.concatenate([calls.message_bytes for calls in column]),
        groups=groups,
        notes=_build_notes(groups, traces),
    )
    return _assign_keys(rows, traces, alignment)


def _compute_arrival_ns(trace: RankTrace) -> Int64:
    """The arrival at each call: the start of its kernel, or on gloo the host's call."""
    start = trace.events.start_ns[trace.calls.event]
    if trace.on_device:
        return start
    issued = trace.calls.issued_ns
    return np.where(issued >= 0, np.minimum(issued, start), start)


def _merge_groups(traces: Sequence[RankTrace]) -> tuple[tuple[Group, ...], list[Int32]]:
    """(all groups, index of the group of each trace's calls).

    A group is identified by its ranks, and by its name if a rank has several groups of the same
    ranks.
    """
    several = {ranks for trace in traces for ranks in _find_repeated(trace.groups)}
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


def _find_repeated(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    counts = Counter(group.ranks for group in groups)
    return [ranks for ranks, count in counts.items() if count > 1]


def _assign_keys(
    rows: MatchedCalls, traces: Sequence[RankTrace], alignment: Alignment | None
) -> MatchedCalls:
    start, end = (
        _convert_by_clocks(rows, traces, alignment, at) for at in (rows.start_ns, rows.end_ns)
    )
    calls = build_call_rows(
        traces, rows.trace, rows.group, start, end, _list_clock_names(traces, alignment)
    )
    collective = np.flatnonzero(~rows.is_message & (rows.group >= 0))
    identified = identify_calls(
        calls, collective, np.flatnonzero(rows.is_message & (calls.peer >= 0))
    )
    label, count = identified.label, int(identified.label.max(initial=-1)) + 1
    members = _count_members(rows, label, count)
    one_call = (members >= 2) & _check_agreement(rows, label, count)
    complete = one_call & (members == _count_expected(rows, label, count))
    known = np.where(label >= 0, label, 0)
    shared = np.where((label >= 0) & _take_by_label(one_call, known), label, -1)
    key = np.where((label >= 0) & _take_by_label(complete, known), label, -1)
    leads = _find_first_kernels(rows, shared)
    return replace(
        rows, key=key, shared=shared, leads=leads, notes=(*rows.notes, *identified.notes)
    )


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


def _list_clock_names(traces: Sequence[RankTrace], alignment: Alignment | None) -> list[str]:
    """The clock of each trace: that of its host, or "common" if it is linked to the common
    clock."""
    if alignment is None:
        return [trace.host for trace in traces]
    joined = [clock.sigma_ns is not None for clock in alignment.clocks]
    return ["common" if one else trace.host for one, trace in zip(joined, traces, strict=True)]


def _count_members(rows: MatchedCalls, label: Int64, count: int) -> Int64:
    """The number of ranks in each call; for a message, the number of recorded ends."""
    known = np.flatnonzero(label >= 0)
    who = np.where(rows.is_message[known], known, rows.trace[known])
    first = first_rows(group_ids(label[known], who))
    return np.bincount(label[known][first], minlength=count)


def _check_agreement(rows: MatchedCalls, label: Int64, count: int) -> Bool:
    """Whether the members of a call have the same op, and the same size unless the op allows
    others."""
    op = np.minimum(rows.op, OP_CODE["send"]).astype(np.int64)
    same_op = group_min(label, op, count) == group_max(label, op, count)
    size = rows.message_bytes
    sized = np.where(size >= 0, label, -1)
    same_size = group_min(sized, size, count) >= group_max(sized, size, count)
    free = group_max(label, (~np.isin(rows.op, _SYMMETRIC_CODES)).astype(np.int64), count) > 0
    agreed: Bool = same_op & (same_size | free) & _has_two_ends(rows, label, count)
    return agreed


def _has_two_ends(rows: MatchedCalls, label: Int64, count: int) -> Bool:
    """Whether the rows of a message are from two ranks."""
    trace = rows.trace.astype(np.int64)
    apart: Bool = group_max(label, trace, count) > group_min(label, trace, count)
    return apart


def _count_expected(rows: MatchedCalls, label: Int64, count: int) -> Int64:
    """The number of members of each call when complete."""
    sizes = np.array([len(group.ranks) for group in rows.groups] + [0], dtype=np.int64)
    return group_max(label, np.where(rows.is_message, 2, sizes[rows.group]), count)


def _build_notes(groups: Sequence[Group], traces: Sequence[RankTrace]) -> tuple[Note, ...]:
    text = "collectives without a process group were assigned to the group of all ranks"
    if any(group.name == UNNAMED for group in groups):
        return (Note("groups_inferred", text),)
    unnamed = [(trace, _find_unnamed(trace)) for trace in traces if trace.on_device]
    most = max((len(events) for _, events in unnamed), default=0)
    if not most:
        return ()
    replayed = max(_count_replayed(trace, events) for trace, events in unnamed)
    some = f" ({replayed:,} of them replayed in CUDA graphs)" if replayed else ""
    text = (
        f"up to {most:,} collectives per rank{some} carry no process group: their axis is unknown, "
        "and their time is not separated into waiting and transfer"
    )
    return (Note("groups_unknown", text),)


def _count_replayed(trace: RankTrace, events: Int64) -> int:
    """How many of these events a graph launch started."""
    launches = trace.events.find_launches(events)
    graph = trace.events.name_mask(tuple("GraphLaunch" in name for name in trace.events.names))
    return int(graph[launches[launches >= 0]].sum())


# Identity of calls across ranks: by sequence number, else by position in order.

_NUMBERED, _ORDERED, _MESSAGE = range(3)


class CallRows(Struct, frozen=True):
    """The calls of all ranks, times on the clocks known so far; columns of one length.

    trace indexes the traces. clocks names the clock of each trace: equal names mean one clock, such
    as a host's; "" is unknown. group is -1 if unknown.
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
    ambiguous = _place_in_order(rows, plain, place)
    way[plain], channel[plain] = _ORDERED, rows.group[plain]
    if len(message):
        channel[message] = _number_channels(rows, message)
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


def _place_in_order(rows: CallRows, plain: Int64, place: Int64) -> bool:
    """Writes the position of each call in its group's order; returns whether any was ambiguous."""
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
    return ambiguous


def _sort_by_time(rows: CallRows, chosen: Int64, label: Int64) -> list[Int64]:
    """The chosen rows of each label, in order of time."""
    if not len(chosen):
        return []
    ordered = np.lexsort((rows.start_ns[chosen], label))
    bounds = np.flatnonzero(np.diff(label[ordered])) + 1
    return np.split(chosen[ordered], bounds)


def _build_sequence(rows: CallRows, chosen: Int64) -> CallSequence:
    """What identifies calls in order: sizes only of ops of which all members pass the same."""
    alike = np.isin(rows.op[chosen], _SYMMETRIC_CODES)
    size = np.where(alike, rows.size_bytes[chosen], -1)
    kind = (rows.op[chosen].astype(np.int64), size, rows.seq[chosen])
    return CallSequence(np.stack(kind, axis=1), rows.end_ns[chosen])


def _number_channels(rows: CallRows, message: Int64) -> Int64:
    """A number for each (group, source, destination) of the messages."""
    sends = rows.op[message] == OP_CODE["send"]
    own_rank, peer_rank = rows.rank[message], rows.peer[message]
    source, target = np.where(sends, own_rank, peer_rank), np.where(sends, peer_rank, own_rank)
    return group_ids(rows.group[message], source, target)


def _place_messages(rows: CallRows, message: Int64, channel: Int64, place: Int64) -> bool:
    """Matches each receive with the n-th send of its channel; returns whether any was ambiguous.

    Recordings that start on different messages are shifted against each other first.
    """
    ambiguous = False
    sends = (rows.op[message] == OP_CODE["send"]).astype(np.int64)
    for ends in _pair_ends(rows, message, channel[message], sends):
        sent, received = ends
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


def _pair_receives(rows: CallRows, sent: Int64, received: Int64) -> Pairing:
    """Matches the receives with the sends.

    Recordings usually start on the same message. Another pairing is used only if its times fit
    clearly better, or if receives would otherwise end before their sends start.
    """
    likely = len(sent) == len(received) and not _is_out_of_order(rows, sent, received)
    receive_sequence = CallSequence(rows.size_bytes[received][:, np.newaxis], rows.end_ns[received])
    send_sequence = CallSequence(rows.size_bytes[sent][:, np.newaxis], rows.end_ns[sent])
    same_clock = rows.share_a_clock(sent, received)
    return pair_sequences(
        receive_sequence, send_sequence, one_clock=same_clock, likely=0 if likely else None
    )


def _is_out_of_order(rows: CallRows, sent: Int64, received: Int64) -> bool:
    """Whether some receive would end before its send starts, on one clock."""
    early = rows.end_ns[received] < rows.start_ns[sent]
    return rows.share_a_clock(sent, received) and bool(early.any())


# Collectives without a process group in the trace.
#
# Old traces, some frameworks, and replays of CUDA graphs have communication kernels without
# arguments. They are treated as collectives of all ranks if every rank of the job is recorded, no
# smaller process group is known, all ran the same communication kernels in the same order, and no
# kernel ends before the last member's kernel has started.

UNNAMED = "unnamed"

EARLY_NS = 100_000
"""Tolerance for kernels that seem to end before the last arrival, on clocks aligned by the
kernels."""


def assign_world_group(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces with calls without a group on the world group, if they are its collectives."""
    world = infer_world_group(traces)
    return list(traces) if world is None else [_add_group(trace, world) for trace in traces]


def _add_group(trace: RankTrace, group: Group) -> RankTrace:
    """The trace with its calls without group and peer on this group."""
    calls, groups = trace.calls, (*trace.groups, group)
    unnamed = (calls.group_id < 0) & (calls.peer < 0)
    group_id = np.where(unnamed, len(groups) - 1, calls.group_id).astype(np.int32)
    return replace(trace, calls=replace(calls, group_id=group_id), groups=groups)


def infer_world_group(traces: Sequence[RankTrace]) -> Group | None:
    """The group of all ranks if the calls without a group are its collectives, else None."""
    rows = [_find_unnamed(trace) for trace in traces]
    complete = len(traces) > 1 and len(traces) == max(trace.world_size for trace in traces)
    if not complete or not len(rows[0]) or len({len(one) for one in rows}) > 1:
        return None
    if any(1 < len(group.ranks) < len(traces) for trace in traces for group in trace.groups):
        return None
    # Beside gloo's calls with a group, those without have an unknown order on each rank.
    if any(not trace.on_device and _has_grouped_calls(trace) for trace in traces):
        return None
    if len({_list_names(trace, one) for trace, one in zip(traces, rows, strict=True)}) > 1:
        return None
    if not _check_overlap(traces, rows):
        return None
    return Group(
        UNNAMED, tuple(trace.rank for trace in traces), "all ranks, inferred from call order"
    )


def _find_unnamed(trace: RankTrace) -> Int64:
    """The events of the calls without group and peer, by start; not those of earlier steps."""
    calls = trace.calls
    unnamed = (calls.group_id < 0) & (calls.peer < 0) & ~find_earlier_calls(trace)
    events = calls.event[unnamed]
    return events[np.argsort(trace.events.start_ns[events], kind="stable")]


def _has_grouped_calls(trace: RankTrace) -> bool:
    calls = trace.calls
    return bool(((calls.group_id >= 0) & (calls.peer < 0)).any())


def _list_names(trace: RankTrace, events: Int64) -> tuple[str, ...]:
    return tuple(trace.events.names[name] for name in trace.events.name_id[events].tolist())


def _check_overlap(traces: Sequence[RankTrace], rows: Sequence[Int64]) -> bool:
    """Whether the n-th kernels of all ranks overlap, after aligning the median ends."""
    start = np.stack([t.events.start_ns[r] for t, r in zip(traces, rows, strict=True)])
    end = np.stack([t.events.ends_of(r) for t, r in zip(traces, rows, strict=True)])
    apart = np.median(end - end[0], axis=1).astype(np.int64)[:, np.newaxis]
    return bool(((end - apart).min(axis=0) >= (start - apart).max(axis=0) - EARLY_NS).all())


# Pairing of two recordings of one call sequence without sequence numbers.
#
# Recordings of two ranks may start and end on different calls, and some calls may be missing.
# Op and size rule out most pairings. Time decides between the rest: the members of a call end
# simultaneously, so under the right pairing the ends differ by a constant, the clock offset.

MAX_SHIFT = 64
"""Maximum number of calls by which recordings without sequence numbers may be shifted."""

_MIN_AGREEING = 8
"""Number of calls that must agree again after a missing one."""

_MAX_SCATTER_NS = 50_000
"""Maximum scatter of the ends of calls whose members end simultaneously; on gloo they do not."""

_PLAIN, _NOISE_NS, _TELLING = 3.0, 10_000, 4
"""A pairing is clearly better if its ends scatter less by this factor beyond this noise, with at
least this many paired calls."""

_MOST_COMPARED = 1 << 18
"""Number of pairs of calls that are compared at once."""

_NEVER = np.iinfo(np.int64).max

Float = npt.NDArray[np.float64]


class Pairing(Struct, frozen=True):
    """The n-th call of the first sequence pairs with the place[n]-th of the second; -1 if unpaired.

    ambiguous: another pairing fits equally well, and only the wall clocks decided.
    """

    place: Int64
    ambiguous: bool


class CallSequence(Struct, frozen=True):
    """Calls in order: kind of shape (n, k), -1 for unknown columns, and their end times."""

    kind: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.end_ns)


def pair_sequences(
    first: CallSequence, second: CallSequence, *, one_clock: bool, likely: int | None = None
) -> Pairing:
    """Finds the best pairing of two sequences, whose end times are on wall clocks.

    Among equally good pairings, the likely one is used; else, on one clock, the one clearly closest
    in time; else the one that pairs the most calls with the smallest shift.
    """
    if one_clock and likely is None and _end_together(first, second):
        likely = 0
    if likely is not None and _fits_closely(first, second, likely):
        return Pairing(_apply_shift(first, second, likely), False)
    shifts = _find_consistent(first, second, _list_shifts(MAX_SHIFT))
    if not len(shifts):
        return _pair_with_gaps(first, second)
    fitting = _select_fitting(first, second, shifts).tolist()
    if likely is not None and likely in fitting:
        return Pairing(_apply_shift(first, second, likely), False)
    best = _choose_closest(first, second, fitting) if one_clock else fitting[0]
    return Pairing(_apply_shift(first, second, best), len(fitting) > 1)


def _end_together(first: CallSequence, second: CallSequence) -> bool:
    """Whether as many calls end within noise of each other: no other pairing is clearly closer."""
    return len(first) == len(second) and _measure_distance_ns(first, second, 0) <= _NOISE_NS


def _choose_closest(first: CallSequence, second: CallSequence, fitting: list[int]) -> int:
    """The pairing closest in time if it is clearly closer than the one that pairs most calls.

    On a busy machine, gloo may end a call on one rank about when it ends the next one on another.
    """
    best = min(fitting, key=lambda shift: _measure_distance_ns(first, second, shift))
    usual = fitting[int(_count_paired(first, second, np.array(fitting)).argmax())]
    limit = _PLAIN * _measure_distance_ns(first, second, best) + _NOISE_NS
    return usual if _measure_distance_ns(first, second, usual) <= limit else best


def _fits_closely(first: CallSequence, second: CallSequence, shift: int) -> bool:
    """Whether this pairing is certain to be among those with the least scatter."""
    one = np.array([shift])
    enough = _count_paired(first, second, one)[0] >= _TELLING
    if not enough or not len(_find_consistent(first, second, one)):
        return False
    return bool(_measure_scatter_ns(first, second, one)[0] <= _NOISE_NS)


def _select_fitting(first: CallSequence, second: CallSequence, shifts: Int64) -> Int64:
    """The pairings with the least scatter, and those that are not distinguishable from them."""
    paired_counts = _count_paired(first, second, shifts)
    if paired_counts.max() < _TELLING:
        return shifts
    comparable = shifts[paired_counts >= _TELLING]
    scatter_ns = _measure_scatter_ns(first, second, comparable)
    if scatter_ns.min() > _MAX_SCATTER_NS:
        return shifts
    fitting: Int64 = comparable[scatter_ns <= _PLAIN * scatter_ns.min() + _NOISE_NS]
    return fitting


def _list_shifts(around: int) -> Int64:
    return np.array(sorted(range(-around, around + 1), key=abs))


def _count_paired(first: CallSequence, second: CallSequence, shifts: Int64) -> Int64:
    """The number of calls that each shift pairs."""
    low, high = np.maximum(shifts, 0), np.minimum(shifts + len(first), len(second))
    return np.asarray(np.maximum(high - low, 0))


def _find_consistent(first: CallSequence, second: CallSequence, shifts: Int64) -> Int64:
    """The shifts under which all paired calls are of one kind.

    At least half of the shorter sequence must be paired; otherwise any two calls of a kind would
    do.
    """
    count = _count_paired(first, second, shifts)
    enough = shifts[(count > 0) & (2 * count >= min(len(first), len(second)))]
    consistent = [
        part[(~paired | _match_kinds(first.kind, second.kind[there])).all(axis=1)]
        for part, there, paired in _pair_by_shift(first, second, enough)
    ]
    return np.concatenate([enough[:0], *consistent])


def _pair_by_shift(
    first: CallSequence, second: CallSequence, shifts: Int64
) -> Iterator[tuple[Int64, Int64, Bool]]:
    """Yields (some of the shifts, their counterparts in the second sequence, whether there is one),
    the last two of shape (shifts, calls)."""
    calls, most = np.arange(len(first)), max(1, _MOST_COMPARED // len(first))
    for at in range(0, len(shifts), most):
        there = calls + shifts[at : at + most, np.newaxis]
        paired = (there >= 0) & (there < len(second))
        yield shifts[at : at + most], np.where(paired, there, 0), paired


def _match_kinds(first: Int64, second: Int64) -> Bool:
    """Whether each pair of calls is of one kind; unknown columns match any."""
    alike = np.ones(np.broadcast_shapes(first.shape, second.shape)[:-1], dtype=np.bool_)
    for column in range(first.shape[-1]):
        mine, theirs = first[..., column], second[..., column]
        unknown = mine < 0
        if not unknown.all():
            alike &= unknown | (mine == theirs) | (theirs < 0)
    return alike


def _measure_scatter_ns(first: CallSequence, second: CallSequence, shifts: Int64) -> Float:
    """For each shift, which pairs some calls, the median distance of the differences of ends to
    their median."""
    return np.array([_compute_scatter(_subtract_ends(first, second, s)) for s in shifts.tolist()])


def _compute_scatter(apart_ns: Int64) -> float:
    low, high = (len(apart_ns) - 1) // 2, len(apart_ns) // 2
    distance = np.abs(apart_ns - np.partition(apart_ns, high)[high])
    middle = np.partition(distance, (low, high))
    return float(middle[low] + middle[high]) / 2


def _subtract_ends(first: CallSequence, second: CallSequence, shift: int) -> Int64:
    """By how much each paired call of the first sequence ends after that of the second."""
    mine = slice(max(-shift, 0), max(len(second) - shift, 0))
    return first.end_ns[mine] - second.end_ns[max(shift, 0) : max(shift + len(first), 0)]


def _measure_distance_ns(first: CallSequence, second: CallSequence, shift: int) -> int:
    return int(np.median(np.abs(_subtract_ends(first, second, shift))))


def _apply_shift(first: CallSequence, second: CallSequence, shift: int) -> Int64:
    place = np.arange(len(first)) + shift
    return np.where((place >= 0) & (place < len(second)), place, -1)


def _pair_with_gaps(first: CallSequence, second: CallSequence) -> Pairing:
    """The pairing with missing calls: after a mismatch it continues at the next agreement."""
    place = np.full(len(first), -1, dtype=np.int64)
    at, there = 0, 0
    while at < len(first) and there < len(second):
        count = min(len(first) - at, len(second) - there)
        alike = _match_kinds(first.kind[at : at + count], second.kind[there : there + count])
        good = int(alike.argmin()) if not alike.all() else count
        place[at : at + good] = np.arange(there, there + good)
        at, there = at + good, there + good
        if good < count:
            step = _find_next_agreement(first, second, at, there)
            if step is None:
                break
            at, there = at + step[0], there + step[1]
    return Pairing(place, True)


def _find_next_agreement(
    first: CallSequence, second: CallSequence, at: int, there: int
) -> tuple[int, int] | None:
    """The smallest number of calls to skip on either side until several agree again."""
    for skipped in range(1, MAX_SHIFT + 1):
        for mine in range(skipped + 1):
            left = first.kind[at + mine : at + mine + _MIN_AGREEING]
            right = second.kind[there + skipped - mine : there + skipped - mine + _MIN_AGREEING]
            if len(left) and len(left) == len(right) and _match_kinds(left, right).all():
                return mine, skipped - mine
    return None
