"""Page: the timeline, from the whole run to one kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Segments, Slices, Tables, Waits
from stepsplit.analyzer.trace import Int32, Int64, UInt8
from stepsplit.dashboard.figures.theme import BUCKET_STYLES
from stepsplit.dashboard.pages.components import View, build_empty_card, build_legend, build_section

# Timeline: ranks and lanes at any zoom, from the whole run to one kernel.

PERFETTO = "https://ui.perfetto.dev"


def build_timeline_page(view: View) -> list[Component]:
    """The timeline page; assets/timeline.js draws into its element."""
    if view.tables is None or not len(view.tables.segments.rank):
        return [
            build_empty_card(
                "No timeline", "The tables of this run were deleted: upload the recording again."
            )
        ]
    attributes: Any = {"data-run": view.run_id, "data-perfetto": PERFETTO} if view.run_id else {}
    place = html.Div(id="timeline-view", className="timeline", **attributes)
    note = "hatched: waiting; click a wait to see the rank it waits for"
    return [build_section("Timeline", note, build_legend(), place)]


# The timeline as JSON for assets/timeline.js.

RANKS, FEW_RANKS = 64, 8

SHAPES, MOST_SLOTS = 40_000, 2_500
"""Limits of the timeline in an exported HTML file: shapes in all, and slots per line."""


def build_index_json(scene: TimelineView) -> dict[str, Any]:
    """Steps, ranks and bucket colors of the run."""
    return {
        "buckets": [
            {"name": look.bucket, "color": look.color, "dark": look.dark, "hatched": look.hatched}
            for look in BUCKET_STYLES
        ],
        "steps": [
            {"step": one.step, "kind": one.kind, "from": one.start_ns, "to": one.end_ns}
            for one in scene.steps
        ],
        "ranks": [{"rank": one.rank, "host": one.host, "stage": one.stage} for one in scene.ranks],
    }


def build_window_json(lines: Sequence[WindowRow]) -> dict[str, Any]:
    """The rows to draw; names are indices into one list, -1 for a shape of many slices."""
    places: dict[str, int] = {}
    rows = [
        {
            "rank": one.rank,
            "lane": one.lane,
            "depth": one.depth,
            "start": one.drawn.start_ns,
            "dur": one.drawn.dur_ns,
            "bucket": one.drawn.bucket,
            "cover": one.drawn.cover,
            "name": _index_names(places, one),
            "owner": one.owner,
        }
        for one in lines
    ]
    return {"rows": rows, "names": list(places)}


def _index_names(places: dict[str, int], one: WindowRow) -> Int64:
    """Indices of the shapes' names in the list of all names, which grows as needed."""
    used, code = np.unique(one.name, return_inverse=True)
    here = [places.setdefault(one.names[i], len(places)) if i >= 0 else -1 for i in used.tolist()]
    return np.array(here, dtype=np.int64)[code]


