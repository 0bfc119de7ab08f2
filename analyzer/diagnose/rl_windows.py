"""What a rank of a role did between two instants of the clock that all roles share."""

from __future__ import annotations

from collections.abc import Mapping

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


def sum_windows(split: RunSplit, rank: RankSplit, edges: Int64) -> list[RoleTime]:
    """What the rank did between each two edges, to the nanosecond."""
    band = rank.attribution.band
    start, end = (map_to_unix_ns(split, rank, side) for side in (band.start_ns, band.end_ns))
    sums = np.zeros((len(BUCKETS), len(edges) - 1), dtype=np.int64)
    for bucket in Bucket:
        chosen = band.bucket == int(bucket)
        sums[bucket] = sum_overlaps(start[chosen], end[chosen], edges)
    unrecorded = np.diff(edges) - sums.sum(axis=0)
    assert (unrecorded >= 0).all(), f"rank {rank.trace.rank}: bands overlap"
    return _list_times(sums, unrecorded)


def sum_phases(
    split: RunSplit, rank: RankSplit, edges: Int64, phases: Mapping[str, Intervals]
) -> Mapping[str, list[RoleTime]]:
    """What the rank did between each two edges in each of these phases, in its own ns and without
    overlap; all of it is recorded."""
    if not phases:
        return {}
    start = np.concatenate([spans.start_ns for spans in phases.values()])
    end = np.concatenate([spans.end_ns for spans in phases.values()])
    phase = np.repeat(np.arange(len(phases)), [len(spans) for spans in phases.values()])
    order = np.argsort(start)
    band = rank.attribution.band
    both = intersect(Intervals(band.start_ns, band.end_ns), Intervals(start[order], end[order]))
    phase, bucket = phase[order][both.right], band.bucket[both.left]
    start, end = (map_to_unix_ns(split, rank, side) for side in (both.start_ns, both.end_ns))
    # Each of these pieces once for each window in which a part of it lies.
    first = np.maximum(np.searchsorted(edges, start, side="right") - 1, 0)
    last = np.minimum(np.searchsorted(edges, end, side="left"), len(edges) - 1)
    count = np.maximum(last - first, 0)
    piece = np.repeat(np.arange(len(start)), count)
    window = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count - first, count)
    part_ns = np.minimum(end[piece], edges[window + 1]) - np.maximum(start[piece], edges[window])
    sums = np.zeros((len(phases), len(BUCKETS), len(edges) - 1), dtype=np.int64)
    np.add.at(sums, (phase[piece], bucket[piece], window), part_ns)
    none = np.zeros(len(edges) - 1, dtype=np.int64)
    return {name: _list_times(own, none) for name, own in zip(phases, sums, strict=True)}


def _list_times(sums: Int64, unrecorded: Int64) -> list[RoleTime]:
    """The time of each window, given that of each bucket in each window."""
    columns = (
        sums.sum(axis=0) + unrecorded,
        sums[Bucket.COMPUTE],
        sums[list(TRANSFERS)].sum(axis=0),
        sums[list(WAITS)].sum(axis=0),
        sums[Bucket.COPY],
        sums[Bucket.IDLE],
        unrecorded,
    )
    return [RoleTime(*row) for row in np.stack(columns, axis=1).tolist()]


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
