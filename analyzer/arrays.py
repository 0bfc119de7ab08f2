"""Array operations: sets of intervals, and group-by without a loop over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.trace import Bool, Int64

# Sets of intervals: half-open, two int64 arrays of ns each.


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals [start_ns, end_ns), both of shape (n,); sorted and disjoint unless stated."""

    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        return int((self.end_ns - self.start_ns).sum())


@dataclass(frozen=True, slots=True)
class Meetings:
    """The overlaps of two sets: the row in each set, and the common part; shape (n,) each."""

    left: Int64
    right: Int64
    start_ns: Int64
    end_ns: Int64


def empty() -> Intervals:
    """The empty set."""
    none = np.empty(0, dtype=np.int64)
    return Intervals(none, none)


def union(start_ns: Int64, end_ns: Int64) -> Intervals:
    """The union of the intervals: sorted and disjoint; touching intervals are merged."""
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
    """For intervals sorted by start: the part of each that no earlier one covers, maybe empty."""
    if not len(start_ns):
        return empty()
    reach = np.maximum.accumulate(end_ns)
    before = np.concatenate(([start_ns[0]], reach[:-1]))
    start = np.maximum(start_ns, before)
    return Intervals(start, np.maximum(start, end_ns))


def meet(left: Intervals, right: Intervals) -> Meetings:
    """The overlaps of two sorted disjoint sets, in time order."""
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
    """Whether each time lies inside one of the sorted disjoint spans."""
    last = np.searchsorted(spans.start_ns, when, side="right") - 1
    found = last >= 0
    found[found] = when[found] < spans.end_ns[last[found]]
    return np.asarray(found)


def overlap_ns(one: Intervals, other: Intervals) -> int:
    """The total overlap of two sorted disjoint sets."""
    both = meet(one, other)
    return int((both.end_ns - both.start_ns).sum())


def without(one: Intervals, other: Intervals) -> Intervals:
    """The part of the first set that the second does not cover; both sorted and disjoint."""
    if not len(one) or not len(other):
        return one
    start = np.concatenate((one.start_ns[:1], other.end_ns))
    end = np.concatenate((other.start_ns, one.end_ns[-1:]))
    both = meet(one, Intervals(start[end > start], end[end > start]))
    return Intervals(both.start_ns, both.end_ns)


# Group-by: rows of one group have the same label.


def labels_of(*columns: npt.NDArray[Any]) -> Int64:
    """A label from 0 for each row; rows that are equal in all columns have the same label."""
    count = len(columns[0])
    order = np.lexsort(columns[::-1])
    new = np.zeros(count, dtype=np.bool_)
    for column in columns:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    found = np.empty(count, dtype=np.int64)
    found[order] = np.cumsum(new)
    return found


def distinct(values: npt.NDArray[Any]) -> Int64:
    """The distinct values in ascending order; they must be non-negative and not large."""
    return np.flatnonzero(np.bincount(values))


def firsts_of(label: Int64) -> Int64:
    """The first row of each label, in label order."""
    return np.asarray(np.unique(label, return_index=True)[1])


def runs_of(label: Int64) -> tuple[Int64, Int64]:
    """The rows stably sorted by label, and the position in that order where each label begins."""
    order = np.argsort(label, kind="stable")
    ordered = label[order]
    new = np.ones(len(ordered), dtype=np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(new)


def place_within(label: Int64) -> Int64:
    """For each row, how many earlier rows have the same label."""
    order, first = runs_of(label)
    begin = np.zeros(len(label), dtype=np.int64)
    begin[first] = first
    place = np.empty(len(label), dtype=np.int64)
    place[order] = np.arange(len(label)) - np.maximum.accumulate(begin)
    return place


def mean_within(label: Int64, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """For each row the mean of the values with the same label; labels are from 0 without gaps."""
    return np.asarray((np.bincount(label, values) / np.bincount(label))[label])


def least_of(label: Int64, values: Int64, count: int) -> Int64:
    """The smallest value of each of count labels; the largest int64 for a label without rows."""
    least = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(least, label[label >= 0], values[label >= 0])
    return least


def most_of(label: Int64, values: Int64, count: int) -> Int64:
    """The largest value of each of count labels; the smallest int64 for a label without rows."""
    most = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(most, label[label >= 0], values[label >= 0])
    return most
