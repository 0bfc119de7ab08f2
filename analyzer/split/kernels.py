"""Compute of a rank by kernel family (GPU kernels, or ops of a CPU run)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import (
    collect_intervals,
    find_interval,
    list_distinct,
    number_distinct,
)
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.trace import EventKinds, Events, Int32, Int64, RankTrace


class KernelFamily(Struct, frozen=True):
    """Compute of one kernel family on one rank, over its full steps (all steps if none is full).

    Concurrent kernels each count in full, so the sum of total_ns may exceed the compute time.

    Attributes:
        rank: Global rank.
        family: Kernel family, such as "gemm" or "attention".
        count: Number of kernels.
        total_ns: Sum of their durations in ns.
        share: total_ns over the sum of all families of the rank, 0..1.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> report.kernels[0].family, round(report.kernels[0].share, 2)
        ('gemm', 0.63)
    """

    rank: int
    family: str
    count: int
    total_ns: int
    share: float


class ComputeEvents(Struct, frozen=True):
    """Compute events of the full steps of a rank (of all steps if none is full), each counted in
    the step that has its middle: a step may begin with the begin of a kernel.

    Columns of one length, sorted by start: step is the step number, row the row of the event,
    name_id indexes names, kinds gives the family of a name. took_ns is the duration of a kernel,
    for an op of a CPU run the self time, without nested ops.
    """

    rank: int
    names: tuple[str, ...]
    kinds: EventKinds
    steps: tuple[int, ...]
    step: Int64
    row: Int32
    name_id: Int32
    took_ns: Int64


def sum_kernel_families(
    traces: Sequence[RankTrace], steps: Sequence[Steps]
) -> tuple[KernelFamily, ...]:
    """One row per rank and family, by rank and then by decreasing time.

    steps has one entry per trace.
    """
    rows: list[KernelFamily] = []
    for trace, own_steps in zip(traces, steps, strict=True):
        compute = collect_compute(trace, own_steps)
        count = np.bincount(compute.name_id, minlength=len(compute.names))
        total = np.zeros(len(compute.names), dtype=np.int64)
        np.add.at(total, compute.name_id, compute.took_ns)
        counts, totals = defaultdict[str, int](int), defaultdict[str, int](int)
        for name in np.flatnonzero(count).tolist():
            family = compute.kinds.find_family(name)
            counts[family] += int(count[name])
            totals[family] += int(total[name])
        everything = sum(totals.values()) or 1
        of_rank = [
            KernelFamily(trace.rank, family, counts[family], ns, ns / everything)
            for family, ns in totals.items()
        ]
        rows += sorted(of_rank, key=lambda row: (-row.total_ns, row.family))
    return tuple(rows)


def collect_compute(trace: RankTrace, steps: Steps) -> ComputeEvents:
    """The compute events of the full steps of a rank (of all steps if none is full)."""
    rows, events = np.flatnonzero(trace.kinds.computes), trace.events
    took = events.dur_ns[rows] if trace.on_device else compute_self_ns(events, rows)
    full = steps.counted
    middle = events.start_ns[rows] + events.dur_ns[rows] // 2
    at = find_interval(collect_intervals(full), middle)
    inside = at >= 0
    numbers = np.array([window.step for window in full], dtype=np.int64)
    return ComputeEvents(
        rank=trace.rank,
        names=events.names,
        kinds=trace.kinds,
        steps=tuple(numbers.tolist()),
        step=numbers[at[inside]],
        row=rows[inside].astype(np.int32),
        name_id=events.name_id[rows[inside]].astype(np.int32),
        took_ns=took[inside],
    )


def compute_self_ns(events: Events, rows: Int64) -> Int64:
    """Self time of nested events: the duration without the events nested inside on the same lane.

    rows ascend. The sum over a lane is the time that its events cover.
    """
    own = events.dur_ns[rows].copy()
    for lane in list_distinct(events.lane[rows]).tolist():
        here = np.flatnonzero(events.lane[rows] == lane)
        start, end = events.start_ns[rows[here]], events.ends_of(rows[here])
        outer_first = np.lexsort((-end, start))
        here, start, end = here[outer_first], start[outer_first], end[outer_first]
        # The innermost enclosing event of each, by nesting level from the outside.
        parent = np.full(len(start), -1, dtype=np.int64)
        left, outer = np.arange(len(start)), np.empty(0, dtype=np.int64)
        while len(left):
            reach = np.maximum.accumulate(end[left])
            on_top = np.concatenate(([True], start[left][1:] >= reach[:-1]))
            level = left[on_top]
            if len(outer):
                parent[level] = outer[np.searchsorted(start[outer], start[level], side="right") - 1]
            left, outer = left[~on_top], level
        nested = parent >= 0
        inside = np.minimum(end[nested], end[parent[nested]]) - start[nested]
        np.subtract.at(own, here[parent[nested]], inside)
    return np.maximum(own, 0)


class KernelWork(Struct, frozen=True):
    """What a kernel or op does: its name, and its input shapes or launch grid, None if unknown.

    Runs of one name with equal shapes do the same work.
    """

    name: str
    shapes: str | None


def find_kernel_work(trace: RankTrace, rows: Int64 | Int32) -> tuple[tuple[KernelWork, ...], Int64]:
    """(the distinct work of these events, the index of each event's in it)."""
    names, texts = trace.events.names, trace.shapes.texts
    shapes = len(texts) + 1
    name_id = trace.events.name_id[rows].astype(np.int64)
    codes, work_id = number_distinct(
        name_id * shapes + trace.shapes.find_ids(rows) + 1, len(names) * shapes
    )
    work = (divmod(code, shapes) for code in codes.tolist())
    return (
        tuple(KernelWork(names[name], texts[shape - 1] if shape else None) for name, shape in work),
        work_id,
    )


class KernelSums(Struct, frozen=True):
    """The compute of a rank in its full steps (all steps if none is full), by kind of work.

    Attributes:
        compute: The compute events.
        work: The kinds of work, with the shapes or launch grid of each.
        families: The kernel family of each kind.
        work_id: The index of its kind for each event.
        count: The number of events of each kind.
        total_ns: Their time together.
    """

    compute: ComputeEvents
    work: tuple[KernelWork, ...]
    families: tuple[str, ...]
    work_id: Int32
    count: list[int]
    total_ns: list[int]

    @classmethod
    def collect(cls, trace: RankTrace, steps: Steps) -> KernelSums:
        """Sums the compute events of a rank."""
        compute = collect_compute(trace, steps)
        work, work_id = find_kernel_work(trace, compute.row)
        name_of_work = np.zeros(len(work), dtype=np.int64)
        name_of_work[work_id] = compute.name_id
        return cls(
            compute=compute,
            work=work,
            families=tuple(map(compute.kinds.find_family, name_of_work.tolist())),
            work_id=work_id.astype(np.int32),
            count=np.bincount(work_id, minlength=len(work)).tolist(),
            total_ns=np.bincount(work_id, compute.took_ns, len(work)).astype(np.int64).tolist(),
        )
