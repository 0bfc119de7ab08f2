"""Causality bounds of a clock: no call ends before the calls that it depends on have started."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.ops import SYMMETRIC_OPS
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.trace import OP_CODE, Int64

# Causality bounds of a clock: a call cannot end before the calls that it depends on have started.
#
# A member of a collective cannot end before the last member has started, and a receive cannot end
# before its send has started. Each such pair between a rank and the aligned ranks is an upper or
# lower bound of the rank's offset.

_MUTUAL = [OP_CODE[op] for op in (*SYMMETRIC_OPS, "barrier")]

_SEND, _RECV = OP_CODE["send"], OP_CODE["recv"]

_NEVER = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)


class Bounds(Struct, frozen=True):
    """The offset lies in [low_ns, high_ns]; None means unbounded on that side."""

    low_ns: int | None
    high_ns: int | None

    @property
    def both(self) -> bool:
        """Whether the offset has consistent bounds on both sides."""
        return self.low_ns is not None and self.high_ns is not None and self.low_ns <= self.high_ns

    @classmethod
    def intersect(cls, bounds: Iterable[Bounds]) -> Bounds:
        """The intersection of all bounds."""
        every = tuple(bounds)
        low = [one.low_ns for one in every if one.low_ns is not None]
        high = [one.high_ns for one in every if one.high_ns is not None]
        return cls(max(low, default=None), min(high, default=None))

    def compute_least_shift(self) -> int:
        """The smallest shift of offset 0 that satisfies the bounds; 0 if they are inconsistent."""
        return self.clamp(0) if self.both else 0

    def clamp(self, offset_ns: int) -> int:
        """The closest offset within the bounds; unchanged if they are inconsistent."""
        low = offset_ns if self.low_ns is None else self.low_ns
        high = offset_ns if self.high_ns is None else self.high_ns
        return offset_ns if low > high else min(max(offset_ns, low), high)


class Causality:
    """The start and end of calls of the aligned ranks, on the common clock."""

    def __init__(self, matched: MatchedCalls) -> None:
        mutual = np.isin(matched.op, _MUTUAL) | matched.together
        known = (matched.shared >= 0) & matched.leads
        begins = mutual | (matched.op == _SEND) | ~matched.waits
        self._begins = np.where(known & begins, matched.shared, -1)
        # What only receives needs the data of all.
        receives = (matched.shared >= 0) & ~matched.arrives & matched.waits
        needs = (known & (mutual | (matched.op == _RECV)) & matched.waits) | receives
        self._needs = np.where(needs, matched.shared, -1)
        self._shared = matched.shared
        self._calls = int(matched.shared.max(initial=-1)) + 1
        self._forget()

    def copy_empty(self) -> Causality:
        """A copy with the same calls and without any times."""
        empty = copy(self)
        empty._forget()
        return empty

    def _forget(self) -> None:
        self._touched = np.zeros(self._calls, dtype=np.bool_)
        self._last_start = np.full(self._calls, _NEVER[0])
        self._first_end = np.full(self._calls, _NEVER[1])

    def record(self, rows: slice, start_ns: Int64, end_ns: Int64) -> Int64:
        """Records the rows of one more rank, on the common clock; returns the calls that no earlier
        one has."""
        begins, needs = self._begins[rows], self._needs[rows]
        shared = self._shared[rows][self._shared[rows] >= 0]
        new = np.unique(shared[~self._touched[shared]])
        self._touched[new] = True
        np.maximum.at(self._last_start, begins[begins >= 0], start_ns[begins >= 0])
        np.minimum.at(self._first_end, needs[needs >= 0], end_ns[needs >= 0])
        return new

    def compute_bounds(self, rows: slice, start_ns: Int64, end_ns: Int64) -> Bounds:
        """The bounds of the offset of a rank with these rows."""
        begins, needs = self._begins[rows], self._needs[rows]
        high = _compute_slack(end_ns[needs >= 0], self._last_start[needs[needs >= 0]])
        low = _compute_slack(self._first_end[begins[begins >= 0]], start_ns[begins >= 0])
        return Bounds(None if low is None else -low, high)


def _compute_slack(end_ns: Int64, start_ns: Int64) -> int | None:
    """The smallest distance from start to end; None if no pair is known."""
    known = (end_ns != _NEVER[1]) & (start_ns != _NEVER[0])
    return int((end_ns[known] - start_ns[known]).min()) if known.any() else None
