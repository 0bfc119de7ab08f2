"""Page: the timeline, from the whole run to one kernel, and the questions that it answers."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from dash import html
from dash.development.base_component import Component
from msgspec import structs

from stepsplit.analyzer.bucket_styles import BUCKET_STYLES
from stepsplit.analyzer.buckets import BUCKETS, Bucket
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.step_rows import StepRow
from stepsplit.analyzer.report.tables import Segments, Slices, Tables, Text, Waits
from stepsplit.analyzer.trace import Bool, Int32, Int64, UInt8
from stepsplit.dashboard.figures.rank_groups import list_rank_groupings, list_rank_locations
from stepsplit.dashboard.pages.components import View, build_empty_card, build_legend, build_section
from stepsplit.dashboard.pages.page import RunPage
from stepsplit.dashboard.pages.timeline_track import DrawnShapes, TimelineTrack, cut_into_slots

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
            {
                "name": look.bucket,
                "color": look.color.light,
                "dark": look.color.dark,
                "hatched": look.hatched,
            }
            for look in BUCKET_STYLES
        ],
        "steps": [
            {"step": one.step, "kind": one.kind, "from": one.start_ns, "to": one.end_ns}
            for one in scene.steps
        ],
        "ranks": [{"rank": one.rank, "host": one.host, "stage": one.stage} for one in scene.ranks],
        "groupings": [
            {"by": one.by, "groups": [{"name": g.label, "ranks": g.ranks} for g in one.groups]}
            for one in scene.groupings
        ],
    }


def build_window_json(window: Window) -> dict[str, Any]:
    """The rows to draw, in few bytes.

    Shapes of many slices are a text of one letter per slot, see `_encode_slots`. Exact slices are
    columns: gap is the time since the end of the slice before (of the window's start, for the
    first), name an index into one list. Columns of one value only are left out: owner -1, and
    name "" at index 0. matched has a # for each slot that contains a match of the search.
    """
    places: dict[str, int] = {"": 0}
    rows = [_encode_row(places, one, window.from_ns) for one in window.rows]
    return {"from": window.from_ns, "to": window.to_ns, "rows": rows, "names": list(places)}


def _encode_row(places: dict[str, int], one: WindowRow, from_ns: int) -> dict[str, Any]:
    line, drawn = one.line, one.drawn
    row: dict[str, Any] = {"rank": one.rank, "lane": line.lane, "depth": line.depth}
    row["slots"] = len(drawn.edges) - 1
    merged = int(np.count_nonzero(drawn.row < 0))
    if merged:
        row["merged"] = _encode_slots(drawn, merged)
    if merged < len(drawn.row):
        start, dur, shown = drawn.start_ns[merged:], drawn.dur_ns[merged:], drawn.row[merged:]
        row["gap"] = start - np.concatenate(([from_ns], (start + dur)[:-1]))
        row["dur"] = dur
        row["bucket"] = (drawn.bucket[merged:] + ord("0")).tobytes().decode()
        # Indices of the shapes' names in the list of all names, which grows as needed.
        own, owner = line.name[shown], line.owner[shown]
        here = np.zeros(len(line.names), dtype=np.int64)
        for used in np.flatnonzero(np.bincount(own)).tolist():
            here[used] = places.setdefault(line.names[used], len(places))
        name = here[own]
        row |= {"name": name} if name.any() else {}
        row |= {"owner": owner} if (owner >= 0).any() else {}
    if one.matched is not None:
        row["matched"] = _encode_runs(np.where(one.matched, ord("#"), ord(".")).astype(np.uint8))
    return row


_LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZab", dtype=np.uint8)
"""Four for each bucket: a quarter, half, three quarters and all of the slot."""


def _encode_slots(drawn: DrawnShapes, merged: int) -> str:
    """The first shapes, those of many slices, slot by slot: a letter for bucket and cover, a dot
    for nothing."""
    start, dur = drawn.start_ns[:merged], drawn.dur_ns[:merged]
    quarters = (drawn.cover[:merged].astype(np.int64) + 1) // 64
    letter = _LETTERS[drawn.bucket[:merged].astype(np.int64) * 4 + quarters - 1]
    low = np.searchsorted(drawn.edges, start)
    width = np.searchsorted(drawn.edges, start + dur) - low
    slots: UInt8 = np.full(len(drawn.edges) - 1, ord("."), dtype=np.uint8)
    # A shape's slots follow each other: the first one, and as many more as it is wide.
    offset = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
    slots[np.repeat(low, width) + offset] = np.repeat(letter, width)
    return _encode_runs(slots)


def _encode_runs(slots: UInt8) -> str:
    """Letters with the number of repetitions, which is left out for one: A12.3B."""
    first = np.flatnonzero(np.append(True, slots[1:] != slots[:-1]))
    count = np.diff(np.append(first, len(slots))).tolist()
    letters = slots[first].tobytes().decode()
    return "".join([f"{one}{n}" if n > 1 else one for one, n in zip(letters, count, strict=True)])


_NOTE = re.compile(r"(-?\d{1,18})-(-?\d{1,18}):(.+)", re.DOTALL)
"""A note in the address: begin and end in ns, and its words."""


def export_json(report: Report, tables: Tables, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Timeline data of an exported HTML file: bands of the middle full step for up to RANKS ranks,
    with lanes if there are at most FEW_RANKS ranks; of notes on other steps their words alone."""
    scene = TimelineView(report, tables)
    full = [one for one in scene.steps if one.kind == "full"] or list(scene.steps)
    step = full[len(full) // 2]
    index = build_index_json(scene)
    index["steps"] = [one for one in index["steps"] if one["step"] == step.step]
    index["ranks"] = index["ranks"][:RANKS]
    found = [parsed for text in notes if (parsed := _NOTE.fullmatch(text))]
    is_shown = [int(one[1]) < step.end_ns and int(one[2]) > step.start_ns for one in found]
    index["notes"] = [one[0] for one, here in zip(found, is_shown, strict=True) if here]
    index["notes_elsewhere"] = [
        (next((f"step {s.step}: " for s in scene.steps if s.start_ns <= int(one[1]) < s.end_ns), "")
         + one[3])
        for one, here in zip(found, is_shown, strict=True) if not here
    ]  # fmt: skip
    ranks = [one["rank"] for one in index["ranks"]]
    slots = min(MOST_SLOTS, SHAPES // len(ranks))
    opened = ranks if len(ranks) <= FEW_RANKS else []
    window = scene.read_window(step.start_ns, step.end_ns, WindowDetail(slots), ranks, opened)
    return {"index": index, "window": build_window_json(window)}


# The timeline of a run: its ranks and steps, and any time window of it.

_CACHED_RANKS, _CACHED_BANDS, _CACHED_SEARCHES = 64, 512, 2

_CACHED_BYTES = 128 << 20
"""Of slices that are kept, so that a range over hundreds of ranks is read from disk once."""

_COMPACT_SLOTS = 8
"""Slices of a compact band with at least so many slots are drawn exactly, others are merged."""


@dataclass(frozen=True, slots=True)
class ShownStep:
    """A step from its first start to its last end over all ranks, in the report's ns."""

    step: int
    kind: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class WindowRow:
    """A row of one rank within a window: drawn.row indexes the line's slices.

    matched says which slots contain a match of the search; None without a search, and for lanes of
    exact slices only.
    """

    rank: int
    line: TimelineRow
    drawn: DrawnShapes
    matched: Bool | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """The rows to draw between two times."""

    from_ns: int
    to_ns: int
    rows: tuple[WindowRow, ...]


@dataclass(frozen=True, slots=True)
class WindowDetail:
    """How finely a window is drawn.

    Rows have `slots` slots, and the bands of closed ranks `compact_slots` unless None; `query` is
    the text searched for. Slices of a band with at least `band_slots` slots are drawn exactly.
    """

    slots: int
    compact_slots: int | None = None
    query: str = ""
    band_slots: int = 1


class TimelineView:
    """The timeline of one run."""

    def __init__(self, report: Report, tables: Tables) -> None:
        self._tables = tables
        self.steps = list_steps(report)
        self.ranks = list_rank_locations(report, tables)
        self.groupings = list_rank_groupings(report, self.ranks)
        self._band = lru_cache(_CACHED_BANDS)(
            lambda rank: build_band(rank, tables.segments, tables.waits)
        )
        self._slices = KeptSlices(tables.slices).read
        self._lanes = lru_cache(_CACHED_RANKS)(self._build_lanes)
        self._names: dict[int, tuple[str, ...]] = {}
        self._matches = lru_cache(_CACHED_SEARCHES)(
            lambda text: find_matches(tables.slices, text, self._names)
        )

    def read_window(
        self,
        from_ns: int,
        to_ns: int,
        detail: WindowDetail,
        ranks: Sequence[int],
        opened: Sequence[int],
    ) -> Window:
        """The bands of the ranks, and the lanes of the opened ones, within the window."""
        rows: list[WindowRow] = []
        edges = cut_into_slots(from_ns, to_ns, detail.slots)
        closed = edges, detail.band_slots
        if detail.compact_slots is not None:
            closed = cut_into_slots(from_ns, to_ns, detail.compact_slots), _COMPACT_SLOTS
        for rank in ranks:
            is_open = rank in opened
            line = self._band(rank)
            drawn = line.track.draw(*((edges, detail.band_slots) if is_open else closed))
            band = WindowRow(rank, line, drawn)
            if detail.query:
                found = self.search(detail.query)
                own = found.select(found.rank == rank)
                matched = find_slots(own.start_ns, own.end_ns, band.drawn.edges)
                band = replace(band, matched=matched)
            rows.append(band)
            for line in self._lanes(rank) if is_open else ():
                row = WindowRow(rank, line, line.track.draw(edges))
                # The browser finds the matches among exact slices itself.
                if detail.query and not (row.drawn.row >= 0).all():
                    words = detail.query.lower()
                    has_words = [words in name.lower() for name in line.names]
                    hits = np.flatnonzero(np.array(has_words, dtype=np.bool_)[line.name])
                    start_ns = line.track.start_ns[hits]
                    end_ns = start_ns + line.track.dur_ns[hits]
                    row = replace(row, matched=find_slots(start_ns, end_ns, row.drawn.edges))
                rows.append(row)
        return Window(from_ns, to_ns, tuple(rows))

    def search(self, text: str) -> Matches:
        """Every slice whose name contains the text."""
        return self._matches(text.lower())

    def read_slices(self, rank: int) -> Slices | None:
        """The slices of the rank; None without."""
        return self._slices(rank)

    def measure(self, ranks: Sequence[int], from_ns: int, to_ns: int) -> tuple[RangeSplit, ...]:
        """The split of the range for each rank."""
        return measure_range(self._tables.segments, ranks, from_ns, to_ns)

    def measure_names(self, ranks: Sequence[int], from_ns: int, to_ns: int) -> tuple[NameTime, ...]:
        """The kernels and calls of the range over these ranks, those with most time first."""
        return measure_names(self._slices, ranks, from_ns, to_ns)

    def find_slice(self, rank: int, lane: str, depth: int, start_ns: int) -> dict[str, Any] | None:
        """The slice that starts there, as the timeline shows it; None if there is none."""
        if lane == BAND:
            line = self._band(rank)
            rows = np.flatnonzero(line.track.start_ns == start_ns)
            if not len(rows):
                return None
            row = int(rows[0])
            return {
                "rank": rank,
                "lane": BAND,
                "depth": 0,
                "start": start_ns,
                "dur": int(line.track.dur_ns[row]),
                "bucket": int(line.track.bucket[row]),
                "name": line.names[int(line.name[row])],
                "owner": int(line.owner[row]),
            }
        own = self._slices(rank)
        if own is None or lane not in own.lanes:
            return None
        here = (own.lane == own.lanes.index(lane)) & (own.depth == depth)
        rows = np.flatnonzero(here & (own.start_ns == start_ns))
        return build_slice_json(rank, own, int(rows[0])) if len(rows) else None

    def find_name(self, rank: int, bucket: int, from_ns: int, to_ns: int) -> str | None:
        """The name that takes most of a bucket's time in the range; None if unknown."""
        own = self._slices(rank)
        if own is None:
            return None
        start, end = own.start_ns, own.start_ns + own.dur_ns
        rows = np.flatnonzero((own.bucket == bucket) & (end > from_ns) & (start < to_ns))
        if not len(rows):
            return None
        inside = np.minimum(end[rows], to_ns) - np.maximum(start[rows], from_ns)
        return own.names[int(np.bincount(own.name[rows], weights=inside).argmax())]

    def _build_lanes(self, rank: int) -> tuple[TimelineRow, ...]:
        own = self._slices(rank)
        return () if own is None else build_lanes(own)


class KeptSlices:
    """The slices of the ranks that were asked for last, as many as fit."""

    def __init__(self, slices: Mapping[int, Slices], most_bytes: int = _CACHED_BYTES) -> None:
        self._all, self._left_bytes, self._lock = slices, most_bytes, Lock()
        self._kept: OrderedDict[int, tuple[Slices, int]] = OrderedDict()

    def read(self, rank: int) -> Slices | None:
        """The slices of the rank; None without."""
        with self._lock:
            if rank in self._kept:
                self._kept.move_to_end(rank)
                return self._kept[rank][0]
        own = self._all.get(rank)
        if own is None:
            return None
        columns = structs.astuple(own)
        size = sum(column.nbytes for column in columns if isinstance(column, np.ndarray))
        with self._lock:
            if rank not in self._kept:
                self._kept[rank] = own, size
                self._left_bytes -= size
            # The newest stays whatever its size: it is in use.
            while self._left_bytes < 0 and len(self._kept) > 1:
                self._left_bytes += self._kept.popitem(last=False)[1][1]
        return own


def list_steps(report: Report) -> tuple[ShownStep, ...]:
    """Steps over all ranks, in order."""
    rows: dict[int, list[StepRow]] = {}
    for row in report.steps:
        rows.setdefault(row.step, []).append(row)
    return tuple(
        ShownStep(
            step,
            next((one.kind for one in own if one.kind != "full"), "full"),
            min(one.start_ns for one in own),
            max(one.start_ns + one.step_ns for one in own),
        )
        for step, own in sorted(rows.items())
    )


# The rows of one rank: its band of buckets, and one row per lane and depth below it.

BAND = "buckets"


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
    low, high = find_rank_rows(segments.rank, rank)
    start, bucket = segments.start_ns[low:high], segments.bucket[low:high]
    lasting = segments.dur_ns[low:high] > 0
    track = TimelineTrack(start[lasting], segments.dur_ns[low:high][lasting], bucket[lasting])
    # Of the wait in which each segment begins; the name "" and the owner -1 without one.
    own = slice(*find_rank_rows(waits.rank, rank))
    axis, axes = _number_texts(waits.axis[own])
    op, ops = _number_texts(waits.op[own])
    used, pair = np.unique(axis * len(ops) + op, return_inverse=True)
    pairs = [(axes[number // len(ops)], ops[number % len(ops)]) for number in used.tolist()]
    names = ("", *(f"{op} on {axis}" if axis else op for axis, op in pairs))
    code = np.append(0, pair + 1)
    at = np.searchsorted(waits.start_ns[own], track.start_ns, side="right") - 1
    end = waits.start_ns[own] + waits.dur_ns[own]
    inside = (at >= 0) & (track.start_ns < np.append(end, 0)[at])
    name = np.where(inside, code[at + 1], 0).astype(np.int32)
    owner = np.where(inside, np.append(waits.owner[own], -1)[at], -1).astype(np.int32)
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
        busy[line.lane] += int(line.track.dur_ns[line.track.bucket == Bucket.COMPUTE].sum())
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


def _number_texts(column: Text) -> tuple[Int64, list[str]]:
    """The number of each of a few different texts, and the texts."""
    numbers, texts = np.zeros(len(column), dtype=np.int64), list[str]()
    left = np.arange(len(column))
    while len(left):
        text = column[left[0]]
        is_same = column[left] == text
        numbers[left[is_same]] = len(texts)
        texts.append(str(text))
        left = left[~is_same]
    return numbers, texts


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
        matching = np.array([text in name.lower() for name in own.names], dtype=np.bool_)
        row = np.flatnonzero(matching[own.name]).astype(np.int32)
        ranks: Int32 = np.full(len(row), rank, dtype=np.int32)
        starts = own.start_ns[row]
        parts.append(Matches(ranks, row, starts, starts + own.dur_ns[row]))
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
    splits = []
    for rank in ranks:
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
        splits.append(RangeSplit(rank, covered, tuple(buckets.tolist())))
    return tuple(splits)


@dataclass(frozen=True, slots=True)
class NameTime:
    """The time of the kernels and calls of one name and bucket within a range, over some ranks.

    Attributes:
        name: Their name.
        bucket: Index into BUCKETS.
        calls: How many of them are at least partly in the range.
        total_ns: Their time in the range; those that overlap count each.
        worst_rank: The rank with most of the time.
        worst_ns: Its time.
    """

    name: str
    bucket: int
    calls: int
    total_ns: int
    worst_rank: int
    worst_ns: int


def measure_names(
    read: Callable[[int], Slices | None], ranks: Sequence[int], from_ns: int, to_ns: int
) -> tuple[NameTime, ...]:
    """The time by name and bucket within the range, most first; idle time has no name."""
    found: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for rank in ranks:
        own = read(rank)
        if own is None:
            continue
        end = own.start_ns + own.dur_ns
        rows = np.flatnonzero(
            (end > from_ns) & (own.start_ns < to_ns) & (own.bucket != Bucket.IDLE)
        )
        inside = np.minimum(end[rows], to_ns) - np.maximum(own.start_ns[rows], from_ns)
        key = own.name[rows].astype(np.int64) * len(BUCKETS) + own.bucket[rows]
        used, place = np.unique(key, return_inverse=True)
        calls = np.bincount(place, minlength=len(used)).tolist()
        sums = np.bincount(place, weights=inside, minlength=len(used)).astype(np.int64).tolist()
        for number, count, total_ns in zip(used.tolist(), calls, sums, strict=True):
            name, bucket = divmod(number, len(BUCKETS))
            found[own.names[name], bucket].append((total_ns, rank, count))
    rows_of = []
    for (name, bucket), of_ranks in found.items():
        worst_ns, worst_rank, _ = max(of_ranks)
        total_ns, calls = sum(one[0] for one in of_ranks), sum(one[2] for one in of_ranks)
        rows_of.append(NameTime(name, bucket, calls, total_ns, worst_rank, worst_ns))
    return tuple(sorted(rows_of, key=lambda one: (-one.total_ns, one.name)))


def build_range_json(from_ns: int, to_ns: int, splits: Sequence[RangeSplit]) -> dict[str, Any]:
    """The range with the split of each rank; buckets are in the order of the index."""
    ranks: list[Mapping[str, Any]] = [
        {"rank": one.rank, "covered": one.covered_ns, "buckets": one.buckets_ns} for one in splits
    ]
    return {"from": from_ns, "to": to_ns, "ranks": ranks}


PAGE = RunPage("timeline", lambda view, _: build_timeline_page(view), needs_tables=True, chapter="")
