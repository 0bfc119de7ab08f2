"""All ranks on one clock as a trace for ui.perfetto.dev: a process a rank, an arrow a wait."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Report, StepRow
from stepsplit.analyzer.report.tables import Boxes, Segments, Tables, Waits
from stepsplit.analyzer.trace import Int64
from stepsplit.dashboard.reporters.perfetto_packets import Origins, Slices, events, head
from stepsplit.dashboard.reporters.perfetto_tracks import (
    BAND,
    STEPS,
    WAITS,
    Lanes,
    lanes_of,
    tracks_of,
)

_LETTERS = "FBW"
"""The phases of report.tables.PHASES, as schedules are drawn."""
_Table = TypeVar("_Table", Segments, Boxes, Waits)
_Key = TypeVar("_Key", bound=Hashable)


def perfetto_trace(report: Report, tables: Tables) -> Iterator[bytes]:
    """The trace in Perfetto's protobuf, in chunks; times are the report's, in ns.

    Where a rank waited, a flow leads there from what the rank that it waited for did as the wait
    ended. The format is not Chrome's JSON, of which Perfetto reads durations as floating point
    microseconds and cuts off what is left of the last nanosecond: slices that touch would overlap.
    """
    tables = Tables(_lasting(tables.segments), _lasting(tables.boxes), _lasting(tables.waits))
    lanes = lanes_of(tables.boxes)
    band = _band(tables.segments, lanes)
    waits = _waits(tables.waits, lanes)
    parts = (band, waits, _steps(report.steps, tables.segments, lanes), _boxes(tables.boxes, lanes))
    source = _sources(tables)
    known = np.flatnonzero(source >= 0)
    yield head(tracks_of(report.run, lanes), [name for part in parts for name in part.names])
    slices = _together(parts, len(band.track) + known)
    yield from events(slices, Origins(np.arange(len(known)) + 1, source[known]))


@dataclass(frozen=True, slots=True)
class _Part:
    """Slices of one kind, columns of one length; name is a place in names."""

    track: Int64
    name: Int64
    names: tuple[str, ...]
    start_ns: Int64
    end_ns: Int64


def _lasting(table: _Table) -> _Table:
    """The rows that last: rounding may leave nothing of an interval on another's clock."""
    kept = table.dur_ns > 0
    return type(table)(*(getattr(table, column.name)[kept] for column in fields(table)))


def _band(segments: Segments, lanes: Lanes) -> _Part:
    end = segments.start_ns + segments.dur_ns
    track = lanes.tracks(segments.rank, BAND)
    return _Part(track, segments.bucket.astype(np.int64), BUCKETS, segments.start_ns, end)


def _waits(waits: Waits, lanes: Lanes) -> _Part:
    columns = (waits.bucket, waits.owner, waits.axis, waits.op)
    name, keys = _coded(zip(*(column.tolist() for column in columns), strict=True))
    names = tuple(_wait_name(*key) for key in keys)
    end = waits.start_ns + waits.dur_ns
    return _Part(lanes.tracks(waits.rank, WAITS), name, names, waits.start_ns, end)


def _wait_name(bucket: int, owner: int, axis: str, op: str) -> str:
    whom = f"waits for rank {owner}" if owner >= 0 else "waits"
    return f"{BUCKETS[bucket]}: {whom} ({f'{axis} {op}'.strip()})"


def _steps(rows: Iterable[StepRow], segments: Segments, lanes: Lanes) -> _Part:
    """Each step from its first segment to its last."""
    kinds = {(row.rank, row.step): row.kind for row in rows}
    new = (np.diff(segments.rank) != 0) | (np.diff(segments.step) != 0)
    edge = np.concatenate(([True], new, [True]))[: len(segments.rank) + 1]
    first, last = np.flatnonzero(edge[:-1]), np.flatnonzero(edge[1:])
    rank, step = segments.rank[first], segments.step[first]
    owners = zip(rank.tolist(), step.tolist(), strict=True)
    name, keys = _coded((number, kinds.get((of, number), "full")) for of, number in owners)
    names = tuple(f"step {n}" if kind == "full" else f"step {n} ({kind})" for n, kind in keys)
    end = segments.start_ns[last] + segments.dur_ns[last]
    return _Part(lanes.tracks(rank, STEPS), name, names, segments.start_ns[first], end)


def _boxes(boxes: Boxes, lanes: Lanes) -> _Part:
    name, keys = _coded(zip(boxes.phase.tolist(), boxes.microbatch.tolist(), strict=True))
    names = tuple(f"{_LETTERS[phase]}{microbatch}" for phase, microbatch in keys)
    return _Part(lanes.of_boxes, name, names, boxes.start_ns, boxes.start_ns + boxes.dur_ns)


def _coded(keys: Iterable[_Key]) -> tuple[Int64, list[_Key]]:
    """The keys as places in the list of distinct ones."""
    places: dict[_Key, int] = {}
    code = [places.setdefault(key, len(places)) for key in keys]
    return np.array(code, dtype=np.int64), list(places)


def _sources(tables: Tables) -> Int64:
    """For each wait the row of the segments in which its owner was as it ended; -1 for none."""
    segments, waits = tables.segments, tables.waits
    found = np.full(len(waits.rank), -1, dtype=np.int64)
    last = waits.start_ns + waits.dur_ns - 1
    for owner in np.unique(waits.owner[waits.owner >= 0]).tolist():
        low, high = np.searchsorted(segments.rank, (owner, owner + 1)).tolist()
        rows = np.flatnonzero(waits.owner == owner)
        at = low + np.searchsorted(segments.start_ns[low:high], last[rows], side="right") - 1
        rows, at = rows[at >= low], at[at >= low]
        inside = last[rows] < segments.start_ns[at] + segments.dur_ns[at]
        found[rows[inside]] = at[inside]
    return found


def _together(parts: tuple[_Part, ...], reached: Int64) -> Slices:
    """All slices, from time 0 at the latest; the n-th row that a flow reaches ends flow n + 1."""
    track = np.concatenate([part.track for part in parts])
    start = np.concatenate([part.start_ns for part in parts])
    end = np.concatenate([part.end_ns for part in parts])
    zero = min(0, int(start.min(initial=0)))
    offset = np.cumsum([0, *(len(part.names) for part in parts[:-1])])
    name = [part.name + before for part, before in zip(parts, offset, strict=True)]
    flow = np.zeros(len(track), dtype=np.int64)
    flow[reached] = np.arange(len(reached)) + 1
    return Slices(track, np.concatenate(name), start - zero, end - zero, flow)
