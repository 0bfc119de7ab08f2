"""Overlap that is lost to the order in which a GPU starts kernels.

A host feeds its GPU through queues, CUDA_DEVICE_MAX_CONNECTIONS of them (8 by default, 1 to 32:
CUDA C++ Programming Guide, "CUDA Environment Variables"). Two things can go wrong:

- One queue: kernels of all streams start in the order of their launches, so that a kernel that is
  not ready holds up what was launched after it on other streams. Compute then starts only when a
  collective ends that it does not need. FSDP loses the overlap of its reduce_scatters
  (verl-omni#421; Megatron-LM refuses 1 with FSDP: validate_args in megatron/training/arguments.py).
- Several queues: a collective that is launched before a kernel that fills the GPU may get in only
  after it. Megatron's tensor and context parallelism needs 1 before Blackwell, so that a collective
  starts before the GEMM that is to hide it (Megatron-LM#533 and the same function).

The finding rests on the trace; the setting is the hint if it is the one that does this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.replay import (
    HoistedCalls,
    WeightedSpans,
    hoist_collectives,
    measure_spans,
    reduce_work,
)
from stepsplit.analyzer.split.event_waits import Awaited, find_awaited
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import Int64

_LEAST_NS = 20_000
"""Shorter delays may be those of a launch, or of an event."""

_TOGETHER_NS = 10_000
"""One kernel starts because another ends if it starts at most this much later."""

_FILLED = 0.8
"""Collectives that hold up compute run for at least this part of the time."""

_MOST_CALLS = 0.5
"""A collective that is usually late: at least this part of the calls of its axis that could have
started during compute that was launched later."""


def find_launch_order(context: CauseContext) -> Iterator[Remedy]:
    """Find compute that starts only when a collective ends, and the reverse, without need."""
    if context.split.ranks[0].trace.on_device:
        yield from _find_held_compute(context)
        yield from _find_late_collectives(context)


# Compute that was launched, and needed nothing, while a collective was running.


def _find_held_compute(context: CauseContext) -> Iterator[Remedy]:
    spans, kernels, held_ns = [], [], 0
    for index, rank in enumerate(context.split.ranks):
        held = _HeldCompute.find(rank)
        begin, end = (rank.clock.map_to_common_ns(at) for at in (held.begin_ns, held.end_ns))
        free = WeightedSpans.cover(begin, end)
        spans.append(free)
        held_ns += int((free.end_ns - free.start_ns).sum())
        mine = context.graph.kernels.list_rows(index)
        events = rank.trace.calls.event[context.graph.kernels.call[mine]]
        kernels.append(mine[np.isin(events, held.comm)])
    if not held_ns:
        return
    chosen = np.concatenate(kernels)
    cut_ns = np.rint(measure_spans(context.graph, spans)).astype(np.int64)
    steps = max(1, int(context.counted.sum()))
    yield replay_remedy(
        context,
        lambda graph: reduce_work(graph, "idle", cut_ns),
        bucket="idle",
        measured_ns=held_ns // steps,
        predicted_ns=0,
        rows=context.counted,
        message=(
            f"lost overlap: compute that is launched, and waits for no event, starts only when a"
            f" collective{_name_axis(context, chosen)} ends,"
            f" {units.format_milliseconds(held_ns // steps)} per step"
            f"{_describe_setting(context, one_queue=True)}"
        ),
        events=context.list_longest_calls(chosen),
    )


class _HeldCompute(Struct, frozen=True):
    """Gaps before compute kernels, on the rank's own clock, and the events of the collectives that
    filled them."""

    begin_ns: Int64
    end_ns: Int64
    comm: Int64

    @classmethod
    def find(cls, rank: RankSplit) -> _HeldCompute:
        """Gaps that collectives fill to the end, after which a kernel starts that needed none.

        It was launched before the gap and after the collectives. What the recorded waits do not
        exclude counts as needed: the gap begins when the last of that has ended.
        """
        work, events = _Kernels.find(rank), rank.trace.events
        # When all compute before each kernel had ended; the first one waits for none.
        start, ended = events.start_ns[work.rows], events.ends_of(work.rows)
        begin = np.concatenate((start[:1], np.maximum.accumulate(ended)[:-1]))
        waits = (start - begin >= _LEAST_NS) & (work.launch_ns >= 0) & (work.launch_ns < begin)
        pairs = _GapCalls.find(rank, work.rows[waits], begin[waits])
        kernel, count = pairs.kernel, int(waits.sum())
        begin_ns, end_ns = begin[waits], start[waits]
        is_free = find_awaited(rank.trace, work.rows[waits][kernel], pairs.comm) == Awaited.NO
        launched_ns = events.find_launch_ns(pairs.comm)
        is_free &= (launched_ns >= 0) & (launched_ns < work.launch_ns[waits][kernel])
        ended_ns = events.ends_of(pairs.comm)
        np.maximum.at(begin_ns, kernel[~is_free], ended_ns[~is_free])
        spent = np.minimum(ended_ns, end_ns[kernel])
        spent -= np.maximum(events.start_ns[pairs.comm], begin_ns[kernel])
        spent = np.where(is_free, np.maximum(spent, 0), 0)
        filled_ns = np.bincount(kernel, spent, minlength=count)
        last_ns = np.full(count, np.iinfo(np.int64).min)
        np.maximum.at(last_ns, kernel[is_free], ended_ns[is_free])
        held = (end_ns - begin_ns >= _LEAST_NS) & (end_ns - last_ns <= _TOGETHER_NS)
        held &= filled_ns >= _FILLED * (end_ns - begin_ns)
        return cls(begin_ns[held], end_ns[held], np.unique(pairs.comm[held[kernel] & is_free]))


class _GapCalls(Struct, frozen=True):
    """Pairs of a compute kernel (by its place) and the event of a collective that ended in the gap
    before it."""

    kernel: Int64
    comm: Int64

    @classmethod
    def find(cls, rank: RankSplit, kernels: Int64, begin_ns: Int64) -> _GapCalls:
        events = rank.trace.events
        calls = np.unique(rank.trace.calls.event)
        calls = calls[np.argsort(events.ends_of(calls), kind="stable")]
        ended_ns = events.ends_of(calls)
        first = np.searchsorted(ended_ns, begin_ns, side="right")
        last = np.searchsorted(ended_ns, events.start_ns[kernels], side="right")
        count = np.maximum(last - first, 0)
        kernel = np.repeat(np.arange(len(kernels)), count)
        at = first[kernel] + np.arange(len(kernel)) - np.repeat(np.cumsum(count) - count, count)
        return cls(kernel, calls[at])


class _Kernels(Struct, frozen=True):
    """The compute kernels of a rank by start; launch_ns is -1 if the launch was not recorded."""

    rank: RankSplit
    rows: Int64
    launch_ns: Int64

    @classmethod
    def find(cls, rank: RankSplit) -> _Kernels:
        events = rank.trace.events
        rows = np.flatnonzero(rank.trace.kinds.computes & (events.dur_ns > 0))
        return cls(rank, rows, events.find_launch_ns(rows))


# Collectives that were launched before compute, and start only when that ends.


def _find_late_collectives(context: CauseContext) -> Iterator[Remedy]:
    table, matched = context.graph.kernels, context.split.matched
    late: list[tuple[int, int, int]] = []
    could: Counter[int] = Counter()
    for index, rank in enumerate(context.split.ranks):
        mine = table.list_rows(index)
        mine = mine[table.resume[mine] >= 0]
        groups = matched.group[table.row[mine]]
        found = _StartOrder.find(rank, rank.trace.calls.event[table.call[mine]])
        could.update(groups[found.beside].tolist())
        ready = rank.clock.map_to_common_ns(found.ready_ns)
        rows = np.flatnonzero(found.late)
        late += zip(mine[rows].tolist(), ready[rows].tolist(), groups[rows].tolist(), strict=True)
    # Those of the axes on which most are late: single ones may be late by chance.
    count = Counter(group for _, _, group in late)
    moves = [
        HoistedCalls(np.array([kernel]), np.array([ready_ns]))
        for kernel, ready_ns, group in late
        if count[group] >= _MOST_CALLS * could[group]
    ]
    if not moves:
        return
    kernels = np.concatenate([move.kernels for move in moves])
    steps = max(1, int(context.counted.sum()))
    yield replay_remedy(
        context,
        lambda graph: hoist_collectives(graph, moves),
        bucket="collective",
        measured_ns=int(context.sum_exposed_ns()[kernels].sum()) // steps,
        predicted_ns=None,
        rows=np.isin(context.graph.steps.rank, context.graph.kernels.rank[kernels]),
        message=(
            f"lost overlap: {len(kernels) / steps:.0f} collectives per step"
            f"{_name_axis(context, kernels)} are launched before a compute kernel, and start only"
            f" when it ends{_describe_setting(context, one_queue=False)}"
        ),
        events=context.list_longest_calls(kernels),
    )


class _StartOrder(Struct, frozen=True):
    """For each communication kernel: when it could start (on the rank's own clock), whether compute
    that was launched later ran at that time, and whether it started only when that ended."""

    ready_ns: Int64
    beside: np.ndarray[tuple[int], np.dtype[np.bool_]]
    late: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @classmethod
    def find(cls, rank: RankSplit, comms: Int64) -> _StartOrder:
        """A collective needs what was launched on any stream of compute before it, and what runs
        before it on its own stream."""
        events, work = rank.trace.events, _Kernels.find(rank)
        launch_ns, start_ns = events.find_launch_ns(comms), events.start_ns[comms]
        none = np.zeros(len(comms), dtype=np.bool_)
        if not len(comms) or not (work.launch_ns >= 0).any():
            return cls(start_ns, none, none)
        order = np.argsort(work.launch_ns, kind="stable")
        ended = np.maximum.accumulate(events.ends_of(work.rows[order]))
        before = np.searchsorted(work.launch_ns[order], launch_ns, side="right") - 1
        needed_ns = np.where(before >= 0, ended[np.maximum(before, 0)], launch_ns)
        # When what ran before each on its own stream had ended.
        free_ns = np.full(len(comms), np.iinfo(np.int64).min)
        for lane in np.unique(events.lane[comms]).tolist():
            rows = np.flatnonzero((events.lane == lane) & (events.dur_ns > 0))
            mine = np.flatnonzero(events.lane[comms] == lane)
            at = np.searchsorted(events.start_ns[rows], start_ns[mine]) - 1
            lane_ended = np.maximum.accumulate(events.ends_of(rows))
            free_ns[mine] = np.where(at >= 0, lane_ended[np.maximum(at, 0)], free_ns[mine])
        ready_ns = np.maximum(np.maximum(launch_ns, needed_ns), free_ns)
        begun = events.start_ns[work.rows]
        at = np.searchsorted(begun, ready_ns + _TOGETHER_NS, side="right") - 1
        kernel = work.rows[np.maximum(at, 0)]
        beside = (at >= 0) & (launch_ns >= 0) & (work.launch_ns[np.maximum(at, 0)] > launch_ns)
        beside &= events.ends_of(kernel) > ready_ns + _LEAST_NS
        since_ns = start_ns - events.ends_of(kernel)
        late = beside & (since_ns >= 0) & (since_ns <= _TOGETHER_NS)
        return cls(ready_ns, beside, late)


# Words.


def _name_axis(context: CauseContext, kernels: Int64) -> str:
    groups = context.split.matched.group[context.graph.kernels.row[kernels]]
    name_group, every = context.split.layout.name_group, context.split.matched.groups
    names = {name_group(every[group]) for group in np.unique(groups[groups >= 0]).tolist()}
    named = sorted(name for name in names if name)
    return f" on {' and '.join(named)}" if named else ""


def _describe_setting(context: CauseContext, one_queue: bool) -> str:
    """The value of CUDA_DEVICE_MAX_CONNECTIONS that explains it; "" if it has another one."""
    values = {one.max_connections for one in context.records}
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    known = bool(context.records)
    if one_queue:
        if known and values != {1}:
            return ""
        was = f"{name} is 1" if known else f"{name}=1 does this (not recorded here)"
        return f"; {was}: leave it unset, or set it to the number of streams, up to 32"
    if known and 1 in values:
        return ""
    numbers = sorted(one for one in values if one is not None)
    value = ", ".join(map(str, numbers)) or "not set"
    was = f"{name} is {value}" if known else f"{name} is not recorded here"
    return f"; {was}: before Blackwell, 1 makes kernels start in the order of their launches"


LAUNCH_ORDER = CauseEntry("launch_order", find_launch_order, basis="replayed")
