"""The pipeline's grid, and the bubble that its holes make."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.attribute import Band
from stepsplit.analyzer.split.calls.waits import BUBBLE, COLLECTIVE, P2P, SKEW
from stepsplit.analyzer.split.intervals import Intervals, overlap_ns, union, without
from stepsplit.analyzer.split.labels import distinct, most_of
from stepsplit.analyzer.trace import Category, Events, Int64, RankTrace

BOX = re.compile(
    r"(?:stepsplit::(?=[FBW] )|PP:(?P<pp>\d{1,9})(?=[FBIW]\d))(?P<letter>[FBIW])"
    r"(?: stage=(?P<stage>\d{1,9}) mb=(?P<mb>\d{1,9})|(?P<pp_mb>\d{1,9}))$"
)
PHASE_OF_LETTER = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
_AT_ONCE = re.compile(r"PP:\((?P<actions>[\dFBIW;]+)\)OVERLAP_F_B$")
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_OF_GPIPE = re.compile(r"(?P<phase>Forward|Backward) (?P<mb>\d{1,9})$")
_MARKERS = (("stepsplit::",), ("PP:",), ("Forward ", "Backward "))
"""How the names of each kind of mark begin; the first kind that a trace holds counts alone."""


@dataclass(frozen=True, slots=True)
class Box:
    """One forward, backward or weight gradient of a microbatch, on the rank's own clock."""

    stage: int
    microbatch: int
    phase: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepGrid:
    """One rank's part of a step: its boxes, and when it worked in them, on the common clock."""

    rank: int
    step: int
    boxes: tuple[Box, ...]
    busy: Intervals


@dataclass(frozen=True, slots=True)
class StageHoles:
    """One stage in one step: the window of its whole pipeline, and the stage's holes in it."""

    rank: int
    step: int
    stage: int
    window_ns: int
    holes_ns: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """A stage's work on a microbatch, as a name tells it."""

    stage: int
    microbatch: int
    phase: str


def boxes_of(trace: RankTrace, stage: int | None = None) -> tuple[Box, ...]:
    """The boxes that annotations mark, on the device where it shows them, in order of time.

    Some of torch's schedules mark them too; where the collector did, its marks alone count. The
    marks of torch's GPipe name no stage: stage, the rank's pp coordinate, does; without it they
    are no boxes. Two actions at once are two boxes of the same time.
    """
    events = trace.events
    of_category = events.of(Category.GPU_ANNOTATION if trace.on_device else Category.ANNOTATION)
    for prefixes in _MARKERS:
        marks = [_marks(name, stage) if name.startswith(prefixes) else () for name in events.names]
        rows = np.flatnonzero(of_category & events.name_mask(tuple(map(bool, marks))))
        if len(rows):
            found = _on_compute_stream(trace, rows).tolist()
            return tuple(
                _box(events, row, mark) for row in found for mark in marks[events.name_id[row]]
            )
    return ()


def _marks(name: str, stage: int | None) -> tuple[_Mark, ...]:
    if (one := BOX.match(name)) is not None:
        phase = PHASE_OF_LETTER[one["letter"]]
        return (_Mark(int(one["stage"] or one["pp"]), int(one["mb"] or one["pp_mb"]), phase),)
    if (several := _AT_ONCE.match(name)) is not None:
        return tuple(
            _Mark(int(at), int(microbatch), PHASE_OF_LETTER[letter])
            for at, letter, microbatch in _ACTION.findall(several["actions"])
        )
    if stage is not None and (named := _OF_GPIPE.match(name)) is not None:
        return (_Mark(stage, int(named["mb"]), named["phase"].lower()),)
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


def _box(events: Events, row: int, mark: _Mark) -> Box:
    start = int(events.start_ns[row])
    return Box(mark.stage, mark.microbatch, mark.phase, start, start + int(events.dur_ns[row]))


def grid_of(rank: int, step: int, boxes: Sequence[Box], band: Band) -> StepGrid:
    """The boxes of one step; busy leaves out waits for the pipeline that lie inside of a box.

    A range may hold the wait for what it works on (torch's own annotations do), which is no work.
    """
    start = np.array([box.start_ns for box in boxes], dtype=np.int64)
    end = np.array([box.end_ns for box in boxes], dtype=np.int64)
    waits = np.isin(band.bucket, (P2P, BUBBLE))
    worked = without(union(start, end), Intervals(band.start_ns[waits], band.end_ns[waits]))
    return StepGrid(rank, step, tuple(boxes), worked)


def holes_of(
    pipelines: Sequence[Sequence[int]], grids: Mapping[tuple[int, int], StepGrid]
) -> tuple[StageHoles, ...]:
    """The holes of every stage of every pipeline whose ranks are all there.

    The window runs from the first forward to the last backward over all stages of the pipeline;
    holes are what its forwards and backwards, with their own communication, leave of it.
    """
    found = []
    for ranks in pipelines:
        for step in sorted({step for rank, step in grids if rank in ranks}):
            parts = [grids[rank, step] for rank in ranks if (rank, step) in grids]
            if len(parts) == len(ranks) and all(len(part.busy) for part in parts):
                found += _holes(ranks, step, parts)
    return tuple(found)


def _holes(ranks: Sequence[int], step: int, parts: Sequence[StepGrid]) -> list[StageHoles]:
    first = min(int(part.busy.start_ns[0]) for part in parts)
    last = max(int(part.busy.end_ns[-1]) for part in parts)
    window = Intervals(np.array([first]), np.array([last]))
    return [
        StageHoles(
            part.rank, step, stage, last - first, last - first - overlap_ns(part.busy, window)
        )
        for stage, part in zip(range(len(ranks)), parts, strict=True)
    ]


def covered_ns(busy: Intervals, band: Band) -> int:
    """Exposed communication inside holes of the schedule that a wait for the pipeline follows.

    Without it the rank would only have waited longer in the same hole.
    """
    after = busy.start_ns[1:]
    hole = np.searchsorted(busy.end_ns[:-1], band.start_ns, side="right") - 1
    inside = np.flatnonzero(hole >= 0)
    inside = inside[band.end_ns[inside] <= after[hole[inside]]]
    waits = inside[band.bucket[inside] == BUBBLE]
    last = most_of(hole[waits], band.start_ns[waits], len(after))
    comm = inside[np.isin(band.bucket[inside], (COLLECTIVE, P2P, SKEW))]
    covered = comm[band.end_ns[comm] <= last[hole[comm]]]
    return int((band.end_ns - band.start_ns)[covered].sum())
