"""Ranks of one host whose clocks are known to each other: what one of them tells holds for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.clocks.bounds import Causality
from stepsplit.analyzer.split.clocks.ends import Ends, Known
from stepsplit.analyzer.split.clocks.fit import ClockFit
from stepsplit.analyzer.trace import Int64, RankTrace

EXACT = ClockFit(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Body:
    """Some ranks of a host, and the clock of each against that of the first; never empty."""

    host: str
    traces: tuple[int, ...]
    clocks: tuple[ClockFit, ...]

    def ends_ns(self, ends: Ends) -> tuple[Int64, Int64]:
        """(the rows of all of its ranks, their ends on its first rank's wall clock)."""
        rows = [ends.of_trace(trace) for trace in self.traces]
        at = [c.common_ns(ends.end_ns[r]) for c, r in zip(self.clocks, rows, strict=True)]
        return np.concatenate(rows), np.concatenate(at)


def bodies_of(
    traces: Sequence[RankTrace], matched: Matched, ends: Ends, wall_ns: Int64
) -> list[Body]:
    """The ranks in bodies: those of a host that calls join; a rank without a host is alone."""
    hosts = [trace.host or f"rank {trace.rank}" for trace in traces]
    causality, rows = Causality(matched), [ends.of_trace(i) for i in range(len(traces))]
    found = []
    for host in dict.fromkeys(hosts):
        left = [trace for trace, its in enumerate(hosts) if its == host]
        while left:
            own = {trace: rows[trace] for trace in left}
            body = _Growing(matched, ends, wall_ns, causality.blank(), own).body(host)
            found.append(body)
            left = [trace for trace in left if trace not in body.traces]
    return sorted(found, key=lambda body: body.traces[0])


class _Growing:
    """A body that begins with the first of some ranks, given with their rows of ends."""

    def __init__(
        self,
        matched: Matched,
        ends: Ends,
        wall_ns: Int64,
        causality: Causality,
        rows: dict[int, Int64],
    ) -> None:
        self._matched, self._ends, self._wall = matched, ends, wall_ns
        self._known, self._causality = Known(ends), causality
        self._left = rows
        self._clocks: dict[int, ClockFit] = {}
        self._take(next(iter(rows)), EXACT)

    def body(self, host: str) -> Body:
        """It and all that calls join to it, those with most calls in common first."""
        while self._left:
            new = max(self._left, key=lambda trace: len(self._known.shared(self._left[trace])))
            shared = self._known.shared(self._left[new])
            if not len(shared):
                break
            self._take(new, self._bounded(new, self._known.fit(shared, self._ends.end_ns[shared])))
        return Body(host, tuple(self._clocks), tuple(self._clocks.values()))

    def _bounded(self, trace: int, fit: ClockFit) -> ClockFit:
        """The clock, moved where an end of its calls would come before what it needs."""
        rows = self._matched.of_trace(trace)
        return fit.moved(self._causality.bounds(rows, *self._edges(trace, fit)).least_move())

    def _take(self, trace: int, clock: ClockFit) -> None:
        self._clocks[trace] = clock
        rows = self._left.pop(trace)
        self._known.learn(rows, clock.common_ns(self._ends.end_ns[rows]), clock.sigma_ns)
        self._causality.learn(self._matched.of_trace(trace), *self._edges(trace, clock))

    def _edges(self, trace: int, clock: ClockFit) -> tuple[Int64, Int64]:
        """When the rank's calls began and ended, by that clock."""
        rows, wall = self._matched.of_trace(trace), self._wall[trace]
        begin, end = self._matched.start_ns[rows] + wall, self._matched.end_ns[rows] + wall
        return clock.common_ns(begin), clock.common_ns(end)
