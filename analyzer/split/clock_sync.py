"""Clock synchronization: offset and drift of each host, from collectives and causality."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepsplit.analyzer.arrays import first_rows, group_ids, group_max, group_median, list_distinct
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.matching import SYMMETRIC_OPS, Alignment, Clock, MatchedCalls
from stepsplit.analyzer.trace import OP_CODE, Int64, Note, RankTrace, compute_start_offsets_ns

# One clock for all ranks: from collectives that end simultaneously, else from causality bounds.


def align(traces: Sequence[RankTrace], matched: MatchedCalls) -> Alignment:
    """Aligns the clocks of all ranks with the first rank's.

    Kernels of one all_reduce, all_gather or reduce_scatter end simultaneously. They align first the
    ranks of each host, then the hosts: always the one with the most such calls shared with aligned
    ranks. gloo's worker threads do not end simultaneously; there, and without such calls, ranks of
    a host share its wall clock. Other ranks are placed within the causality bounds. A rank without
    any link keeps its wall clock, with a note.
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
        self._causality = Causality(matched)
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
        self._unlinked: list[int] = []

    def join_next(self) -> None:
        """Aligns one more clock domain, the one with the best evidence."""
        domain = max(self.left, key=self._score_domain)
        self.left.remove(domain)
        fit = self._fit_domain(domain) if self.clocks else EXACT
        for trace, own in zip(domain.traces, domain.clocks, strict=True):
            clock = self._choose_clock(
                trace, None if fit is None else own.compose(fit), domain.host
            )
            self.clocks[trace] = clock
            self._of_host.setdefault(domain.host, clock)
            self._record_clock(trace, clock)

    def build_notes(self) -> tuple[Note, ...]:
        """Notes on ranks that kept their wall clocks without a link to the others."""
        return tuple(
            Note(
                "clock_unaligned",
                f"rank {self._traces[i].rank} shares neither a collective nor a host with rank "
                f"{self._traces[0].rank}: its wall clock is used uncorrected",
                self._traces[i].rank,
            )
            for i in sorted(self._unlinked)
        )

    def _score_domain(self, domain: ClockDomain) -> tuple[int, bool, int, int]:
        """The evidence for aligning this domain now, as a sort key; the first one if tied."""
        index = int(self._domain[domain.traces[0]])
        shared, touching = int(self._shared.count[index]), int(self._touching.count[index])
        return shared, domain.host in self._of_host, touching, -domain.traces[0]

    def _fit_domain(self, domain: ClockDomain) -> ClockFit | None:
        """The domain's clock from shared ends, within the causality bounds; None without shared
        calls."""
        rows, end_ns = self._own[domain.traces]
        known = np.isin(rows, self._known.select_known(rows))
        if not known.any():
            return None
        fit = self._known.fit_clock(rows[known], end_ns[known])
        bounds = [
            self._compute_bounds(trace, self._build_clock(trace, own.compose(fit)))
            for trace, own in zip(domain.traces, domain.clocks, strict=True)
        ]
        return fit.shift(Bounds.intersect(bounds).compute_least_shift())

    def _choose_clock(self, trace: int, fit: ClockFit | None, host: str) -> Clock:
        if fit is not None:
            return self._build_clock(trace, fit)
        return self._take_host_clock(trace, host) or self._place_within_bounds(trace)

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
        )

    def _take_host_clock(self, trace: int, host: str) -> Clock | None:
        """The wall clock of an aligned rank on the same host, if any."""
        host_clock, wall = self._of_host.get(host), int(self._wall[trace])
        if host_clock is None:
            return None
        own_trace = self._traces[trace]
        sigma = host_clock.sigma_ns or None
        return Clock(
            own_trace.rank,
            own_trace.host,
            host_clock.offset_ns,
            wall,
            host_clock.pivot_ns,
            host_clock.drift_ppm,
            sigma,
        )

    def _place_within_bounds(self, trace: int) -> Clock:
        """The middle of the causality bounds, as for a round trip; else the wall clock, clamped to
        them."""
        own_trace, wall = self._traces[trace], int(self._wall[trace])
        bounds = self._compute_bounds(trace, Clock(own_trace.rank, own_trace.host, 0, wall))
        if bounds.low_ns is not None and bounds.high_ns is not None and bounds.both:
            half = (bounds.high_ns - bounds.low_ns) // 2
            return Clock(
                own_trace.rank, own_trace.host, bounds.low_ns + half, wall, sigma_ns=half + 1
            )
        self._unlinked.append(trace)
        return Clock(own_trace.rank, own_trace.host, bounds.clamp(0), wall)

    def _find_rows(self, trace: int) -> slice:
        return self._matched.slice_trace(trace)

    def _convert_to_common(self, trace: int, clock: Clock) -> tuple[Int64, Int64]:
        rows, matched = self._find_rows(trace), self._matched
        return clock.map_to_common_ns(matched.start_ns[rows]), clock.map_to_common_ns(
            matched.end_ns[rows]
        )

    def _compute_bounds(self, trace: int, clock: Clock) -> Bounds:
        """The causality bounds of the offset between this clock and the common one."""
        return self._causality.compute_bounds(
            self._find_rows(trace), *self._convert_to_common(trace, clock)
        )

    def _record_clock(self, trace: int, clock: Clock) -> None:
        """Records when the rank's calls started and ended on the common clock."""
        rows = self._ends.find_rows(trace)
        ended = clock.map_to_common_ns(self._ends.end_ns[rows] - clock.wall_ns)
        self._shared.add(self._known.learn(rows, ended, float(clock.sigma_ns or 0)))
        edges = self._convert_to_common(trace, clock)
        self._touching.add(self._causality.record(self._find_rows(trace), *edges))


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


