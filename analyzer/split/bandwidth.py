"""algbw and busbw of each kind of collective, and the number of calls per step by kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import collect_intervals, find_interval, group_ids, group_rows
from stepsplit.analyzer.ops import compute_busbw_factor
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.split.transfers import Arrivals
from stepsplit.analyzer.trace import OPS, Int64, RankTrace, find_earlier_calls

# Bandwidth of each kind of collective, waits excluded.


class CollectiveRow(Struct, frozen=True):
    """Statistics of all calls of one op, dtype and size on one group.

    Attributes:
        group: Index of the group in report.groups; -1 if unknown.
        op: Operation, such as "all_reduce".
        dtype: Data type; None if unknown.
        message_bytes: Message size in bytes, as nccl-tests counts it; None if unknown.
        count: Number of calls; a collective counts once for all members.
        transfer_ns_median: Median transfer time in ns, waits excluded.
        wait_ns_median: Median wait for the last member in ns.
        algbw_bytes_per_s: message_bytes / transfer time; None if the size is unknown or calls are
            unmatched.
        busbw_bytes_per_s: algbw times the bus factor of nccl-tests; None like algbw.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> row = report.collectives[0]
        >>> row.op, round(row.busbw_bytes_per_s / 1e9, 2)
        ('all_reduce', 0.25)
    """

    group: int
    op: str
    dtype: str | None
    message_bytes: int | None
    count: int
    transfer_ns_median: int
    wait_ns_median: int
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None


def compute_collective_stats(
    traces: Sequence[RankTrace], matched: MatchedCalls, arrivals: Arrivals
) -> tuple[CollectiveRow, ...]:
    """One row per kind of call, by decreasing transfer time."""
    moved = np.maximum(arrivals.moved_ns - arrivals.moves_ns, 0)
    life = arrivals.end_ns - arrivals.start_ns
    waited = np.clip(arrivals.moves_ns - arrivals.start_ns, 0, life)
    # A call's barriers are rows of their own: they count with the row that carries it out.
    parts = np.flatnonzero(matched.carrier != np.arange(len(matched)))
    for column in (moved, waited):
        np.add.at(column, matched.carrier[parts], column[parts])
    stats = []
    for kind, rows in group_by_kind(traces, matched):
        group, op, size = kind.group, kind.op, kind.message_bytes
        transfer = int(np.median(moved[rows]))
        known = group >= 0 and size > 0 and transfer > 0 and not arrivals.estimated[rows].any()
        algbw = size / (transfer / 1e9) if known else None
        ranks = len(matched.groups[group].ranks) if group >= 0 else 1
        keys = matched.key[rows]
        stats.append(
            CollectiveRow(
                group=group,
                op=op,
                dtype=kind.dtype or None,
                message_bytes=size if size >= 0 else None,
                count=len(np.unique(keys[keys >= 0])) + int((keys < 0).sum()),
                transfer_ns_median=transfer,
                wait_ns_median=int(np.median(waited[rows])),
                algbw_bytes_per_s=algbw,
                busbw_bytes_per_s=None
                if algbw is None
                else algbw * compute_busbw_factor(op, ranks),
            )
        )
    return tuple(sorted(stats, key=lambda s: (-s.transfer_ns_median * s.count, s.group, s.op)))


# Calls per step of each kind.


class StepCallsRow(Struct, frozen=True):
    """Calls of one kind per full step, summed over the recorded ranks.

    A collective counts at each member.

    Attributes:
        group: Index of the group in report.groups; -1 if unknown.
        op: Operation, such as "all_reduce".
        dtype: Data type; None if unknown.
        message_bytes: Message size in bytes; None if unknown.
        calls: Calls in most steps.
        least: Fewest calls in a step.
        most: Most calls in a step.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> report.step_calls[0].op, report.step_calls[0].calls
        ('all_reduce', 24)
    """

    group: int
    op: str
    dtype: str | None
    message_bytes: int | None
    calls: int
    least: int
    most: int


def count_step_calls(
    traces: Sequence[RankTrace], steps: Sequence[Steps], matched: MatchedCalls
) -> tuple[StepCallsRow, ...]:
    """One row per kind of call in the full steps; a call belongs to the window in which it starts.

    The usual number is determined per rank, since a call may start just before or after a step
    edge.
    """
    window = np.full(len(matched), -1, dtype=np.int64)
    for trace, own in enumerate(steps):
        calls = matched.slice_trace(trace)
        window[calls] = find_interval(collect_intervals(own.counted), matched.start_ns[calls])
    built = []
    for kind, rows in group_by_kind(traces, matched):
        rows = rows[matched.counts[rows] & (window[rows] >= 0)]
        counts_by_rank = [
            np.bincount(
                window[rows[matched.trace[rows] == trace]], minlength=len(steps[trace].counted)
            )
            for trace in np.unique(matched.trace[rows]).tolist()
        ]
        # None of the kind in a full step.
        if not counts_by_rank:
            continue
        usual = sum(int(np.bincount(counts).argmax()) for counts in counts_by_rank)
        least, most = (
            sum(int(edge(counts)) for counts in counts_by_rank) for edge in (np.min, np.max)
        )
        size = kind.message_bytes if kind.message_bytes >= 0 else None
        built.append(
            StepCallsRow(kind.group, kind.op, kind.dtype or None, size, usual, least, most)
        )
    return tuple(built)


# Kinds of calls: the same op, dtype and size on the same group.


class CallKind(Struct, frozen=True):
    """One op, dtype and size on one group; -1 and "" mean unknown."""

    group: int
    op: str
    dtype: str
    message_bytes: int


def group_by_kind(
    traces: Sequence[RankTrace], matched: MatchedCalls
) -> list[tuple[CallKind, Int64]]:
    """Each kind with the rows of its calls, in order of first occurrence; calls of steps before the
    recording are of no kind."""
    # All traces' names of dtypes, "" for unknown, and the place of each call's among them.
    names = tuple(dict.fromkeys(("", *(name for trace in traces for name in trace.calls.dtypes))))
    number = {name: i for i, name in enumerate(names)}
    dtype = np.concatenate([
        np.array([number[name] for name in trace.calls.dtypes], dtype=np.int64)[trace.calls.dtype]
        for trace in traces
    ])  # fmt: skip
    dtype, size = _fill_from_members(matched, dtype, names.index(""))
    # A barrier is part of the call that another kernel carries out.
    own = matched.carrier == np.arange(len(matched))
    rows = np.flatnonzero(own & ~np.concatenate([find_earlier_calls(trace) for trace in traces]))
    columns = (matched.group, matched.op, dtype, size)
    order, first = group_rows(group_ids(*(column[rows] for column in columns)))
    kinds = np.split(rows[order], first[1:]) if len(order) else []
    rows_by_kind = []
    for rows in sorted(kinds, key=lambda rows: int(rows[0])):
        first_row = rows[0]
        op, name = OPS[matched.op[first_row]], names[dtype[first_row]]
        rows_by_kind.append(
            (CallKind(int(matched.group[first_row]), op, name, int(size[first_row])), rows)
        )
    return rows_by_kind


def _fill_from_members(matched: MatchedCalls, dtype: Int64, unknown: int) -> tuple[Int64, Int64]:
    """The dtype and size of each call, for a matched collective from its best-informed member.

    A root may know only the size. The dtype is the last one recorded with the largest size so far.
    """
    rows = np.flatnonzero((matched.key >= 0) & ~matched.is_message)
    order, first = group_rows(matched.key[rows])
    rows = rows[order]
    call = np.repeat(np.arange(len(first)), np.diff(first, append=len(rows)))
    sizes, place = np.unique(matched.message_bytes[rows], return_inverse=True)
    rising = call * len(sizes) + place
    knows = np.maximum.accumulate(rising) == rising
    named = knows & (dtype[rows] != unknown)
    best_size = np.empty(len(first), dtype=np.int64)
    best_size[call[knows]] = matched.message_bytes[rows][knows]
    best_dtype = np.full(len(first), unknown, dtype=np.int64)
    best_dtype[call[named]] = dtype[rows][named]
    dtype, size = dtype.copy(), matched.message_bytes.copy()
    dtype[rows], size[rows] = best_dtype[call], best_size[call]
    return dtype, size
