"""How much slower kernels are while communication moves data beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.split.calls.waits import COLLECTIVE, P2P, Pieces
from stepsplit.analyzer.split.classify import computing
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import Int64, RankTrace

LEAST_PLACES = 10
"""Fewer kernels that ran both ways say little."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Compute under moving communication takes ratio times what it takes without.

    places are the kernels of a step that were compared, under and alone how often they ran;
    lost_ns is what the runs under communication took beyond what they take alone, in all steps.
    """

    ratio: float
    places: int
    under: int
    alone: int
    lost_ns: int


def slowdown_under_communication(
    trace: RankTrace, steps: Steps, pieces: Pieces, rules: Rules = BUILT_IN
) -> Contention | None:
    """Kernels with communication moving data for at least half of their time, against the same
    kernels in other steps without any; None where fewer than LEAST_PLACES ran both ways.

    A trace states no shapes, and kernels of one name beside communication are often of other
    shapes than the rest, so only the n-th run of a name in a step is held against the n-th in other
    steps, among the full steps that run that name equally often. The ratio is that of the medians,
    each place weighted by the time that its runs under communication take alone. Runs that
    communication only touches are left out.
    """
    rows = np.flatnonzero(computing(trace, rules))
    start, took = trace.events.start_ns[rows], trace.events.dur_ns[rows]
    place = _places(trace.events.name_id[rows].astype(np.int64), start, steps.windows)
    beside = _covered_ns(start, took, _moving(pieces))
    under, alone = (place >= 0) & (2 * beside >= took) & (took > 0), (place >= 0) & (beside == 0)
    both = np.intersect1d(place[under], place[alone])
    if len(both) < LEAST_PLACES:
        return None
    under, alone = under & np.isin(place, both), alone & np.isin(place, both)
    runs = np.bincount(np.searchsorted(both, place[under]))
    took_ns = float(runs @ _medians(place[under], took[under]))
    alone_ns = float(runs @ _medians(place[alone], took[alone]))
    lost_ns = round(took_ns - alone_ns)
    return Contention(
        took_ns / max(alone_ns, 1.0), len(both), int(under.sum()), int(alone.sum()), lost_ns
    )


def _moving(pieces: Pieces) -> Intervals:
    """When data moves; a call that only waits leaves the memory and the links alone."""
    moving = np.isin(pieces.bucket, (COLLECTIVE, P2P))
    return union(pieces.start_ns[moving], pieces.end_ns[moving])


def _places(name: Int64, start: Int64, windows: Sequence[StepWindow]) -> Int64:
    """A number for each (name, n-th run in its step); -1 outside of full steps, and in those that
    run the name more or less often than most do. start ascends."""
    full = [w for w in windows if w.kind == "full"]
    step = np.searchsorted([w.start_ns for w in full], start, side="right") - 1
    inside = step >= 0
    inside[inside] &= start[inside] < np.array([w.end_ns for w in full])[step[inside]]
    place, first = np.full(len(name), -1, dtype=np.int64), 0
    rows = np.flatnonzero(inside)
    rows = rows[np.lexsort((rows, step[rows], name[rows]))]
    for same in np.split(rows, np.flatnonzero(np.diff(name[rows])) + 1):
        counts = np.bincount(step[same], minlength=len(full))
        usual = int(np.bincount(counts[counts > 0]).argmax()) if len(same) else 0
        nth = np.arange(len(same)) - np.repeat(np.cumsum(counts) - counts, counts)
        place[same] = np.where(counts[step[same]] == usual, first + nth, -1)
        first += usual
    return place


def _medians(place: Int64, took: Int64) -> Int64:
    """The median of each place, in their order; the lower of two in the middle."""
    order = np.lexsort((took, place))
    _, first, count = np.unique(place[order], return_index=True, return_counts=True)
    return np.asarray(took[order][first + (count - 1) // 2])


def _covered_ns(start: Int64, took: Int64, by: Intervals) -> Int64:
    """For how long of each interval the set holds."""
    sums = np.concatenate(([0], np.cumsum(by.end_ns - by.start_ns)))

    def until(at: Int64) -> Int64:
        begun = np.searchsorted(by.start_ns, at, side="right")
        last = np.maximum(begun - 1, 0)
        over = np.maximum(by.end_ns[last] - at, 0) if len(by) else np.zeros_like(at)
        return np.asarray(sums[begun] - np.where(begun > 0, over, 0))

    return until(start + took) - until(start)
