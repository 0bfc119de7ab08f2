"""What causality says of a clock: nothing ends before that which it needs has begun.

No member of a collective ends before the last has started, and no receive ends before its send has
begun. Each such pair of a rank here and ranks on the common clock bounds this rank's offset, from
above or from below.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.calls.match import TOGETHER, Matched
from stepsplit.analyzer.trace import OP_CODE, Int64

_MUTUAL = [OP_CODE[op] for op in (*TOGETHER, "barrier")]
_SEND, _RECV = OP_CODE["send"], OP_CODE["recv"]
_NEVER = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offset lies in [low_ns, high_ns]; None is no bound on that side."""

    low_ns: int | None
    high_ns: int | None

    @property
    def both(self) -> bool:
        """Whether the offset is bounded, without contradiction, from both sides."""
        return self.low_ns is not None and self.high_ns is not None and self.low_ns <= self.high_ns

    @classmethod
    def all_of(cls, bounds: Iterable[Bounds]) -> Bounds:
        """What all of these leave."""
        every = tuple(bounds)
        low = [one.low_ns for one in every if one.low_ns is not None]
        high = [one.high_ns for one in every if one.high_ns is not None]
        return cls(max(low, default=None), min(high, default=None))

    def least_move(self) -> int:
        """By how much an offset of 0 must move to lie within; 0 where the bounds contradict."""
        return self.nearest(0) if self.both else 0

    def nearest(self, offset_ns: int) -> int:
        """The offset within the bounds that is nearest; as it is where they contradict."""
        low = offset_ns if self.low_ns is None else self.low_ns
        high = offset_ns if self.high_ns is None else self.high_ns
        return offset_ns if low > high else min(max(offset_ns, low), high)


class Causality:
    """When the calls of ranks whose clocks are known began and ended, on the common clock."""

    def __init__(self, matched: Matched) -> None:
        mutual = np.isin(matched.op, _MUTUAL)
        known = (matched.shared >= 0) & matched.leads
        self._begins = np.where(known & (mutual | (matched.op == _SEND)), matched.shared, -1)
        self._needs = np.where(known & (mutual | (matched.op == _RECV)), matched.shared, -1)
        self._shared = matched.shared
        self._calls = int(matched.shared.max(initial=-1)) + 1
        self._forget()

    def blank(self) -> Causality:
        """The same calls, of which nothing is known yet."""
        other = copy(self)
        other._forget()
        return other

    def _forget(self) -> None:
        self._touched = np.zeros(self._calls, dtype=np.bool_)
        self._last_start = np.full(self._calls, _NEVER[0])
        self._first_end = np.full(self._calls, _NEVER[1])

    def learn(self, rows: slice, start_ns: Int64, end_ns: Int64) -> None:
        """The rows of one more rank, on the common clock."""
        begins, needs = self._begins[rows], self._needs[rows]
        self._touched[self._shared[rows][self._shared[rows] >= 0]] = True
        np.maximum.at(self._last_start, begins[begins >= 0], start_ns[begins >= 0])
        np.minimum.at(self._first_end, needs[needs >= 0], end_ns[needs >= 0])

    def touching(self, rows: slice) -> int:
        """How many of the rows are of a call that a known rank made too."""
        shared = self._shared[rows]
        return int(self._touched[shared[shared >= 0]].sum())

    def bounds(self, rows: slice, start_ns: Int64, end_ns: Int64) -> Bounds:
        """The bounds on the offset of a rank whose rows are these, on the clock to be bounded."""
        begins, needs = self._begins[rows], self._needs[rows]
        high = _slack(end_ns[needs >= 0], self._last_start[needs[needs >= 0]])
        low = _slack(self._first_end[begins[begins >= 0]], start_ns[begins >= 0])
        return Bounds(None if low is None else -low, high)


def _slack(end_ns: Int64, start_ns: Int64) -> int | None:
    """By how much the ends come after the starts at least; None where no pair is known."""
    known = (end_ns != _NEVER[1]) & (start_ns != _NEVER[0])
    return int((end_ns[known] - start_ns[known]).min()) if known.any() else None
