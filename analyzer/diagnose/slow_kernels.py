"""Kernels that are slower on one rank than on its peers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import log
from statistics import NormalDist

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.report.diagnosis_rows import SlowKernel
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.kernels import KernelSums, KernelWork
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import GRID, Float, Int64, KnownWork

MIN_RATIO = 1.05
"""Healthy devices of one type differ by less."""

_LEAST_APART = log(MIN_RATIO)

MIN_COUNT = 12
"""Minimum runs of a kernel to estimate its noise."""

FALSE_ALARMS = 1e-3
"""Expected false positives per recording of balanced ranks with normal noise."""

_MIN_STEPS = 3

_MIN_SIGMAS = 6.0
"""Lower limit, because kernel times have heavier tails than a normal distribution and sigmas
estimated from few runs are often too small."""

_SIGMA_OF_MEDIAN = 1.2533
"""For normal noise: sqrt(n) * (sigma of the median of n values) / sigma."""


class SlowRank(Struct, frozen=True):
    """The slow kernels of one family on one rank; ratio is their total time over that of the peers.

    lost_ns is the cost per step; kernel is the most expensive kernel. equal: what is known to be
    equal on the peers for most of the cost.
    """

    rank: int
    family: str
    ratio: float
    lost_ns: int
    kernels: int
    kernel: str
    equal: KnownWork


class _KernelRuns(Struct, frozen=True):
    """The runs of one kernel on one rank in order of time; counts is their number per step."""

    rank: int
    counts: Int64
    took_ns: Int64


class _ComparableRuns(Struct, frozen=True):
    """The runs of one kernel, of equal shapes, on the ranks that ran it equally often.

    took_ns has shape (ranks, runs), in order of time, with nan in a step in which the rank ran it
    more or less often than the others; counts is the usual number of runs per step.
    """

    work: KernelWork
    family: str
    rank: Int64
    counts: Int64
    took_ns: Float


def find_slow_kernels(split: RunSplit) -> tuple[SlowKernel, ...]:
    """Finds the kernels that are slower on one rank than on its peers, by decreasing cost."""
    stages = [split.layout.find_stage(rank.trace.rank) for rank in split.ranks]
    return compare_kernel_times([rank.kernels for rank in split.ranks], stages)


def compare_kernel_times(
    full: Sequence[KernelSums], stages: Sequence[int]
) -> tuple[SlowKernel, ...]:
    """Finds the kernels that are slower on one rank than on its peers; one entry per trace.

    The n-th run of a name in a step is compared with the n-th run of this name and the same shapes
    on the other ranks, in steps that are full on all ranks, and only among ranks that ran it
    equally often in most steps: a kernel on larger inputs is more work, not slower. Ranks are
    compared within their pipeline stage (stages) if at least _MIN_PEERS ranks of the
    stage ran it, because the n-th runs of two stages do different work in most schedules; without
    shapes the only rank of a stage is compared with no other. The ratio of a rank is the median
    over those runs, relative to the median rank. It counts if it is at least MIN_RATIO and exceeds
    the noise between runs, between steps and between ranks (each from the MAD) by more than is
    expected once in 1 / FALSE_ALARMS recordings.
    """
    common = set.intersection(*(set(one.compute.steps) for one in full)) if full else set()
    comparable = [
        one for one in _group_comparable(full, stages, sorted(common)) if (one.took_ns > 0).any()
    ]
    tests = sum(len(one.rank) for one in comparable) or 1
    sigmas = max(_MIN_SIGMAS, NormalDist().inv_cdf(1 - FALSE_ALARMS / tests))
    rows = [row for one in comparable for row in _compare_ranks(one, sigmas, len(common))]
    return tuple(
        sorted(rows, key=lambda row: (-row.lost_ns, row.rank, row.kernel, row.shapes or ""))
    )


def sum_slow_ranks(kernels: Sequence[SlowKernel]) -> tuple[SlowRank, ...]:
    """The slow kernels summed by rank and family, by decreasing cost."""
    by_family = defaultdict[tuple[int, str], list[SlowKernel]](list)
    for one in kernels:
        by_family[one.rank, one.family].append(one)
    rows = []
    for (rank, family), found in by_family.items():
        lost = sum(one.lost_ns for one in found)
        usual = sum(one.lost_ns / (one.ratio - 1) for one in found)
        worst = max(found, key=lambda one: one.lost_ns)
        # Equal shapes are only claimed if most of the cost is of kernels that have any.
        known = sum(one.lost_ns for one in found if one.shapes is not None)
        of_grids = sum(one.lost_ns for one in found if (one.shapes or "").startswith(GRID))
        equal: KnownWork = (
            "" if 2 * known <= lost else "grids" if 2 * of_grids > known else "shapes"
        )
        ratio = 1 + lost / usual
        rows.append(SlowRank(rank, family, ratio, lost, len(found), worst.kernel, equal))
    return tuple(sorted(rows, key=lambda row: (-row.lost_ns, row.rank, row.family)))


_MIN_PEERS = 3
"""With two ranks the median is between them: neither is known to be the slow one."""


def _group_comparable(
    all_runs: Sequence[KernelSums], stages: Sequence[int], common: Sequence[int]
) -> Iterator[_ComparableRuns]:
    """The kernels that at least two ranks ran often enough, and equally often in most steps."""
    stage_of = {one.compute.rank: stage for one, stage in zip(all_runs, stages, strict=True)}
    runs = defaultdict[KernelWork, list[_KernelRuns]](list)
    families = dict[KernelWork, str]()
    for one in all_runs:
        compute = one.compute
        rows = np.flatnonzero(np.isin(compute.step, common))
        rows = rows[np.argsort(one.work_id[rows], kind="stable")]
        first = np.flatnonzero(np.diff(one.work_id[rows], prepend=-1))
        for same in np.split(rows, first[1:]) if len(rows) else ():
            if len(same) >= MIN_COUNT:
                counts = np.bincount(
                    np.searchsorted(common, compute.step[same]), minlength=len(common)
                )
                work = one.work[one.work_id[same[0]]]
                families[work] = one.families[one.work_id[same[0]]]
                runs[work].append(
                    _KernelRuns(compute.rank, counts.astype(np.int64), compute.took_ns[same])
                )
    for work, everywhere in runs.items():
        for peers in _split_by_stage(everywhere, stage_of, is_known=work.shapes is not None):
            for equal in _split_by_counts(peers):
                usual = equal[0].counts
                ranks = np.array([own.rank for own in equal], dtype=np.int64)
                took = np.full((len(equal), int(usual.sum())), np.nan)
                step = np.repeat(np.arange(len(usual)), usual)
                for placed, own in zip(took, equal, strict=True):
                    # A step with another number of runs is left out: which of them is the n-th?
                    is_usual = own.counts == usual
                    placed[is_usual[step]] = own.took_ns[np.repeat(is_usual, own.counts)]
                yield _ComparableRuns(work, families[work], ranks, usual, took)


def _split_by_counts(runs: Sequence[_KernelRuns]) -> Iterator[list[_KernelRuns]]:
    """The ranks that ran the kernel as often as most of them in more than half of the steps that
    run it; the first one of each list did so in all."""
    left = list(runs)
    while len(left) > 1:
        kinds = Counter(one.counts.tobytes() for one in left)
        most = kinds.most_common(1)[0][0]
        left.sort(key=lambda one: one.counts.tobytes() != most)
        alike = [one for one in left if _is_alike(one, left[0].counts)]
        if len(alike) > 1:
            yield alike
        left = [one for one in left if not _is_alike(one, left[0].counts)]


def _is_alike(runs: _KernelRuns, usual: Int64) -> bool:
    ran = (runs.counts > 0) | (usual > 0)
    equal = (runs.counts == usual) & ran
    return 2 * int(equal.sum()) > int(ran.sum()) and int(usual[equal].sum()) >= MIN_COUNT


def _split_by_stage(
    runs: Sequence[_KernelRuns], stage_of: Mapping[int, int], *, is_known: bool
) -> Iterator[list[_KernelRuns]]:
    """The runs of each stage with enough ranks, and those of all other ranks together.

    If the shapes are not known, these are without the only ranks of stages.
    """
    by_stage = defaultdict[int, list[_KernelRuns]](list)
    for one in runs:
        by_stage[stage_of[one.rank]].append(one)
    peers = Counter(stage_of.values())
    is_comparable = len(peers) == 1 or is_known
    others = [
        run
        for stage, same in by_stage.items()
        if len(same) < _MIN_PEERS and (is_comparable or peers[stage] > 1)
        for run in same
    ]
    yield from (same for same in by_stage.values() if len(same) >= _MIN_PEERS)
    if len(others) > 1:
        yield others


def _compare_ranks(runs: _ComparableRuns, sigmas: float, steps: int) -> Iterator[SlowKernel]:
    took = np.log(np.maximum(runs.took_ns, 1))
    usual = _compute_median(took, axis=0)
    by_rank = _compute_median(took - usual, axis=1)
    middle = _compute_low_median(by_rank)
    apart = by_rank - middle
    if not (apart >= _LEAST_APART).any():
        return
    noise = _estimate_noise(took - usual, by_rank, runs.counts)
    least = np.maximum(_LEAST_APART, sigmas * noise)
    expected_ns = float(np.exp(usual + middle).sum()) / steps
    for row in np.flatnonzero(apart >= least).tolist():
        ratio = float(np.exp(apart[row]))
        yield SlowKernel(
            rank=int(runs.rank[row]),
            kernel=runs.work.name,
            family=runs.family,
            ratio=ratio,
            lost_ns=round(expected_ns * (ratio - 1)),
            count=int(np.isfinite(runs.took_ns[row]).sum()),
            shapes=runs.work.shapes,
        )


def _estimate_noise(beyond: Float, by_rank: Float, counts: Int64) -> Float:
    """The standard deviation of each rank's ratio, from its runs, its steps and the other ranks.

    The median rank itself is uncertain with few ranks; with two, it shifts by as much in the other
    direction.
    """
    parts = np.split(beyond, np.cumsum(counts)[:-1], axis=1)
    by_step = np.stack([_compute_median(p, axis=1) for p in parts if p.shape[1]], axis=1)
    of_median = _estimate_median_sigma(beyond, by_rank)
    if by_step.shape[1] >= _MIN_STEPS:
        of_median = np.maximum(of_median, _estimate_median_sigma(by_step, by_rank))
    spread = SIGMA_OF_MAD * _compute_low_median(np.abs(by_rank - _compute_low_median(by_rank)))
    return np.asarray(np.hypot((1 + 2 / len(by_rank)) * of_median, spread))


def _estimate_median_sigma(values: Float, by_rank: Float) -> Float:
    """The standard deviation of each rank's median of these values, shape (ranks, n)."""
    sigma = SIGMA_OF_MAD * _compute_median(np.abs(values - by_rank[:, None]), axis=1)
    # A rank whose few values agree by chance is as noisy as its peers.
    sigma = np.maximum(sigma, np.median(sigma))
    return np.asarray(_SIGMA_OF_MEDIAN * sigma / np.sqrt(np.isfinite(values).sum(axis=1)))


def _compute_median(values: Float, axis: int) -> Float:
    """The median without nan; nan of nothing else."""
    ordered = np.sort(values, axis)
    n = np.isfinite(values).sum(axis, keepdims=True)
    low, high = (
        np.take_along_axis(ordered, np.maximum(middle, 0), axis)
        for middle in ((n - 1) // 2, n // 2)
    )
    return np.asarray((low + high) / 2).squeeze(axis)


def _compute_low_median(values: Float) -> float:
    """The lower middle value: for two ranks the faster one is the reference."""
    return float(np.sort(values)[(len(values) - 1) // 2])
