"""One clock for all ranks: from collectives that end together, else from what causality allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.clock_bounds import Bounds, Causality
from stepsplit.analyzer.split.clock_fit import ClockFit, fitted
from stepsplit.analyzer.split.clocks import Alignment, Clock
from stepsplit.analyzer.split.labels import labels_of, most_of
from stepsplit.analyzer.split.match import TOGETHER, Matched
from stepsplit.analyzer.trace import OP_CODE, Int64, Note, RankTrace, wall_lead_ns


def align(traces: Sequence[RankTrace], matched: Matched) -> Alignment:
    """The clocks of the ranks against the first rank's.

    Kernels of one all_reduce, all_gather or reduce_scatter end together: the rank that has most of
    them in common with ranks whose clocks are known is joined to all of these, then the next.
    gloo's worker threads do not end together: there, and without such a collective, the ranks of a
    host share its wall clock. What is left is placed within the bounds of causality; what nothing
    joins keeps its wall clock, with a note.
    """
    joining = _Joining(traces, matched)
    left = set(range(len(traces)))
    while left:
        new = max(left, key=lambda i: (*joining.reasons(i), -i))
        joining.join(new)
        left.discard(new)
    t0 = min(trace.t0_unix_ns for trace in traces)
    return Alignment(
        tuple(joining.clocks[i] for i in range(len(traces))), t0, joining.notes(traces)
    )


def _domain(trace: RankTrace) -> str:
    """The host whose wall clock the rank reads; a rank without a host reads its own."""
    return trace.host or f"rank {trace.rank}"


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls that end together, one row a member: call, trace, kind, and end by wall clock."""

    call: Int64
    trace: Int64
    kind: Int64
    end_ns: Int64


def _calls_together(traces: Sequence[RankTrace], matched: Matched, wall: Int64) -> _Calls:
    on_device = np.array([trace.on_device for trace in traces])
    together = np.isin(matched.op, [OP_CODE[op] for op in TOGETHER]) & (matched.shared >= 0)
    rows = np.flatnonzero(together & on_device[matched.trace])
    member = labels_of(matched.shared[rows], matched.trace[rows])
    count = int(member.max(initial=-1)) + 1
    end = most_of(member, matched.end_ns[rows] + wall[matched.trace[rows]], count)
    one = rows[np.unique(member, return_index=True)[1]]
    kind = labels_of(matched.group[one], matched.op[one], matched.message_bytes[one])
    return _Calls(matched.shared[one], matched.trace[one].astype(np.int64), kind, end)


