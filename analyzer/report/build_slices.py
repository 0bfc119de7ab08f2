"""RunSplit -> Slices: what each rank ran, and each call in its pieces, on the common clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.readers.kernel_rules import Rules
from stepsplit.analyzer.report.slices import Slices
from stepsplit.analyzer.split.classify import computing, copying
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import Bool, Int32, Int64, Lane, UInt8

_COMPUTE, _COPY = BUCKETS.index("compute"), BUCKETS.index("copy")
_DEEPEST = 15
"""What lies deeper than that is drawn over one another."""


class BuiltSlices(Mapping[int, Slices]):
    """The slices of a split run by rank, each built when it is asked for: few who analyze ask."""

    def __init__(self, found: RunSplit, origin_ns: int, rules: Rules) -> None:
        self._ranks = {rank.trace.rank: rank for rank in found.ranks}
        self._origin_ns, self._rules = origin_ns, rules

    def __getitem__(self, rank: int) -> Slices:
        return _slices(self._ranks[rank], self._origin_ns, self._rules)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


def _slices(rank: RankSplit, origin_ns: int, rules: Rules) -> Slices:
    trace, pieces = rank.trace, rank.pieces
    events = trace.events
    compute = np.flatnonzero(computing(trace, rules))
    copies = np.flatnonzero(copying(trace))
    moved = np.flatnonzero(pieces.end_ns > pieces.start_ns)
    row = np.concatenate((compute, copies, trace.calls.event[pieces.call[moved]]))
    ran = row[: len(compute) + len(copies)]
    start = rank.clock.common_ns(np.concatenate((events.start_ns[ran], pieces.start_ns[moved])))
    end = rank.clock.common_ns(np.concatenate((events.end_ns[ran], pieces.end_ns[moved])))
    nobody = np.full(len(ran), -1, dtype=np.int32)
    kinds = np.repeat([_COMPUTE, _COPY], [len(compute), len(copies)])
    depth = _depths(events.lane[row], start, end)
    order = np.lexsort((start, depth, events.lane[row]))
    lane, lanes = _used(events.lane[row], [lane_name(lane) for lane in events.lanes])
    name, names = _used(events.name_id[row], events.names)
    return Slices(
        lane=lane[order],
        depth=depth[order],
        name=name[order],
        bucket=np.concatenate((kinds, pieces.bucket[moved]))[order].astype(np.uint8),
        owner=np.concatenate((nobody, pieces.owner[moved]))[order],
        start_ns=start[order] - origin_ns,
        dur_ns=(end - start)[order],
        lanes=lanes,
        names=names,
    )


def lane_name(lane: Lane) -> str:
    """How people call the lane."""
    if lane.stream >= 0:
        return f"stream {lane.stream}"
    return lane.tid if lane.tid.startswith(("stream", "thread")) else f"thread {lane.tid}"


def _used(code: Int32, words: Sequence[str]) -> tuple[Int32, tuple[str, ...]]:
    """The codes as places in the words that are used, and these."""
    used, place = np.unique(code, return_inverse=True)
    return place.astype(np.int32), tuple(words[i] for i in used.tolist())


def _depths(lane: Int32, start: Int64, end: Int64) -> UInt8:
    """For each slice the first level of its lane at which nothing before it is still open."""
    depth = np.full(len(lane), _DEEPEST, dtype=np.uint8)
    left = np.lexsort((-end, start, lane))
    for level in range(_DEEPEST):
        if not len(left):
            break
        top = _on_top(lane[left], start[left], end[left])
        depth[left[top]] = level
        left = left[~top]
    return depth


def _on_top(lane: Int32, start: Int64, end: Int64) -> Bool:
    """Which slices start when all before them on their lane have ended; sorted by lane, start."""
    top = np.ones(len(lane), dtype=np.bool_)
    first = np.flatnonzero(np.diff(lane, prepend=lane[0] - 1))
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(lane)], strict=True):
        reach = np.maximum.accumulate(end[low:high])
        top[low + 1 : high] = start[low + 1 : high] >= reach[:-1]
    return top
