"""Sets of instants as sorted disjoint half-open intervals, two int64 ns arrays each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.trace import Bool, Int64


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals [start_ns, end_ns), both of shape (n,); who makes a set says what it promises."""

    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        return int((self.end_ns - self.start_ns).sum())


@dataclass(frozen=True, slots=True)
class Meetings:
    """Where two sets meet: the indices of either side, and the common part; shape (n,) each."""

    left: Int64
    right: Int64
    start_ns: Int64
    end_ns: Int64


def empty() -> Intervals:
    """No instant at all."""
    none = np.empty(0, dtype=np.int64)
    return Intervals(none, none)


def union(start_ns: Int64, end_ns: Int64) -> Intervals:
    """The instants in at least one interval: sorted, disjoint, touching ones joined."""
    kept = end_ns > start_ns
    start, end = start_ns[kept], end_ns[kept]
    if not len(start):
        return empty()
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start[first], reach[last])


def own(start_ns: Int64, end_ns: Int64) -> Intervals:
    """For intervals sorted by start: of each the part that no earlier one covers, maybe empty."""
    if not len(start_ns):
        return empty()
    reach = np.maximum.accumulate(end_ns)
    before = np.concatenate(([start_ns[0]], reach[:-1]))
    start = np.maximum(start_ns, before)
    return Intervals(start, np.maximum(start, end_ns))


def meet(left: Intervals, right: Intervals) -> Meetings:
    """The common parts of two sorted disjoint sets, in order of time."""
    low = np.searchsorted(right.end_ns, left.start_ns, side="right")
    high = np.searchsorted(right.start_ns, left.end_ns, side="left")
    count = np.maximum(high - low, 0)
    i = np.repeat(np.arange(len(left)), count)
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    start = np.maximum(left.start_ns[i], right.start_ns[j])
    end = np.minimum(left.end_ns[i], right.end_ns[j])
    real = end > start
    return Meetings(i[real], j[real], start[real], end[real])


def inside(spans: Intervals, when: Int64) -> Bool:
    """Which instants lie in the sorted disjoint spans."""
    last = np.searchsorted(spans.start_ns, when, side="right") - 1
    found = last >= 0
    found[found] = when[found] < spans.end_ns[last[found]]
    return np.asarray(found)


def overlap_ns(one: Intervals, other: Intervals) -> int:
    """How long both sorted disjoint sets hold at once."""
    both = meet(one, other)
    return int((both.end_ns - both.start_ns).sum())


def without(one: Intervals, other: Intervals) -> Intervals:
    """The instants of one that are not in the other; both sorted and disjoint."""
    if not len(one) or not len(other):
        return one
    start = np.concatenate((one.start_ns[:1], other.end_ns))
    end = np.concatenate((other.start_ns, one.end_ns[-1:]))
    both = meet(one, Intervals(start[end > start], end[end > start]))
    return Intervals(both.start_ns, both.end_ns)
