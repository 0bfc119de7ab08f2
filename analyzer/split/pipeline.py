"""The pipeline's grid, and the bubble that its holes make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.attribute import Band
from stepsplit.analyzer.split.intervals import Intervals, overlap_ns, union, without
from stepsplit.analyzer.split.waits import BUBBLE, COLLECTIVE, P2P, SKEW
from stepsplit.analyzer.trace import Category, Events, RankTrace

BOX = re.compile(
    r"(?:stepsplit::(?=[FBW] )|PP:(?P<pp>\d+)(?=[FBIW]\d))(?P<letter>[FBIW])"
    r"(?: stage=(?P<stage>\d+) mb=(?P<mb>\d+)|(?P<pp_mb>\d+))$"
)
PHASE_OF_LETTER = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


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


def boxes_of(trace: RankTrace) -> tuple[Box, ...]:
    """The boxes that annotations mark, on the device where it shows them, in order of time.

    Some of torch's schedules mark them too; where the collector did, its marks alone count.
    """
    category = Category.GPU_ANNOTATION if trace.on_device else Category.ANNOTATION
    events = trace.events
    ours = events.of(category) & events.named("stepsplit::")
    matches = [BOX.match(name) for name in events.names]
    rows = events.of(category) & events.name_mask(tuple(m is not None for m in matches))
    chosen = rows & ours if (rows & ours).any() else rows
    return tuple(
        _box(events, row, matches[events.name_id[row]]) for row in np.flatnonzero(chosen).tolist()
    )


def _box(events: Events, row: int, match: re.Match[str] | None) -> Box:
    assert match is not None
    start = int(events.start_ns[row])
    return Box(
        stage=int(match["stage"] or match["pp"]),
        microbatch=int(match["mb"] or match["pp_mb"]),
        phase=PHASE_OF_LETTER[match["letter"]],
        start_ns=start,
        end_ns=start + int(events.dur_ns[row]),
    )


def grid_of(rank: int, step: int, boxes: Sequence[Box], band: Band, lead_ns: int) -> StepGrid:
    """The boxes of one step; busy leaves out waits for the pipeline that lie inside of a box.

    A range may hold the wait for what it works on (torch's own annotations do), which is no work.
    """
    start = np.array([box.start_ns for box in boxes], dtype=np.int64)
    end = np.array([box.end_ns for box in boxes], dtype=np.int64)
    waits = np.isin(band.bucket, (P2P, BUBBLE))
    worked = without(union(start, end), Intervals(band.start_ns[waits], band.end_ns[waits]))
    busy = Intervals(worked.start_ns + lead_ns, worked.end_ns + lead_ns)
    return StepGrid(rank, step, tuple(boxes), busy)


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


def schedule_named(stated: str) -> str:
    """The schedule's name as the model knows it, of what a person or torch's class calls it."""
    name = stated.lower().replace("_", "").replace("-", "").removeprefix("schedule")
    return "interleaved" if name in ("interleaved", "interleaved1f1b", "loopedbfs") else name


def schedule_of(last_stage: Sequence[Box], chunks: int) -> str:
    """The schedule by the boxes of the last stage.

    Weight gradients of their own tell zero bubble; else the first backward follows the first
    forward at once (1F1B) or comes after all of them (GPipe).
    """
    ordered = sorted(last_stage, key=lambda box: box.start_ns)
    if any(box.phase == "weight" for box in ordered):
        return "zerobubble"
    if chunks > 1:
        return "interleaved"
    first = next((i for i, box in enumerate(ordered) if box.phase == "backward"), 0)
    return "1f1b" if first == 1 else "gpipe"


def covered_ns(busy: Intervals, band: Band, lead_ns: int) -> int:
    """Exposed communication inside holes of the schedule that a wait for the pipeline follows.

    Without it the rank would only have waited longer in the same hole.
    """
    comm = np.isin(band.bucket, (COLLECTIVE, P2P, SKEW))
    start, end = band.start_ns + lead_ns, band.end_ns + lead_ns
    total = 0
    for low, high in zip(busy.end_ns[:-1].tolist(), busy.start_ns[1:].tolist(), strict=True):
        inside = (start >= low) & (end <= high)
        waits = np.flatnonzero(inside & (band.bucket == BUBBLE))
        if len(waits):
            before = inside & comm & (end <= start[waits[-1]])
            total += int((end - start)[before].sum())
    return total
