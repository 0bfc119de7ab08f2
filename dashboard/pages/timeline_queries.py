"""Questions about a timeline: groups of ranks, places of a name, a slice, the split of a range."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Segments, Slices
from stepsplit.analyzer.trace import Bool, Int32, Int64
from stepsplit.collectors.run_spec import Mesh
from stepsplit.dashboard.figures.communication import RankGroup

# Ways to group the ranks.

_Label = tuple[int, str]
"""The number of a group, by which groups are ordered, and its name."""


@dataclass(frozen=True, slots=True)
class RankGrouping:
    """A way to group the ranks: the groups of recorded ranks."""

    by: str
    groups: tuple[RankGroup, ...]


def list_groupings(
    report: Report, stages: Mapping[int, int | None], hosts: Mapping[int, str | None]
) -> tuple[RankGrouping, ...]:
    """The ways to group the ranks that yield several groups: by stage, host and mesh axis."""
    mesh = _read_mesh(report)
    keys = {
        "stage": {rank: _label_stage(rank, stage, mesh) for rank, stage in stages.items()},
        "host": {rank: host if host is None else (0, host) for rank, host in hosts.items()},
    }
    axes = [*(mesh.axes if mesh else ()), *(one.axis for one in report.groups if one.axis)]
    for axis in dict.fromkeys(axes):
        keys[axis] = _label_axis_groups(axis, mesh, report)
    made = (_group_ranks(by, own) for by, own in keys.items())
    return tuple(one for one in made if len(one.groups) > 1)


def _read_mesh(report: Report) -> Mesh | None:
    """The mesh, if it covers all ranks of the job."""
    try:
        mesh = Mesh.of({one.axis: one.size for one in report.run.mesh or ()})
    except ValueError:
        return None
    return mesh if mesh.axes and mesh.world_size == report.run.world_size else None


def _label_stage(rank: int, stage: int | None, mesh: Mesh | None) -> _Label | None:
    """Ranks with several stages, or none in the pipeline grid, have that of the mesh."""
    if stage is None and mesh is not None and "pp" in mesh.axes:
        stage = mesh.coordinate(rank, "pp")
    return None if stage is None else (stage, f"stage {stage}")


def _label_axis_groups(axis: str, mesh: Mesh | None, report: Report) -> dict[int, _Label | None]:
    """The group of each rank along the axis: by the mesh, else its largest recorded group."""
    own = sorted((g.ranks for g in report.groups if g.axis == axis), key=len, reverse=True)
    groups: dict[int, tuple[int, ...] | None] = {}
    for rank in report.run.ranks:
        if mesh is not None and axis in mesh.axes:
            groups[rank] = mesh.line(rank, axis)
        else:
            groups[rank] = next((group for group in own if rank in group), None)
    numbers = {group: n for n, group in enumerate(sorted({g for g in groups.values() if g}))}
    return {
        rank: (numbers[group], f"{axis} group {numbers[group]}") if group else None
        for rank, group in groups.items()
    }


def _group_ranks(by: str, labels: Mapping[int, _Label | None]) -> RankGrouping:
    members: dict[_Label, list[int]] = defaultdict(list)
    for rank, label in labels.items():
        members[label or (len(labels), "other ranks")].append(rank)
    groups = tuple(RankGroup(name, tuple(own)) for (_, name), own in sorted(members.items()))
    return RankGrouping(by, groups)


# Slices whose name contains a text.

MAX_QUERY_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Matches:
    """The slices that match a search, ordered by start; columns of equal length.

    row is the row in the slices of the rank.
    """

    rank: Int32
    row: Int32
    start_ns: Int64
    end_ns: Int64

    def select(self, chosen: Bool) -> Matches:
        """The matches of a mask."""
        start, end = self.start_ns[chosen], self.end_ns[chosen]
        return Matches(self.rank[chosen], self.row[chosen], start, end)

    def narrow(self, ranks: Sequence[int] | None, from_ns: int, to_ns: int) -> Matches:
        """The matches that start in the window, of these ranks; None for all ranks."""
        inside = (self.start_ns >= from_ns) & (self.start_ns < to_ns)
        return self.select(inside if ranks is None else inside & np.isin(self.rank, ranks))

    def count_before(self, time_ns: int) -> int:
        """The number of matches that start before this time."""
        return int(np.searchsorted(self.start_ns, time_ns))


def find_matches(
    slices: Mapping[int, Slices], text: str, names: dict[int, tuple[str, ...]]
) -> Matches:
    """Every slice whose name contains the text, in any case.

    names are those of the ranks' slices as far as known, and grow as needed: ranks without a
    matching name are not read again.
    """
    parts: list[Matches] = []
    for rank in slices:
        if rank in names and not any(text in name.lower() for name in names[rank]):
            continue
        own = slices[rank]
        names[rank] = own.names
        parts.append(_find_in_rank(rank, own, text))
    if not parts:
        none: Int32 = np.empty(0, dtype=np.int32)
        times: Int64 = np.empty(0, dtype=np.int64)
        return Matches(none, none, times, times)
    start = np.concatenate([part.start_ns for part in parts])
    order = np.argsort(start, kind="stable")
    return Matches(
        rank=np.concatenate([part.rank for part in parts])[order],
        row=np.concatenate([part.row for part in parts])[order],
        start_ns=start[order],
        end_ns=np.concatenate([part.end_ns for part in parts])[order],
    )


def _find_in_rank(rank: int, own: Slices, text: str) -> Matches:
    matching = np.array([text in name.lower() for name in own.names], dtype=np.bool_)
    row = np.flatnonzero(matching[own.name]).astype(np.int32)
    ranks: Int32 = np.full(len(row), rank, dtype=np.int32)
    return Matches(ranks, row, own.start_ns[row], own.start_ns[row] + own.dur_ns[row])


def build_matches_json(
    found: Matches, read: Callable[[int], Slices | None], first: int, limit: int
) -> dict[str, Any]:
    """The number of matches, by rank and in all, and `limit` matches from number `first` on."""
    ranks, counts = np.unique(found.rank, return_counts=True)
    shown = slice(first, first + limit)
    places = zip(found.rank[shown].tolist(), found.row[shown].tolist(), strict=True)
    read_places = ((rank, read(rank), row) for rank, row in places)
    return {
        "count": len(found.rank),
        "ranks": np.column_stack((ranks, counts)).tolist(),
        "first": first,
        "matches": [build_slice_json(rank, own, row) for rank, own, row in read_places if own],
    }


def find_slots(start_ns: Int64, end_ns: Int64, edges: Int64) -> Bool:
    """Which slots between the edges contain a part of a slice."""
    inside = (end_ns > edges[0]) & (start_ns < edges[-1])
    low = np.searchsorted(edges, start_ns[inside], side="right") - 1
    high = np.searchsorted(edges, end_ns[inside], side="left")
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, np.maximum(low, 0), 1)
    np.add.at(change, np.clip(np.maximum(high, low + 1), 0, len(edges) - 1), -1)
    return np.cumsum(change)[:-1] > 0


# One slice.


def build_slice_json(rank: int, own: Slices, row: int) -> dict[str, Any]:
    """A slice as the timeline shows it."""
    return {
        "rank": rank,
        "lane": own.lanes[int(own.lane[row])],
        "depth": int(own.depth[row]),
        "start": int(own.start_ns[row]),
        "dur": int(own.dur_ns[row]),
        "bucket": int(own.bucket[row]),
        "name": own.names[int(own.name[row])],
        "owner": int(own.owner[row]),
    }


def locate_slice(own: Slices, lane: str, depth: int, start_ns: int) -> int | None:
    """The row of the slice on that lane and depth with that start; None if there is none."""
    if lane not in own.lanes:
        return None
    here = (own.lane == own.lanes.index(lane)) & (own.depth == depth)
    rows = np.flatnonzero(here & (own.start_ns == start_ns))
    return int(rows[0]) if len(rows) else None


def find_dominant_name(own: Slices, bucket: int, from_ns: int, to_ns: int) -> str | None:
    """The name with the most time in the range among the slices of the bucket; None without."""
    start, end = own.start_ns, own.start_ns + own.dur_ns
    rows = np.flatnonzero((own.bucket == bucket) & (end > from_ns) & (start < to_ns))
    if not len(rows):
        return None
    inside = np.minimum(end[rows], to_ns) - np.maximum(start[rows], from_ns)
    return own.names[int(np.bincount(own.name[rows], weights=inside).argmax())]


def find_rank_rows(ranks: Int32, rank: int) -> tuple[int, int]:
    """The first row of the rank and the one after its last, in a column sorted by rank."""
    # Of the same type: NumPy would convert the whole column otherwise.
    low, high = np.searchsorted(ranks, np.array((rank, rank + 1), dtype=ranks.dtype)).tolist()
    return low, high


# The split of a range.


@dataclass(frozen=True, slots=True)
class RangeSplit:
    """The time of one rank in each bucket within a range, in ns; covered_ns is their sum."""

    rank: int
    covered_ns: int
    buckets_ns: tuple[int, ...]


def measure_range(
    segments: Segments, ranks: Sequence[int], from_ns: int, to_ns: int
) -> tuple[RangeSplit, ...]:
    """The split of the range for each rank, exact to the nanosecond."""
    return tuple(_measure_rank(segments, rank, from_ns, to_ns) for rank in ranks)


def _measure_rank(segments: Segments, rank: int, from_ns: int, to_ns: int) -> RangeSplit:
    first, last = find_rank_rows(segments.rank, rank)
    low, high = first + np.searchsorted(segments.start_ns[first:last], (from_ns, to_ns))
    # The segment before the first one that starts in the range may reach into it.
    rows = slice(max(low - 1, first), high)
    start = segments.start_ns[rows]
    end = start + segments.dur_ns[rows]
    inside = np.maximum(np.minimum(end, to_ns) - np.maximum(start, from_ns), 0)
    # Sums of whole numbers below 2**53 are exact in float64: 104 days in ns.
    sums = np.bincount(segments.bucket[rows], weights=inside, minlength=len(BUCKETS))
    buckets = sums.astype(np.int64)
    covered = int(inside.sum())
    assert covered == int(buckets.sum()), f"time is lost on rank {rank}"
    return RangeSplit(rank, covered, tuple(buckets.tolist()))


def build_range_json(from_ns: int, to_ns: int, splits: Sequence[RangeSplit]) -> dict[str, Any]:
    """The range with the split of each rank; buckets are in the order of the index."""
    ranks: list[Mapping[str, Any]] = [
        {"rank": one.rank, "covered": one.covered_ns, "buckets": one.buckets_ns} for one in splits
    ]
    return {"from": from_ns, "to": to_ns, "ranks": ranks}
