"""Slowdown of kernels under concurrent communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, collect_intervals, find_interval, union
from stepsplit.analyzer.buckets import TRANSFERS
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.split.transfers import Pieces
from stepsplit.analyzer.trace import Int64, RankTrace

MIN_PLACES = 10
"""Minimum number of kernels that ran both with and without communication."""


class Contention(Struct, frozen=True):
    """Slowdown of compute under concurrent data transfer: ratio of times with and without it.

    places is the number of kernels of a step that were compared, under and alone the number of runs
    with and without communication; lost_ns is the extra time of the runs under communication, over
    all steps.
    """

    ratio: float
    places: int
    under: int
    alone: int
    lost_ns: int


def measure_contention(trace: RankTrace, steps: Steps, pieces: Pieces) -> Contention | None:
    """Compares kernels that overlap with data transfer with the same kernels that do not.

    Overlapped means for at least half of the kernel's time; None for fewer than MIN_PLACES
    comparable kernels.

    A trace has no shapes, and kernels of the same name under communication often have other shapes.
    So only the n-th run of a name in a step is compared with the n-th run in other full steps that
    run the name equally often. The ratio is between medians; each kernel is weighted by its time
    without communication. Runs overlapped for less than half their time are ignored.
    """
    rows = np.flatnonzero(trace.kinds.computes)
    start, took = trace.events.start_ns[rows], trace.events.dur_ns[rows]
    place = _number_places(trace.events.name_id[rows].astype(np.int64), start, steps.windows)
    # The intervals in which data moves; a waiting call uses neither memory nor links.
    moving = np.isin(pieces.bucket, TRANSFERS)
    covered_ns = _measure_covered_ns(
        start, took, union(pieces.start_ns[moving], pieces.end_ns[moving])
    )
    under, alone = (
        (place >= 0) & (2 * covered_ns >= took) & (took > 0),
        (place >= 0) & (covered_ns == 0),
    )
    both = np.intersect1d(place[under], place[alone])
    if len(both) < MIN_PLACES:
        return None
    under, alone = under & np.isin(place, both), alone & np.isin(place, both)
    runs = np.bincount(np.searchsorted(both, place[under]))
    took_ns = float(runs @ _compute_medians(place[under], took[under]))
    alone_ns = float(runs @ _compute_medians(place[alone], took[alone]))
    lost_ns = round(took_ns - alone_ns)
    return Contention(
        took_ns / max(alone_ns, 1.0), len(both), int(under.sum()), int(alone.sum()), lost_ns
    )


def _number_places(name: Int64, start: Int64, windows: Sequence[StepWindow]) -> Int64:
    """A number for each (name, n-th run in its step); -1 outside full steps and in steps that run
    the name more or less often than usual. start ascends."""
    full = [w for w in windows if w.kind == "full"]
    step = find_interval(collect_intervals(full), start)
    place, first = np.full(len(name), -1, dtype=np.int64), 0
    rows = np.flatnonzero(step >= 0)
    rows = rows[np.lexsort((rows, step[rows], name[rows]))]
    for same in np.split(rows, np.flatnonzero(np.diff(name[rows])) + 1):
        counts = np.bincount(step[same], minlength=len(full))
        usual = int(np.bincount(counts[counts > 0]).argmax()) if len(same) else 0
        nth = np.arange(len(same)) - np.repeat(np.cumsum(counts) - counts, counts)
        place[same] = np.where(counts[step[same]] == usual, first + nth, -1)
        first += usual
    return place


def _compute_medians(place: Int64, took: Int64) -> Int64:
    """The median of each place; for an even count the lower of the two middle values."""
    order = np.lexsort((took, place))
    _, first, count = np.unique(place[order], return_index=True, return_counts=True)
    return np.asarray(took[order][first + (count - 1) // 2])


def _measure_covered_ns(start: Int64, took: Int64, by: Intervals) -> Int64:
    """The time for which each interval is covered by the set."""
    sums = np.concatenate(([0], np.cumsum(by.end_ns - by.start_ns)))

    def until(at: Int64) -> Int64:
        begun = np.searchsorted(by.start_ns, at, side="right")
        last = np.maximum(begun - 1, 0)
        over = np.maximum(by.end_ns[last] - at, 0) if len(by) else np.zeros_like(at)
        return np.asarray(sums[begun] - np.where(begun > 0, over, 0))

    return until(start + took) - until(start)
