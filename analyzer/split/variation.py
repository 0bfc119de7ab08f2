"""How the steps of a run differ: their usual time, their tail, and what held the slow ones up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS, StepSplit
from stepsplit.analyzer.trace import Int64

LEAST_STEPS = 6
"""Fewer steps do not tell which of them are unusual."""
LEAST_EXCESS = 0.03
"""A step that is longer by less is not slow, however even the others are."""
SIGMAS = 5.0
_SIGMA_OF_MAD = 1.4826
_WAITS = ("skew", "bubble")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The full steps of one rank, or of all (rank is None: each step as long as on its last rank).

    p99_ns is by nearest rank: the least time that at least 99 % of the steps do not exceed, which
    for fewer than 100 steps is the longest. slow_steps are the numbers of the slow ones.
    """

    rank: int | None
    steps: int
    median_ns: int
    p99_ns: int
    longest_ns: int
    slow_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A slow step of the run, and where its excess over the median step began.

    bucket is what most exceeded its own median, on the rank where it did by excess_in_bucket_ns;
    waits (skew and bubble) are taken only where nothing else explains half of the excess, for
    they are what the other ranks see of it.
    """

    step: int
    step_ns: int
    excess_ns: int
    rank: int
    bucket: str
    excess_in_bucket_ns: int


@dataclass(frozen=True, slots=True)
class Variation:
    """The steps of each rank and of the run; run is None where no step is full on every rank."""

    ranks: tuple[StepTimes, ...]
    run: StepTimes | None
    slow: tuple[SlowStep, ...]


def variation_of(steps: Sequence[StepSplit]) -> Variation:
    """How the full steps differ.

    A step is slow that takes longer than the median by SIGMAS standard deviations (by MAD) and by
    LEAST_EXCESS, of LEAST_STEPS or more.
    """
    by_rank = defaultdict[int, dict[int, StepSplit]](dict)
    for one in steps:
        if one.kind == "full":
            by_rank[one.rank][one.step] = one
    ranks = [_times(rank, _lengths(by_rank[rank].values())) for rank in sorted(by_rank)]
    common = sorted(set.intersection(*map(set, by_rank.values()))) if by_rank else []
    if not common:
        return Variation(tuple(ranks), None, ())
    run = _times(None, {n: max(_lengths(_of_step(by_rank, n)).values()) for n in common})
    return Variation(tuple(ranks), run, _slow(by_rank, common, run))


_Splits = Mapping[int, Mapping[int, StepSplit]]
"""The step splits by rank and step."""


def _of_step(by_rank: _Splits, step: int) -> list[StepSplit]:
    return [of_rank[step] for of_rank in by_rank.values()]


def _lengths(steps: Iterable[StepSplit]) -> Mapping[int, int]:
    return {one.step: one.split.step_ns for one in steps}


def _times(rank: int | None, length_ns: Mapping[int, int]) -> StepTimes:
    ordered = np.sort(np.array(list(length_ns.values()), dtype=np.int64))
    middle = _middle(ordered)
    slow = tuple(n for n, ns in sorted(length_ns.items()) if _is_slow(ns, ordered, middle))
    place = -(-99 * len(ordered) // 100) - 1
    return StepTimes(rank, len(ordered), middle, int(ordered[place]), int(ordered[-1]), slow)


def _middle(values: Int64) -> int:
    """The median, the mean of the two in the middle rounded down."""
    ordered = np.sort(values)
    return int(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def _is_slow(step_ns: int, all_ns: Int64, middle: int) -> bool:
    if len(all_ns) < LEAST_STEPS:
        return False
    sigma = _SIGMA_OF_MAD * _middle(np.abs(all_ns - middle))
    return step_ns - middle > max(SIGMAS * sigma, LEAST_EXCESS * middle)


def _slow(by_rank: _Splits, common: Sequence[int], run: StepTimes) -> tuple[SlowStep, ...]:
    ranks = sorted(by_rank)
    buckets = np.array(
        [[by_rank[rank][n].split.buckets_ns for rank in ranks] for n in common], dtype=np.int64
    )
    usual = np.sort(buckets, axis=0)[(len(common) - 1) // 2]
    return tuple(
        _explained(step, buckets[common.index(step)], usual, ranks, run) for step in run.slow_steps
    )


def _explained(
    step: int, buckets_ns: Int64, usual_ns: Int64, ranks: Sequence[int], run: StepTimes
) -> SlowStep:
    step_ns = int(buckets_ns.sum(axis=1).max())
    excess, beyond = step_ns - run.median_ns, buckets_ns - usual_ns
    waits = [BUCKETS.index(bucket) for bucket in _WAITS]
    own = beyond.copy()
    own[:, waits] = np.iinfo(np.int64).min
    told = own if 2 * int(own.max()) >= excess else beyond
    row, bucket = divmod(int(told.argmax()), len(BUCKETS))
    return SlowStep(step, step_ns, excess, ranks[row], BUCKETS[bucket], int(beyond[row, bucket]))
