"""When calls that end together ended, as far as the clocks of their members are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import distinct, firsts_of, labels_of, most_of
from stepsplit.analyzer.split.calls.match import TOGETHER, Matched
from stepsplit.analyzer.split.clocks.fit import BIAS_NS, ClockFit, fitted
from stepsplit.analyzer.trace import OP_CODE, Int64, RankTrace


@dataclass(frozen=True, slots=True)
class Ends:
    """One row a member of each all_reduce, all_gather and reduce_scatter of a device.

    kind is one number for each (group, op, size), its members' ends have a bias each; end_ns is by
    the member's wall clock.
    """

    call: Int64
    trace: Int64
    kind: Int64
    end_ns: Int64

    def of_trace(self, trace: int) -> Int64:
        """The rows of one trace."""
        return np.flatnonzero(self.trace == trace)


def ends_of(traces: Sequence[RankTrace], matched: Matched, wall_ns: Int64) -> Ends:
    """The ends of the matched calls; gloo's worker threads do not end together and are left out."""
    on_device = np.array([trace.on_device for trace in traces])
    together = np.isin(matched.op, [OP_CODE[op] for op in TOGETHER]) & (matched.shared >= 0)
    rows = np.flatnonzero(together & on_device[matched.trace])
    member = labels_of(matched.shared[rows], matched.trace[rows])
    count = int(member.max(initial=-1)) + 1
    end = most_of(member, matched.end_ns[rows] + wall_ns[matched.trace[rows]], count)
    one = rows[firsts_of(member)]
    trace = matched.trace[one].astype(np.int64)
    kind = labels_of(matched.group[one], matched.op[one], matched.message_bytes[one])
    return Ends(matched.shared[one], trace, kind, end)


class Known:
    """The calls that ended at a known time, the mean of their members', and how sure that is."""

    def __init__(self, ends: Ends) -> None:
        calls = int(ends.call.max(initial=-1)) + 1
        self._ends = ends
        self._sum_ns, self._count = np.zeros(calls), np.zeros(calls, dtype=np.int64)
        self._doubt_ns = np.full(calls, np.inf)

    def learn(self, rows: Int64, common_ns: Int64, sigma_ns: float) -> None:
        """The ends of one more rank, on the common clock."""
        call = self._ends.call[rows]
        self._sum_ns[call] += common_ns
        self._count[call] += 1
        self._doubt_ns[call] = np.minimum(self._doubt_ns[call], sigma_ns)

    def shared(self, rows: Int64) -> Int64:
        """Which of these rows are of a known call."""
        return rows[self._count[self._ends.call[rows]] > 0]

    def fit(self, rows: Int64, end_ns: Int64) -> ClockFit:
        """The clock by which these rows, of known calls and at least one, ended then."""
        call = self._ends.call[rows]
        there = np.rint(self._sum_ns[call] / self._count[call]).astype(np.int64)
        kind = self._ends.kind[rows]
        found = fitted(end_ns, end_ns - there, labels_of(kind, self._ends.trace[rows]))
        theirs = BIAS_NS / float(np.sqrt(len(distinct(kind))))
        return found.doubted(theirs).doubted(float(np.median(self._doubt_ns[call])))
