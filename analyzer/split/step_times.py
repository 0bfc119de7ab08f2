"""Step time variation: median, tail, and the causes of slow steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.buckets import BUCKETS, WAITS, StepSplit
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.trace import Int64

MIN_STEPS = 6
"""Minimum number of steps for detecting slow ones."""

MIN_EXCESS = 0.03
"""A step must exceed the median by at least this fraction to be slow."""

SIGMAS = 5.0


class StepDurations(Struct, frozen=True):
    """Step time statistics over the full steps of one rank, or of the run.

    For the run (rank is None) the duration of a step is that of its slowest rank.

    Attributes:
        rank: Global rank; None for the whole run.
        steps: Number of full steps.
        median_ns: Median step time in ns.
        p99_ns: 99th percentile (nearest rank) in ns; equals longest_ns for fewer than 100 steps.
        longest_ns: Longest step time in ns.
        slow_steps: Numbers of the slow steps (outliers), ascending.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [row.median_ns for row in report.step_times if row.rank is None]
        [175986355]
    """

    rank: int | None
    steps: int
    median_ns: int
    p99_ns: int
    longest_ns: int
    slow_steps: tuple[int, ...]


class SlowStep(Struct, frozen=True):
    """A slow step of the run, and the bucket and rank where its excess over the median arose.

    Waits (skew and bubble) are reported only if no other bucket explains half of the excess,
    because a wait is usually the effect of a delay on another rank.

    Attributes:
        step: Step number.
        step_ns: Step time on the slowest rank in ns.
        excess_ns: step_ns minus the median step time of the run in ns.
        rank: Rank on which the bucket exceeded its median most.
        bucket: Name of that bucket, one of BUCKETS.
        excess_in_bucket_ns: Time of that bucket beyond its median on that rank in ns.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [(row.step, row.rank, row.bucket) for row in report.slow_steps]
        []
    """

    step: int
    step_ns: int
    excess_ns: int
    rank: int
    bucket: str
    excess_in_bucket_ns: int


class Variation(Struct, frozen=True):
    """Step time statistics by rank and of the run; run is None if no step is full on every rank."""

    ranks: tuple[StepDurations, ...]
    run: StepDurations | None
    slow: tuple[SlowStep, ...]


def compute_variation(steps: Sequence[StepSplit]) -> Variation:
    """Computes step time statistics over the full steps.

    A step is slow if it exceeds the median by SIGMAS standard deviations (estimated from the MAD)
    and by MIN_EXCESS; at least MIN_STEPS steps are needed.
    """
    by_rank = defaultdict[int, dict[int, StepSplit]](dict)
    for split in steps:
        if split.kind == "full":
            by_rank[split.rank][split.step] = split
    ranks = [
        _build_durations(rank, _map_durations(by_rank[rank].values())) for rank in sorted(by_rank)
    ]
    common = sorted(set.intersection(*map(set, by_rank.values()))) if by_rank else []
    if not common:
        return Variation(tuple(ranks), None, ())
    run = _build_durations(
        None,
        {
            n: max(_map_durations([of_rank[n] for of_rank in by_rank.values()]).values())
            for n in common
        },
    )
    buckets = np.array(
        [[own[n].split.buckets_ns for _, own in sorted(by_rank.items())] for n in common],
        dtype=np.int64,
    )
    usual = np.sort(buckets, axis=0)[(len(common) - 1) // 2]
    slow = tuple(
        _explain_slow_step(step, buckets[common.index(step)], usual, sorted(by_rank), run)
        for step in run.slow_steps
    )
    return Variation(tuple(ranks), run, slow)


def _map_durations(steps: Iterable[StepSplit]) -> Mapping[int, int]:
    return {one.step: one.split.step_ns for one in steps}


def _build_durations(rank: int | None, length_ns: Mapping[int, int]) -> StepDurations:
    ordered = np.sort(np.array(list(length_ns.values()), dtype=np.int64))
    middle = _compute_median(ordered)
    sigma = SIGMA_OF_MAD * _compute_median(np.abs(ordered - middle))
    limit_ns = max(SIGMAS * sigma, MIN_EXCESS * middle)
    enough = len(ordered) >= MIN_STEPS
    slow = tuple(n for n, ns in sorted(length_ns.items()) if enough and ns - middle > limit_ns)
    place = -(-99 * len(ordered) // 100) - 1
    return StepDurations(rank, len(ordered), middle, int(ordered[place]), int(ordered[-1]), slow)


def _compute_median(values: Int64) -> int:
    """The median; for an even count the mean of the two middle values, rounded down."""
    ordered = np.sort(values)
    return int(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def _explain_slow_step(
    step: int, buckets_ns: Int64, usual_ns: Int64, ranks: Sequence[int], run: StepDurations
) -> SlowStep:
    step_ns = int(buckets_ns.sum(axis=1).max())
    excess, beyond = step_ns - run.median_ns, buckets_ns - usual_ns
    own = beyond.copy()
    own[:, list(WAITS)] = np.iinfo(np.int64).min
    candidates = own if 2 * int(own.max()) >= excess else beyond
    row, bucket = divmod(int(candidates.argmax()), len(BUCKETS))
    return SlowStep(step, step_ns, excess, ranks[row], BUCKETS[bucket], int(beyond[row, bucket]))