class _Joining:
    """The clocks that are known so far, and what they say of when each call ended."""

    def __init__(self, traces: Sequence[RankTrace], matched: Matched) -> None:
        self.clocks: dict[int, Clock] = {}
        self._traces, self._matched = traces, matched
        self._wall = wall_lead_ns(traces)
        self._calls = _calls_together(traces, matched, self._wall)
        self._rows = [np.flatnonzero(self._calls.trace == i) for i in range(len(traces))]
        calls = int(self._calls.call.max(initial=-1)) + 1
        self._sum_ns, self._known = np.zeros(calls), np.zeros(calls, dtype=np.int64)
        self._in_common = np.zeros(len(traces), dtype=np.int64)
        self._causality = Causality(matched)
        self._touched = np.zeros(int(matched.shared.max(initial=-1)) + 1, dtype=np.bool_)
        self._in_touch = np.zeros(len(traces), dtype=np.int64)
        self._hosts: set[str] = set()
        self._unlinked: set[int] = set()

    def reasons(self, new: int) -> tuple[int, bool, int]:
        """How well the rank can be joined now."""
        host_known = _domain(self._traces[new]) in self._hosts
        return int(self._in_common[new]), host_known, int(self._in_touch[new])

    def join(self, new: int) -> None:
        """Finds the clock of one more rank."""
        self.clocks[new] = self._clock(new)
        self._hosts.add(_domain(self._traces[new]))
        self._learn(new)

    def notes(self, traces: Sequence[RankTrace]) -> tuple[Note, ...]:
        """Which ranks kept their wall clocks though others have other ones."""
        return tuple(
            Note(
                "clock_unaligned",
                f"rank {traces[i].rank} shares no collective and no host with rank "
                f"{traces[0].rank}: its wall clock is taken as it is",
                traces[i].rank,
            )
            for i in sorted(self._unlinked)
        )

    def _clock(self, new: int) -> Clock:
        trace, wall = self._traces[new], int(self._wall[new])
        if not self.clocks:
            return Clock(trace.rank, trace.host, 0, wall, 0, None, 0, 0)
        if self._in_common[new]:
            return self._by_ends(new)
        if mates := [c for i, c in self.clocks.items() if self._same_host(i, new)]:
            return Clock(trace.rank, trace.host, mates[0].offset_at(wall), wall)
        return self._by_bounds(new)

    def _same_host(self, known: int, new: int) -> bool:
        return _domain(self._traces[known]) == _domain(self._traces[new])

    def _by_ends(self, new: int) -> Clock:
        rows = self._rows[new][self._known[self._calls.call[self._rows[new]]] > 0]
        call, here = self._calls.call[rows], self._calls.end_ns[rows]
        there = np.rint(self._sum_ns[call] / self._known[call]).astype(np.int64)
        found = fitted(here, here - there, self._calls.kind[rows])
        return self._within_bounds(new, _clock_of(self._traces[new], int(self._wall[new]), found))

    def _within_bounds(self, new: int, clock: Clock) -> Clock:
        """The clock, moved where an end of its calls would come before what it needs."""
        bounds = self._bounds(new, clock)
        moved = bounds.nearest(0) if bounds.both else 0
        if not moved:
            return clock
        return Clock(
            clock.rank, clock.host, clock.offset_ns + moved, clock.wall_ns, clock.pivot_ns,
            clock.drift_ppm, (clock.sigma_ns or 0) + abs(moved), clock.residual_ns,
        )  # fmt: skip

    def _by_bounds(self, new: int) -> Clock:
        """The middle of what causality allows, as of a round trip; else the wall clock, bounded."""
        trace, wall = self._traces[new], int(self._wall[new])
        bounds = self._bounds(new, Clock(trace.rank, trace.host, 0, wall))
        if bounds.both:
            assert bounds.low_ns is not None and bounds.high_ns is not None
            half = (bounds.high_ns - bounds.low_ns) // 2
            return Clock(trace.rank, trace.host, bounds.low_ns + half, wall, sigma_ns=half + 1)
        self._unlinked.add(new)
        return Clock(trace.rank, trace.host, bounds.nearest(0), wall)

    def _bounds(self, new: int, clock: Clock) -> Bounds:
        """What causality leaves of the offset between that clock and the common one."""
        rows, matched = self._matched.of_trace(new), self._matched
        start, end = matched.start_ns[rows], matched.end_ns[rows]
        return self._causality.bounds(rows, clock.common_ns(start), clock.common_ns(end))

    def _learn(self, new: int) -> None:
        """When the rank's calls began and ended, on the common clock, is known from here on."""
        chosen, clock, matched = self._rows[new], self.clocks[new], self._matched
        call = self._calls.call[chosen]
        self._sum_ns[call] += clock.common_ns(self._calls.end_ns[chosen] - clock.wall_ns)
        fresh = (self._known == 0) & (np.bincount(call, minlength=len(self._known)) > 0)
        self._known[call] += 1
        met = self._calls.trace[fresh[self._calls.call]]
        self._in_common += np.bincount(met, minlength=len(self._in_common))
        rows = matched.of_trace(new)
        start, end = clock.common_ns(matched.start_ns[rows]), clock.common_ns(matched.end_ns[rows])
        self._causality.learn(rows, start, end)
        self._touch(matched.shared[rows])

    def _touch(self, calls: Int64) -> None:
        """Ranks that share these calls, of whatever kind, can be bounded by causality."""
        fresh = np.zeros(len(self._touched), dtype=np.bool_)
        fresh[calls[calls >= 0]] = True
        fresh &= ~self._touched
        self._touched |= fresh
        shared = self._matched.shared
        known = np.flatnonzero(shared >= 0)
        met = self._matched.trace[known[fresh[shared[known]]]]
        self._in_touch += np.bincount(met, minlength=len(self._in_touch))


def _clock_of(trace: RankTrace, wall_ns: int, found: ClockFit) -> Clock:
    return Clock(
        rank=trace.rank,
        host=trace.host,
        offset_ns=round(found.offset_ns),
        wall_ns=wall_ns,
        pivot_ns=round(found.pivot_ns),
        drift_ppm=found.drift * 1e6 or None,
        sigma_ns=int(found.sigma_ns) + 1,
        residual_ns=round(found.residual_ns),
    )
