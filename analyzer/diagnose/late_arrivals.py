"""Ranks that arrive last at collectives more often than by chance, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import group_ids
from stepsplit.analyzer.buckets import StepSplit
from stepsplit.analyzer.report.diagnosis_rows import Lateness
from stepsplit.analyzer.significance import compute_last_p_value
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.split.transfers import Arrivals
from stepsplit.analyzer.trace import Bool, Int64

_MAX_P_VALUE = 1e-4

_MIN_LATE_NS = 20_000

_MIN_STEP_FRACTION = 0.01
"""Straggler criteria: p-value below _MAX_P_VALUE, median lateness above _MIN_LATE_NS, and a cost
to the group above this fraction of the step time."""


def compute_lateness(split: RunSplit) -> tuple[Lateness, ...]:
    """One row per rank, axis, kind of call and group size."""
    matched, arrivals = split.matched, split.arrivals
    ranks = np.array([rank.trace.rank for rank in split.ranks])
    steps = [rank.steps for rank in split.ranks]
    members = _find_member_arrivals(matched, arrivals, ranks)
    axes = (*(split.layout.name_group(group) for group in matched.groups), None)
    names = tuple(dict.fromkeys(axes))
    axis = np.array([names.index(name) for name in axes])[matched.group[members.row]]
    trace = matched.trace[members.row].astype(np.int64)
    message = matched.is_message[members.row]
    label = group_ids(trace, axis, message, members.members)
    step = _assign_steps(trace, arrivals.start_ns[members.row], steps)
    whole = [sum(one.split.step_ns for one in own) for own in steps]
    lateness = []
    for rows in _split_by_label(label):
        first = int(rows[0])
        i = int(trace[first])
        kind = (int(ranks[i]), names[int(axis[first])], bool(message[first]))
        lateness.append(_build_row(*kind, members, rows, step[rows], whole[i]))
    return tuple(lateness)


class _MemberArrivals(Struct, frozen=True):
    """One row per member of each complete call: whether it was last, and by how much.

    Columns of one length: row indexes Matched, members is the number of members of the call.
    """

    row: Int64
    members: Int64
    last: Bool
    late_ns: Int64


def _find_member_arrivals(
    matched: MatchedCalls, arrivals: Arrivals, ranks: Int64
) -> _MemberArrivals:
    """The members of complete calls; a call has no last member if one of the others left before."""
    row = np.flatnonzero((matched.key >= 0) & matched.leads)
    row = row[np.lexsort((arrivals.start_ns[row], matched.key[row]))]
    start = arrivals.start_ns[row]
    first = np.flatnonzero(np.diff(matched.key[row], prepend=-1))
    members = np.diff(first, append=len(row))
    end = first + members - 1
    late = start[end] - start[first + (members - 1) // 2]
    awaited = arrivals.last[row] == np.repeat(ranks[matched.trace[row[end]]], members)
    last = np.zeros(len(row), dtype=np.bool_)
    if len(row):
        last[end] = np.logical_and.reduceat(awaited, first) & (late > 0)
    return _MemberArrivals(row, np.repeat(members, members), last, np.repeat(late, members))


def _assign_steps(trace: Int64, at_ns: Int64, steps: Sequence[Sequence[StepSplit]]) -> Int64:
    """The index of the step of its trace in which each call started, -1 before the first."""
    step_index = np.full(len(trace), -1, dtype=np.int64)
    for rows in _split_by_label(trace):
        starts = np.array([one.start_ns for one in steps[trace[rows[0]]]], dtype=np.int64)
        step_index[rows] = np.searchsorted(starts, at_ns[rows], side="right") - 1
    return step_index


def _split_by_label(label: Int64) -> list[Int64]:
    order = np.argsort(label, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(order) else []


def _build_row(
    rank: int,
    axis: str | None,
    message: bool,
    arrivals: _MemberArrivals,
    rows: Int64,
    step: Int64,
    whole_ns: int,
) -> Lateness:
    late = arrivals.late_ns[rows][arrivals.last[rows]]
    members, last = int(arrivals.members[rows[0]]), len(late)
    median, total = int(np.median(late)) if last else 0, int(late.sum())
    chance = None if message else compute_last_p_value(last, len(rows), members)
    straggles = False
    if (
        chance is not None
        and chance < _MAX_P_VALUE
        and median > _MIN_LATE_NS
        and total > _MIN_STEP_FRACTION * whole_ns
    ):
        # Calls of one step are correlated, so a single slow step looks like many late calls: it
        # must be last more often than its share in more than half of the steps.
        calls = np.bincount(step + 1)
        of_late = np.bincount(step[arrivals.last[rows]] + 1, minlength=len(calls))
        straggles = 2 * int((of_late * members > calls).sum()) > int((calls > 0).sum())
    return Lateness(rank, axis, message, members, len(rows), last, median, total, chance, straggles)
