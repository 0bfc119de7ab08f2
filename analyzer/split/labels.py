"""Numbers for equal rows: what belongs together gets one label, without a loop over the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.trace import Int64


def labels_of(*columns: npt.NDArray[Any]) -> Int64:
    """For rows given by columns of one length: rows equal in all columns have one label, from 0."""
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
    """The values that occur, in order; none of them negative, and the largest no great number."""
    return np.flatnonzero(np.bincount(values))


def firsts_of(label: Int64) -> Int64:
    """The first row of each label, in the order of the labels."""
    return np.asarray(np.unique(label, return_index=True)[1])


def runs_of(label: Int64) -> tuple[Int64, Int64]:
    """(the rows in order of label and then as they were, where each label begins in it)."""
    order = np.argsort(label, kind="stable")
    ordered = label[order]
    new = np.ones(len(ordered), dtype=np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(new)


def place_within(label: Int64) -> Int64:
    """The how manieth of its label each row is, from 0, in the order of the rows."""
    order, first = runs_of(label)
    begin = np.zeros(len(label), dtype=np.int64)
    begin[first] = first
    place = np.empty(len(label), dtype=np.int64)
    place[order] = np.arange(len(label)) - np.maximum.accumulate(begin)
    return place


def mean_within(label: Int64, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """For each row the mean of the values that have its label; labels as labels_of gives them."""
    return np.asarray((np.bincount(label, values) / np.bincount(label))[label])


def least_of(label: Int64, values: Int64, count: int) -> Int64:
    """The smallest value of each of count labels; the largest int64 where a label has no row."""
    least = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(least, label[label >= 0], values[label >= 0])
    return least


def most_of(label: Int64, values: Int64, count: int) -> Int64:
    """The largest value of each of count labels; the smallest int64 where a label has no row."""
    most = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(most, label[label >= 0], values[label >= 0])
    return most
