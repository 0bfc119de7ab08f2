"""Clock synchronization: offset and drift of each host, from collectives and causality."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.split.call_ends import CallEnds, KnownEnds, collect_ends
from stepsplit.analyzer.split.causality import Bounds, Causality
from stepsplit.analyzer.split.clock import Alignment, Clock
from stepsplit.analyzer.split.clock_fit import EXACT, ClockFit
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.trace import (
    OP_CODE,
    Bool,
    Int64,
    Lack,
    Note,
    RankTrace,
    compute_start_offsets_ns,
)


def align(traces: Sequence[RankTrace], matched: MatchedCalls) -> Alignment:
    """Aligns the clocks of all ranks with the first rank's.

    Kernels of one all_reduce, all_gather or reduce_scatter end simultaneously. They align first the
    ranks of each host, then the hosts: always the one with the most such calls shared with aligned
    ranks. gloo's worker threads do not end simultaneously; there, and without such calls, ranks of
    a host share its wall clock. Other ranks are placed within the bounds by causality and by the
    recorder's probes of the hosts' clocks. Where none of the ranks left has a link, the first of
    them keeps its wall clock, and ranks that only have links to it are an island with it, with a
    note on each.
    """
    joining = _ClockJoin(traces, matched)
    while joining.left:
        joining.join_next()
    t0 = min(trace.t0_unix_ns for trace in traces)
    clocks = tuple(joining.clocks[i] for i in range(len(traces)))
    return Alignment(clocks, t0, joining.build_notes())


class _ClockJoin:
    """The clocks aligned so far, and the end times of calls that follow from them."""

    def __init__(self, traces: Sequence[RankTrace], matched: MatchedCalls) -> None:
        self.clocks: dict[int, Clock] = {}
        self._traces, self._matched = traces, matched
        self._wall = compute_start_offsets_ns(traces)
        self._ends = collect_ends(traces, matched, self._wall)
        self._known = KnownEnds(self._ends)
        self._causality, self._message_ends = Causality(matched), Causality(matched)
        self._is_single_send = _find_single_sends(traces, matched)
        self.left = find_clock_domains(traces, matched, self._ends, self._wall)
        self._own = {body.traces: body.compute_ends_ns(self._ends) for body in self.left}
        self._domain = np.empty(len(traces), dtype=np.int64)
        for index, domain in enumerate(self.left):
            self._domain[list(domain.traces)] = index
        count, linked = len(self.left), np.flatnonzero(matched.shared >= 0)
        self._shared = _LinkCounts(self._ends.call, self._domain[self._ends.trace], count)
        self._touching = _LinkCounts(
            matched.shared[linked], self._domain[matched.trace[linked]], count
        )
        self._of_host: dict[str, Clock] = {}
        # The ranks of a host have its clock, and its probe.
        self._probed = {trace.host: trace.probed_clock for trace in traces}
        self._island: int | None = None

    def join_next(self) -> None:
        """Aligns one more clock domain, the one with the best evidence; where nothing links any of
        them, one begins an island."""
        domains = sorted(self.left, key=self._score_domain, reverse=True)
        links = ((domain, self._link_domain(domain)) for domain in domains)
        domain, clocks = next((one for one in links if one[1]), (domains[0], ()))
        if not clocks:
            if self.clocks:
                # Forgets the times so far, which are not comparable with those of this domain.
                # Nothing is left that they would align, as all domains have been tried.
                self._island = self._traces[domain.traces[0]].rank
                self._causality = self._causality.copy_empty()
                self._message_ends = self._message_ends.copy_empty()
                self._touching.count[:] = 0
                self._of_host.clear()
            clocks = self._build_clocks(domain, EXACT)
        self.left.remove(domain)
        for trace, clock in zip(domain.traces, clocks, strict=True):
            self.clocks[trace] = clock
            self._of_host.setdefault(domain.host, clock)
            # Records when the rank's calls started and ended on the common clock.
            rows = self._ends.find_rows(trace)
            ended = clock.map_to_common_ns(self._ends.end_ns[rows] - clock.wall_ns)
            self._shared.add(self._known.learn(rows, ended, float(clock.sigma_ns or 0)))
            edges = self._convert_to_common(trace, clock)
            self._touching.add(self._causality.record(self._find_rows(trace), *edges))
            self._message_ends.record(self._find_rows(trace), *self._take_send_ends(trace, *edges))

    def build_notes(self) -> tuple[Note, ...]:
        """Notes on ranks without a link to the first one."""
        first, notes = self._traces[0].rank, []
        for _, clock in sorted(self.clocks.items()):
            if clock.island is None:
                continue
            text = f"no call and no host aligns rank {clock.island} with rank {first}"
            if clock.rank == clock.island:
                text += ": its wall clock is used uncorrected"
            else:
                text = f"rank {clock.rank} is aligned with rank {clock.island} alone, and {text}"
            notes.append(Note("clock_unaligned", text, clock.rank, Lack.CLOCK))
        return tuple(notes)

    def _link_domain(self, domain: ClockDomain) -> tuple[Clock, ...]:
        """The clocks of a domain's ranks by what links them to the aligned ones, () if nothing
        does."""
        fit = self._fit_domain(domain)
        if fit is not None:
            return self._build_clocks(domain, fit)
        host_clock = self._of_host.get(domain.host)
        touching = self._touching.count[self._domain[domain.traces[0]]]
        if host_clock is None and (touching or self._probed.get(domain.host)):
            placed = (self._place_within_bounds(trace) for trace in domain.traces)
            host_clock = next((clock for clock in placed if clock), None)
        if host_clock is None:
            return ()
        return tuple(
            host_clock
            if host_clock.rank == self._traces[trace].rank
            else self._take_host_clock(trace, host_clock)
            for trace in domain.traces
        )

    def _build_clocks(self, domain: ClockDomain, fit: ClockFit) -> tuple[Clock, ...]:
        return tuple(
            self._build_clock(trace, own.compose(fit))
            for trace, own in zip(domain.traces, domain.clocks, strict=True)
        )

    def _score_domain(self, domain: ClockDomain) -> tuple[int, bool, int, int]:
        """The evidence for aligning this domain now, as a sort key; the first one if tied."""
        index = int(self._domain[domain.traces[0]])
        shared, touching = int(self._shared.count[index]), int(self._touching.count[index])
        return shared, domain.host in self._of_host, touching, -domain.traces[0]

    def _fit_domain(self, domain: ClockDomain) -> ClockFit | None:
        """The domain's clock from shared ends, within the causality bounds; None without shared
        calls."""
        if not self._shared.count[self._domain[domain.traces[0]]]:
            return None
        rows, end_ns = self._own[domain.traces]
        known = np.isin(rows, self._known.select_known(rows))
        fit = self._known.fit_clock(rows[known], end_ns[known])
        clocks = zip(domain.traces, self._build_clocks(domain, fit), strict=True)
        bounds = [self._compute_bounds(trace, clock) for trace, clock in clocks]
        return fit.shift(Bounds.intersect(bounds).compute_least_shift())

    def _build_clock(self, trace: int, fit: ClockFit) -> Clock:
        return Clock(
            rank=self._traces[trace].rank,
            host=self._traces[trace].host,
            offset_ns=round(fit.offset_ns),
            wall_ns=int(self._wall[trace]),
            pivot_ns=round(fit.pivot_ns),
            drift_ppm=fit.drift * 1e6 or None,
            sigma_ns=math.ceil(fit.sigma_ns),
            residual_ns=round(fit.residual_ns),
            island=self._island,
        )

    def _take_host_clock(self, trace: int, host_clock: Clock) -> Clock:
        """The wall clock of an aligned rank on the same host."""
        own_trace = self._traces[trace]
        return Clock(
            own_trace.rank,
            own_trace.host,
            host_clock.offset_ns,
            int(self._wall[trace]),
            host_clock.pivot_ns,
            host_clock.drift_ppm,
            host_clock.sigma_ns or None,
            island=host_clock.island,
        )

    def _place_within_bounds(self, trace: int) -> Clock | None:
        """The middle of what causality and the probes of hosts' clocks allow, as for a round trip;
        None if that is not bounded on both sides."""
        own_trace, wall = self._traces[trace], int(self._wall[trace])
        uncorrected = Clock(own_trace.rank, own_trace.host, 0, wall)
        rows, edges = self._find_rows(trace), self._convert_to_common(trace, uncorrected)
        bounds = self._causality.compute_bounds(rows, *edges)
        # A rank that always comes first is bound on one side only by when messages start. A send
        # does not end after its receive: of messages both ways this leaves what buffers hold.
        ended = self._message_ends.compute_bounds(rows, *self._take_send_ends(trace, *edges))
        if ended.low_ns is not None and ended.high_ns is not None and ended.both:
            # By how much ends are apart is known no better than that.
            lacking = max(0, _APART_NS - (ended.high_ns - ended.low_ns) // 2)
            wider = Bounds(ended.low_ns - lacking, ended.high_ns + lacking)
            bounds = Bounds.intersect((bounds, wider))
        # A probe that contradicts the calls is from before a clock was set.
        if (probed := Bounds.intersect([bounds, *self._bound_by_probes(trace)])).both:
            bounds = probed
        if bounds.low_ns is not None and bounds.high_ns is not None and bounds.both:
            half = (bounds.high_ns - bounds.low_ns) // 2
            return Clock(
                own_trace.rank, own_trace.host, bounds.low_ns + half, wall, sigma_ns=half + 1,
                island=self._island,
            )  # fmt: skip
        return None

    def _bound_by_probes(self, trace: int) -> Iterator[Bounds]:
        """The bounds of the offset by the probes of this rank's host and of each aligned one."""
        if (own := self._traces[trace].probed_clock) is None:
            return
        for host, clock in self._of_host.items():
            if (other := self._probed.get(host)) is not None:
                offset_ns = clock.offset_ns + own.offset_ns - other.offset_ns
                within_ns = own.within_ns + other.within_ns + (clock.sigma_ns or 0)
                yield Bounds(offset_ns - within_ns, offset_ns + within_ns)

    def _find_rows(self, trace: int) -> slice:
        return self._matched.slice_trace(trace)

    def _convert_to_common(self, trace: int, clock: Clock) -> tuple[Int64, Int64]:
        rows, matched = self._find_rows(trace), self._matched
        return clock.map_to_common_ns(matched.start_ns[rows]), clock.map_to_common_ns(
            matched.end_ns[rows]
        )

    def _take_send_ends(self, trace: int, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
        """(since when the receives of a rank's calls may end, the ends of its own calls)."""
        sends = self._is_single_send[self._find_rows(trace)]
        return np.where(sends, np.maximum(start_ns, end_ns - _APART_NS), start_ns), end_ns

    def _compute_bounds(self, trace: int, clock: Clock) -> Bounds:
        """The causality bounds of the offset between this clock and the common one."""
        return self._causality.compute_bounds(
            self._find_rows(trace), *self._convert_to_common(trace, clock)
        )


_APART_NS = 10_000
"""Kernels that end with the data of one message end within this time of each other: 1 to 7 us for
those of a collective (clock_fit.py)."""


def _find_single_sends(traces: Sequence[RankTrace], matched: MatchedCalls) -> Bool:
    """Which rows are sends of a kernel on a device that holds no other message."""
    found: Bool = np.asarray(matched.op == OP_CODE["send"])
    for index, trace in enumerate(traces):
        messages = np.bincount(trace.calls.event, minlength=1)[trace.calls.event]
        found[matched.slice_trace(index)] &= (messages == 1) & trace.on_device
    return found


class _LinkCounts:
    """The number of rows of each clock domain whose call is known.

    Each call is counted once, when it becomes known: the work is linear in the rows.

    Args:
        call: The call of each row.
        domain: The clock domain of each row.
        domains: The number of clock domains.
    """

    def __init__(self, call: Int64, domain: Int64, domains: int) -> None:
        self._order = np.argsort(call, kind="stable")
        self._call, self._domain = call[self._order], domain
        self.count = np.zeros(domains, dtype=np.int64)

    def add(self, calls: Int64) -> None:
        """Counts the rows of these calls, which were not known before."""
        first, last = (np.searchsorted(self._call, calls, side) for side in ("left", "right"))
        length = last - first
        at = np.arange(length.sum()) + np.repeat(first - np.cumsum(length) + length, length)
        np.add.at(self.count, self._domain[self._order[at]], 1)


# Clock domains: ranks of one host whose clocks are aligned with each other.


class ClockDomain(Struct, frozen=True):
    """A clock domain: ranks of a host, and the clock of each against the first; never empty."""

    host: str
    traces: tuple[int, ...]
    clocks: tuple[ClockFit, ...]

    def compute_ends_ns(self, ends: CallEnds) -> tuple[Int64, Int64]:
        """(rows of all its ranks, their ends on the wall clock of its first rank)."""
        rows = [ends.find_rows(trace) for trace in self.traces]
        at = [c.map_to_common_ns(ends.end_ns[r]) for c, r in zip(self.clocks, rows, strict=True)]
        return np.concatenate(rows), np.concatenate(at)


def find_clock_domains(
    traces: Sequence[RankTrace], matched: MatchedCalls, ends: CallEnds, wall_ns: Int64
) -> list[ClockDomain]:
    """The clock domains: ranks of a host linked by calls; a rank without a host name is alone."""
    hosts = [trace.host or f"rank {trace.rank}" for trace in traces]
    causality, rows = Causality(matched), [ends.find_rows(i) for i in range(len(traces))]
    domains = []
    for host in dict.fromkeys(hosts):
        left = [trace for trace, its in enumerate(hosts) if its == host]
        while left:
            own = {trace: rows[trace] for trace in left}
            domain = _DomainBuilder(
                matched, ends, wall_ns, causality.copy_empty(), own
            ).build_domain(host)
            domains.append(domain)
            left = [trace for trace in left if trace not in domain.traces]
    return sorted(domains, key=lambda body: body.traces[0])


class _DomainBuilder:
    """A clock domain under construction, starting with the first of some ranks (given with their
    rows)."""

    def __init__(
        self,
        matched: MatchedCalls,
        ends: CallEnds,
        wall_ns: Int64,
        causality: Causality,
        rows: dict[int, Int64],
    ) -> None:
        self._matched, self._ends, self._wall = matched, ends, wall_ns
        self._known, self._causality = KnownEnds(ends), causality
        self._left = rows
        self._clocks: dict[int, ClockFit] = {}
        self._add_trace(next(iter(rows)), EXACT)

    def build_domain(self, host: str) -> ClockDomain:
        """Adds all ranks linked by calls, those with the most shared calls first, and returns the
        domain."""
        while self._left:
            candidate = max(
                self._left, key=lambda trace: len(self._known.select_known(self._left[trace]))
            )
            shared = self._known.select_known(self._left[candidate])
            if not len(shared):
                break
            # The clock, shifted if an end of its calls would precede a start that it depends on.
            fit = self._known.fit_clock(shared, self._ends.end_ns[shared])
            rows = self._matched.slice_trace(candidate)
            self._add_trace(
                candidate,
                fit.shift(
                    self._causality.compute_bounds(
                        rows, *self._compute_edges(candidate, fit)
                    ).compute_least_shift()
                ),
            )
        return ClockDomain(host, tuple(self._clocks), tuple(self._clocks.values()))

    def _add_trace(self, trace: int, clock: ClockFit) -> None:
        self._clocks[trace] = clock
        rows = self._left.pop(trace)
        self._known.learn(rows, clock.map_to_common_ns(self._ends.end_ns[rows]), clock.sigma_ns)
        self._causality.record(self._matched.slice_trace(trace), *self._compute_edges(trace, clock))

    def _compute_edges(self, trace: int, clock: ClockFit) -> tuple[Int64, Int64]:
        """The starts and ends of the rank's calls on this clock."""
        rows, wall = self._matched.slice_trace(trace), self._wall[trace]
        begin, end = self._matched.start_ns[rows] + wall, self._matched.end_ns[rows] + wall
        return clock.map_to_common_ns(begin), clock.map_to_common_ns(end)
