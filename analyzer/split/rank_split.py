"""One rank of a recording split: its steps, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.buckets import StepSplit
from stepsplit.analyzer.split.attribute import Attribution, Band, attribute
from stepsplit.analyzer.split.calls.arrivals import Arrivals
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.calls.waits import Pieces, pieces_of, without_lag
from stepsplit.analyzer.split.classify import Work
from stepsplit.analyzer.split.clocks.clock import Alignment, Clock
from stepsplit.analyzer.split.mesh.layout import Layout
from stepsplit.analyzer.split.phases import phases_of
from stepsplit.analyzer.split.pipeline.boxes import found_boxes
from stepsplit.analyzer.split.pipeline.grid import StepGrid, covered_ns, grid_of
from stepsplit.analyzer.split.pipeline.marked import Box
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import RankTrace


@dataclass(frozen=True, slots=True)
class Together:
    """What only all ranks together tell; the clocks are in the order of the traces."""

    matched: Matched
    arrivals: Arrivals
    alignment: Alignment
    layout: Layout


@dataclass(frozen=True, slots=True)
class RankSplit:
    """One rank: steps and grids on the common clock, what they are made of on its own.

    steps and grids have one entry a window, axis and phase one a row of the exposed pieces.
    """

    trace: RankTrace
    windows: Steps
    work: Work
    pieces: Pieces
    attribution: Attribution
    steps: tuple[StepSplit, ...]
    grids: tuple[StepGrid, ...]
    axis: tuple[str | None, ...]
    phase: tuple[str, ...]
    clock: Clock

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each step."""
        return tuple(step.step for step in self.steps)


def split_rank(
    index: int, trace: RankTrace, work: Work, windows: Steps, together: Together
) -> RankSplit:
    """The split of the rank whose trace has that index."""
    clock, layout = together.alignment.clocks[index], together.layout
    rows = together.matched.of_trace(index)
    pieces = pieces_of(trace, rows, together.arrivals, clock, layout)
    if not trace.on_device:
        pieces = without_lag(pieces, work.compute)
    found = attribute(windows.windows, work, pieces)
    boxes = found_boxes(trace, layout).boxes
    bands = [_cut(found.band, i, clock) for i in range(len(windows.windows))]
    grids = _grids(trace.rank, windows.windows, boxes, bands, clock)
    guessed = found.exposed.window[together.arrivals.estimated[rows][found.exposed.call]]
    phases = phases_of(trace, windows.windows, layout)
    return RankSplit(
        trace=trace,
        windows=windows,
        work=work,
        pieces=pieces,
        attribution=found,
        steps=_steps(windows, found, grids, bands, set(guessed.tolist()), clock),
        grids=grids,
        axis=_axes(trace, found, layout),
        phase=tuple(phases[call] for call in found.exposed.call.tolist()),
        clock=clock,
    )


def _axes(trace: RankTrace, found: Attribution, layout: Layout) -> tuple[str | None, ...]:
    """The axis of the group of each exposed row."""
    axes = (*(layout.axis_of(group) for group in trace.groups), None)
    return tuple(axes[group] for group in trace.calls.group_id[found.exposed.call].tolist())


def _steps(
    windows: Steps,
    found: Attribution,
    grids: Sequence[StepGrid],
    bands: Sequence[Band],
    estimated: set[int],
    clock: Clock,
) -> tuple[StepSplit, ...]:
    """The steps on the common clock; one that a guessed call held up is estimated."""
    covered = [covered_ns(g.busy, band) for g, band in zip(grids, bands, strict=True)]
    return tuple(
        StepSplit(
            rank=grids[i].rank,
            step=window.step,
            kind=window.kind,
            start_ns=clock.common_at(window.start_ns),
            split=replace(found.splits[i], bubble_covered_ns=covered[i]),
            estimated=i in estimated,
        )
        for i, window in enumerate(windows.windows)
    )


def _grids(
    rank: int,
    windows: Sequence[StepWindow],
    boxes: Sequence[Box],
    bands: Sequence[Band],
    clock: Clock,
) -> tuple[StepGrid, ...]:
    """The boxes that begin in each window; bands and what comes out are on the common clock."""
    own = np.array([(box.start_ns, box.end_ns) for box in boxes], dtype=np.int64).reshape(-1, 2)
    start, end = clock.common_ns(own[:, 0]).tolist(), clock.common_ns(own[:, 1]).tolist()
    moved = [
        replace(box, start_ns=low, end_ns=high)
        for box, low, high in zip(boxes, start, end, strict=True)
    ]
    edges = own[:, 0].searchsorted([(w.start_ns, w.end_ns) for w in windows]).reshape(-1, 2)
    return tuple(
        grid_of(rank, window.step, moved[low:high], band)
        for window, band, (low, high) in zip(windows, bands, edges.tolist(), strict=True)
    )


def _cut(band: Band, window: int, clock: Clock) -> Band:
    """The band of one window, on the common clock."""
    rows = slice(*band.window.searchsorted([window, window + 1]).tolist())
    start, end = clock.common_ns(band.start_ns[rows]), clock.common_ns(band.end_ns[rows])
    return Band(band.window[rows], band.bucket[rows], start, end)
