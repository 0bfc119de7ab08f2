"""Slow devices: ranks that take longer than others for all that both compute.

slow_kernels.py tests each kernel by itself, for which it needs many runs of it. Here all kernels of
a rank are one test, so that a step of few kernels is enough, and a stage of one or two ranks: the
same kernels with equal grids and shapes are compared wherever they ran.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np

from stepsplit.analyzer.arrays import group_ids, group_rows
from stepsplit.analyzer.diagnose.slow_kernels import MIN_COUNT, MIN_RATIO
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.kernels import KernelWork
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Float

_LEAST_APART = log(MIN_RATIO)

_AGREE = 0.8
"""Kernels with this share of the compared time take longer: a device slows all of them, and larger
inputs of one part of the model do not. Kernels that wait for memory slow less than others."""

_MIN_SHARE = 0.5
"""At least this share of a rank's compute is compared."""

_MAX_KINDS = 64
"""Only so many kernels of equal shapes, those that take most time, are compared."""

_MIN_SIGMAS = 6.0
"""As for single kernels (slow_kernels.py)."""

_MIN_STEPS = 3
"""Of fewer steps of a rank it is not known how much they differ."""


class _Excess(NamedTuple):
    """By how much the runs of a kernel in a step take longer than on the median rank: logarithms of
    the ratios, and their times in ns."""

    step: int
    log_ratio: Float
    took_ns: Float


def find_slow_devices(split: RunSplit) -> dict[int, Float]:
    """Find the ranks that take longer for all they compute than others for the same.

    The runs of a kernel in a step are compared by length, the longest with the longest: ranks of
    different stages run the same kernels in another order.

    Returns:
        For each slow rank, by its index: the time that each of its steps should take over that it
        takes, in the order of its windows.
    """
    if len(split.ranks) < 2 or not split.ranks[0].trace.on_device:
        return {}
    computed = np.zeros(len(split.ranks))
    total: Counter[KernelWork] = Counter()
    collected = []
    for index, rank in enumerate(split.ranks):
        sums = rank.kernels
        computed[index] = sum(sums.total_ns)
        # Without a grid or shapes, longer may be larger.
        for work, spent_ns in zip(sums.work, sums.total_ns, strict=True):
            if work.shapes is not None:
                total[work] += spent_ns
        collected.append(sums)
    compared = {work for work, _ in total.most_common(_MAX_KINDS)}
    runs: dict[tuple[KernelWork, int], dict[int, Float]] = defaultdict(dict)
    for index, sums in enumerate(collected):
        is_compared = np.array([work in compared for work in sums.work], dtype=np.bool_)
        known = np.flatnonzero(is_compared[sums.work_id])
        known = known[np.argsort(sums.compute.took_ns[known], kind="stable")]
        kind, step = sums.work_id[known], sums.compute.step[known]
        took_ns = np.maximum(sums.compute.took_ns[known], 1).astype(np.float64)
        order, first = group_rows(group_ids(kind, step))
        for rows in np.split(order, first[1:]) if len(order) else ():
            runs[sums.work[kind[rows[0]]], int(step[rows[0]])][index] = took_ns[rows]
    excess: dict[int, list[_Excess]] = defaultdict(list)
    for (_, number), by_rank in runs.items():
        usual_count = Counter(map(len, by_rank.values())).most_common(1)[0][0]
        alike = [index for index, took in by_rank.items() if len(took) == usual_count]
        if len(alike) < 2:
            continue
        of_rank = np.stack([by_rank[index] for index in alike])
        # Of two ranks, the faster one is the reference.
        usual_ns = np.sort(of_rank, axis=0)[(len(alike) - 1) // 2]
        for index, own in zip(alike, of_rank, strict=True):
            excess[index].append(_Excess(number, np.log(own / usual_ns), own))
    slow = {}
    by_step: dict[int, dict[int, float]] = {}
    for index, parts in excess.items():
        ratio = np.concatenate([one.log_ratio for one in parts])
        weight = np.concatenate([one.took_ns for one in parts])
        if weight.sum() < _MIN_SHARE * computed[index] or len(ratio) < MIN_COUNT:
            continue
        typical = float(np.median(ratio))
        error = SIGMA_OF_MAD * float(np.median(np.abs(ratio - typical))) / np.sqrt(len(ratio))
        if typical < max(_LEAST_APART, _MIN_SIGMAS * error):
            continue
        agrees = weight * (ratio >= _LEAST_APART)
        if agrees.sum() < _AGREE * weight.sum():
            # A device that heats up is not slow at first. That this is no chance shows
            # where the steps of several others do not differ, or those of the only other one.
            by_step = by_step or {other: _measure_steps(own) for other, own in excess.items()}
            others = [own for other, own in by_step.items() if other != index]
            apart = [abs(ratio) for own in others for ratio in own.values()]
            noise = SIGMA_OF_MAD * float(np.median(apart)) if len(others) > 1 else np.inf
            if len(split.ranks) == 2 and len(others) == 1:
                noise = _measure_drift(excess[1 - index])
            hot_steps = [step for step, own in by_step[index].items() if own >= _LEAST_APART]
            step = np.repeat([one.step for one in parts], [len(one.log_ratio) for one in parts])
            hot = np.isin(step, hot_steps)
            if typical < _MIN_SIGMAS * noise or agrees[hot].sum() < _AGREE * weight[hot].sum():
                continue
        # In each step by itself: a device that heats up slows down from step to step. A step that
        # no peer has whole has the pace of the others.
        windows = split.ranks[index].windows.windows
        of_step = [[one for one in parts if one.step == window.step] for window in windows]
        pace = np.array([_measure_pace(here or parts) for here in of_step])
        slow[index] = pace
    return slow


def _measure_pace(parts: Sequence[_Excess]) -> float:
    """The time that kernels should take over that they take."""
    lasted = sum(float(one.took_ns.sum()) for one in parts)
    should = sum(float((one.took_ns * np.exp(-one.log_ratio)).sum()) for one in parts)
    return min(should / lasted, 1.0)


def _measure_drift(parts: Sequence[_Excess]) -> float:
    """By how much, as a logarithm, steps of a rank differ from its median step at most; infinite
    if too few have the same kernels."""
    spent: dict[int, float] = defaultdict(float)
    runs: Counter[int] = Counter()
    for one in parts:
        spent[one.step] += float(one.took_ns.sum())
        runs[one.step] += len(one.took_ns)
    usual = Counter(runs.values()).most_common(1)[0][0]
    alike = np.log([spent[step] for step, count in runs.items() if count == usual])
    if len(alike) < _MIN_STEPS:
        return np.inf
    return float(np.abs(alike - np.median(alike)).max())


def _measure_steps(parts: Sequence[_Excess]) -> dict[int, float]:
    """The median excess of the kernels in each step of a rank, by the number of the step."""
    by_step: dict[int, list[Float]] = defaultdict(list)
    for one in parts:
        by_step[one.step].append(one.log_ratio)
    return {step: float(np.median(np.concatenate(own))) for step, own in by_step.items()}
