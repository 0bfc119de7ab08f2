"""Collectives without a process group in the trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from stepsplit.analyzer.split.protocols import find_call_roles
from stepsplit.analyzer.trace import (
    Bool,
    Category,
    EventKind,
    EventKinds,
    Group,
    Int64,
    RankTrace,
    find_earlier_calls,
)

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
    if world is None:
        return list(traces)
    assigned = []
    for trace in traces:
        calls = trace.calls
        unnamed = (calls.group_id < 0) & (calls.peer < 0) & ~_is_by_library(trace)
        group_id = np.where(unnamed, len(trace.groups), calls.group_id).astype(np.int32)
        calls = replace(calls, group_id=group_id)
        assigned.append(replace(trace, calls=calls, groups=(*trace.groups, world)))
    return assigned


def drop_lone_calls(trace: RankTrace) -> RankTrace:
    """The trace without the calls on groups of one rank, which communicate nothing: what their
    kernels move stays on the device."""
    calls = trace.calls
    lone = np.array([*(len(group.ranks) == 1 for group in trace.groups), False])[calls.group_id]
    if not lone.any():
        return trace
    columns = {
        name: getattr(calls, name)[~lone]
        for name in ("event", "issued_ns", "group_id", "seq", "op", "dtype", "peer")
    }
    sizes = {name: getattr(calls, name)[~lone] for name in ("input_bytes", "message_bytes")}
    kind = trace.kinds.kind.copy()
    events = calls.event[lone]
    kind[events[trace.events.is_category(Category.KERNEL)[events]]] = int(EventKind.COPY)
    return replace(
        trace,
        calls=replace(calls, **columns, **sizes),
        kinds=EventKinds(kind, trace.kinds.family, trace.kinds.families),
    )


def infer_world_group(traces: Sequence[RankTrace]) -> Group | None:
    """The group of all ranks if the calls without a group are its collectives, else None."""
    rows = [find_unnamed(trace, libraries=False) for trace in traces]
    complete = len(traces) > 1 and len(traces) == max(trace.world_size for trace in traces)
    if not complete or not len(rows[0]) or len({len(one) for one in rows}) > 1:
        return None
    if any(1 < len(group.ranks) < len(traces) for trace in traces for group in trace.groups):
        return None
    # If gloo has calls with a group too, those without have an unknown order on each rank.
    if any(
        not trace.on_device and ((trace.calls.group_id >= 0) & (trace.calls.peer < 0)).any()
        for trace in traces
    ):
        return None
    names = {
        tuple(trace.events.names[name] for name in trace.events.name_id[one].tolist())
        for trace, one in zip(traces, rows, strict=True)
    }
    if len(names) > 1:
        return None
    # A graph of several groups looks like this, too: of those only the calls themselves tell.
    if len(traces) > 2 and any(find_replayed(*one).any() for one in zip(traces, rows, strict=True)):
        return None
    # Whether the n-th kernels of all ranks overlap, after aligning the median ends.
    start = np.stack([t.events.start_ns[r] for t, r in zip(traces, rows, strict=True)])
    end = np.stack([t.events.ends_of(r) for t, r in zip(traces, rows, strict=True)])
    apart = np.median(end - end[0], axis=1).astype(np.int64)[:, np.newaxis]
    if not bool(((end - apart).min(axis=0) >= (start - apart).max(axis=0) - EARLY_NS).all()):
        return None
    return Group(
        UNNAMED, tuple(trace.rank for trace in traces), "all ranks, inferred from call order"
    )


def find_unnamed(trace: RankTrace, *, libraries: bool = True) -> Int64:
    """The events of the calls without group and peer, by start; not those of earlier steps.

    libraries: with those by kernels of a library's protocol, whose groups need better evidence.
    """
    calls = trace.calls
    unnamed = (calls.group_id < 0) & (calls.peer < 0) & ~find_earlier_calls(trace)
    if not libraries:
        unnamed &= ~_is_by_library(trace)
    events = calls.event[unnamed]
    return events[np.argsort(trace.events.start_ns[events], kind="stable")]


def find_replayed(trace: RankTrace, events: Int64) -> Bool:
    """Which of these events a graph launch started."""
    launches = trace.events.find_launches(events)
    graph = trace.events.name_mask(tuple("GraphLaunch" in name for name in trace.events.names))
    return np.asarray((launches >= 0) & graph[launches])


def _is_by_library(trace: RankTrace) -> Bool:
    return find_call_roles(trace).mask("protocol")
