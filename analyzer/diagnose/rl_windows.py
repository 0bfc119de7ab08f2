"""What a rank of a role did between two instants of the clock that all roles share."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, intersect
from stepsplit.analyzer.buckets import BUCKETS, TRANSFERS, WAITS, Bucket
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.rl_step import RoleTime
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import Int64


class JobRole(Struct, frozen=True):
    """A role: its ranks in the split of its program, its own report, and its folder."""

    name: str
    program: int
    split: RunSplit
    ranks: tuple[RankSplit, ...]
    report: Report
    place: str


def map_to_unix_ns(split: RunSplit, rank: RankSplit, own_ns: Int64) -> Int64:
    """Own times of the rank in Unix ns of its program's reference clock."""
    at = split.ranks.index(rank)
    return split.alignment.clocks[at].map_to_common_ns(own_ns) + split.alignment.t0_unix_ns


def sum_windows(
    split: RunSplit, rank: RankSplit, edges: Int64, spans: Intervals | None = None
) -> list[RoleTime]:
    """What the rank did between each two edges, to the nanosecond; of spans, in its own ns, what it
    did in these, which is all recorded."""
    band = rank.attribution.band
    own_start, own_end, own_bucket = band.start_ns, band.end_ns, band.bucket
    if spans is not None:
        both = intersect(Intervals(own_start, own_end), spans)
        own_start, own_end, own_bucket = both.start_ns, both.end_ns, band.bucket[both.left]
    start, end = (map_to_unix_ns(split, rank, side) for side in (own_start, own_end))
    sums = np.zeros((len(BUCKETS), len(edges) - 1), dtype=np.int64)
    for bucket in Bucket:
        chosen = own_bucket == int(bucket)
        sums[bucket] = sum_overlaps(start[chosen], end[chosen], edges)
    windows = np.diff(edges) if spans is None else sums.sum(axis=0)
    unrecorded = windows - sums.sum(axis=0)
    assert (unrecorded >= 0).all(), f"rank {rank.trace.rank}: bands overlap"
    return [
        RoleTime(
            window_ns=int(windows[at]),
            compute_ns=int(sums[Bucket.COMPUTE, at]),
            transfer_ns=int(sums[list(TRANSFERS), at].sum()),
            wait_ns=int(sums[list(WAITS), at].sum()),
            copy_ns=int(sums[Bucket.COPY, at]),
            idle_ns=int(sums[Bucket.IDLE, at]),
            unrecorded_ns=int(unrecorded[at]),
        )
        for at in range(len(windows))
    ]


def sum_overlaps(start: Int64, end: Int64, edges: Int64) -> Int64:
    """The time of the intervals, which do not overlap, between each two edges."""
    start, end = np.sort(start), np.sort(end)
    # The time of all intervals before an instant, at each edge.
    before = np.concatenate([[0], np.cumsum(end - start)])
    at = np.searchsorted(start, edges, side="right")
    if not len(start):
        return np.zeros(len(edges) - 1, dtype=np.int64)
    beyond = np.where(at > 0, np.maximum(end[at - 1] - edges, 0), 0)
    covered: Int64 = np.diff(before[at] - beyond)
    return covered
