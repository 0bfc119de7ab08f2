"""The tracks of one rank: its band of buckets, and a line for each lane and depth below it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.tables import Segments, Slices, Waits
from stepsplit.analyzer.trace import Int32, Int64
from stepsplit.dashboard.timeline.track import Track

BAND = "buckets"
_COMPUTE = BUCKETS.index("compute")


@dataclass(frozen=True, slots=True)
class Line:
    """A track with what its slices are called; name indexes names, owner is -1 for nobody."""

    lane: str
    depth: int
    track: Track
    name: Int32
    owner: Int32
    names: tuple[str, ...]


def band_of(rank: int, segments: Segments, waits: Waits) -> Line:
    """The buckets of the rank; waits are named by what was waited in."""
    low, high = np.searchsorted(segments.rank, (rank, rank + 1)).tolist()
    start, bucket = segments.start_ns[low:high], segments.bucket[low:high]
    lasting = segments.dur_ns[low:high] > 0
    track = Track(start[lasting], segments.dur_ns[low:high][lasting], bucket[lasting])
    name, owner, names = _waited(rank, track.start_ns, waits)
    return Line(BAND, 0, track, name, owner, names)


def lanes_of(slices: Slices) -> tuple[Line, ...]:
    """A line for each depth of each lane, the lane with the most compute first."""
    place = slices.lane.astype(np.int64) * 256 + slices.depth
    first = np.flatnonzero(np.diff(place, prepend=-1)).tolist()
    edges = zip(first, [*first[1:], len(place)], strict=True)
    lines = [_line(slices, slice(low, high)) for low, high in edges]
    busy: dict[str, int] = defaultdict(int)
    for line in lines:
        busy[line.lane] += int(line.track.dur_ns[line.track.bucket == _COMPUTE].sum())
    return tuple(sorted(lines, key=lambda line: (-busy[line.lane], line.lane, line.depth)))


def _line(slices: Slices, rows: slice) -> Line:
    return Line(
        lane=slices.lanes[int(slices.lane[rows.start])],
        depth=int(slices.depth[rows.start]),
        track=Track(slices.start_ns[rows], slices.dur_ns[rows], slices.bucket[rows]),
        name=slices.name[rows],
        owner=slices.owner[rows],
        names=slices.names,
    )


def _waited(rank: int, start_ns: Int64, waits: Waits) -> tuple[Int32, Int32, tuple[str, ...]]:
    """For each segment of a rank the wait in which it begins: its name and whom it is for."""
    low, high = np.searchsorted(waits.rank, (rank, rank + 1)).tolist()
    own = slice(low, high)
    places: dict[str, int] = {"": 0}
    pairs = zip(waits.axis[own].tolist(), waits.op[own].tolist(), strict=True)
    words = (f"{op} on {axis}" if axis else op for axis, op in pairs)
    code = np.array([0, *(places.setdefault(word, len(places)) for word in words)], dtype=np.int32)
    at = np.searchsorted(waits.start_ns[own], start_ns, side="right") - 1
    end = waits.start_ns[own] + waits.dur_ns[own]
    inside = (at >= 0) & (start_ns < np.append(end, 0)[at])
    owner = np.append(waits.owner[own], -1)
    name = np.where(inside, code[at + 1], 0).astype(np.int32)
    return name, np.where(inside, owner[at], -1).astype(np.int32), tuple(places)
