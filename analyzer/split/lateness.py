"""Slow ranks: late arrivals at collectives, slow kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt, lgamma, log, log1p
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import labels_of
from stepsplit.analyzer.buckets import StepSplit
from stepsplit.analyzer.split.kernels import Computed, computed
from stepsplit.analyzer.split.matching import Matched
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.split.transfers import Arrivals
from stepsplit.analyzer.trace import Bool, Int64, RankTrace

# Which ranks come last to collectives more often than chance has it, and by how much.

_CHANCE = 1e-4

_LATE_NS = 20_000

_OF_STEPS = 0.01
"""A straggler is less likely than this by chance, is later than this in the median call in which it
comes last, and costs its group more than this share of its steps."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How often one rank came last, of the collectives or messages on one axis that it was in.

    Only calls count whose members, so many each, are all there, and each call once. last is in how
    many of them all others waited for this rank; late_ns how much later than the median member (of
    two in the middle the earlier) it then came, the median and the sum. p_value is the chance of
    coming last so often where all members are alike, 1 at no more than its share; None for
    messages, where it is the schedule that decides which end waits.
    """

    rank: int
    axis: str | None
    message: bool
    members: int
    calls: int
    last: int
    late_ns_median: int
    late_ns_total: int
    p_value: float | None
    straggler: bool

    @property
    def last_fraction(self) -> float:
        """In which part of the calls that it was in the rank came last, 0..1."""
        return self.last / self.calls


def lateness_of(
    traces: Sequence[RankTrace],
    matched: Matched,
    arrivals: Arrivals,
    layout: RankLayout,
    steps: Sequence[Sequence[StepSplit]],
) -> tuple[Lateness, ...]:
    """A row for each rank, axis, kind of call and size of group; steps are those of each trace.

    A straggler is also last more often than its share in more than half of its steps: the calls of
    one step hang together, so that one slow step would else look like many late calls.
    """
    seen = _seen(matched, arrivals, np.array([trace.rank for trace in traces]))
    axes = (*(layout.axis_of(group) for group in matched.groups), None)
    names = tuple(dict.fromkeys(axes))
    axis = np.array([names.index(name) for name in axes])[matched.group[seen.row]]
    trace = matched.trace[seen.row].astype(np.int64)
    message = matched.is_message[seen.row]
    label = labels_of(trace, axis, message, seen.members)
    step = _steps(trace, arrivals.start_ns[seen.row], steps)
    whole = [sum(one.split.step_ns for one in own) for own in steps]
    found = []
    for rows in _parts(label):
        first = int(rows[0])
        i = int(trace[first])
        kind = (traces[i].rank, names[int(axis[first])], bool(message[first]))
        found.append(_row(*kind, seen, rows, step[rows], whole[i]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A row a member of each complete call: is it the last, and how late; columns of one length.

    row indexes Matched, members is how many the call has.
    """

    row: Int64
    members: Int64
    last: Bool
    late_ns: Int64


