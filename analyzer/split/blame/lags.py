"""Of each wait: what the rank that came last did more of than the one that waited for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.split.blame.exposed_waits import Waits
from stepsplit.analyzer.split.blame.levels import RankTime
from stepsplit.analyzer.split.calls.waits import BUBBLE, SKEW
from stepsplit.analyzer.trace import Bool, Int64

Float = npt.NDArray[np.float64]
COMPUTE, COPY, IDLE = (BUCKETS.index(name) for name in ("compute", "copy", "idle"))
_MOVING = [BUCKETS.index(name) for name in ("collective", "p2p")]
_WAITING = [SKEW, BUBBLE]
_LITTLE = 0.01
"""Work beyond that of the peers is told apart only where it is such a part of all work."""


@dataclass(frozen=True, slots=True)
class Lags:
    """For each wait the shares of its causes, 0..1.

    direct has one column a cause of blame.CAUSES, passed is what the owner itself waited for: the
    two add up to 1 where the owner is known, which is a rank of the recording. named: the owner is
    known by its number at least. fair is the part of direct that is compute such as anybody's.
    low and high bound the owner's waits, as rows, to which what is passed on goes.
    """

    direct: Float
    passed: Float
    fair: Float
    known: Bool
    named: Bool
    low: Int64
    high: Int64
    length_ns: Int64

    def mean_of(self, amount: Float) -> Float:
        """Of each wait's range of the owner's waits, the sum of an amount over their length."""
        sums = np.concatenate(([0.0], np.cumsum(amount)))
        length = np.concatenate(([0], np.cumsum(self.length_ns)))
        total = length[self.high] - length[self.low]
        return np.where(total > 0, (sums[self.high] - sums[self.low]) / np.maximum(total, 1), 0.0)

    def passed_on(self, amount: Float) -> Float:
        """Amounts (waits, origins) handed to the waits of the ranges, by their length."""
        length = np.concatenate(([0], np.cumsum(self.length_ns)))
        density = amount / np.maximum(length[self.high] - length[self.low], 1)[:, np.newaxis]
        edges = np.zeros((len(amount) + 1, amount.shape[1]))
        np.add.at(edges, self.low, density)
        np.add.at(edges, self.high, -density)
        handed = np.cumsum(edges, axis=0)[:-1] * self.length_ns[:, np.newaxis]
        return np.maximum(handed, 0.0)


def lags_of(ranks: Sequence[RankTime], waits: Waits) -> Lags:
    """The causes of each wait."""
    level = np.concatenate([one.level_ns for one in ranks])
    came = np.concatenate([one.came_ns for one in ranks])
    late = np.concatenate([one.late_ns for one in ranks])
    begin = np.array([one.activity.start_ns[0] for one in ranks])
    known = (waits.waited_for >= 0) & (waits.waited_for != waits.who)
    level = np.maximum(level, np.maximum(begin[waits.who], begin[waits.waited_for]))
    level = np.minimum(level, came)
    more = _spent(ranks, waits.waited_for, level, late) - _spent(ranks, waits.who, level, came)
    during = _spent(ranks, waits.waited_for, came, late)
    more = np.maximum(more, 0)
    more = np.where(more.sum(axis=1, keepdims=True) > 0, more, during)
    low, high = _ranges(ranks, waits, level, late)
    return _shared(ranks, waits, more.astype(np.float64), known, low, high)


def _spent(ranks: Sequence[RankTime], who: Int64, since: Int64, until: Int64) -> Int64:
    """What ranks spent in each bucket from one instant to another; nothing for an unknown rank."""
    found = np.zeros((len(who), len(BUCKETS)), dtype=np.int64)
    until = np.maximum(until, since)
    for i, one in enumerate(ranks):
        rows = np.flatnonzero(who == i)
        if len(rows):
            found[rows] = one.activity.spent_ns(until[rows]) - one.activity.spent_ns(since[rows])
    return found


def _ranges(
    ranks: Sequence[RankTime], waits: Waits, since: Int64, until: Int64
) -> tuple[Int64, Int64]:
    """The rows of the owner's waits that end between two instants."""
    low, high = (np.zeros(len(waits.waited_for), dtype=np.int64) for _ in range(2))
    for i, one in enumerate(ranks):
        rows = np.flatnonzero(waits.waited_for == i)
        low[rows] = waits.first[i] + np.searchsorted(one.end_ns, since[rows], side="right")
        high[rows] = waits.first[i] + np.searchsorted(one.end_ns, until[rows], side="right")
    return low, np.maximum(low, high)


def _shared(
    ranks: Sequence[RankTime], waits: Waits, more: Float, known: Bool, low: Int64, high: Int64
) -> Lags:
    length = np.concatenate(([0], np.cumsum(waits.length_ns)))
    can_pass = known & (length[high] > length[low])
    waited = np.where(can_pass, more[:, _WAITING].sum(axis=1), 0.0)
    moved = more[:, _MOVING].sum(axis=1)
    slower, extra = _beyond(ranks, waits)
    computed = more[:, COMPUTE]
    direct = np.stack(
        [computed * (1 - extra), computed * extra, more[:, IDLE], more[:, COPY], moved], axis=1
    )
    total = direct.sum(axis=1) + waited
    nothing = total <= 0
    direct[nothing, -1], total = 1.0, np.where(nothing, 1.0, total)
    fair = computed * (1 - slower) / total
    fair = np.where(waits.bucket == BUBBLE, fair, 0.0)
    share = direct / total[:, np.newaxis]
    passed = np.where(known, waited / total, 0.0)
    return Lags(share, passed, fair, known, waits.owner >= 0, low, high, waits.length_ns)


def _beyond(ranks: Sequence[RankTime], waits: Waits) -> tuple[Float, Float]:
    """(which part of the owner's compute is beyond its peers', how much of that is more work)."""
    beyond, extra = np.zeros(len(waits.waited_for)), np.zeros(len(waits.waited_for))
    for i, one in enumerate(ranks):
        rows = np.flatnonzero(waits.waited_for == i)
        place = np.clip(np.searchsorted(one.step, waits.step[rows]), 0, len(one.step) - 1)
        slower, more = one.workload.slower[place], one.workload.more[place]
        beyond[rows] = slower + more
        told = beyond[rows] > _LITTLE
        extra[rows] = np.where(told, more / np.maximum(beyond[rows], 1e-12), 0.0)
    return beyond, extra
