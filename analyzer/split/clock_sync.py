"""Clock synchronization: offset and drift of each host, from collectives and causality."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import distinct, firsts_of, labels_of, most_of, runs_of
from stepsplit.analyzer.split.matching import TOGETHER, Alignment, Clock, Matched
from stepsplit.analyzer.trace import OP_CODE, Int64, Note, RankTrace, wall_lead_ns

# One clock for all ranks: from collectives that end simultaneously, else from causality bounds.


def align(traces: Sequence[RankTrace], matched: Matched) -> Alignment:
    """Aligns the clocks of all ranks with the first rank's.

    Kernels of one all_reduce, all_gather or reduce_scatter end simultaneously. They align first the
    ranks of each host, then the hosts: always the one with the most such calls shared with aligned
    ranks. gloo's worker threads do not end simultaneously; there, and without such calls, ranks of
    a host share its wall clock. Other ranks are placed within the causality bounds. A rank without
    any link keeps its wall clock, with a note.
    """
    joining = _Joining(traces, matched)
    while joining.left:
        joining.join()
    t0 = min(trace.t0_unix_ns for trace in traces)
    clocks = tuple(joining.clocks[i] for i in range(len(traces)))
    return Alignment(clocks, t0, joining.notes())


class _Joining:
    """The clocks aligned so far, and the end times of calls that follow from them."""

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
        """Aligns one more clock domain, the one with the best evidence."""
        body = max(self.left, key=self._reasons)
        self.left.remove(body)
        fit = self._fit(body) if self.clocks else EXACT
        for trace, own in zip(body.traces, body.clocks, strict=True):
            clock = self._clock(trace, None if fit is None else own.then(fit), body.host)
            self.clocks[trace] = clock
            self._of_host.setdefault(body.host, clock)
            self._learn(trace, clock)

    def notes(self) -> tuple[Note, ...]:
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

    def _reasons(self, body: Body) -> tuple[int, bool, int, int]:
        """The evidence for aligning this domain now, as a sort key; the first one if tied."""
        shared = len(self._known.shared(self._own[body.traces][0]))
        touching = sum(self._causality.touching(self._rows(trace)) for trace in body.traces)
        return shared, body.host in self._of_host, touching, -body.traces[0]

    def _fit(self, body: Body) -> ClockFit | None:
        """The domain's clock from shared ends, within the causality bounds; None without shared
        calls."""
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
        """The wall clock of an aligned rank on the same host, if any."""
        mate, wall = self._of_host.get(host), int(self._wall[trace])
        if mate is None:
            return None
        one = self._traces[trace]
        sigma = mate.sigma_ns or None
        return Clock(one.rank, one.host, mate.offset_ns, wall, mate.pivot_ns, mate.drift_ppm, sigma)

    def _by_bounds(self, trace: int) -> Clock:
        """The middle of the causality bounds, as for a round trip; else the wall clock, clamped to
        them."""
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
        """The causality bounds of the offset between this clock and the common one."""
        return self._causality.bounds(self._rows(trace), *self._common(trace, clock))

    def _learn(self, trace: int, clock: Clock) -> None:
        """Records when the rank's calls started and ended on the common clock."""
        rows = self._ends.of_trace(trace)
        ended = clock.common_ns(self._ends.end_ns[rows] - clock.wall_ns)
        self._known.learn(rows, ended, float(clock.sigma_ns or 0))
        self._causality.learn(self._rows(trace), *self._common(trace, clock))


@dataclass(frozen=True, slots=True)
class ClockFit:
    """offset_ns holds at pivot_ns; drift is in ns per ns, 0 if not measurable."""

    offset_ns: float
    pivot_ns: float
    drift: float
    sigma_ns: float
    residual_ns: float

    def common_ns(self, wall_ns: Int64) -> Int64:
        """Maps times of the fitted clock to its reference clock."""
        drift = self.drift * (wall_ns - round(self.pivot_ns)).astype(np.float64)
        return wall_ns - round(self.offset_ns) - np.rint(drift).astype(np.int64)

    def then(self, other: ClockFit) -> ClockFit:
        """Composes two fits: this clock against the reference of other."""
        pivot = np.array([round(self.pivot_ns)], dtype=np.int64)
        offset = int((pivot - other.common_ns(self.common_ns(pivot)))[0])
        return ClockFit(
            float(offset), float(pivot[0]), self.drift + other.drift,
            float(np.hypot(self.sigma_ns, other.sigma_ns)),
            max(self.residual_ns, other.residual_ns),
        )  # fmt: skip

    def doubted(self, sigma_ns: float) -> ClockFit:
        """Adds the uncertainty of the reference."""
        return replace(self, sigma_ns=float(np.hypot(self.sigma_ns, sigma_ns)))

    def moved(self, by_ns: int) -> ClockFit:
        """Shifts the offset, and adds the shift to the uncertainty."""
        doubt = self.sigma_ns + abs(by_ns)
        return replace(self, offset_ns=self.offset_ns + by_ns, sigma_ns=doubt)


