"""How often each kind of call is made in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.calls.kinds import CallKind, kinds_of
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.trace import Int64, RankTrace


@dataclass(frozen=True, slots=True)
class StepCalls:
    """The calls of one kind in a full step, those of all recorded ranks together: as most steps
    have it, the least and the most that a step has."""

    kind: CallKind
    calls: int
    least: int
    most: int


def step_calls(
    traces: Sequence[RankTrace], steps: Sequence[Steps], matched: Matched
) -> tuple[StepCalls, ...]:
    """A row for each kind of call that a full step has; a call is of the window that it began in.

    Most steps decide rank by rank: a call may begin just before or after the edge of a step.
    """
    window, counted = _windows(steps, matched)
    rows = [
        _row(kind, rows[matched.leads[rows]], matched, window, counted)
        for kind, rows in kinds_of(traces, matched)
    ]
    return tuple(row for row in rows if row.most)


def _windows(steps: Sequence[Steps], matched: Matched) -> tuple[Int64, list[int]]:
    """(for each call which of its rank's full steps it began in, -1 for none; how many there are
    by rank)."""
    window = np.full(len(matched), -1, dtype=np.int64)
    for trace, own in enumerate(steps):
        rows = matched.of_trace(trace)
        start, full = matched.start_ns[rows], own.counted
        starts = np.array([one.start_ns for one in full], dtype=np.int64)
        ends = np.array([one.end_ns for one in full], dtype=np.int64)
        at = np.searchsorted(starts, start, side="right") - 1
        window[rows] = np.where((at >= 0) & (start < ends[at]), at, -1)
    return window, [len(own.counted) for own in steps]


def _row(
    kind: CallKind, rows: Int64, matched: Matched, window: Int64, counted: Sequence[int]
) -> StepCalls:
    rows = rows[window[rows] >= 0]
    ranks = np.unique(matched.trace[rows]).tolist()
    of_ranks = [
        np.bincount(window[rows[matched.trace[rows] == rank]], minlength=counted[rank])
        for rank in ranks
    ]
    usual = sum(int(np.bincount(counts).argmax()) for counts in of_ranks)
    least, most = (sum(int(edge(counts)) for counts in of_ranks) for edge in (np.min, np.max))
    return StepCalls(kind, usual, least, most)
