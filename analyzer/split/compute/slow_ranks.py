"""Which ranks take longer than their peers for the same kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.split.compute.kernels import Computed, computed
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.trace import Int64, RankTrace

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
    rank: Int64
    counts: Int64
    took_ns: Int64


def slow_kernels(
    traces: Sequence[RankTrace], steps: Sequence[Steps], rules: Rules = BUILT_IN
) -> tuple[SlowKernel, ...]:
    """The kernels that a rank runs slower than its peers, what costs most first.

    A trace states no shapes, so the n-th run of a name in a step is compared with the n-th on each
    other rank, in the steps that are full on all, and only among ranks that ran it equally often
    in each of them. A rank's ratio is the median over those runs, against the median rank's. It
    counts where it is LEAST_RATIO at least, and further from 1 than the noise of runs and steps
    and the spread of the ranks (each by MAD) let expect once in 1 / FALSE_ALARMS recordings.
    """
    everyone = [computed(trace, found, rules) for trace, found in zip(traces, steps, strict=True)]
    common = set.intersection(*(set(one.steps) for one in everyone)) if everyone else set()
    alike = [one for one in _alike(everyone, sorted(common)) if one.took_ns.any()]
    tests = sum(len(one.rank) for one in alike) or 1
    sigmas = max(_LEAST_SIGMAS, NormalDist().inv_cdf(1 - FALSE_ALARMS / tests))
    found = [row for one in alike for row in _slow(one, sigmas, len(common), rules)]
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
    for one in everyone:
        for kernel, counts, took in _by_kernel(one, np.array(common, dtype=np.int64)):
            if len(took) >= LEAST_COUNT:
                runs[kernel][counts].append((one.rank, took))
    for kernel, alternatives in runs.items():
        for counts, same in alternatives.items():
            if len(same) > 1:
                ranks = np.array([rank for rank, _ in same], dtype=np.int64)
                by_step = np.frombuffer(counts, dtype=np.int64)
                yield _Alike(kernel, ranks, by_step, np.stack([took for _, took in same]))


def _by_kernel(one: Computed, common: Int64) -> Iterator[tuple[str, bytes, Int64]]:
    """Of each kernel its name, its counts by step, and its durations in order of time."""
    rows = np.flatnonzero(np.isin(one.step, common))
    rows = rows[np.argsort(one.name_id[rows], kind="stable")]
    first = np.flatnonzero(np.diff(one.name_id[rows], prepend=-1))
    for same in np.split(rows, first[1:]) if len(rows) else ():
        counts = np.bincount(np.searchsorted(common, one.step[same]), minlength=len(common))
        yield one.names[one.name_id[same[0]]], counts.tobytes(), one.took_ns[same]


def _slow(one: _Alike, sigmas: float, steps: int, rules: Rules) -> Iterator[SlowKernel]:
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
            family=rules.family_of(one.kernel),
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
