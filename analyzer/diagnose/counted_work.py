"""The work that a job counts itself: tokens, samples or FLOPs of each rank and step, and how much
of the differences in compute it explains.

Attention takes more than proportional time, and what every step does alike takes less. So the law
between work and time is estimated: compute grows as the work to some power from 0 (no influence) to
2 (attention alone). Its power comes from the steps of each rank, compared with that rank's other
steps, so that a slow rank does not look like a law. Where the work of a rank hardly varies it stays
open, and a rank with more work is slow only beyond what the square of its work explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log
from statistics import NormalDist

import numpy as np
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids
from stepsplit.analyzer.diagnose.slow_kernels import FALSE_ALARMS, MIN_RATIO
from stepsplit.analyzer.report.work_rows import WORK_NOUNS, StepWorkRow, WorkSummary, WorkUnit
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import Bool, Float, Int64, Note
from stepsplit.collectors.formats.rank_record import RankRecord, RecordedWork, StepWork

_UNITS: tuple[WorkUnit, ...] = ("flops", "tokens", "samples")
"""What is compared first where several are known: FLOPs say most about the time."""

_LEAST_UNEVEN = 1.02
"""Up to this ratio of the most to the mean work of a step, the work is even."""

_LEAST_APART = log(MIN_RATIO)

MIN_STEPS = 3
"""A rank of fewer steps is not compared by its work."""

_MIN_SIGMAS = 4.0
"""A rank is slow beyond its work if its mean excess is so many standard errors, or more where many
ranks are compared. Those of kernels (slow_kernels.py) have tails; these are means of steps."""

_MAX_POWER = 2.0
"""Attention alone: the square of the tokens of one sequence."""

_POWER_SIGMAS = 3.0
"""Powers within so many standard errors count as possible."""

_KNOWN_POWER = 0.35
"""Up to this standard error the estimated power is used, else time is taken as proportional."""

_LEAST_ON_CORES, _FEW = log(1.25), 0.1
"""From which time on a rank on a CPU is slow: two of 60 healthy ones took 1.17 and 1.18 times as
long. And in all but which part of its steps it is held up by what else its cores do: no rank of 20
jobs of 2 and 4 ranks at loads of 2 to 4 was, and 14 of 15 with 1/1.8 of their part of the cores."""

_MAX_MORE_KERNELS = 1.1
"""A rank that runs so many times as many kernels, also for its work, does what no count has."""


class WorkLaw(Struct, frozen=True):
    """The counted work of a recording and what compute it explains.

    Attributes:
        summary: the work in numbers.
        of_row: the work of each row of the steps (all ranks, in order); nan where unknown.
        factor: the compute of each row at the mean work of its stage in the step over that at its
            own work; 1 where either is unknown, and everywhere where the work is even.
        uneven: the rows of stages and steps whose ranks have different work.
        slow: the ranks, by index, that take so many times as long as others for equal work, the
            least ratio that any possible law leaves.
        unjudged: the ranks, by index, of stages with too few steps for a law, and how many times as
            long as the peer with the least work each may take: by the square of its work.
    """

    summary: WorkSummary
    of_row: Float
    factor: Float
    uneven: Bool
    slow: dict[int, float]
    unjudged: dict[int, float]

    def bound_times(self, index: int, of_rank: Int64) -> float:
        """How many times as long as its peers the rank may take by its work alone: inf where its
        steps say by a law what exceeds it. 1 if it has the same work in each step; of_rank is the
        index of the rank of each row."""
        if not self.uneven[of_rank == index].any():
            return 1.0
        return self.unjudged.get(index, float("inf"))


class CountedWork(Struct, frozen=True):
    """What a job counted, and the law between work and time where all ranks counted the same."""

    rows: tuple[StepWorkRow, ...] = ()
    law: WorkLaw | None = None
    notes: tuple[Note, ...] = ()


def read_counted_work(
    split: RunSplit, of_rank: Int64, full: Bool, records: Sequence[RankRecord]
) -> CountedWork:
    """The work that the ranks counted, and what compute it explains.

    Args:
        split: the split recording.
        of_rank: the index of the rank of each row of the steps.
        full: the rows that enter the mean step.
        records: what each rank recorded; without work in any, nothing is returned.
    """
    counted_by = {one.rank.rank: one.work for one in records if one.work is not None}
    if not counted_by:
        return CountedWork()
    rows = [
        StepWorkRow(rank.trace.rank, one.step, one.tokens, one.samples, one.flops)
        for rank in split.ranks
        for one in _number_as_split(rank, counted_by.get(rank.trace.rank))
    ]
    counted = full if full.any() else np.ones_like(full)
    numbers = np.array([rank.trace.rank for rank in split.ranks])
    of_row, unit, lacking = np.zeros(0), _UNITS[0], list[str]()
    for unit in _UNITS:
        amount = {(row.rank, row.step): getattr(row, unit) for row in rows}
        found = [amount.get((rank.trace.rank, s.step)) for rank in split.ranks for s in rank.steps]
        of_row = np.array([np.nan if one is None else float(one) for one in found])
        unknown = np.isnan(of_row) & counted
        if not unknown.any():
            if of_row[counted].any():
                break
            lacking.append(f"all {WORK_NOUNS[unit]} are 0")
        elif not np.isnan(of_row[counted]).all():
            ranks = units.format_number_list(np.unique(numbers[of_rank[unknown]]).tolist())
            lacking.append(f"{WORK_NOUNS[unit]} are unknown in steps of ranks {ranks}")
    else:
        text = f"times are not compared by work: {'; '.join(lacking) or 'no full step has any'}"
        return CountedWork(tuple(rows), None, (Note("work_unknown", text),))
    origin = ", ".join(sorted({work.origin for work in counted_by.values()}))
    return CountedWork(tuple(rows), _fit_law(split, of_rank, counted, of_row, unit, origin))


def _number_as_split(rank: RankSplit, work: RecordedWork | None) -> Iterator[StepWork]:
    """The work of the rank's steps with the numbers that they have in the split: those of the first
    rank, and of steps of several marks that of the last one, with the work of all of them."""
    if work is None:
        return
    by_mark = {one.step + rank.windows.shift: one for one in work.steps}
    before = None
    for window in rank.windows.windows:
        # The steps at the edges of a recording may have fewer marks.
        first = window.step - rank.windows.marks + 1
        first = first if before is None else max(first, before + 1)
        before = window.step
        parts = [by_mark.get(number) for number in range(first, window.step + 1)]
        known = [one for one in parts if one is not None]
        if len(known) == len(parts):
            sums = [
                None if None in counts else sum(filter(None, counts))
                for counts in zip(
                    *((one.tokens, one.samples, one.flops) for one in known), strict=True
                )
            ]
            yield StepWork(window.step, *sums)


def _fit_law(
    split: RunSplit, of_rank: Int64, counted: Bool, work: Float, unit: WorkUnit, origin: str
) -> WorkLaw:
    """The law that the counted rows follow, and the ranks that exceed it."""
    splits = [step.split for rank in split.ranks for step in rank.steps]
    compute = np.array([one.compute_ns for one in splits], dtype=np.float64)
    step_ns = np.array([one.step_ns for one in splits], dtype=np.float64)
    numbers = np.array([step.step for rank in split.ranks for step in rank.steps])
    stages = np.array([split.layout.find_stage(rank.trace.rank) for rank in split.ranks])
    stage = stages[of_rank]
    label = group_ids(stage, numbers)
    rows = _Rows(of_rank, stage, label, counted, work, compute)
    peers = _compare_peers(label, work)
    power, error, (low, high) = _estimate_power(of_rank, rows.known, work, compute)
    used = float(np.clip(power, low, high)) if error <= _KNOWN_POWER else None
    has_uneven = bool((peers.uneven & counted).any())
    # A stage counts once in each of its steps, however many ranks it has.
    once = np.unique(label[counted], return_index=True)[1]
    summary = WorkSummary(
        unit=unit,
        origin=origin,
        mean=float(work[counted].mean()),
        most_ratio=float(peers.most_ratio[counted][once].mean()) if has_uneven else 1.0,
        ns_per_unit=float(step_ns[counted].mean() / work[counted].mean()),
        power=used if has_uneven else None,
        power_low=low,
        power_high=high,
    )
    factor = _scale_to_mean_work(rows, peers, used, (low, high))
    slow, unjudged = dict[int, float](), dict[int, float]()
    if has_uneven:
        share = np.concatenate([_measure_undisturbed(rank) for rank in split.ranks])
        slow, unjudged = _judge_ranks(rows, peers, compute * share)
    slow = {
        index: ratio
        for index, ratio in slow.items()
        if not _has_other_work(split, of_rank, counted, work, stages, index)
    }
    return WorkLaw(summary, work, factor, peers.uneven, slow, unjudged)


_LEAST_RUNS = 4
"""So many runs of an op have a second quarter."""


def _measure_undisturbed(rank: RankSplit) -> Float:
    """The share of each step's compute that is left if the runs of an op, of equal shapes where
    they are known, all take the mean of the second quarter of them, by length, in that step.

    The time of an op on a CPU has what other programs had of its core meanwhile: of fewer than half
    of the runs, and of those many times their own. A GPU runs a kernel to its end: its share is 1.
    """
    share = np.ones(len(rank.steps))
    if rank.trace.on_device:
        return share
    compute, work_id = rank.kernels.compute, rank.kernels.work_id
    for place, number in enumerate(rank.numbers):
        mine = np.flatnonzero(compute.step == number)
        order = mine[np.lexsort((compute.took_ns[mine], work_id[mine]))]
        first = np.flatnonzero(np.diff(work_id[order], prepend=-1))
        usual_ns = sum(
            len(runs) * float(runs[len(runs) // 4 : (len(runs) + 1) // 2].mean())
            if len(runs) >= _LEAST_RUNS
            else float(runs.sum())
            for runs in np.split(compute.took_ns[order], first[1:])
        )
        if usual_ns > 0:  # else a coarse clock has left most runs without a duration
            share[place] = usual_ns / int(compute.took_ns[mine].sum())
    return share


class _Rows(Struct, frozen=True):
    """The steps of all ranks, in order: the index of the rank, its stage, a number of stage and
    step, whether the step enters the mean, its work (nan where unknown) and its compute in ns."""

    of_rank: Int64
    stage: Int64
    label: Int64
    counted: Bool
    work: Float
    compute: Float

    @property
    def known(self) -> Bool:
        """The rows of the mean whose work is known."""
        return self.counted & ~np.isnan(self.work)

    @property
    def fits(self) -> Bool:
        """The rows that a law between work and compute can be fitted to."""
        return self.known & (self.work > 0) & (self.compute > 0)


class _PeerWork(Struct, frozen=True):
    """For each row the work of its peers, the ranks that could share its work: those of its stage
    in its step. most_ratio is the most over the mean."""

    mean: Float
    most_ratio: Float
    least: Float
    uneven: Bool


def _compare_peers(label: Int64, work: Float) -> _PeerWork:
    """The work of the rows with the same label; a row whose own is unknown is not uneven."""
    known = ~np.isnan(work)
    count = np.maximum(np.bincount(label, known), 1)
    mean = (np.bincount(label, np.where(known, work, 0)) / count)[label]
    most, least = np.zeros(len(count)), np.full(len(count), np.inf)
    np.maximum.at(most, label, np.where(known, work, 0))
    np.minimum.at(least, label, np.where(known, work, np.inf))
    ratio = most[label] / np.where(mean > 0, mean, 1)
    return _PeerWork(mean, ratio, least[label], known & (ratio > _LEAST_UNEVEN))


def _scale_to_mean_work(
    rows: _Rows, peers: _PeerWork, power: float | None, powers: tuple[float, float]
) -> Float:
    """The factor that makes the compute of each row that of its peers' mean work.

    By ratios of a law, which keep what else makes a row longer. power is that of the law if it is
    known, powers are its ends.
    """
    factor = np.ones(len(rows.work))
    for stage in np.unique(rows.stage[peers.uneven]).tolist():
        mine, fits = peers.uneven & (rows.stage == stage), rows.fits & (rows.stage == stage)
        if not fits.any():
            continue
        of_rank, work, compute = rows.of_rank[fits], rows.work[fits], rows.compute[fits]
        if power is not None:
            curve = _fit_curve(of_rank, work, compute, power)
        else:
            # Of ranks whose work does not vary: the law that makes them differ least.
            curve = _Curve.of_power(_compare_ranks(of_rank, work, compute, *powers))
        # A row without work gets the usual time.
        usual = float(np.median(compute / curve.compute(work)))
        spent = np.where(
            rows.work[mine] > 0, curve.compute(rows.work[mine]), rows.compute[mine] / usual
        )
        at_mean = curve.compute(peers.mean[mine])
        factor[mine] = np.divide(at_mean, spent, out=np.ones(len(spent)), where=spent > 0)
    return factor


def _judge_ranks(
    rows: _Rows, peers: _PeerWork, undisturbed: Float
) -> tuple[dict[int, float], dict[int, float]]:
    """The ranks that are slow and those that cannot be judged, as in WorkLaw, of stages whose
    ranks have different work. undisturbed: the compute without what other programs added."""
    _, _, powers = _estimate_power(rows.of_rank, rows.known, rows.work, undisturbed)
    slow, unjudged = dict[int, float](), dict[int, float]()
    for stage in np.unique(rows.stage[peers.uneven & rows.counted]).tolist():
        members = rows.fits & (rows.stage == stage)
        indices, steps = np.unique(rows.of_rank[members], return_counts=True)
        if steps.min(initial=MIN_STEPS) >= MIN_STEPS:
            slow |= _find_slow(rows, members, undisturbed, powers)
            continue
        for index in indices.tolist():
            mine = rows.known & (rows.of_rank == index)
            least = peers.least[mine]
            more = np.divide(
                rows.work[mine], least, out=np.full(len(least), np.inf), where=least > 0
            )
            unjudged[index] = float(more.max(initial=1.0)) ** _MAX_POWER
    return slow, unjudged


def _estimate_power(
    of_rank: Int64, rows: Bool, work: Float, compute: Float
) -> tuple[float, float, tuple[float, float]]:
    """(the power, its standard error, the lowest and highest possible one) by which compute grows
    as the work, within ranks; an infinite error where the work of no rank varies, or too few steps
    are known."""
    unknown = 1.0, float("inf"), (0.0, _MAX_POWER)
    rows = rows & (work > 0) & (compute > 0)
    if not rows.any():
        return unknown
    own, x, y = of_rank[rows], np.log(work[rows]), np.log(compute[rows])
    # Without steps that something else made long. They are found by a slope of medians: that of
    # least squares bends to three of ten, and then they look like the others.
    rest = y - _find_median_slope(own, x, y) * x
    for one in np.unique(own).tolist():
        rest[own == one] -= np.median(rest[own == one])
    sigma = SIGMA_OF_MAD * float(np.median(np.abs(rest)))
    keep = np.abs(rest) <= max(_MIN_SIGMAS * sigma, _LEAST_APART)
    own, x, y = np.unique(own[keep], return_inverse=True)[1], x[keep], y[keep]
    freedom = len(own) - int(own.max(initial=-1)) - 2
    count = np.bincount(own)
    x -= (np.bincount(own, x) / count)[own]
    y -= (np.bincount(own, y) / count)[own]
    squares = float(x @ x)
    if freedom < 2 or squares < freedom * log(_LEAST_UNEVEN) ** 2:
        return unknown
    power = float(x @ y) / squares
    rest = y - power * x
    error = float(np.sqrt(rest @ rest / freedom / squares))
    low, high = np.clip(
        [power - _POWER_SIGMAS * error, power + _POWER_SIGMAS * error], 0, _MAX_POWER
    )
    return power, error, (float(low), float(high))


_MOST_LAGS = 20
"""Steps are compared with so many before them: all of a usual recording, and linear in a long one.
Half as many leave out half of the pairs of twenty steps, twice as many add none to them."""


def _find_median_slope(own: Int64, x: Float, y: Float) -> float:
    """The median of the slopes between steps of the same rank, by their distances in x; 1 without
    any."""
    order = np.argsort(own, kind="stable")
    own, x, y = own[order], x[order], y[order]
    dx, dy = [], []
    for lag in range(1, min(_MOST_LAGS, len(own) - 1) + 1):
        same = own[lag:] == own[:-lag]
        dx.append((x[lag:] - x[:-lag])[same])
        dy.append((y[lag:] - y[:-lag])[same])
    along, up = (np.concatenate([np.zeros(0), *parts]) for parts in (dx, dy))
    apart = along != 0
    if not apart.any():
        return 1.0
    slopes, weights = up[apart] / along[apart], np.abs(along[apart])
    order = np.argsort(slopes, kind="stable")
    total = np.cumsum(weights[order])
    return float(slopes[order][np.searchsorted(total, total[-1] / 2)])


class _Curve(Struct, frozen=True):
    """Compute by work, up to a factor: a sum of powers of the work, each with its share."""

    scale: float
    shares: tuple[tuple[float, float], ...]

    @classmethod
    def of_power(cls, power: float) -> _Curve:
        """The compute that grows as this power."""
        return cls(1.0, ((power, 1.0),))

    def compute(self, work: Float) -> Float:
        """The compute of this work."""
        total = np.zeros(len(work))
        for power, share in self.shares:
            total += share * (work / self.scale) ** power
        return total


_TERMS = ((0.0,), (1.0,), (2.0,), (0.0, 1.0), (0.0, 2.0), (1.0, 2.0), (0.0, 1.0, 2.0))
"""What each step does alike, what is proportional to its work, and attention."""


def _fit_curve(of_rank: Int64, work: Float, compute: Float, power: float) -> _Curve:
    """The curve of a constant, a proportional and a square part, none negative, that fits the rows
    best, each rank up to a factor of its own."""
    scale = float(work.mean())
    # The level of each rank by the power alone, so that a slow one does not bend the curve.
    level = np.log(compute) - power * np.log(work / scale)
    for one in np.unique(of_rank).tolist():
        level[of_rank == one] = np.median(level[of_rank == one])
    relative = compute / np.exp(level)
    best, least = _Curve.of_power(power), np.inf
    for terms in _TERMS:
        columns = np.stack([(work / scale) ** term for term in terms], axis=1)
        columns /= relative[:, np.newaxis]
        shares = np.linalg.lstsq(columns, np.ones(len(work)), rcond=None)[0]
        error = float(((columns @ shares - 1) ** 2).sum())
        # A term more must explain something, as it always fits a little better.
        if (shares > 0).all() and error < 0.98 * least:
            best = _Curve(scale, tuple(zip(terms, shares.tolist(), strict=True)))
            least = error
    return best


def _compare_ranks(of_rank: Int64, work: Float, compute: Float, low: float, high: float) -> float:
    """The power between low and high by which the mean ranks differ least."""
    own = np.unique(of_rank, return_inverse=True)[1]
    count = np.bincount(own)
    x, y = (np.bincount(own, np.log(one)) / count for one in (work, compute))
    x, y = x - x.mean(), y - y.mean()
    squares = float(x @ x)
    return float(np.clip(x @ y / squares if squares > 0 else 1.0, low, high))


def _find_slow(
    rows: _Rows, members: Bool, undisturbed: Float, powers: tuple[float, float]
) -> dict[int, float]:
    """The ranks of a stage, whose rows are members, that take longer than its others by any
    possible law, and so many times as long by the one that explains most."""
    ranks = np.unique(rows.of_rank[members]).tolist()
    if len(ranks) < 2:
        return {}
    own = [members & (rows.of_rank == one) for one in ranks]
    x = [np.log(rows.work[one]) for one in own]
    apart, noise = _compare_levels(x, [np.log(undisturbed[one]) for one in own], powers)
    # Without shapes these runs of an op are not always of the same work: what the rank
    # computes in all must not say otherwise, as far as others leave its core alone.
    whole, doubt = _compare_levels(x, [np.log(rows.compute[one]) for one in own], powers)
    # In what nothing interrupts, too, cores differ by more than devices of a type: by their caches.
    on_cores = bool((undisturbed[members] < rows.compute[members]).any())
    least = _LEAST_ON_CORES if on_cores else _LEAST_APART
    is_slow = (apart >= np.maximum(least, noise)) & (whole + doubt >= _LEAST_APART)
    # Or it takes longer than the others in nearly all steps: a limit of its container, or a program
    # beside it that does not end, holds it up as much as a slow core.
    steps, step = np.unique(rows.label[members], return_inverse=True)
    spent = np.full((len(ranks), len(steps)), np.nan)
    took = np.log(rows.compute[members]) - sum(powers) / 2 * np.log(rows.work[members])
    spent[np.searchsorted(ranks, rows.of_rank[members]), step] = took
    spent = spent[:, ~np.isnan(spent).any(axis=0)]
    is_held = np.zeros(len(ranks), dtype=np.bool_)
    if spent.size:
        others = [np.median(np.delete(spent, at, axis=0), axis=0) for at in range(len(ranks))]
        above = spent - others
        is_held = np.quantile(above, _FEW, axis=1) > 0
        is_held &= whole >= np.maximum(_LEAST_ON_CORES, doubt)
        # As even ranks are not in so many steps, whatever their noise.
        by_chance = len(ranks) * 0.5 ** spent.shape[1]
        is_held |= (above.min(axis=1) > 0) & (by_chance < FALSE_ALARMS) & (whole >= _LEAST_ON_CORES)
    times = np.where(is_held, np.maximum(apart, whole), apart)
    return {ranks[at]: exp(float(times[at])) for at in np.flatnonzero(is_slow | is_held).tolist()}


def _compare_levels(
    x: Sequence[Float], y: Sequence[Float], powers: tuple[float, float]
) -> tuple[Float, Float]:
    """By how much each rank takes longer than the usual one, by the possible law that explains most
    of it, and what of that noise may be; as logarithms, as are the work x and the compute y of the
    steps of each rank."""
    # What the ranks' own steps say of the law holds as far as their work varies; beyond, and for a
    # rank with always more work than the others, all laws are possible.
    middle = np.array([float(np.mean(one)) for one in x])
    reach = max(float(np.abs(one - np.mean(one)).max()) for one in x)
    apart = np.full(len(x), np.inf)
    for power in np.linspace(*powers, 9).tolist():
        level = np.array([np.median(b - power * a) for a, b in zip(x, y, strict=True)])
        usual = int(np.argsort(level, kind="stable")[(len(x) - 1) // 2])
        more = middle - middle[usual]
        beyond = np.maximum(np.abs(more) - reach, 0)
        allowed = beyond * np.where(more > 0, _MAX_POWER - power, power)
        apart = np.minimum(apart, level - level[usual] - allowed)
    used = sum(powers) / 2
    rest = [b - used * a for a, b in zip(x, y, strict=True)]
    level = np.array([np.median(one) for one in rest])
    own = np.array([SIGMA_OF_MAD * np.median(np.abs(one - np.median(one))) for one in rest])
    pooled = np.concatenate([one - np.median(one) for one in rest])
    sigma = np.maximum(own, SIGMA_OF_MAD * float(np.median(np.abs(pooled))))
    steps = np.array([len(one) for one in rest])
    # The level of the rank that it is compared with is as uncertain as its own.
    error = np.sqrt(2) * _SIGMA_OF_MEDIAN * sigma / np.sqrt(steps)
    away = np.sort(np.abs(level - np.sort(level)[(len(x) - 1) // 2]))
    spread = SIGMA_OF_MAD * float(away[(len(x) - 1) // 2])
    sigmas = max(_MIN_SIGMAS, NormalDist().inv_cdf(1 - FALSE_ALARMS / len(x)))
    sigmas *= 1 + 1 / max(int(steps.sum()) - len(x), 1)
    return apart, np.asarray(sigmas * np.hypot(error, spread))


_SIGMA_OF_MEDIAN = 1.2533
"""For normal noise: sqrt(n) * (sigma of the median of n values) / sigma."""


def _has_other_work(
    split: RunSplit, of_rank: Int64, counted: Bool, work: Float, stages: Int64, index: int
) -> bool:
    """Whether the rank runs more kernels than the others of its stage, also for its work: an
    evaluation, or layers that only it has, are in no count. Another stage has other layers."""
    kernels, done = np.zeros(len(split.ranks)), np.zeros(len(split.ranks))
    for other, rank in enumerate(split.ranks):
        mine = counted & (of_rank == other)
        numbers = np.array(rank.numbers)[mine[of_rank == other]]
        kernels[other] = np.isin(rank.kernels.compute.step, numbers).sum() / max(len(numbers), 1)
        done[other] = work[mine].mean() if mine.any() else 0.0
    others = (stages == stages[index]) & (np.arange(len(split.ranks)) != index)
    per_work = kernels / np.maximum(done, 1e-9)
    more = (one[index] / max(float(np.median(one[others])), 1e-9) for one in (kernels, per_work))
    return bool(min(more) > _MAX_MORE_KERNELS)
