"""The pipeline grid of a run and its bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import Intervals, group_max, overlap_ns, subtract, union
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.split.attribute import BucketBands
from stepsplit.analyzer.split.microbatch_slots import MicrobatchSlot


class StepGrid(Struct, frozen=True):
    """The slots of one rank in one step, and the intervals of work in them, on the common clock."""

    rank: int
    step: int
    slots: tuple[MicrobatchSlot, ...]
    busy: Intervals


class StageBubble(Struct, frozen=True):
    """One stage in one step: the window of its whole pipeline, and the bubble of the stage in
    it."""

    rank: int
    step: int
    stage: int
    window_ns: int
    bubble_ns: int


def build_grid(rank: int, step: int, slots: Sequence[MicrobatchSlot], waits: Intervals) -> StepGrid:
    """The grid of one step; busy excludes these waits for other stages inside the slots.

    An annotation may contain the wait for its input, as torch's own do.
    """
    start = np.array([box.start_ns for box in slots], dtype=np.int64)
    end = np.array([box.end_ns for box in slots], dtype=np.int64)
    worked = subtract(union(start, end), waits)
    return StepGrid(rank, step, number_microbatches(slots), worked)


def number_microbatches(slots: Sequence[MicrobatchSlot]) -> tuple[MicrobatchSlot, ...]:
    """The slots of a step with unique microbatch numbers.

    A schedule that is called once per microbatch starts at 0 each time.
    """
    passes: Counter[tuple[int, int, str]] = Counter()
    count = max((box.microbatch for box in slots), default=0) + 1
    renumbered = []
    for slot in slots:
        again = passes[slot.stage, slot.microbatch, slot.phase]
        passes[slot.stage, slot.microbatch, slot.phase] += 1
        renumbered.append(
            replace(slot, microbatch=slot.microbatch + again * count) if again else slot
        )
    return tuple(renumbered)


def compute_stage_bubbles(
    pipelines: Sequence[Sequence[int]], grids: Mapping[tuple[int, int], StepGrid]
) -> tuple[StageBubble, ...]:
    """The bubble of every stage of every pipeline whose ranks are all recorded.

    The window runs from the first forward to the last backward over all stages of the pipeline; the
    bubble is the part without forwards and backwards, including their own communication.
    """
    bubbles = []
    for ranks in pipelines:
        for step in sorted({step for rank, step in grids if rank in ranks}):
            parts = [grids[rank, step] for rank in ranks if (rank, step) in grids]
            if len(parts) == len(ranks) and all(len(part.busy) for part in parts):
                first = min(int(part.busy.start_ns[0]) for part in parts)
                last = max(int(part.busy.end_ns[-1]) for part in parts)
                window = Intervals(np.array([first]), np.array([last]))
                bubbles += [
                    StageBubble(
                        part.rank,
                        step,
                        stage,
                        last - first,
                        last - first - overlap_ns(part.busy, window),
                    )
                    for stage, part in zip(range(len(ranks)), parts, strict=True)
                ]
    return tuple(bubbles)


def sum_bubble_covered_ns(busy: Intervals, band: BucketBands) -> int:
    """Exposed communication inside the pipeline bubble that is followed by a pipeline wait.

    Without it the rank would only have waited longer in the same bubble.
    """
    after = busy.start_ns[1:]
    bubble = np.searchsorted(busy.end_ns[:-1], band.start_ns, side="right") - 1
    inside = np.flatnonzero(bubble >= 0)
    inside = inside[band.end_ns[inside] <= after[bubble[inside]]]
    waits = inside[band.bucket[inside] == Bucket.BUBBLE]
    last = group_max(bubble[waits], band.start_ns[waits], len(after))
    comm = inside[np.isin(band.bucket[inside], (Bucket.COLLECTIVE, Bucket.P2P, Bucket.SKEW))]
    covered = comm[band.end_ns[comm] <= last[bubble[comm]]]
    return int((band.end_ns - band.start_ns)[covered].sum())