# Clock domains: ranks of one host whose clocks are aligned with each other.

EXACT = ClockFit(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Body:
    """A clock domain: ranks of a host, and the clock of each against the first; never empty."""

    host: str
    traces: tuple[int, ...]
    clocks: tuple[ClockFit, ...]

    def ends_ns(self, ends: Ends) -> tuple[Int64, Int64]:
        """(rows of all its ranks, their ends on the wall clock of its first rank)."""
        rows = [ends.of_trace(trace) for trace in self.traces]
        at = [c.common_ns(ends.end_ns[r]) for c, r in zip(self.clocks, rows, strict=True)]
        return np.concatenate(rows), np.concatenate(at)


def bodies_of(
    traces: Sequence[RankTrace], matched: Matched, ends: Ends, wall_ns: Int64
) -> list[Body]:
    """The clock domains: ranks of a host linked by calls; a rank without a host name is alone."""
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
    """A clock domain under construction, starting with the first of some ranks (given with their
    rows)."""

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
        """Adds all ranks linked by calls, those with the most shared calls first, and returns the
        domain."""
        while self._left:
            new = max(self._left, key=lambda trace: len(self._known.shared(self._left[trace])))
            shared = self._known.shared(self._left[new])
            if not len(shared):
                break
            self._take(new, self._bounded(new, self._known.fit(shared, self._ends.end_ns[shared])))
        return Body(host, tuple(self._clocks), tuple(self._clocks.values()))

    def _bounded(self, trace: int, fit: ClockFit) -> ClockFit:
        """The clock, shifted if an end of its calls would precede a start that it depends on."""
        rows = self._matched.of_trace(trace)
        return fit.moved(self._causality.bounds(rows, *self._edges(trace, fit)).least_move())

    def _take(self, trace: int, clock: ClockFit) -> None:
        self._clocks[trace] = clock
        rows = self._left.pop(trace)
        self._known.learn(rows, clock.common_ns(self._ends.end_ns[rows]), clock.sigma_ns)
        self._causality.learn(self._matched.of_trace(trace), *self._edges(trace, clock))

    def _edges(self, trace: int, clock: ClockFit) -> tuple[Int64, Int64]:
        """The starts and ends of the rank's calls on this clock."""
        rows, wall = self._matched.of_trace(trace), self._wall[trace]
        begin, end = self._matched.start_ns[rows] + wall, self._matched.end_ns[rows] + wall
        return clock.common_ns(begin), clock.common_ns(end)


# Causality bounds of a clock: a call cannot end before the calls that it depends on have started.
#
# A member of a collective cannot end before the last member has started, and a receive cannot end
# before its send has started. Each such pair between a rank and the aligned ranks is an upper or
# lower bound of the rank's offset.

_MUTUAL = [OP_CODE[op] for op in (*TOGETHER, "barrier")]

_SEND, _RECV = OP_CODE["send"], OP_CODE["recv"]

_NEVER = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offset lies in [low_ns, high_ns]; None means unbounded on that side."""

    low_ns: int | None
    high_ns: int | None

    @property
    def both(self) -> bool:
        """Whether the offset has consistent bounds on both sides."""
        return self.low_ns is not None and self.high_ns is not None and self.low_ns <= self.high_ns

    @classmethod
    def all_of(cls, bounds: Iterable[Bounds]) -> Bounds:
        """The intersection of all bounds."""
        every = tuple(bounds)
        low = [one.low_ns for one in every if one.low_ns is not None]
        high = [one.high_ns for one in every if one.high_ns is not None]
        return cls(max(low, default=None), min(high, default=None))

    def least_move(self) -> int:
        """The smallest shift of offset 0 that satisfies the bounds; 0 if they are inconsistent."""
        return self.nearest(0) if self.both else 0

    def nearest(self, offset_ns: int) -> int:
        """The closest offset within the bounds; unchanged if they are inconsistent."""
        low = offset_ns if self.low_ns is None else self.low_ns
        high = offset_ns if self.high_ns is None else self.high_ns
        return offset_ns if low > high else min(max(offset_ns, low), high)


class Causality:
    """The start and end of calls of the aligned ranks, on the common clock."""

    def __init__(self, matched: Matched) -> None:
        mutual = np.isin(matched.op, _MUTUAL)
        known = (matched.shared >= 0) & matched.leads
        self._begins = np.where(known & (mutual | (matched.op == _SEND)), matched.shared, -1)
        self._needs = np.where(known & (mutual | (matched.op == _RECV)), matched.shared, -1)
        self._shared = matched.shared
        self._calls = int(matched.shared.max(initial=-1)) + 1
        self._forget()

    def blank(self) -> Causality:
        """A copy with the same calls and without any times."""
        other = copy(self)
        other._forget()
        return other

    def _forget(self) -> None:
        self._touched = np.zeros(self._calls, dtype=np.bool_)
        self._last_start = np.full(self._calls, _NEVER[0])
        self._first_end = np.full(self._calls, _NEVER[1])

    def learn(self, rows: slice, start_ns: Int64, end_ns: Int64) -> None:
        """Records the rows of one more rank, on the common clock."""
        begins, needs = self._begins[rows], self._needs[rows]
        self._touched[self._shared[rows][self._shared[rows] >= 0]] = True
        np.maximum.at(self._last_start, begins[begins >= 0], start_ns[begins >= 0])
        np.minimum.at(self._first_end, needs[needs >= 0], end_ns[needs >= 0])

    def touching(self, rows: slice) -> int:
        """The number of rows whose call is shared with an aligned rank."""
        shared = self._shared[rows]
        return int(self._touched[shared[shared >= 0]].sum())

    def bounds(self, rows: slice, start_ns: Int64, end_ns: Int64) -> Bounds:
        """The bounds of the offset of a rank with these rows."""
        begins, needs = self._begins[rows], self._needs[rows]
        high = _slack(end_ns[needs >= 0], self._last_start[needs[needs >= 0]])
        low = _slack(self._first_end[begins[begins >= 0]], start_ns[begins >= 0])
        return Bounds(None if low is None else -low, high)


def _slack(end_ns: Int64, start_ns: Int64) -> int | None:
    """The smallest distance from start to end; None if no pair is known."""
    known = (end_ns != _NEVER[1]) & (start_ns != _NEVER[0])
    return int((end_ns[known] - start_ns[known]).min()) if known.any() else None


# End times of calls that end simultaneously on all members.


@dataclass(frozen=True, slots=True)
class Ends:
    """One row per member of each all_reduce, all_gather and reduce_scatter on a device.

    kind is one number for each (group, op, size), with one bias per member; end_ns is on the
    member's wall clock.
    """

    call: Int64
    trace: Int64
    kind: Int64
    end_ns: Int64

    def of_trace(self, trace: int) -> Int64:
        """The rows of one trace."""
        return np.flatnonzero(self.trace == trace)


def ends_of(traces: Sequence[RankTrace], matched: Matched, wall_ns: Int64) -> Ends:
    """The ends of the matched calls, without gloo, whose worker threads do not end
    simultaneously."""
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
    """The known end time of each call, the mean over the aligned members, and its uncertainty."""

    def __init__(self, ends: Ends) -> None:
        calls = int(ends.call.max(initial=-1)) + 1
        self._ends = ends
        self._sum_ns, self._count = np.zeros(calls), np.zeros(calls, dtype=np.int64)
        self._doubt_ns = np.full(calls, np.inf)

    def learn(self, rows: Int64, common_ns: Int64, sigma_ns: float) -> None:
        """Records the ends of one more rank, on the common clock."""
        call = self._ends.call[rows]
        self._sum_ns[call] += common_ns
        self._count[call] += 1
        self._doubt_ns[call] = np.minimum(self._doubt_ns[call], sigma_ns)

    def shared(self, rows: Int64) -> Int64:
        """Selects the rows whose call has a known end."""
        return rows[self._count[self._ends.call[rows]] > 0]

    def fit(self, rows: Int64, end_ns: Int64) -> ClockFit:
        """Fits the clock to the known ends of these rows, at least one."""
        call = self._ends.call[rows]
        there = np.rint(self._sum_ns[call] / self._count[call]).astype(np.int64)
        kind = self._ends.kind[rows]
        found = fitted(end_ns, end_ns - there, labels_of(kind, self._ends.trace[rows]))
        theirs = BIAS_NS / float(np.sqrt(len(distinct(kind))))
        return found.doubted(theirs).doubted(float(np.median(self._doubt_ns[call])))


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

_SURE, _WORTH_NS = 3.0, 2_000
"""A drift is applied if it exceeds its uncertainty by this factor and the clock shift by this
time."""

_NORMAL = 1.4826
"""For normal noise: standard deviation / median absolute value."""


def fitted(at_ns: Int64, apart_ns: Int64, kind: Int64) -> ClockFit:
    """Fits offset and drift to the differences of ends; kind is the same for calls with one bias.

    At least one call; at_ns is the time on the fitted clock.
    """
    start = int(apart_ns[len(apart_ns) // 2])
    apart = (apart_ns - start).astype(np.float64)
    pivot = float(np.median(at_ns))
    since = (at_ns - pivot).astype(np.float64)
    drift, doubt = _drift(since, apart, kind)
    level = apart - drift * since
    offset, sigma = _together(_middle_of_kinds(level, kind), _noise(level, kind))
    residual = float(np.median(np.abs(level - offset)))
    sigma = float(np.hypot(sigma, doubt * np.ptp(since) / 2))
    return ClockFit(start + offset, pivot, drift, sigma, residual)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Median and number of calls of each kind; of_row is the median of each row's kind."""

    middle: Float
    count: Int64
    of_row: Float


def _middle_of_kinds(level: Float, kind: Int64) -> _Kinds:
    label = labels_of(kind)
    order, first = runs_of(label)
    parts = np.split(level[order], first[1:])
    middle = np.array([np.median(part) for part in parts])
    return _Kinds(middle, np.array([len(part) for part in parts]), middle[label])


def _together(kinds: _Kinds, noise_ns: float) -> tuple[float, float]:
    """(offset, its standard deviation): the weighted mean over kinds, each with its bias and
    noise."""
    spread = BIAS_NS**2 + (1.25 * noise_ns) ** 2 / kinds.count
    middle = float(np.median(np.repeat(kinds.middle, np.minimum(kinds.count, 99))))
    sane = np.abs(kinds.middle - middle) <= 4 * np.sqrt(spread)
    weight = np.where(sane, 1 / spread, 0.0)
    weight = weight if weight.any() else 1 / spread
    return float((weight * kinds.middle).sum() / weight.sum()), float(1 / np.sqrt(weight.sum()))


def _noise(level: Float, kind: Int64) -> float:
    """The standard deviation of the residuals around the median of each kind."""
    left = np.abs(level - _middle_of_kinds(level, kind).of_row)
    free = max(len(level) - len(distinct(kind)) - 2, 1)
    return _NORMAL * float(np.median(left)) * float(np.sqrt(len(level) / free))


def _drift(since: Float, apart: Float, kind: Int64) -> tuple[float, float]:
    """(drift in ns per ns, its uncertainty); 0 if span and noise allow no measurement.

    The biases of the kinds are removed first.
    """
    span = float(np.ptp(since))
    if len(since) < len(distinct(kind)) + _FEWEST or span < _SHORTEST_NS:
        return 0.0, _USUAL
    slope = _slope(since, apart)
    for _ in range(2):
        level = apart - slope * since
        slope += _slope(since, level - _middle_of_kinds(level, kind).of_row)
    noise = _noise(apart - slope * since, kind)
    doubt = 1.25 * noise / (float(np.std(since)) * np.sqrt(len(since)))
    if abs(slope) > _SURE * doubt and abs(slope) * span > _WORTH_NS:
        return slope, doubt
    return 0.0, min(max(abs(slope), doubt), _MOST)


def _slope(since: Float, apart: Float) -> float:
    """Theil-Sen slope: the median slope between the medians of time bins."""
    order = np.argsort(since, kind="stable")
    parts = np.array_split(order, min(_BINS, max(len(order) // 3, 2)))
    x = np.array([np.median(since[part]) for part in parts])
    y = np.array([np.median(apart[part]) for part in parts])
    i, j = np.triu_indices(len(x), k=1)
    apart_in_time = x[j] - x[i]
    told = apart_in_time > 0
    return float(np.median((y[j] - y[i])[told] / apart_in_time[told])) if told.any() else 0.0
