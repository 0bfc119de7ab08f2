"""Who waits for whom: sums over the waits of a run."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.report.tables import Waits
from stepsplit.analyzer.trace import Bool, Int64

_MAX_CHAIN = 64
"""Waits in a chain; only clocks that contradict each other make a longer one."""


def sum_waits_by_owner(waits: Waits, size: int) -> Int64:
    """The time in ns that each rank (row) waits for each rank (column), of ranks below `size`."""
    known = _select_known(waits, size)
    sums = np.zeros((size, size), dtype=np.int64)
    np.add.at(sums, (waits.rank[known], waits.owner[known]), waits.dur_ns[known])
    return sums


def _select_known(waits: Waits, size: int) -> Bool:
    return (waits.owner >= 0) & (waits.owner < size) & (waits.rank < size)


def sum_waits_by_root(waits: Waits, size: int) -> Int64:
    """The time in ns that each rank (row) waits for each root (column), of ranks below `size`.

    While the rank that is waited for waits itself, the root is the one at the end of that chain of
    waits: a rank that works, or waits for an unknown one.
    """
    known = _select_known(waits, size)
    rank, owner = (one[known].astype(np.int64) for one in (waits.rank, waits.owner))
    begin, end = waits.start_ns[known], (waits.start_ns + waits.dur_ns)[known]
    sums = sum_waits_by_owner(waits, size)
    # Ranks one after the other on a line of time, to find the waits of many ranks at once.
    shift = int(end.max(initial=0)) - int(begin.min(initial=0)) + 1
    begins, ends = rank * shift + begin, rank * shift + end
    row, at, low, high = rank, owner, begin, end
    for _ in range(_MAX_CHAIN):
        first = np.searchsorted(ends, at * shift + low, side="right")
        count = np.maximum(np.searchsorted(begins, at * shift + high, side="left") - first, 0)
        if not count.any():
            break
        part = np.repeat(np.arange(len(row)), count)
        wait = first[part] + np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
        row, before, at = row[part], at[part], owner[wait]
        low, high = np.maximum(low[part], begin[wait]), np.minimum(high[part], end[wait])
        np.subtract.at(sums, (row, before), high - low)
        np.add.at(sums, (row, at), high - low)
    return sums
