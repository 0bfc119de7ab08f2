"""Critical path of each step across ranks.

The path is followed backward in time from the rank that finishes last. If that rank waited for
another one, the path continues on the other rank at the end of the wait, which is the other's
arrival. A wait stays on the path only if the awaited rank is unknown or not recorded, or if two
ranks wait for each other at the same instant (a transfer slower than its link usually is, or small
clock errors).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, intersect
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.split.attribute import IDLE, Attribution
from stepsplit.analyzer.split.matching import Clock
from stepsplit.analyzer.split.transfers import BUBBLE, COLLECTIVE, SKEW
from stepsplit.analyzer.trace import Int32, Int64, RankTrace, UInt8


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank on the common clock: its steps, and its time in intervals of one bucket each.

    The intervals are sorted and disjoint; their columns have one length. owner is the rank waited
    for (-1: none), op indexes OPS (0: none), axis indexes axes (None: no axis).
    """

    rank: int
    step: Int64
    step_start_ns: Int64
    step_end_ns: Int64
    start_ns: Int64
    end_ns: Int64
    bucket: UInt8
    owner: Int32
    op: UInt8
    axis: Int32
    axes: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class PathPart:
    """Time that one rank contributes to the critical path of a step, per bucket and mesh axis.

    The parts of a step add up to its length.

    Attributes:
        step: Step number.
        rank: Global rank.
        bucket: Bucket of that time, one of BUCKETS.
        axis: Mesh axis for communication buckets; None for other buckets or an unknown axis.
        ns: Duration in ns.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> sum(part.ns for part in report.critical_path if part.bucket == "compute")
        547681158
    """

    step: int
    rank: int
    bucket: str
    axis: str | None
    ns: int


@dataclass(frozen=True, slots=True)
class PathStep:
    """Extent of the critical path of one step.

    Attributes:
        step: Step number.
        start_ns: Earliest step start over all ranks, on the common clock in ns.
        end_ns: Latest step end over all ranks, on the common clock in ns.
        last_rank: Rank that finished last.
        jumps: Number of times the path changes ranks.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [row.end_ns - row.start_ns for row in report.path_steps]
        [205392950, 211505143, 193900128, 193884229, 204092305]
    """

    step: int
    start_ns: int
    end_ns: int
    last_rank: int
    jumps: int


@dataclass(frozen=True, slots=True)
class Jumps:
    """Rank changes of the paths, backward in time within each step; columns of one length.

    from_rank waited for to_rank until at_ns (common clock). op indexes OPS.
    """

    step: Int64
    at_ns: Int64
    from_rank: Int32
    to_rank: Int32
    op: UInt8
    axis: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True)
class CriticalPaths:
    """The critical path of each step; the parts of a step add up to its length, to the nanosecond.

    Steps of different ranks overlap slightly, so the first part of a path may belong to the
    previous step on another rank. Time without a record on the rank counts as idle.
    """

    steps: tuple[PathStep, ...]
    parts: tuple[PathPart, ...]
    jumps: Jumps


def build_timeline(
    trace: RankTrace,
    attribution: Attribution,
    steps: Sequence[int],
    axis: Sequence[str | None],
    clock: Clock,
) -> Timeline:
    """The timeline of one rank; steps has one number per window, axis one entry per exposed row."""
    band, exposed = attribution.band, attribution.exposed
    alone = np.flatnonzero((band.bucket < COLLECTIVE) | (band.bucket > BUBBLE))
    axes = (None, *dict.fromkeys(name for name in axis if name is not None))
    number = {name: i for i, name in enumerate(axes)}
    start = clock.map_to_common_ns(np.concatenate((band.start_ns[alone], exposed.start_ns)))
    end = clock.map_to_common_ns(np.concatenate((band.end_ns[alone], exposed.end_ns)))
    order = np.argsort(start, kind="stable")
    order = order[end[order] > start[order]]
    none = np.zeros(len(alone), dtype=np.int32)
    window = np.arange(len(steps))
    first = np.searchsorted(band.window, window, side="left")
    last = np.searchsorted(band.window, window, side="right") - 1
    return Timeline(
        rank=trace.rank,
        step=np.array(steps, dtype=np.int64),
        step_start_ns=clock.map_to_common_ns(band.start_ns[first]),
        step_end_ns=clock.map_to_common_ns(band.end_ns[last]),
        start_ns=start[order],
        end_ns=end[order],
        bucket=np.concatenate((band.bucket[alone], exposed.bucket))[order],
        owner=np.concatenate((none - 1, exposed.owner))[order],
        op=np.concatenate((none.astype(np.uint8), trace.calls.op[exposed.call]))[order],
        axis=np.concatenate((none, np.array([number[name] for name in axis], np.int32)))[order],
        axes=axes,
    )


def find_critical_paths(ranks: Sequence[Timeline]) -> CriticalPaths:
    """The critical path of every step of any rank, by step number."""
    waits = _collect_waits(ranks)
    steps: list[PathStep] = []
    parts: list[PathPart] = []
    jumps: list[tuple[int, _PathSegment]] = []
    for number in sorted({step for one in ranks for step in one.step.tolist()}):
        begin, end, last = _find_span(ranks, number)
        segments = _walk_back(waits, last, begin, end)
        step_parts = tuple(_sum_parts(ranks, segments, number))
        assert sum(part.ns for part in step_parts) == end - begin, (
            f"path of step {number} is incomplete"
        )
        parts += step_parts
        jumps += [(number, stay) for stay in segments[:-1]]
        steps.append(PathStep(number, begin, end, ranks[last].rank, len(segments) - 1))
    return CriticalPaths(tuple(steps), tuple(parts), _build_jumps(ranks, jumps))


