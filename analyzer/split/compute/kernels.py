"""What a rank computes: its kernels, or the ops of a CPU run, by family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import distinct
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.split.classify import computing
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.trace import Events, Int64, RankTrace


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """All compute of one family on one rank, over its full steps, or all where none is full.

    Kernels that run side by side count their whole time each, so that total_ns may exceed the
    steps' compute_ns. share is the family's part of the sum over all families, 0..1.
    """

    rank: int
    family: str
    count: int
    total_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class Computed:
    """The compute that began in a rank's full steps, or in all where none is full.

    Columns of one length, sorted by start.

    step is the step's number, name_id indexes the trace's names. took_ns is the duration of a
    kernel; of an op of a CPU run, which holds others, what none of those took.
    """

    rank: int
    names: tuple[str, ...]
    steps: tuple[int, ...]
    step: Int64
    name_id: Int64
    took_ns: Int64


def kernel_families(
    traces: Sequence[RankTrace], steps: Sequence[Steps], rules: Rules = BUILT_IN
) -> tuple[KernelFamily, ...]:
    """A row for each family of each rank, by rank and then the largest first.

    steps has the windows of each trace.
    """
    rows = []
    for trace, found in zip(traces, steps, strict=True):
        rows += _families(computed(trace, found, rules), rules)
    return tuple(rows)


def computed(trace: RankTrace, steps: Steps, rules: Rules = BUILT_IN) -> Computed:
    """What the rank computed in its full steps, or in all where none is full."""
    rows, events = np.flatnonzero(computing(trace, rules)), trace.events
    took = events.dur_ns[rows] if trace.on_device else own_ns(events, rows)
    full = steps.counted
    starts = np.array([window.start_ns for window in full], dtype=np.int64)
    ends = np.array([window.end_ns for window in full], dtype=np.int64)
    at = np.searchsorted(starts, events.start_ns[rows], side="right") - 1
    inside = at >= 0
    inside[inside] &= events.start_ns[rows[inside]] < ends[at[inside]]
    numbers = np.array([window.step for window in full], dtype=np.int64)
    return Computed(
        rank=trace.rank,
        names=events.names,
        steps=tuple(numbers.tolist()),
        step=numbers[at[inside]],
        name_id=events.name_id[rows[inside]].astype(np.int64),
        took_ns=took[inside],
    )


def own_ns(events: Events, rows: Int64) -> Int64:
    """Of each of these nested events its time outside of those that it holds on its lane.

    rows ascend. The sum over a lane is the time that the events cover.
    """
    own = events.dur_ns[rows].copy()
    for lane in distinct(events.lane[rows]).tolist():
        here = np.flatnonzero(events.lane[rows] == lane)
        start, end = events.start_ns[rows[here]], events.end_ns[rows[here]]
        outer_first = np.lexsort((-end, start))
        here, start, end = here[outer_first], start[outer_first], end[outer_first]
        holder = _holders(start, end)
        held = holder >= 0
        inside = np.minimum(end[held], end[holder[held]]) - start[held]
        np.subtract.at(own, here[holder[held]], inside)
    return np.maximum(own, 0)


def _holders(start: Int64, end: Int64) -> Int64:
    """The innermost event around each, -1 for none; of events sorted by start, outer ones first."""
    holder = np.full(len(start), -1, dtype=np.int64)
    left = np.arange(len(start))
    outer = np.empty(0, dtype=np.int64)
    while len(left):  # once a level of nesting
        reach = np.maximum.accumulate(end[left])
        on_top = np.concatenate(([True], start[left][1:] >= reach[:-1]))
        level = left[on_top]
        if len(outer):
            holder[level] = outer[np.searchsorted(start[outer], start[level], side="right") - 1]
        left, outer = left[~on_top], level
    return holder


def _families(found: Computed, rules: Rules) -> list[KernelFamily]:
    count = np.bincount(found.name_id, minlength=len(found.names))
    total = np.zeros(len(found.names), dtype=np.int64)
    np.add.at(total, found.name_id, found.took_ns)
    counts, totals = defaultdict[str, int](int), defaultdict[str, int](int)
    for name in np.flatnonzero(count).tolist():
        family = rules.family_of(found.names[name])
        counts[family] += int(count[name])
        totals[family] += int(total[name])
    everything = sum(totals.values()) or 1
    rows = [
        KernelFamily(found.rank, family, counts[family], ns, ns / everything)
        for family, ns in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.total_ns, row.family))