@dataclass(frozen=True, slots=True)
class ClockFit:
    """offset_ns holds at pivot_ns; drift is in ns per ns, 0 if not measurable."""

    offset_ns: float
    pivot_ns: float
    drift: float
    sigma_ns: float
    residual_ns: float

    def map_to_common_ns(self, wall_ns: Int64) -> Int64:
        """Maps times of the fitted clock to its reference clock."""
        drift = self.drift * (wall_ns - round(self.pivot_ns)).astype(np.float64)
        return wall_ns - round(self.offset_ns) - np.rint(drift).astype(np.int64)

    def compose(self, outer: ClockFit) -> ClockFit:
        """Composes two fits: this clock against the reference of other."""
        pivot = np.array([round(self.pivot_ns)], dtype=np.int64)
        offset = int((pivot - outer.map_to_common_ns(self.map_to_common_ns(pivot)))[0])
        return ClockFit(
            float(offset), float(pivot[0]), self.drift + outer.drift,
            float(np.hypot(self.sigma_ns, outer.sigma_ns)),
            max(self.residual_ns, outer.residual_ns),
        )  # fmt: skip

    def add_uncertainty(self, sigma_ns: float) -> ClockFit:
        """Adds the uncertainty of the reference."""
        return replace(self, sigma_ns=float(np.hypot(self.sigma_ns, sigma_ns)))

    def shift(self, by_ns: int) -> ClockFit:
        """Shifts the offset, and adds the shift to the uncertainty."""
        doubt = self.sigma_ns + abs(by_ns)
        return replace(self, offset_ns=self.offset_ns + by_ns, sigma_ns=doubt)


# Clock domains: ranks of one host whose clocks are aligned with each other.

EXACT = ClockFit(0.0, 0.0, 0.0, 0.0, 0.0)


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
            self._add_trace(
                candidate,
                self._apply_bounds(
                    candidate, self._known.fit_clock(shared, self._ends.end_ns[shared])
                ),
            )
        return ClockDomain(host, tuple(self._clocks), tuple(self._clocks.values()))

    def _apply_bounds(self, trace: int, fit: ClockFit) -> ClockFit:
        """The clock, shifted if an end of its calls would precede a start that it depends on."""
        rows = self._matched.slice_trace(trace)
        return fit.shift(
            self._causality.compute_bounds(
                rows, *self._compute_edges(trace, fit)
            ).compute_least_shift()
        )

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
        mutual = np.isin(matched.op, _MUTUAL)
        known = (matched.shared >= 0) & matched.leads
        self._begins = np.where(known & (mutual | (matched.op == _SEND)), matched.shared, -1)
        self._needs = np.where(known & (mutual | (matched.op == _RECV)), matched.shared, -1)
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


# End times of calls that end simultaneously on all members.


