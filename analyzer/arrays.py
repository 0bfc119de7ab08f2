"""Array operations: sets of intervals, group-by without a loop over rows, columns of Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from stepsplit.analyzer.trace import Bool, Int32, Int64

if TYPE_CHECKING:
    import pyarrow as pa

# Sets of intervals: half-open, two int64 arrays of ns each.


class Intervals(Struct, frozen=True):
    """Intervals [start_ns, end_ns), both of shape (n,); sorted and disjoint unless stated."""

    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        return int((self.end_ns - self.start_ns).sum())


class TimeSpan(Protocol):
    """What lasts from an instant to another, such as a step or a microbatch's pass."""

    @property
    def start_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...


class Intersections(Struct, frozen=True):
    """The overlaps of two sets: the row in each set, and the common part; shape (n,) each."""

    left: Int64
    right: Int64
    start_ns: Int64
    end_ns: Int64


def make_empty_intervals() -> Intervals:
    """The empty set."""
    no_ns = np.empty(0, dtype=np.int64)
    return Intervals(no_ns, no_ns)


def collect_intervals(spans: Iterable[TimeSpan]) -> Intervals:
    """The intervals of the spans, in their order."""
    edges = np.array([(one.start_ns, one.end_ns) for one in spans], dtype=np.int64)
    return Intervals(*edges.reshape(-1, 2).T)


def union(start_ns: Int64, end_ns: Int64) -> Intervals:
    """The union of the intervals: sorted and disjoint; touching intervals are merged."""
    nonempty = end_ns > start_ns
    start, end = start_ns[nonempty], end_ns[nonempty]
    if not len(start):
        return make_empty_intervals()
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start[first], reach[last])


def trim_overlaps(start_ns: Int64, end_ns: Int64) -> Intervals:
    """For intervals sorted by start: the part of each that no earlier one covers, maybe empty."""
    if not len(start_ns):
        return make_empty_intervals()
    reach = np.maximum.accumulate(end_ns)
    covered_until = np.concatenate(([start_ns[0]], reach[:-1]))
    start = np.maximum(start_ns, covered_until)
    return Intervals(start, np.maximum(start, end_ns))


def intersect(left: Intervals, right: Intervals) -> Intersections:
    """The overlaps of two sorted disjoint sets, in time order."""
    low = np.searchsorted(right.end_ns, left.start_ns, side="right")
    high = np.searchsorted(right.start_ns, left.end_ns, side="left")
    count = np.maximum(high - low, 0)
    i = np.repeat(np.arange(len(left)), count)
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    start = np.maximum(left.start_ns[i], right.start_ns[j])
    end = np.minimum(left.end_ns[i], right.end_ns[j])
    nonempty = end > start
    if nonempty.all():  # unless an interval is empty; copies would be as large as the overlaps
        return Intersections(i, j, start, end)
    return Intersections(i[nonempty], j[nonempty], start[nonempty], end[nonempty])


def find_interval(spans: Intervals, times_ns: Int64) -> Int64:
    """The index of the sorted disjoint span in which each time lies, -1 for none."""
    last = np.searchsorted(spans.start_ns, times_ns, side="right") - 1
    started = np.flatnonzero(last >= 0)
    last[started[times_ns[started] >= spans.end_ns[last[started]]]] = -1
    return last


def is_inside(spans: Intervals, times_ns: Int64) -> Bool:
    """Whether each time lies inside one of the sorted disjoint spans."""
    return find_interval(spans, times_ns) >= 0


def overlap_ns(left: Intervals, right: Intervals) -> int:
    """The total overlap of two sorted disjoint sets."""
    both = intersect(left, right)
    return int((both.end_ns - both.start_ns).sum())


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """The part of the first set that the second does not cover; both sorted and disjoint."""
    if not len(left) or not len(right):
        return left
    start = np.concatenate((left.start_ns[:1], right.end_ns))
    end = np.concatenate((right.start_ns, left.end_ns[-1:]))
    both = intersect(left, Intervals(start[end > start], end[end > start]))
    return Intervals(both.start_ns, both.end_ns)


# Tables: structs whose fields are columns of one length.

_Table = TypeVar("_Table", bound=Struct)


def select_rows(table: _Table, rows: Int64 | Bool) -> _Table:
    """The table with these rows of each column; rows are their numbers or a mask."""
    return type(table)(*(column[rows] for column in structs.astuple(table)))


def join_tables(*tables: _Table) -> _Table:
    """The rows of one or more tables of a kind, one table after the other."""
    columns = zip(*map(structs.astuple, tables), strict=True)
    return type(tables[0])(*map(np.concatenate, columns))


