"""Which ranks come last to collectives more often than chance has it, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, lgamma, log, log1p

import numpy as np

from stepsplit.analyzer.arrays import labels_of
from stepsplit.analyzer.buckets import StepSplit
from stepsplit.analyzer.split.calls.arrivals import Arrivals
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.mesh.layout import Layout
from stepsplit.analyzer.trace import Bool, Int64, RankTrace

_CHANCE = 1e-4
_LATE_NS = 20_000
_OF_STEPS = 0.01
"""A straggler is less likely than this by chance, is later than this in the median call in which it
comes last, and costs its group more than this share of its steps."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How often one rank came last, of the collectives or messages on one axis that it was in.

    Only calls count whose members, so many each, are all there, and each call once. last is in how
    many of them all others waited for this rank; late_ns how much later than the median member (of
    two in the middle the earlier) it then came, the median and the sum. p_value is the chance of
    coming last so often where all members are alike, 1 at no more than its share; None for
    messages, where it is the schedule that decides which end waits.
    """

    rank: int
    axis: str | None
    message: bool
    members: int
    calls: int
    last: int
    late_ns_median: int
    late_ns_total: int
    p_value: float | None
    straggler: bool

    @property
    def last_fraction(self) -> float:
        """In which part of the calls that it was in the rank came last, 0..1."""
        return self.last / self.calls


def lateness_of(
    traces: Sequence[RankTrace],
    matched: Matched,
    arrivals: Arrivals,
    layout: Layout,
    steps: Sequence[Sequence[StepSplit]],
) -> tuple[Lateness, ...]:
    """A row for each rank, axis, kind of call and size of group; steps are those of each trace.

    A straggler is also last more often than its share in more than half of its steps: the calls of
    one step hang together, so that one slow step would else look like many late calls.
    """
    seen = _seen(matched, arrivals, np.array([trace.rank for trace in traces]))
    axes = (*(layout.axis_of(group) for group in matched.groups), None)
    names = tuple(dict.fromkeys(axes))
    axis = np.array([names.index(name) for name in axes])[matched.group[seen.row]]
    trace = matched.trace[seen.row].astype(np.int64)
    message = matched.is_message[seen.row]
    label = labels_of(trace, axis, message, seen.members)
    step = _steps(trace, arrivals.start_ns[seen.row], steps)
    whole = [sum(one.split.step_ns for one in own) for own in steps]
    found = []
    for rows in _parts(label):
        first = int(rows[0])
        i = int(trace[first])
        kind = (traces[i].rank, names[int(axis[first])], bool(message[first]))
        found.append(_row(*kind, seen, rows, step[rows], whole[i]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A row a member of each complete call: is it the last, and how late; columns of one length.

    row indexes Matched, members is how many the call has.
    """

    row: Int64
    members: Int64
    last: Bool
    late_ns: Int64


def _seen(matched: Matched, arrivals: Arrivals, ranks: Int64) -> _Seen:
    """The members; nobody is last whom some member did not wait for, as it had left already."""
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
    return _Seen(row, np.repeat(members, members), last, np.repeat(late, members))


def _steps(trace: Int64, at_ns: Int64, steps: Sequence[Sequence[StepSplit]]) -> Int64:
    """In the how manieth step of its trace each call began, -1 for before the first."""
    found = np.full(len(trace), -1, dtype=np.int64)
    for rows in _parts(trace):
        starts = np.array([one.start_ns for one in steps[trace[rows[0]]]], dtype=np.int64)
        found[rows] = np.searchsorted(starts, at_ns[rows], side="right") - 1
    return found


def _parts(label: Int64) -> list[Int64]:
    order = np.argsort(label, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(order) else []


def _row(
    rank: int, axis: str | None, message: bool, seen: _Seen, rows: Int64, step: Int64, whole_ns: int
) -> Lateness:
    late = seen.late_ns[rows][seen.last[rows]]
    members, last = int(seen.members[rows[0]]), len(late)
    median, total = int(np.median(late)) if last else 0, int(late.sum())
    chance = None if message else chance_of(last, len(rows), members)
    straggles = (
        chance is not None
        and chance < _CHANCE
        and median > _LATE_NS
        and total > _OF_STEPS * whole_ns
        and _in_most_steps(step, seen.last[rows], members)
    )
    return Lateness(rank, axis, message, members, len(rows), last, median, total, chance, straggles)


def _in_most_steps(step: Int64, last: Bool, members: int) -> bool:
    """Whether it was last more often than its share in more than half of the steps."""
    calls = np.bincount(step + 1)
    often = np.bincount(step[last] + 1, minlength=len(calls)) * members > calls
    return 2 * int(often.sum()) > int((calls > 0).sum())


def chance_of(last: int, calls: int, members: int) -> float:
    """The chance of coming last at least so often in calls of so many equal members.

    The upper tail of the binomial distribution of probability 1 / members; 1 at or below its mean.
    """
    if last * members <= calls:
        return 1.0
    odds = 1 / (members - 1)
    first = (
        lgamma(calls + 1) - lgamma(last + 1) - lgamma(calls - last + 1)
        - last * log(members) + (calls - last) * log1p(-1 / members)
    )  # fmt: skip
    more = np.arange(last, min(calls, last + 40 * (isqrt(calls) + 1)))
    terms = np.concatenate(([0.0], np.cumsum(np.log((calls - more) / (more + 1) * odds))))
    return min(1.0, float(np.exp(first + terms).sum()))