@dataclass(frozen=True, slots=True)
class _Waits:
    """The waits of one rank for other recorded ranks, in order; owner indexes the ranks."""

    part: list[int]
    start_ns: list[int]
    end_ns: list[int]
    owner: list[int]


@dataclass(frozen=True, slots=True)
class _PathSegment:
    """A segment of the path on one rank; it starts where the wait of that part ends (-1: no wait).

    rank and owner (the rank waited for) index the ranks.
    """

    rank: int
    start_ns: int
    end_ns: int
    part: int
    owner: int


def _collect_waits(ranks: Sequence[Timeline]) -> list[_Waits]:
    index = {one.rank: i for i, one in enumerate(ranks)}
    rank_waits = []
    for timeline in ranks:
        present = [rank for rank in index if rank != timeline.rank]
        waits = np.isin(timeline.bucket, (SKEW, BUBBLE)) & np.isin(timeline.owner, present)
        part = np.flatnonzero(waits)
        owner = [index[rank] for rank in timeline.owner[part].tolist()]
        rank_waits.append(
            _Waits(
                part.tolist(),
                timeline.start_ns[part].tolist(),
                timeline.end_ns[part].tolist(),
                owner,
            )
        )
    return rank_waits


def _find_span(ranks: Sequence[Timeline], step: int) -> tuple[int, int, int]:
    """(first start, last end, index of the rank that ends last) of a step over all ranks."""
    edges = [
        (int(one.step_start_ns[window]), int(one.step_end_ns[window]), place)
        for place, one in enumerate(ranks)
        for window in np.flatnonzero(one.step == step).tolist()
    ]
    _, end, last = max(edges, key=lambda edge: edge[1])
    return min(start for start, _, _ in edges), end, last


def _walk_back(waits: Sequence[_Waits], rank: int, begin: int, end: int) -> list[_PathSegment]:
    """The path segments from end back to begin.

    Going to a rank that was already visited at the current instant would loop, so such waits are
    skipped.
    """
    segments: list[_PathSegment] = []
    at = before = end
    visited = {rank}
    while (row := bisect_left(waits[rank].start_ns, before) - 1) >= 0:
        leave, owner = min(waits[rank].end_ns[row], at), waits[rank].owner[row]
        if leave <= begin:
            break
        if leave < at:
            visited = {rank}
        elif owner in visited:
            before = waits[rank].start_ns[row]
            continue
        segments.append(_PathSegment(rank, leave, at, waits[rank].part[row], owner))
        visited.add(owner)
        rank, at, before = owner, leave, leave
    return [*segments, _PathSegment(rank, begin, at, -1, -1)]


def _sum_parts(
    ranks: Sequence[Timeline], segments: Sequence[_PathSegment], step: int
) -> Iterator[PathPart]:
    """Sums the time of the segments of one step by rank, bucket and axis."""
    who = np.array([stay.rank for stay in segments])
    start = np.array([stay.start_ns for stay in segments], dtype=np.int64)
    end = np.array([stay.end_ns for stay in segments], dtype=np.int64)
    for place in np.unique(who).tolist():
        rows = np.flatnonzero(who == place)[::-1]
        sums = _sum_by_bucket(ranks[place], Intervals(start[rows], end[rows]))
        for bucket, axis in np.argwhere(sums).tolist():
            name = ranks[place].axes[axis]
            ns = int(sums[bucket, axis])
            yield PathPart(step, ranks[place].rank, BUCKETS[bucket], name, ns)


def _sum_by_bucket(timeline: Timeline, stays: Intervals) -> Int64:
    """The time of the segments on one rank, by bucket and axis: shape (buckets, axes)."""
    both = intersect(stays, Intervals(timeline.start_ns, timeline.end_ns))
    sums = np.zeros((len(BUCKETS), len(timeline.axes)), dtype=np.int64)
    cell = (timeline.bucket[both.right], timeline.axis[both.right])
    np.add.at(sums, cell, both.end_ns - both.start_ns)
    sums[IDLE, 0] += stays.total_ns - int(sums.sum())
    return sums


def _build_jumps(ranks: Sequence[Timeline], segments: Iterable[tuple[int, _PathSegment]]) -> Jumps:
    segments = tuple(segments)
    waited = [(ranks[stay.rank], stay.part) for _, stay in segments]
    return Jumps(
        step=np.array([step for step, _ in segments], dtype=np.int64),
        at_ns=np.array([stay.start_ns for _, stay in segments], dtype=np.int64),
        from_rank=np.array([one.rank for one, _ in waited], dtype=np.int32),
        to_rank=np.array([ranks[stay.owner].rank for _, stay in segments], dtype=np.int32),
        op=np.array([one.op[part] for one, part in waited], dtype=np.uint8),
        axis=tuple(one.axes[one.axis[part]] for one, part in waited),
    )