# Group-by: rows of one group have the same label.


def group_ids(*columns: npt.NDArray[Any]) -> Int64:
    """A label from 0 for each row; rows that are equal in all columns have the same label."""
    count = len(columns[0])
    order = np.lexsort(columns[::-1])
    new = np.zeros(count, dtype=np.bool_)
    for column in columns:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    ids = np.empty(count, dtype=np.int64)
    ids[order] = np.cumsum(new)
    return ids


def list_distinct(values: npt.NDArray[Any]) -> Int64:
    """The distinct values in ascending order; they must be non-negative and not large."""
    return np.flatnonzero(np.bincount(values))


def sort_distinct(values: Int64) -> Int64:
    """The distinct values in ascending order. np.unique hashes integers, which takes up to 16 times
    as long where most of many differ (numpy 2.4)."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def number_distinct(values: Int64, limit: int) -> tuple[Int64, Int64]:
    """The distinct values in ascending order, and the position of each value among them; values are
    from 0 to below limit. Without a sort, unless the limit is far above their number."""
    if limit > 8 * len(values) + 1024:
        distinct, position = np.unique(values, return_inverse=True)
        return distinct, position
    occurs = np.zeros(limit, dtype=np.bool_)
    occurs[values] = True
    distinct = np.flatnonzero(occurs)
    position = np.zeros(limit, dtype=np.int64)
    position[distinct] = np.arange(len(distinct))
    return distinct, position[values]


def first_rows(label: Int64) -> Int64:
    """The first row of each label, in label order."""
    return np.asarray(np.unique(label, return_index=True)[1])


def group_rows(label: Int64 | Int32) -> tuple[Int64, Int64]:
    """The rows stably sorted by label, and the position in that order where each label begins."""
    order = np.argsort(label, kind="stable")
    ordered = label[order]
    new = np.ones(len(ordered), dtype=np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(new)


def number_within_group(label: Int64) -> Int64:
    """For each row, how many earlier rows have the same label."""
    order, first = group_rows(label)
    begin = np.zeros(len(label), dtype=np.int64)
    begin[first] = first
    place = np.empty(len(label), dtype=np.int64)
    place[order] = np.arange(len(label)) - np.maximum.accumulate(begin)
    return place


def list_ranges(first: Int64 | Int32, count: Int64 | Int32) -> Int64:
    """The numbers from first[i] on, count[i] of them, for each i."""
    before = np.cumsum(count, dtype=np.int64) - count
    ranges = np.repeat(first - before, count)
    ranges += np.arange(len(ranges))
    return ranges


def group_mean(label: Int64, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """For each row the mean of the values with the same label; labels are from 0 without gaps."""
    return np.asarray((np.bincount(label, values) / np.bincount(label))[label])


def group_median(label: Int64, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The median of the values of each label; labels are from 0 without gaps."""
    ordered = values[np.lexsort((values, label))]
    count = np.bincount(label)
    first = np.cumsum(count) - count
    return np.asarray((ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2)


def group_min(label: Int64, values: Int64, count: int) -> Int64:
    """The smallest value of each of count labels; the largest int64 for a label without rows."""
    least = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(least, label[label >= 0], values[label >= 0])
    return least


def group_max(label: Int64, values: Int64, count: int) -> Int64:
    """The largest value of each of count labels; the smallest int64 for a label without rows."""
    most = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(most, label[label >= 0], values[label >= 0])
    return most


# Columns of Arrow.


def view_numbers(column: pa.Array) -> npt.NDArray[Any]:
    """The numbers without a copy. Arrow's own conversion would import pandas, for a quarter of a
    second. Raises ValueError if some are missing."""
    if column.null_count:
        raise ValueError("a column with gaps")
    kind = np.dtype(str(column.type))
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * kind.itemsize)


def wrap_numbers(column: npt.NDArray[Any]) -> pa.Array:
    """The numbers as a column, without a copy and without pandas; the inverse of `view_numbers`.

    Booleans, which Arrow packs into bits, are no numbers: ValueError.
    """
    import pyarrow as pa

    if column.dtype.kind not in "iuf":
        raise ValueError(f"a column of {column.dtype}")
    column = np.ascontiguousarray(column)
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])


def wrap_texts(texts: Sequence[str]) -> pa.Array:
    """The texts as a column of Arrow's; its own conversion of a list would import pandas."""
    import pyarrow as pa

    encoded = [one.encode() for one in texts]
    ends = np.array([0, *accumulate(map(len, encoded))], dtype=np.int32)
    return pa.StringArray.from_buffers(
        len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))
    )
