"""One clock for all ranks: from collectives that end together, else from what causality allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.clocks.bodies import EXACT, Body, bodies_of
from stepsplit.analyzer.split.clocks.bounds import Bounds, Causality
from stepsplit.analyzer.split.clocks.clock import Alignment, Clock
from stepsplit.analyzer.split.clocks.ends import Known, ends_of
from stepsplit.analyzer.split.clocks.fit import ClockFit
from stepsplit.analyzer.trace import Int64, Note, RankTrace, wall_lead_ns


def align(traces: Sequence[RankTrace], matched: Matched) -> Alignment:
    """The clocks of the ranks against the first rank's.

    Kernels of one all_reduce, all_gather or reduce_scatter end together. They join first the ranks
    of each host, then the hosts: the one that has most of such calls in common with ranks whose
    clocks are known, then the next. gloo's worker threads do not end together: there, and without
    such a call, the ranks of a host share its wall clock. What is left is placed within the bounds
    of causality; what nothing joins keeps its wall clock, with a note.
    """
    joining = _Joining(traces, matched)
    while joining.left:
        joining.join()
    t0 = min(trace.t0_unix_ns for trace in traces)
    clocks = tuple(joining.clocks[i] for i in range(len(traces)))
    return Alignment(clocks, t0, joining.notes())


class _Joining:
    """The clocks that are known so far, and what they say of when each call ended."""

    def __init__(self, traces: Sequence[RankTrace], matched: Matched) -> None:
        self.clocks: dict[int, Clock] = {}
        self._traces, self._matched = traces, matched
        self._wall = wall_lead_ns(traces)
        self._ends = ends_of(traces, matched, self._wall)
        self._known = Known(self._ends)
        self._causality = Causality(matched)
        self.left = bodies_of(traces, matched, self._ends, self._wall)
        self._own = {body.traces: body.ends_ns(self._ends) for body in self.left}
        self._of_host: dict[str, Clock] = {}
        self._unlinked: list[int] = []

    def join(self) -> None:
        """Finds the clocks of one more body, the one that can be joined best."""
        body = max(self.left, key=self._reasons)
        self.left.remove(body)
        fit = self._fit(body) if self.clocks else EXACT
        for trace, own in zip(body.traces, body.clocks, strict=True):
            clock = self._clock(trace, None if fit is None else own.then(fit), body.host)
            self.clocks[trace] = clock
            self._of_host.setdefault(body.host, clock)
            self._learn(trace, clock)

    def notes(self) -> tuple[Note, ...]:
        """Which ranks kept their wall clocks though others have other ones."""
        return tuple(
            Note(
                "clock_unaligned",
                f"rank {self._traces[i].rank} shares no collective and no host with rank "
                f"{self._traces[0].rank}: its wall clock is taken as it is",
                self._traces[i].rank,
            )
            for i in sorted(self._unlinked)
        )

    def _reasons(self, body: Body) -> tuple[int, bool, int, int]:
        """How well the body can be joined now; of equal ones the first."""
        shared = len(self._known.shared(self._own[body.traces][0]))
        touching = sum(self._causality.touching(self._rows(trace)) for trace in body.traces)
        return shared, body.host in self._of_host, touching, -body.traces[0]

    def _fit(self, body: Body) -> ClockFit | None:
        """The body's clock by ends, within the bounds of causality; None where no call joins it."""
        rows, end_ns = self._own[body.traces]
        known = np.isin(rows, self._known.shared(rows))
        if not known.any():
            return None
        fit = self._known.fit(rows[known], end_ns[known])
        bounds = [
            self._bounds(trace, self._clock_by(trace, own.then(fit)))
            for trace, own in zip(body.traces, body.clocks, strict=True)
        ]
        return fit.moved(Bounds.all_of(bounds).least_move())

    def _clock(self, trace: int, fit: ClockFit | None, host: str) -> Clock:
        if fit is not None:
            return self._clock_by(trace, fit)
        return self._by_host(trace, host) or self._by_bounds(trace)

    def _clock_by(self, trace: int, fit: ClockFit) -> Clock:
        return Clock(
            rank=self._traces[trace].rank,
            host=self._traces[trace].host,
            offset_ns=round(fit.offset_ns),
            wall_ns=int(self._wall[trace]),
            pivot_ns=round(fit.pivot_ns),
            drift_ppm=fit.drift * 1e6 or None,
            sigma_ns=math.ceil(fit.sigma_ns),
            residual_ns=round(fit.residual_ns),
        )

    def _by_host(self, trace: int, host: str) -> Clock | None:
        """The wall clock that the rank shares with another of its host, if one is known."""
        mate, wall = self._of_host.get(host), int(self._wall[trace])
        if mate is None:
            return None
        one = self._traces[trace]
        sigma = mate.sigma_ns or None
        return Clock(one.rank, one.host, mate.offset_ns, wall, mate.pivot_ns, mate.drift_ppm, sigma)

    def _by_bounds(self, trace: int) -> Clock:
        """The middle of what causality allows, as of a round trip; else the wall clock, bounded."""
        one, wall = self._traces[trace], int(self._wall[trace])
        bounds = self._bounds(trace, Clock(one.rank, one.host, 0, wall))
        if bounds.low_ns is not None and bounds.high_ns is not None and bounds.both:
            half = (bounds.high_ns - bounds.low_ns) // 2
            return Clock(one.rank, one.host, bounds.low_ns + half, wall, sigma_ns=half + 1)
        self._unlinked.append(trace)
        return Clock(one.rank, one.host, bounds.nearest(0), wall)

    def _rows(self, trace: int) -> slice:
        return self._matched.of_trace(trace)

    def _common(self, trace: int, clock: Clock) -> tuple[Int64, Int64]:
        rows, matched = self._rows(trace), self._matched
        return clock.common_ns(matched.start_ns[rows]), clock.common_ns(matched.end_ns[rows])

    def _bounds(self, trace: int, clock: Clock) -> Bounds:
        """What causality leaves of the offset between that clock and the common one."""
        return self._causality.bounds(self._rows(trace), *self._common(trace, clock))

    def _learn(self, trace: int, clock: Clock) -> None:
        """When the rank's calls began and ended, on the common clock, is known from here on."""
        rows = self._ends.of_trace(trace)
        ended = clock.common_ns(self._ends.end_ns[rows] - clock.wall_ns)
        self._known.learn(rows, ended, float(clock.sigma_ns or 0))
        self._causality.learn(self._rows(trace), *self._common(trace, clock))
