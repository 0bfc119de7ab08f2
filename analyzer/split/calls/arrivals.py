"""When the data of each call moved, told from all of its members: what else it did was waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import least_of
from stepsplit.analyzer.split.calls.match import TOGETHER, Matched
from stepsplit.analyzer.split.calls.transfers import guessed_transfers, message_transfers
from stepsplit.analyzer.split.clocks.clock import Alignment
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Int32, Int64, RankTrace

_FROM_ROOT = [OP_CODE[op] for op in ("broadcast", "scatter")]
_MAY_LEAVE = [OP_CODE[op] for op in OPS if op not in (*TOGETHER, "recv")]
"""What may end before a member comes. A receive only seems to, by a clock that is a little off."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When the data of each call moved, on the common clock; columns of one length.

    Data moves from moves_ns to moved_ns, the rest of the call is waiting. last is the rank that
    came last, -1 where nobody knows; estimated marks calls of which a member is not there.
    """

    start_ns: Int64
    end_ns: Int64
    moves_ns: Int64
    moved_ns: Int64
    last: Int32
    estimated: Bool


def arrivals_of(traces: Sequence[RankTrace], matched: Matched, alignment: Alignment) -> Arrivals:
    """When data moved in each call, and who came last."""
    start, end = matched.start_ns.copy(), matched.end_ns.copy()
    for i, clock in enumerate(alignment.clocks):
        rows = matched.of_trace(i)
        start[rows], end[rows] = clock.common_ns(start[rows]), clock.common_ns(end[rows])
    ranks = np.array([trace.rank for trace in traces], dtype=np.int32)
    came = _last_to_come(matched, start, end, ranks)
    moved = message_transfers(traces, matched, came.at_ns, end, ~came.left_early)
    guess = guessed_transfers(traces, matched, came.at_ns, end)
    waited = guess >= 0
    moves = np.where(waited, end - guess, came.at_ns)
    last = np.where(waited, _absent(matched, ranks), came.rank).astype(np.int32)
    return Arrivals(start, end, np.maximum(moves, start), moved, last, matched.key < 0)


@dataclass(frozen=True, slots=True)
class _Coming:
    """For each row the last arrival that it had to wait for, and whose; -1 where it has no fellow.

    left_early: some end of the call came before somebody's arrival, so that it tells no transfer.
    """

    at_ns: Int64
    rank: Int32
    left_early: Bool


def _last_to_come(matched: Matched, start: Int64, end: Int64, ranks: Int32) -> _Coming:
    members = _Members.of(matched, start)
    last = members.last_of(matched)
    may_leave = (matched.shared >= 0) & np.isin(matched.op, _MAY_LEAVE)
    left = np.zeros(len(members.after) + 1, dtype=np.bool_)
    left[matched.shared[may_leave & (end <= start[last])]] = True
    left_early: Bool = left[matched.shared] & (matched.shared >= 0)
    rows = np.flatnonzero(left_early)
    last[rows] = _waited_for(matched, members, rows, start, end)
    who = np.where(matched.shared >= 0, ranks[matched.trace[last]], -1).astype(np.int32)
    return _Coming(start[last], who, left_early)


@dataclass(frozen=True, slots=True)
class _Members:
    """The first rows of the members, by call and then by arrival; after[call] is its end."""

    order: Int64
    after: Int64

    @classmethod
    def of(cls, matched: Matched, start: Int64) -> _Members:
        known = np.flatnonzero((matched.shared >= 0) & matched.leads)
        order = known[np.lexsort((start[known], matched.shared[known]))]
        calls = np.arange(int(matched.shared.max(initial=-1)) + 1)
        return cls(order, np.searchsorted(matched.shared[order], calls, side="right"))

    def of_call(self, call: int) -> Int64:
        """The rows of one call, in the order of their arrival."""
        return self.order[self.after[call - 1] if call else 0 : self.after[call]]

    def last_of(self, matched: Matched) -> Int64:
        """For each row that of the last member of its call, itself where it has no fellow."""
        last = np.arange(len(matched))
        rows = np.flatnonzero(matched.shared >= 0)
        last[rows] = self.order[self.after[matched.shared[rows]] - 1]
        return last


def _waited_for(
    matched: Matched, members: _Members, rows: Int64, start: Int64, end: Int64
) -> list[int]:
    """For rows of calls that some member left early, the last that came before that.

    From a root (broadcast, scatter) all wait for the root alone, so who comes after the first has
    left is not the root, and nobody waited for it.
    """
    first_end = least_of(matched.shared, end, len(members.after))
    last = []
    for row in rows.tolist():
        call = int(matched.shared[row])
        fellows = members.of_call(call)
        limit = first_end[call] if matched.op[row] in _FROM_ROOT else end[row]
        place = int(np.searchsorted(start[fellows], limit, side="right")) - 1
        last.append(int(fellows[max(place, 0)]))
    return last


def _absent(matched: Matched, present: Int32) -> Int32:
    """The rank that each incomplete call lacks, -1 where it lacks none or several."""
    here = set(present.tolist())
    lacking = [set(group.ranks) - here for group in matched.groups]
    only = [next(iter(ranks)) if len(ranks) == 1 else -1 for ranks in lacking]
    of_group = np.array([*only, -1], dtype=np.int32)[matched.group]
    return np.where(matched.key < 0, of_group, -1).astype(np.int32)