def export_json(report: Report, tables: Tables) -> dict[str, Any]:
    """Timeline data of an exported HTML file: bands of the middle full step for up to RANKS ranks,
    with lanes if there are at most FEW_RANKS ranks."""
    scene = TimelineView(report, tables)
    full = [one for one in scene.steps if one.kind == "full"] or list(scene.steps)
    step = full[len(full) // 2]
    index = build_index_json(scene)
    index["steps"] = [one for one in index["steps"] if one["step"] == step.step]
    index["ranks"] = index["ranks"][:RANKS]
    ranks = [one["rank"] for one in index["ranks"]]
    slots = min(MOST_SLOTS, SHAPES // len(ranks))
    opened = ranks if len(ranks) <= FEW_RANKS else []
    lines = scene.read_window(step.start_ns, step.end_ns, slots, ranks, opened)
    return {"index": index, "window": build_window_json(lines)}


# The timeline of a run: its ranks and steps, and any time window of it.

_CACHED_RANKS = 64


@dataclass(frozen=True, slots=True)
class ShownStep:
    """A step from its first start to its last end over all ranks, in the report's ns."""

    step: int
    kind: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankLocation:
    """A rank with its host and pipeline stage; None if unknown."""

    rank: int
    host: str | None
    stage: int | None


@dataclass(frozen=True, slots=True)
class WindowRow:
    """A row of one rank within a window.

    name and owner have one entry per shape: name indexes names, -1 for a shape of many slices;
    owner is the rank waited for, -1 if none.
    """

    rank: int
    lane: str
    depth: int
    drawn: DrawnShapes
    name: Int64
    owner: Int64
    names: tuple[str, ...]


class TimelineView:
    """The timeline of one run."""

    def __init__(self, report: Report, tables: Tables) -> None:
        self._tables = tables
        self.steps = list_steps(report)
        self.ranks = list_rank_locations(report, tables)
        self._band = lru_cache(_CACHED_RANKS * 4)(
            lambda rank: build_band(rank, tables.segments, tables.waits)
        )
        self._lanes = lru_cache(_CACHED_RANKS)(self._read_lanes)

    def read_window(
        self, from_ns: int, to_ns: int, slots: int, ranks: Sequence[int], opened: Sequence[int]
    ) -> tuple[WindowRow, ...]:
        """The bands of the ranks, and the lanes of the opened ones, within the window."""
        lines = [
            (rank, line)
            for rank in ranks
            for line in (self._band(rank), *(self._lanes(rank) if rank in opened else ()))
        ]
        return tuple(_cut_to_window(rank, line, from_ns, to_ns, slots) for rank, line in lines)

    def _read_lanes(self, rank: int) -> tuple[TimelineRow, ...]:
        slices = self._tables.slices
        return build_lanes(slices[rank]) if rank in slices else ()


def list_steps(report: Report) -> tuple[ShownStep, ...]:
    """Steps over all ranks, in order."""
    spans: dict[int, list[ShownStep]] = {}
    for row in report.steps:
        own = ShownStep(row.step, row.kind, row.start_ns, row.start_ns + row.step_ns)
        spans.setdefault(row.step, []).append(own)
    return tuple(_merge_ranks(own) for _, own in sorted(spans.items()))


def _merge_ranks(spans: Sequence[ShownStep]) -> ShownStep:
    kind = next((one.kind for one in spans if one.kind != "full"), "full")
    start, end = min(one.start_ns for one in spans), max(one.end_ns for one in spans)
    return ShownStep(spans[0].step, kind, start, end)


def list_rank_locations(report: Report, tables: Tables) -> tuple[RankLocation, ...]:
    """The recorded ranks with their host and pipeline stage."""
    hosts = {rank: one.host for one in report.run.hosts for rank in one.ranks}
    boxes = tables.boxes
    stages: dict[int, list[int]] = defaultdict(list)
    for rank, stage in np.unique(np.column_stack((boxes.rank, boxes.stage)), axis=0).tolist():
        stages[rank].append(stage)
    return tuple(
        RankLocation(rank, _drop_unknown(hosts.get(rank)), _take_single(stages.get(rank, [])))
        for rank in report.run.ranks
    )


def _drop_unknown(host: str | None) -> str | None:
    return None if host in (None, "unknown") else host


def _take_single(stages: Sequence[int]) -> int | None:
    return stages[0] if len(stages) == 1 else None


def _cut_to_window(rank: int, line: TimelineRow, from_ns: int, to_ns: int, slots: int) -> WindowRow:
    drawn = line.track.draw(from_ns, to_ns, slots)
    name, owner = (_select_rows(column, drawn.row) for column in (line.name, line.owner))
    return WindowRow(rank, line.lane, line.depth, drawn, name, owner, line.names)


def _select_rows(column: Int32, rows: Int64) -> Int64:
    """Values of the column in these rows, -1 for row -1."""
    values = np.full(len(rows), -1, dtype=np.int64)
    known = rows >= 0
    values[known] = column[rows[known]]
    return values


# The rows of one rank: its band of buckets, and one row per lane and depth below it.

BAND = "buckets"

_COMPUTE = BUCKETS.index("compute")


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """A track with the names of its slices: name indexes names; owner is the rank waited for,
    -1 if none."""

    lane: str
    depth: int
    track: TimelineTrack
    name: Int32
    owner: Int32
    names: tuple[str, ...]


def build_band(rank: int, segments: Segments, waits: Waits) -> TimelineRow:
    """The band of a rank's buckets; waits are named by their op and axis."""
    low, high = np.searchsorted(segments.rank, (rank, rank + 1)).tolist()
    start, bucket = segments.start_ns[low:high], segments.bucket[low:high]
    lasting = segments.dur_ns[low:high] > 0
    track = TimelineTrack(start[lasting], segments.dur_ns[low:high][lasting], bucket[lasting])
    name, owner, names = _match_waits(rank, track.start_ns, waits)
    return TimelineRow(BAND, 0, track, name, owner, names)


def build_lanes(slices: Slices) -> tuple[TimelineRow, ...]:
    """One row per lane and depth, the lane with the most compute first; () without slices."""
    if not len(slices.lane):
        return ()
    place = slices.lane.astype(np.int64) * 256 + slices.depth
    first = np.flatnonzero(np.diff(place, prepend=-1)).tolist()
    edges = zip(first, [*first[1:], len(place)], strict=True)
    lines = [_build_row(slices, slice(low, high)) for low, high in edges]
    busy: dict[str, int] = defaultdict(int)
    for line in lines:
        busy[line.lane] += int(line.track.dur_ns[line.track.bucket == _COMPUTE].sum())
    return tuple(sorted(lines, key=lambda line: (-busy[line.lane], line.lane, line.depth)))


def _build_row(slices: Slices, rows: slice) -> TimelineRow:
    return TimelineRow(
        lane=slices.lanes[int(slices.lane[rows.start])],
        depth=int(slices.depth[rows.start]),
        track=TimelineTrack(slices.start_ns[rows], slices.dur_ns[rows], slices.bucket[rows]),
        name=slices.name[rows],
        owner=slices.owner[rows],
        names=slices.names,
    )


def _match_waits(rank: int, start_ns: Int64, waits: Waits) -> tuple[Int32, Int32, tuple[str, ...]]:
    """Name and owner of the wait in which each segment begins; the name "" and -1 without one."""
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


# One row at any zoom: exact slices, or the dominant bucket of each slot.

Float64 = npt.NDArray[np.float64]

_FULL = 255

_NOISE = 1e-6
"""Tolerance for rounding when a slot is completely covered."""


@dataclass(frozen=True, slots=True)
class DrawnShapes:
    """Shapes to draw for a track, as columns of equal length; shapes of many slices come first.

    bucket indexes buckets.BUCKETS; cover is the filled fraction, 0 to 255; row indexes the track,
    -1 for a shape of many slices.
    """

    start_ns: Int64
    dur_ns: Int64
    bucket: UInt8
    cover: UInt8
    row: Int64


@dataclass(frozen=True)
class TimelineTrack:
    """Non-overlapping slices ordered by start; columns of equal length, bucket indexes BUCKETS."""

    start_ns: Int64
    dur_ns: Int64
    bucket: UInt8

    def draw(self, from_ns: int, to_ns: int, slots: int) -> DrawnShapes:
        """Slices within the window; if there are more than slots, those shorter than a slot are
        merged into slots."""
        low = int(np.searchsorted(self._end_ns, from_ns, side="right"))
        high = int(np.searchsorted(self.start_ns, to_ns, side="left"))
        if high - low <= slots:
            return self._draw_exactly(np.arange(low, high))
        edges = np.linspace(from_ns, to_ns, slots + 1).astype(np.int64)
        long = self.dur_ns[low:high] * slots >= to_ns - from_ns
        exact = self._draw_exactly(low + np.flatnonzero(long))
        return _concatenate(self._draw_slots(edges, exact), exact)

    def _draw_exactly(self, rows: Int64) -> DrawnShapes:
        whole = np.full(len(rows), _FULL, dtype=np.uint8)
        columns = (self.start_ns[rows], self.dur_ns[rows], self.bucket[rows])
        return DrawnShapes(*columns, whole, rows)

    def _draw_slots(self, edges: Int64, drawn: DrawnShapes) -> DrawnShapes:
        """The dominant bucket of each slot among slices that are not drawn exactly; neighboring
        slots with equal bucket and cover become one shape."""
        apart = TimelineTrack(drawn.start_ns, drawn.dur_ns, drawn.bucket)
        busy = self._compute_busy_ns(edges) - apart._compute_busy_ns(edges)
        cover = np.ceil(np.clip(busy.sum(axis=0) / np.diff(edges), 0, 1) * 4 - _NOISE) / 4
        winner = busy.argmax(axis=0).astype(np.uint8)
        key = np.where(cover > 0, winner + cover, -1)
        first = np.flatnonzero(np.diff(key, prepend=-2.0))
        last = np.append(first[1:], len(key))
        shown = key[first] >= 0
        first, last = first[shown], last[shown]
        return DrawnShapes(
            start_ns=edges[first],
            dur_ns=edges[last] - edges[first],
            bucket=winner[first],
            cover=(cover[first] * _FULL).astype(np.uint8),
            row=np.full(len(first), -1, dtype=np.int64),
        )

    def _compute_busy_ns(self, edges: Int64) -> Float64:
        """Time in ns per bucket (rows) and slot between the edges (columns)."""
        busy = np.zeros((len(BUCKETS), len(edges) - 1))
        for bucket, (times, so_far) in self._sums:
            busy[bucket] = np.diff(np.interp(edges, times, so_far))
        return busy

    @cached_property
    def _end_ns(self) -> Int64:
        return self.start_ns + self.dur_ns

    @cached_property
    def _sums(self) -> list[tuple[int, tuple[Float64, Float64]]]:
        """Cumulative time of each bucket as points (time, time so far)."""
        return [(int(bucket), self._sum(bucket)) for bucket in np.unique(self.bucket)]

    def _sum(self, bucket: int) -> tuple[Float64, Float64]:
        own = np.flatnonzero(self.bucket == bucket)
        so_far = np.concatenate(([0.0], np.cumsum(self.dur_ns[own], dtype=np.float64)))
        times = np.column_stack((self.start_ns[own], self._end_ns[own])).astype(np.float64)
        return times.ravel(), np.column_stack((so_far[:-1], so_far[1:])).ravel()


def _concatenate(first: DrawnShapes, second: DrawnShapes) -> DrawnShapes:
    both = ((getattr(first, each.name), getattr(second, each.name)) for each in fields(DrawnShapes))
    return DrawnShapes(*(np.concatenate(pair) for pair in both))
