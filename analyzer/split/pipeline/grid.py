"""The pipeline's grid, and the bubble that its holes make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.arrays import Intervals, most_of, overlap_ns, union, without
from stepsplit.analyzer.split.attribute import Band
from stepsplit.analyzer.split.calls.waits import BUBBLE, COLLECTIVE, P2P, SKEW
from stepsplit.analyzer.split.pipeline.marked import Box


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


def grid_of(rank: int, step: int, boxes: Sequence[Box], band: Band) -> StepGrid:
    """The boxes of one step; busy leaves out waits for the pipeline that lie inside of a box.

    A range may hold the wait for what it works on (torch's own annotations do), which is no work.
    """
    start = np.array([box.start_ns for box in boxes], dtype=np.int64)
    end = np.array([box.end_ns for box in boxes], dtype=np.int64)
    waits = np.isin(band.bucket, (P2P, BUBBLE))
    worked = without(union(start, end), Intervals(band.start_ns[waits], band.end_ns[waits]))
    return StepGrid(rank, step, numbered(boxes), worked)


def numbered(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """The boxes of a step with each microbatch's number once.

    A schedule that is called for one microbatch after the other begins anew each time.
    """
    passes: Counter[tuple[int, int, str]] = Counter()
    count = max((box.microbatch for box in boxes), default=0) + 1
    found = []
    for box in boxes:
        again = passes[box.stage, box.microbatch, box.phase]
        passes[box.stage, box.microbatch, box.phase] += 1
        found.append(replace(box, microbatch=box.microbatch + again * count) if again else box)
    return tuple(found)


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
