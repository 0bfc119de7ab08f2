"""Collectives of which a trace names no group: the world's, where all ranks agree that they are.

Old traces, and some frameworks today, record communication kernels without arguments. Where every
rank of the job is there and all ran the same communication kernels in the same order, and no kernel
ends before the last of its fellows has begun, they are one collective of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepsplit.analyzer.trace import Group, Int64, RankTrace

NAME = "unnamed"
EARLY_NS = 100_000
"""How much before the last arrival a kernel may seem to end, on clocks joined by the kernels."""


def world_of_unnamed(traces: Sequence[RankTrace]) -> Group | None:
    """The group of all ranks, if the calls without a group are its collectives; else None."""
    rows = [_unnamed(trace) for trace in traces]
    everybody = len(traces) > 1 and len(traces) == max(trace.world_size for trace in traces)
    if not everybody or not len(rows[0]) or len({len(one) for one in rows}) > 1:
        return None
    if len({_names(trace, one) for trace, one in zip(traces, rows, strict=True)}) > 1:
        return None
    if not _together(traces, rows):
        return None
    return Group(NAME, tuple(trace.rank for trace in traces), "all ranks, told by order")


def _unnamed(trace: RankTrace) -> Int64:
    """The events of the calls without group and peer, in order of their start."""
    calls = trace.calls
    events = calls.event[(calls.group_id < 0) & (calls.peer < 0)]
    return events[np.argsort(trace.events.start_ns[events], kind="stable")]


def _names(trace: RankTrace, events: Int64) -> tuple[str, ...]:
    return tuple(trace.events.names[name] for name in trace.events.name_id[events].tolist())


def _together(traces: Sequence[RankTrace], rows: Sequence[Int64]) -> bool:
    """Whether the n-th kernels overlap on all ranks, once their median ends are laid together."""
    start = np.stack([t.events.start_ns[r] for t, r in zip(traces, rows, strict=True)])
    end = np.stack([t.events.end_ns[r] for t, r in zip(traces, rows, strict=True)])
    apart = np.median(end - end[0], axis=1).astype(np.int64)[:, np.newaxis]
    return bool(((end - apart).min(axis=0) >= (start - apart).max(axis=0) - EARLY_NS).all())