def _seen(matched: Matched, arrivals: Arrivals, ranks: Int64) -> _Seen:
    """The members; nobody is last whom some member did not wait for, as it had left already."""
    row = np.flatnonzero((matched.key >= 0) & matched.leads)
    row = row[np.lexsort((arrivals.start_ns[row], matched.key[row]))]
    start = arrivals.start_ns[row]
    first = np.flatnonzero(np.diff(matched.key[row], prepend=-1))
    members = np.diff(first, append=len(row))
    end = first + members - 1
    late = start[end] - start[first + (members - 1) // 2]
    awaited = arrivals.last[row] == np.repeat(ranks[matched.trace[row[end]]], members)
    last = np.zeros(len(row), dtype=np.bool_)
    if len(row):
        last[end] = np.logical_and.reduceat(awaited, first) & (late > 0)
    return _Seen(row, np.repeat(members, members), last, np.repeat(late, members))


def _steps(trace: Int64, at_ns: Int64, steps: Sequence[Sequence[StepSplit]]) -> Int64:
    """In the how manieth step of its trace each call began, -1 for before the first."""
    found = np.full(len(trace), -1, dtype=np.int64)
    for rows in _parts(trace):
        starts = np.array([one.start_ns for one in steps[trace[rows[0]]]], dtype=np.int64)
        found[rows] = np.searchsorted(starts, at_ns[rows], side="right") - 1
    return found


def _parts(label: Int64) -> list[Int64]:
    order = np.argsort(label, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(order) else []


def _row(
    rank: int, axis: str | None, message: bool, seen: _Seen, rows: Int64, step: Int64, whole_ns: int
) -> Lateness:
    late = seen.late_ns[rows][seen.last[rows]]
    members, last = int(seen.members[rows[0]]), len(late)
    median, total = int(np.median(late)) if last else 0, int(late.sum())
    chance = None if message else chance_of(last, len(rows), members)
    straggles = (
        chance is not None
        and chance < _CHANCE
        and median > _LATE_NS
        and total > _OF_STEPS * whole_ns
        and _in_most_steps(step, seen.last[rows], members)
    )
    return Lateness(rank, axis, message, members, len(rows), last, median, total, chance, straggles)


def _in_most_steps(step: Int64, last: Bool, members: int) -> bool:
    """Whether it was last more often than its share in more than half of the steps."""
    calls = np.bincount(step + 1)
    often = np.bincount(step[last] + 1, minlength=len(calls)) * members > calls
    return 2 * int(often.sum()) > int((calls > 0).sum())


def chance_of(last: int, calls: int, members: int) -> float:
    """The chance of coming last at least so often in calls of so many equal members.

    The upper tail of the binomial distribution of probability 1 / members; 1 at or below its mean.
    """
    if last * members <= calls:
        return 1.0
    odds = 1 / (members - 1)
    first = (
        lgamma(calls + 1) - lgamma(last + 1) - lgamma(calls - last + 1)
        - last * log(members) + (calls - last) * log1p(-1 / members)
    )  # fmt: skip
    more = np.arange(last, min(calls, last + 40 * (isqrt(calls) + 1)))
    terms = np.concatenate(([0.0], np.cumsum(np.log((calls - more) / (more + 1) * odds))))
    return min(1.0, float(np.exp(first + terms).sum()))


# Which ranks take longer than their peers for the same kernels.

Float = npt.NDArray[np.float64]

LEAST_RATIO = 1.05
"""Devices of one kind differ by less, without anything being wrong."""

LEAST_COUNT = 12
"""Fewer runs of a kernel do not tell its noise."""

FALSE_ALARMS = 1e-3
"""How many a recording of balanced ranks may give, if its noise is normal."""

_LEAST_STEPS = 3

_LEAST_SIGMAS = 6.0
"""Kernels' noise has longer tails, and what is estimated from few runs is often too small."""

_SIGMA_OF_MAD, _SIGMA_OF_MEDIAN = 1.4826, 1.2533
"""Of normal noise: sigma / MAD, and sqrt(n) times the sigma of a median of n / sigma."""


@dataclass(frozen=True, slots=True)
class SlowKernel:
    """A kernel that takes one rank ratio times as long as it takes its peers.

    lost_ns is what that costs the rank in a step; count is how often the rank ran it.
    """

    rank: int
    kernel: str
    family: str
    ratio: float
    lost_ns: int
    count: int


@dataclass(frozen=True, slots=True)
class SlowRank:
    """The slow kernels of one family on one rank: together they take ratio times their peers'.

    lost_ns is what that costs the rank in a step; kernel is the one that costs most.
    """

    rank: int
    family: str
    ratio: float
    lost_ns: int
    kernels: int
    kernel: str


@dataclass(frozen=True, slots=True)
class _Alike:
    """The runs of one kernel on the ranks that ran it equally often in each step.

    took_ns is of shape (ranks, runs), in the order of time; counts has the runs of each step.
    """

    kernel: str
    family: str
    rank: Int64
    counts: Int64
    took_ns: Int64


def slow_kernels(traces: Sequence[RankTrace], steps: Sequence[Steps]) -> tuple[SlowKernel, ...]:
    """The kernels that a rank runs slower than its peers, what costs most first.

    A trace states no shapes, so the n-th run of a name in a step is compared with the n-th on each
    other rank, in the steps that are full on all, and only among ranks that ran it equally often
    in each of them. A rank's ratio is the median over those runs, against the median rank's. It
    counts where it is LEAST_RATIO at least, and further from 1 than the noise of runs and steps
    and the spread of the ranks (each by MAD) let expect once in 1 / FALSE_ALARMS recordings.
    """
    everyone = [computed(trace, found) for trace, found in zip(traces, steps, strict=True)]
    common = set.intersection(*(set(one.steps) for one in everyone)) if everyone else set()
    alike = [one for one in _alike(everyone, sorted(common)) if one.took_ns.any()]
    tests = sum(len(one.rank) for one in alike) or 1
    sigmas = max(_LEAST_SIGMAS, NormalDist().inv_cdf(1 - FALSE_ALARMS / tests))
    found = [row for one in alike for row in _slow(one, sigmas, len(common))]
    return tuple(sorted(found, key=lambda row: (-row.lost_ns, row.rank, row.kernel)))


def slow_ranks(kernels: Sequence[SlowKernel]) -> tuple[SlowRank, ...]:
    """The slow kernels summed by rank and family, what costs most first."""
    together = defaultdict[tuple[int, str], list[SlowKernel]](list)
    for one in kernels:
        together[one.rank, one.family].append(one)
    rows = [_summed(rank, family, found) for (rank, family), found in together.items()]
    return tuple(sorted(rows, key=lambda row: (-row.lost_ns, row.rank, row.family)))


def _summed(rank: int, family: str, found: Sequence[SlowKernel]) -> SlowRank:
    lost = sum(one.lost_ns for one in found)
    usual = sum(one.lost_ns / (one.ratio - 1) for one in found)
    worst = max(found, key=lambda one: one.lost_ns)
    return SlowRank(rank, family, 1 + lost / usual, lost, len(found), worst.kernel)


def _alike(everyone: Sequence[Computed], common: Sequence[int]) -> Iterator[_Alike]:
    """The kernels that at least two ranks ran often enough, and equally often in each step."""
    runs = defaultdict[str, dict[bytes, list[tuple[int, Int64]]]](lambda: defaultdict(list))
    families = dict[str, str]()
    for one in everyone:
        for name_id, counts, took in _by_kernel(one, np.array(common, dtype=np.int64)):
            if len(took) >= LEAST_COUNT:
                kernel = one.names[name_id]
                families[kernel] = one.kinds.family_of(name_id)
                runs[kernel][counts].append((one.rank, took))
    for kernel, alternatives in runs.items():
        for counts, same in alternatives.items():
            if len(same) > 1:
                ranks = np.array([rank for rank, _ in same], dtype=np.int64)
                by_step = np.frombuffer(counts, dtype=np.int64)
                yield _Alike(
                    kernel, families[kernel], ranks, by_step, np.stack([took for _, took in same])
                )


def _by_kernel(one: Computed, common: Int64) -> Iterator[tuple[int, bytes, Int64]]:
    """Of each kernel its name_id, its counts by step, and its durations in order of time."""
    rows = np.flatnonzero(np.isin(one.step, common))
    rows = rows[np.argsort(one.name_id[rows], kind="stable")]
    first = np.flatnonzero(np.diff(one.name_id[rows], prepend=-1))
    for same in np.split(rows, first[1:]) if len(rows) else ():
        counts = np.bincount(np.searchsorted(common, one.step[same]), minlength=len(common))
        yield int(one.name_id[same[0]]), counts.tobytes(), one.took_ns[same]


def _slow(one: _Alike, sigmas: float, steps: int) -> Iterator[SlowKernel]:
    took = np.log(np.maximum(one.took_ns, 1))
    usual = np.median(took, axis=0)
    by_rank = np.median(took - usual, axis=1)
    middle = _low_median(by_rank)
    apart = by_rank - middle
    least = np.maximum(np.log(LEAST_RATIO), sigmas * _noise(took - usual, by_rank, one.counts))
    expected_ns = float(np.exp(usual + middle).sum()) / steps
    for row in np.flatnonzero(apart >= least).tolist():
        ratio = float(np.exp(apart[row]))
        yield SlowKernel(
            rank=int(one.rank[row]),
            kernel=one.kernel,
            family=one.family,
            ratio=ratio,
            lost_ns=round(expected_ns * (ratio - 1)),
            count=one.took_ns.shape[1],
        )


def _noise(beyond: Float, by_rank: Float, counts: Int64) -> Float:
    """How far chance puts each rank from the middle: by its runs, by its steps, by the ranks.

    The middle is of few ranks itself; of two ranks it moves as far the other way.
    """
    parts = np.split(beyond, np.cumsum(counts)[:-1], axis=1)
    by_step = np.stack([np.median(p, axis=1) for p in parts if p.shape[1]], axis=1)
    of_median = _sigma_of_median(beyond, by_rank)
    if by_step.shape[1] >= _LEAST_STEPS:
        of_median = np.maximum(of_median, _sigma_of_median(by_step, by_rank))
    spread = _SIGMA_OF_MAD * _low_median(np.abs(by_rank - _low_median(by_rank)))
    return np.asarray(np.hypot((1 + 2 / len(by_rank)) * of_median, spread))


def _sigma_of_median(values: Float, by_rank: Float) -> Float:
    """The standard deviation of each rank's median of such values, of shape (ranks, n)."""
    sigma = _SIGMA_OF_MAD * np.median(np.abs(values - by_rank[:, None]), axis=1)
    # A rank whose few values happen to agree is as noisy as its peers.
    sigma = np.maximum(sigma, np.median(sigma))
    return np.asarray(_SIGMA_OF_MEDIAN * sigma / np.sqrt(values.shape[1]))


def _low_median(values: Float) -> float:
    """The lower of the two in the middle: of two ranks the faster is the usual one."""
    return float(np.sort(values)[(len(values) - 1) // 2])
