"""The boxes of a pipeline that annotations mark."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import distinct
from stepsplit.analyzer.split.pipeline.marks import MARKERS, Mark, marks_in
from stepsplit.analyzer.trace import Category, Events, Int64, RankTrace


@dataclass(frozen=True, slots=True)
class Box:
    """One forward, backward or weight gradient of a microbatch, on the rank's own clock."""

    stage: int
    microbatch: int
    phase: str
    start_ns: int
    end_ns: int


def boxes_of(trace: RankTrace, stage: int | None = None) -> tuple[Box, ...]:
    """The boxes that annotations mark, on the device where it shows them, in order of time.

    Some of torch's schedules mark them too; where the collector did, its marks alone count. The
    marks of torch's GPipe name no stage: stage, the rank's pp coordinate, does; without it they
    are no boxes. Two actions at once are two boxes of the same time.
    """
    events = trace.events
    of_category = events.of(Category.GPU_ANNOTATION if trace.on_device else Category.ANNOTATION)
    for prefixes in MARKERS:
        marks = [
            marks_in(name, stage) if name.startswith(prefixes) else () for name in events.names
        ]
        rows = np.flatnonzero(of_category & events.name_mask(tuple(map(bool, marks))))
        if len(rows):
            found = _on_compute_stream(trace, rows).tolist()
            return tuple(
                _box(events, row, mark) for row in found for mark in marks[events.name_id[row]]
            )
    return ()


def _on_compute_stream(trace: RankTrace, rows: Int64) -> Int64:
    """A device shows a mark once for each stream that worked in it: the one that computes most."""
    events = trace.events
    lanes = distinct(events.lane[rows]).tolist()
    if not trace.on_device or len(lanes) == 1:
        return rows
    computes = events.of(Category.KERNEL)
    computes[trace.calls.event] = False
    work = np.bincount(
        events.lane[computes], weights=events.dur_ns[computes], minlength=len(events.lanes)
    )
    of_stream: dict[tuple[str, str], float] = defaultdict(float)
    for lane, busy in zip(events.lanes, work.tolist(), strict=True):
        of_stream[lane.pid, lane.tid] += busy
    streams = {lane: (events.lanes[lane].pid, events.lanes[lane].tid) for lane in lanes}
    busiest = max(lanes, key=lambda lane: of_stream[streams[lane]])
    return np.asarray(rows[events.lane[rows] == busiest])


def _box(events: Events, row: int, mark: Mark) -> Box:
    start = int(events.start_ns[row])
    return Box(mark.stage, mark.microbatch, mark.phase, start, start + int(events.dur_ns[row]))
