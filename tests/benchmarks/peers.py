"""What the peers say of the same ranks: HolisticTraceAnalysis and TraceLens, by their definitions.

HTA runs itself, on the traces that stepsplit has read. TraceLens is on no package index, so its
definitions are written anew here, after its documented columns; no line of it is run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.hta import convert_to_hta
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    OP_CODE,
    Bool,
    Category,
    Events,
    Int64,
    RankTrace,
    compute_start_offsets_ns,
)

_NAMED_COMMUNICATION = re.compile("nccl|rccl|cross_device_reduce", re.IGNORECASE)
_KNOWN_OPS = [OP_CODE[op] for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")]


@dataclass(frozen=True, slots=True)
class PeerSplit:
    """What a peer says of one rank; wait_ns is None where it tells no waiting from moving data."""

    rank: int
    compute_ns: int
    communication_ns: int
    wait_ns: int | None
    idle_ns: int


def hta_split(traces: Sequence[RankTrace]) -> tuple[PeerSplit, ...]:
    """HTA's temporal breakdown of each rank, over the steps that it keeps: all but the last.

    Communication is what its non_compute_time is without memcpy and memset: kernels with NCCL's
    names that run under no compute, waiting or not. Raises as HTA does, IndexError for a rank
    without a device and UsageError where it is not installed.
    """
    analysis = convert_to_hta(traces)
    whole = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    ids = analysis.t.symbol_table.get_sym_id_map()
    copies = [ids["gpu_memcpy"], ids["gpu_memset"]]
    for rank, frame in analysis.t.traces.items():
        analysis.t.traces[rank] = frame[~frame["cat"].isin(copies)]
    without_copies = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    return tuple(
        PeerSplit(
            rank=rank,
            compute_ns=_ns(whole.loc[rank, "compute_time(us)"]),
            communication_ns=_ns(without_copies.loc[rank, "non_compute_time(us)"]),
            wait_ns=None,
            idle_ns=_ns(whole.loc[rank, "idle_time(us)"]),
        )
        for rank in whole.index
    )


def tracelens_split(traces: Sequence[RankTrace]) -> tuple[PeerSplit, ...]:
    """TraceLens's GPU timeline of each rank with its sums over collectives, over the whole trace.

    Compute holds memset, and every communication without NCCL's name; kernels without a launch in
    the trace are left out. Communication is the sum of what the fastest rank took for each
    collective and wait that of how much later its last rank began, hidden under compute or not, so
    that nothing adds up to the rank's time. Messages and rooted collectives are not in it.
    """
    spent = _collectives(traces)
    return tuple(
        _timeline(trace, communication_ns, wait_ns)
        for trace, (communication_ns, wait_ns) in zip(traces, spent, strict=True)
    )


def _ns(us: float) -> int:
    return round(float(us) * 1000)


def _timeline(trace: RankTrace, communication_ns: int, wait_ns: int | None) -> PeerSplit:
    events = trace.events
    rows = np.flatnonzero(events.is_category(*DEVICE_CATEGORIES))
    linked = np.zeros(len(events), dtype=np.bool_)
    linked[rows[events.find_launches(rows) >= 0]] = True
    named = tuple(_NAMED_COMMUNICATION.search(name) is not None for name in events.names)
    computes = linked & ~events.name_mask(named) & ~events.is_category(Category.MEMCPY)
    busy = _covered(events, linked)
    span_ns = int(busy.end_ns[-1] - busy.start_ns[0]) if len(busy) else 0
    compute_ns = _covered(events, computes).total_ns
    return PeerSplit(trace.rank, compute_ns, communication_ns, wait_ns, span_ns - busy.total_ns)


def _covered(events: Events, rows: Bool) -> Intervals:
    return union(events.start_ns[rows], events.end_ns[rows])


@dataclass(frozen=True, slots=True)
class _Called:
    """The collectives of all ranks, equal label for equal collective; columns of one length."""

    trace: Int64
    label: Int64
    start_ns: Int64
    dur_ns: Int64


def _collectives(traces: Sequence[RankTrace]) -> list[tuple[int, int | None]]:
    """Each rank's sums over its collectives: the least duration on any rank, and its wait."""
    called = _called(traces)
    least = np.full(int(called.label.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    last = np.full(len(least), np.iinfo(np.int64).min)
    np.minimum.at(least, called.label, called.dur_ns)
    np.maximum.at(last, called.label, called.start_ns)
    sums = np.zeros((2, len(traces)), dtype=np.int64)
    np.add.at(sums[0], called.trace, least[called.label])
    np.add.at(sums[1], called.trace, last[called.label] - called.start_ns)
    known = np.isin(np.arange(len(traces)), called.trace).tolist()
    moved, waited = sums.tolist()
    return [(m, w if k else None) for m, w, k in zip(moved, waited, known, strict=True)]


def _called(traces: Sequence[RankTrace]) -> _Called:
    """The n-th call on a group is one collective on every rank, whenever its trace began.

    Starts are of the ranks' own wall clocks. Where no call names its group all calls are taken, in
    their order; else those of a known group and op.
    """
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    grouped = any((trace.calls.group_id >= 0).any() for trace in traces)
    columns = []
    for i, (trace, lead_ns) in enumerate(
        zip(traces, compute_start_offsets_ns(traces).tolist(), strict=True)
    ):
        own = [numbers.setdefault((g.name, g.ranks), len(numbers)) for g in trace.groups]
        group = np.array([*own, -1], dtype=np.int64)[trace.calls.group_id]
        known = (group >= 0) & np.isin(trace.calls.op, _KNOWN_OPS)
        rows = np.flatnonzero(known if grouped else np.ones(len(group), dtype=np.bool_))
        event = trace.calls.event[rows]
        start, dur = trace.events.start_ns[event] + lead_ns, trace.events.dur_ns[event]
        columns.append(
            np.stack([np.full(len(rows), i), group[rows], _nth(group[rows]), start, dur])
        )
    trace_id, group, nth, start, dur = np.concatenate(columns, axis=1)
    label = np.unique(np.stack([group, nth]), axis=1, return_inverse=True)[1]
    return _Called(trace_id, label, start, dur)


def _nth(group: Int64) -> Int64:
    """Each call's number among the calls of its group."""
    order = np.argsort(group, kind="stable")
    nth = np.empty(len(group), dtype=np.int64)
    nth[order] = np.arange(len(group)) - np.searchsorted(group[order], group[order])
    return nth
