"""Critical path of each step across ranks.

The path is followed backward in time from the rank that finishes last, along the dependency of each
event that determined its time. If the rank waited for another one, the path continues on the other
rank at the end of the wait, which is the other's arrival. A wait stays on the path only if no
recorded rank caused it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import (
    Intervals,
    group_ids,
    group_rows,
    intersect,
    sort_distinct,
    union,
)
from stepsplit.analyzer.buckets import BUCKETS, COMMUNICATION, Bucket
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.report.diagnosis_rows import PathKernel, PathPart, PathStep
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import EventKind, Int32, Int64, UInt8


class CriticalPaths(Struct, frozen=True):
    """The critical path of each step; the parts of a step add up to its length, to the nanosecond.

    The path of a step begins where that of the step before ended, with its last rank, so that no
    instant is on two of them: a rank that waits at the begin of its step for the end of another
    rank's step before does so on the path of the latter. Time without a record on the rank counts
    as idle. kernels are those of all steps, longest first; their start is on the common clock.
    """

    steps: tuple[PathStep, ...]
    parts: tuple[PathPart, ...]
    kernels: tuple[PathKernel, ...]


def find_critical_paths(
    split: RunSplit, graph: DependencyGraph, numbers: Iterable[int]
) -> CriticalPaths:
    """The critical paths of the steps of these numbers, which some rank has."""
    activity = [_RankActivity.build(rank) for rank in split.ranks]
    steps: list[PathStep] = []
    parts: list[PathPart] = []
    on_path: dict[int, list[_PathSegment]] = defaultdict(list)
    for number in sorted(numbers):
        # A step begins when its first rank does, but not before the steps before it have ended on
        # all ranks: else an instant would be on two paths.
        rows = graph.steps.step == number
        ends = graph.steps.end[rows]
        last = int(ends[graph.at_ns[ends].argmax()])
        end = int(graph.at_ns[last])
        first_begin = int(graph.at_ns[graph.steps.begin[rows]].min())
        before = graph.at_ns[graph.steps.end[graph.steps.step < number]]
        begin = min(end, int(before.max(initial=first_begin)))
        segments = _walk_back(graph, last, begin)
        step_parts = []
        by_rank: dict[int, list[_PathSegment]] = defaultdict(list)
        for segment in reversed(segments):  # which are from the end back to the begin
            by_rank[segment.rank].append(segment)
            on_path[segment.rank].append(segment)
        for place, own in sorted(by_rank.items()):
            of_rank = activity[place]
            sums = of_rank.sum_ns(_list_intervals(own))
            for bucket, axis in np.argwhere(sums).tolist():
                ns = int(sums[bucket, axis])
                part = PathPart(number, of_rank.rank, BUCKETS[bucket], of_rank.axes[axis], ns)
                step_parts.append(part)
        assert sum(part.ns for part in step_parts) == end - begin, (
            f"path of step {number} is incomplete"
        )
        parts += step_parts
        last_rank = activity[segments[0].rank].rank
        steps.append(PathStep(number, begin, end, last_rank, jumps=len(segments) - 1))
    kernels: list[PathKernel] = []
    for rank, own in on_path.items():
        spans = _list_intervals(own)
        # Those of consecutive steps may overlap.
        kernels += _list_path_kernels(split.ranks[rank], union(spans.start_ns, spans.end_ns))
    kernels.sort(key=lambda one: (-one.ns, one.rank, one.kernel, one.stream or 0))
    return CriticalPaths(tuple(steps), tuple(parts), tuple(kernels[:MOST_KERNELS]))


# The way back.


class _PathSegment(Struct, frozen=True):
    """A segment of the path on one rank; rank indexes the ranks."""

    rank: int
    start_ns: int
    end_ns: int


def _list_intervals(segments: Sequence[_PathSegment]) -> Intervals:
    edges = np.array([(one.start_ns, one.end_ns) for one in segments], dtype=np.int64)
    return Intervals(edges[:, 0], edges[:, 1])


def _walk_back(graph: DependencyGraph, node: int, begin: int) -> list[_PathSegment]:
    """The path segments from a node back to the time begin."""
    path = [node]
    while (node := graph.binding.item(node)) >= 0 and graph.at_ns.item(node) > begin:
        path.append(node)
    nodes = np.array(path)
    ranks, times = graph.find_ranks(nodes).tolist(), graph.at_ns[nodes].tolist()
    segments: list[_PathSegment] = []
    rank, end = ranks[0], times[0]
    for other, at_ns in zip(ranks, times, strict=True):
        if other not in (rank, -1):
            leave = min(end, at_ns)
            segments.append(_PathSegment(rank, leave, end))
            rank, end = other, leave
    return [*segments, _PathSegment(rank, begin, end)]


# The time of each rank on the path, by bucket and axis.


class _RankActivity(Struct, frozen=True):
    """The time of one rank on the common clock, in sorted and disjoint intervals of one bucket
    each; axis indexes axes."""

    rank: int
    start_ns: Int64
    end_ns: Int64
    bucket: UInt8
    axis: Int32
    axes: tuple[str | None, ...]

    @classmethod
    def build(cls, rank: RankSplit) -> _RankActivity:
        band, exposed = rank.attribution.band, rank.attribution.exposed
        alone = np.flatnonzero(~np.isin(band.bucket, COMMUNICATION))
        axes = (None, *dict.fromkeys(name for name in rank.axis if name is not None))
        number = {name: i for i, name in enumerate(axes)}
        to_common = rank.clock.map_to_common_ns
        start = to_common(np.concatenate((band.start_ns[alone], exposed.start_ns)))
        end = to_common(np.concatenate((band.end_ns[alone], exposed.end_ns)))
        order = np.argsort(start, kind="stable")
        order = order[end[order] > start[order]]
        none = np.zeros(len(alone), dtype=np.int32)
        axis = np.concatenate((none, np.array([number[name] for name in rank.axis], np.int32)))
        return cls(
            rank=rank.trace.rank,
            start_ns=start[order],
            end_ns=end[order],
            bucket=np.concatenate((band.bucket[alone], exposed.bucket))[order],
            axis=axis[order],
            axes=axes,
        )

    def sum_ns(self, segments: Intervals) -> Int64:
        """The time of the segments by bucket and axis: shape (buckets, axes)."""
        both = intersect(segments, Intervals(self.start_ns, self.end_ns))
        sums = np.zeros((len(BUCKETS), len(self.axes)), dtype=np.int64)
        cell = (self.bucket[both.right], self.axis[both.right])
        np.add.at(sums, cell, both.end_ns - both.start_ns)
        sums[Bucket.IDLE, 0] += segments.total_ns - int(sums.sum())
        return sums


# The kernels on the path.

MOST_KERNELS = 20
"""Rows of PathKernel in a report."""


def _list_path_kernels(rank: RankSplit, path: Intervals) -> Iterator[PathKernel]:
    """The kernels of one rank that lie in these intervals of the common clock."""
    events = rank.trace.events
    pieces = _KernelPieces.build(rank)
    both = intersect(path, Intervals(pieces.start_ns, pieces.end_ns))
    if not len(both.right):
        return
    event, bucket = pieces.event[both.right], pieces.bucket[both.right]
    took = both.end_ns - both.start_ns
    kind = group_ids(events.name_id[event], events.lane[event], bucket)
    part_of = group_ids(event)
    by_event = np.bincount(part_of, took)[part_of]
    order, first = group_rows(kind)
    for rows in np.split(order, first[1:]):
        longest = int(event[rows[by_event[rows].argmax()]])
        lane = events.lanes[events.lane[longest]]
        yield PathKernel(
            rank=rank.trace.rank,
            kernel=events.name_of(longest),
            stream=lane.stream if lane.stream >= 0 else None,
            bucket=BUCKETS[bucket[rows[0]]],
            ns=int(took[rows].sum()),
            count=len(sort_distinct(event[rows])),
            start_ns=rank.clock.map_instant_to_common_ns(int(events.start_ns[longest])),
            dur_ns=int(events.dur_ns[longest]),
        )


class _KernelPieces(Struct, frozen=True):
    """The time of a rank's kernels on the common clock, each instant once; sorted columns."""

    start_ns: Int64
    end_ns: Int64
    event: Int64
    bucket: UInt8

    @classmethod
    def build(cls, rank: RankSplit) -> _KernelPieces:
        exposed, kinds = rank.attribution.exposed, rank.trace.kinds
        columns = [
            (exposed.start_ns, exposed.end_ns, rank.trace.calls.event[exposed.call], exposed.bucket)
        ]
        columns += [
            _cut_pieces(rank, np.flatnonzero(kinds.computes), Bucket.COMPUTE),
            _cut_pieces(rank, np.flatnonzero(kinds.is_kind(EventKind.COPY)), Bucket.COPY),
        ]
        start, end, event, bucket = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        order = np.argsort(start, kind="stable")
        to_common = rank.clock.map_to_common_ns
        return cls(to_common(start[order]), to_common(end[order]), event[order], bucket[order])


def _cut_pieces(rank: RankSplit, event: Int64, bucket: int) -> tuple[Int64, Int64, Int64, UInt8]:
    """The start, end, event and bucket of each piece of these events that is time of the bucket."""
    events, band = rank.trace.events, rank.attribution.band
    reached = np.maximum.accumulate(np.append(0, events.ends_of(event)))[:-1]
    start = np.maximum(events.start_ns[event], reached)
    seen = events.ends_of(event) > start
    own = Intervals(start[seen], events.ends_of(event)[seen])
    rows = band.bucket == bucket
    both = intersect(own, Intervals(band.start_ns[rows], band.end_ns[rows]))
    number = np.full(len(both.left), bucket, dtype=np.uint8)
    return both.start_ns, both.end_ns, event[seen][both.left], number
