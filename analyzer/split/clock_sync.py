"""Clock synchronization: offsets and drift of hosts from collectives and causality."""

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

# One clock for all ranks: from collectives that end together, else from what causality allows.


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


@dataclass(frozen=True, slots=True)
class ClockFit:
    """offset_ns holds at pivot_ns; drift is in ns per ns, 0 where none can be told."""

    offset_ns: float
    pivot_ns: float
    drift: float
    sigma_ns: float
    residual_ns: float

    def common_ns(self, wall_ns: Int64) -> Int64:
        """Times of the fitted clock on the one that it was fitted to."""
        drift = self.drift * (wall_ns - round(self.pivot_ns)).astype(np.float64)
        return wall_ns - round(self.offset_ns) - np.rint(drift).astype(np.int64)

    def then(self, other: ClockFit) -> ClockFit:
        """The clock against a third, given the second's against that."""
        pivot = np.array([round(self.pivot_ns)], dtype=np.int64)
        offset = int((pivot - other.common_ns(self.common_ns(pivot)))[0])
        return ClockFit(
            float(offset), float(pivot[0]), self.drift + other.drift,
            float(np.hypot(self.sigma_ns, other.sigma_ns)),
            max(self.residual_ns, other.residual_ns),
        )  # fmt: skip

    def doubted(self, sigma_ns: float) -> ClockFit:
        """The same, where what it was fitted to is itself in doubt."""
        return replace(self, sigma_ns=float(np.hypot(self.sigma_ns, sigma_ns)))

    def moved(self, by_ns: int) -> ClockFit:
        """The same, moved by what it is then in doubt about too."""
        doubt = self.sigma_ns + abs(by_ns)
        return replace(self, offset_ns=self.offset_ns + by_ns, sigma_ns=doubt)


# Ranks of one host whose clocks are known to each other: what one of them tells holds for all.

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


# What causality says of a clock: nothing ends before that which it needs has begun.
#
# No member of a collective ends before the last has started, and no receive ends before its send
# has begun. Each such pair of a rank here and ranks on the common clock bounds this rank's
# offset, from above or from below.

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


# When calls that end together ended, as far as the clocks of their members are known.


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


# One clock against another, from the ends of calls that end together: offset, drift, and doubt.
#
# What is measured is apart_ns = (end here) - (end there). It holds the offset and the drift of
# the clock, a bias of the call's kind (where a rank sits in a ring or tree decides by how much
# its kernel outlives others'; one number for each group, op and size), and noise with outliers.

Float = npt.NDArray[np.float64]

BIAS_NS = 1_500
"""How far the ends of one kind of call lie apart for good: 1 to 7 us on real hosts of 8 GPUs."""

_BINS, _FEWEST, _SHORTEST_NS = 32, 6, 10_000_000

_USUAL, _MOST = 2e-5, 1e-4
"""Free-running clocks of computers drift by some 20 ppm, two against each other by 100 at most: the
doubt where the data say nothing, and where they say little."""

_SURE, _WORTH_NS = 3.0, 2_000
"""A drift counts if it is so many times its own doubt, and moves the clock by so much in all."""

_NORMAL = 1.4826
"""The standard deviation of normal noise over the median of its size."""


def fitted(at_ns: Int64, apart_ns: Int64, kind: Int64) -> ClockFit:
    """The clock that explains the ends apart; kind is the same for calls of one bias. At least one.

    at_ns is when, on the clock that is fitted.
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
    """The median of each kind and how many calls it has; of_row has the median of each row's."""

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
    """(offset, its standard deviation): the mean of kinds, each with its own bias and noise."""
    spread = BIAS_NS**2 + (1.25 * noise_ns) ** 2 / kinds.count
    middle = float(np.median(np.repeat(kinds.middle, np.minimum(kinds.count, 99))))
    sane = np.abs(kinds.middle - middle) <= 4 * np.sqrt(spread)
    weight = np.where(sane, 1 / spread, 0.0)
    weight = weight if weight.any() else 1 / spread
    return float((weight * kinds.middle).sum() / weight.sum()), float(1 / np.sqrt(weight.sum()))


def _noise(level: Float, kind: Int64) -> float:
    """The standard deviation of what is left when each kind has its own middle."""
    left = np.abs(level - _middle_of_kinds(level, kind).of_row)
    free = max(len(level) - len(distinct(kind)) - 2, 1)
    return _NORMAL * float(np.median(left)) * float(np.sqrt(len(level) / free))


def _drift(since: Float, apart: Float, kind: Int64) -> tuple[float, float]:
    """(ns per ns, its doubt): 0 where span and noise do not allow to tell it.

    The biases of kinds are taken out first.
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
    """Theil and Sen's: the median slope between the medians of stretches of time."""
    order = np.argsort(since, kind="stable")
    parts = np.array_split(order, min(_BINS, max(len(order) // 3, 2)))
    x = np.array([np.median(since[part]) for part in parts])
    y = np.array([np.median(apart[part]) for part in parts])
    i, j = np.triu_indices(len(x), k=1)
    apart_in_time = x[j] - x[i]
    told = apart_in_time > 0
    return float(np.median((y[j] - y[i])[told] / apart_in_time[told])) if told.any() else 0.0
