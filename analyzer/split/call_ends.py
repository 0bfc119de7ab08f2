"""End times of calls that end simultaneously on all members."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import first_rows, group_ids, group_max, list_distinct
from stepsplit.analyzer.split.clock_fit import BIAS_NS, ClockFit, fit_offset_and_drift
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.trace import Int64, RankTrace


class CallEnds(Struct, frozen=True):
    """One row per member of each call on a device that ends on all of them at once, by trace.

    kind is one number for each (group, op, size), with one bias per member; end_ns is on the
    member's wall clock.
    """

    call: Int64
    trace: Int64
    kind: Int64
    end_ns: Int64

    def find_rows(self, trace: int) -> Int64:
        """The rows of one trace."""
        return np.arange(*np.searchsorted(self.trace, [trace, trace + 1]).tolist())


def collect_ends(traces: Sequence[RankTrace], matched: MatchedCalls, wall_ns: Int64) -> CallEnds:
    """The ends of the matched calls, without gloo, whose worker threads do not end
    simultaneously."""
    on_device = np.array([trace.on_device for trace in traces])
    together = matched.together & (matched.shared >= 0)
    rows = np.flatnonzero(together & on_device[matched.trace])
    member = group_ids(matched.shared[rows], matched.trace[rows])
    count = int(member.max(initial=-1)) + 1
    end = group_max(member, matched.end_ns[rows] + wall_ns[matched.trace[rows]], count)
    first_row = rows[first_rows(member)]
    by_trace = np.argsort(matched.trace[first_row], kind="stable")
    first_row, end = first_row[by_trace], end[by_trace]
    trace = matched.trace[first_row].astype(np.int64)
    kind = group_ids(
        matched.group[first_row], matched.op[first_row], matched.message_bytes[first_row]
    )
    return CallEnds(matched.shared[first_row], trace, kind, end)


class KnownEnds:
    """The known end time of each call, the mean over the aligned members, and its uncertainty."""

    def __init__(self, ends: CallEnds) -> None:
        calls = int(ends.call.max(initial=-1)) + 1
        self._ends = ends
        self._sum_ns, self._count = np.zeros(calls), np.zeros(calls, dtype=np.int64)
        self._doubt_ns = np.full(calls, np.inf)

    def learn(self, rows: Int64, common_ns: Int64, sigma_ns: float) -> Int64:
        """Records the ends of one more rank, on the common clock; returns the calls whose end was
        not known before."""
        call = self._ends.call[rows]
        new: Int64 = call[self._count[call] == 0]
        self._sum_ns[call] += common_ns
        self._count[call] += 1
        self._doubt_ns[call] = np.minimum(self._doubt_ns[call], sigma_ns)
        return new

    def select_known(self, rows: Int64) -> Int64:
        """Selects the rows whose call has a known end."""
        return rows[self._count[self._ends.call[rows]] > 0]

    def fit_clock(self, rows: Int64, end_ns: Int64) -> ClockFit:
        """Fits the clock to the known ends of these rows, at least one."""
        call = self._ends.call[rows]
        known_ns = np.rint(self._sum_ns[call] / self._count[call]).astype(np.int64)
        kind = self._ends.kind[rows]
        clock_fit = fit_offset_and_drift(
            end_ns, end_ns - known_ns, group_ids(kind, self._ends.trace[rows])
        )
        bias_ns = BIAS_NS / float(np.sqrt(len(list_distinct(kind))))
        return clock_fit.add_uncertainty(bias_ns).add_uncertainty(
            float(np.median(self._doubt_ns[call]))
        )