class CallEnds(Struct, frozen=True):
    """One row per member of each all_reduce, all_gather and reduce_scatter on a device, by trace.

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
    together = np.isin(matched.op, [OP_CODE[op] for op in SYMMETRIC_OPS]) & (matched.shared >= 0)
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


# Offset, drift and uncertainty of a clock, from the ends of shared calls.
#
# The measurement is apart_ns = (end on this clock) - (end on the reference). It contains the offset
# and drift of the clock, a bias for the kind of call (group, op and size: the position of a rank in
# the ring or tree decides how long its kernel runs on), and noise with outliers.

Float = npt.NDArray[np.float64]

BIAS_NS = 1_500
"""Systematic difference between the ends of one kind of call: 1 to 7 us on real hosts with 8
GPUs."""

_BINS, _FEWEST, _SHORTEST_NS = 32, 6, 10_000_000

_USUAL, _MOST = 2e-5, 1e-4
"""Free-running computer clocks drift by about 20 ppm, two against each other by at most 100 ppm:
the uncertainty of the drift without data, and its upper limit."""

_NO_CLOCK = 1e-3
"""No two clocks drift apart as fast: the times of such a rank are damaged."""

_SURE, _WORTH_NS = 3.0, 5_000
"""A drift is applied if it exceeds its uncertainty by this factor, and if it shifts the clock by
more than the biases of the calls can."""


def fit_offset_and_drift(at_ns: Int64, apart_ns: Int64, kind: Int64) -> ClockFit:
    """Fits offset and drift to the differences of ends; kind is the same for calls with one bias.

    At least one call; at_ns is the time on the fitted clock.
    """
    start = int(apart_ns[len(apart_ns) // 2])
    apart = (apart_ns - start).astype(np.float64)
    pivot = float(np.median(at_ns))
    since = (at_ns - pivot).astype(np.float64)
    drift, doubt = _estimate_drift(since, apart, kind)
    level = apart - drift * since
    offset, sigma = _combine_kinds(_compute_kind_medians(level, kind), _estimate_noise(level, kind))
    residual = float(np.median(np.abs(level - offset)))
    sigma = float(np.hypot(sigma, doubt * np.ptp(since) / 2))
    return ClockFit(start + offset, pivot, drift, sigma, residual)


class _Kinds(Struct, frozen=True):
    """Median and number of calls of each kind; of_row is the median of each row's kind."""

    middle: Float
    count: Int64
    of_row: Float


def _compute_kind_medians(level: Float, kind: Int64) -> _Kinds:
    label = group_ids(kind)
    middle = group_median(label, level)
    return _Kinds(middle, np.bincount(label), middle[label])


def _combine_kinds(kinds: _Kinds, noise_ns: float) -> tuple[float, float]:
    """(offset, its standard deviation): the weighted mean over kinds, each with its bias and
    noise."""
    spread = BIAS_NS**2 + (1.25 * noise_ns) ** 2 / kinds.count
    middle = float(np.median(np.repeat(kinds.middle, np.minimum(kinds.count, 99))))
    sane = np.abs(kinds.middle - middle) <= 4 * np.sqrt(spread)
    weight = np.where(sane, 1 / spread, 0.0)
    weight = weight if weight.any() else 1 / spread
    return float((weight * kinds.middle).sum() / weight.sum()), float(1 / np.sqrt(weight.sum()))


def _estimate_noise(level: Float, kind: Int64) -> float:
    """The standard deviation of the residuals around the median of each kind."""
    left = np.abs(level - _compute_kind_medians(level, kind).of_row)
    free = max(len(level) - len(list_distinct(kind)) - 2, 1)
    return SIGMA_OF_MAD * float(np.median(left)) * float(np.sqrt(len(level) / free))


def _estimate_drift(since: Float, apart: Float, kind: Int64) -> tuple[float, float]:
    """(drift in ns per ns, its uncertainty); 0 if span and noise allow no measurement.

    The biases of the kinds are removed first.
    """
    span = float(np.ptp(since))
    if len(since) < len(list_distinct(kind)) + _FEWEST or span < _SHORTEST_NS:
        return 0.0, _USUAL
    slope = _estimate_slope(since, apart)
    for _ in range(2):
        level = apart - slope * since
        slope += _estimate_slope(since, level - _compute_kind_medians(level, kind).of_row)
    noise = _estimate_noise(apart - slope * since, kind)
    doubt = 1.25 * noise / (float(np.std(since)) * np.sqrt(len(since)))
    if abs(slope) > _NO_CLOCK:
        return 0.0, _MOST
    if abs(slope) > _SURE * doubt and abs(slope) * span > _WORTH_NS:
        return slope, doubt
    return 0.0, min(max(abs(slope), doubt), _MOST)


def _estimate_slope(since: Float, apart: Float) -> float:
    """Theil-Sen slope: the median slope between the medians of time bins."""
    order = np.argsort(since, kind="stable")
    time_bin = _number_bins(len(order), min(_BINS, max(len(order) // 3, 2)))
    x, y = (group_median(time_bin, values[order]) for values in (since, apart))
    i, j = np.triu_indices(len(x), k=1)
    apart_in_time = x[j] - x[i]
    valid = apart_in_time > 0
    return float(np.median((y[j] - y[i])[valid] / apart_in_time[valid])) if valid.any() else 0.0


def _number_bins(rows: int, bins: int) -> Int64:
    """The bin of each row: bins of equal size, the first ones larger by one if they must be."""
    size, larger = divmod(rows, bins)
    return np.repeat(np.arange(bins), size + (np.arange(bins) < larger))
