"""Waits charged to the ranks on the paths, and which of them exceed their variation."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import compress
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.diagnose.graph.binding_paths import BLAME_CAUSES, COMPUTES, BindingPaths
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.exposed_waits import ExposedWaits
from stepsplit.analyzer.diagnose.graph.path_pairs import PathPairs
from stepsplit.analyzer.report.build import find_full_numbers
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Bool, Float, Int64

_SIGNIFICANCE = 3.0
"""A rank is blamed if what it causes exceeds that of the median rank by this many standard errors,
or its work that of the median of its peers."""


_NEARLY_ALL = 0.9
"""Its work must exceed theirs in this share of the steps, too: of a few steps the error is hardly
known."""


_OUTLIER = 6.0
"""A rank is blamed in a step in which its work exceeds its median step by this many standard
deviations. At 3 and 12 a slow kernel in one step of five is blamed alike, and noise of 3 % is
not."""


class Charges(Struct, frozen=True):
    """The waits that each rank caused; table: shape (ranks, steps, origins, BLAME_CAUSES).

    A wait counts to the step in which the rank that is waited for spent the time: at the begin of a
    step that may be the end of the one before, such as of an optimizer on its host. But what is
    shown of the full steps adds up: time in another step stays with the wait. full is by step.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    full: Bool
    table: Float

    @classmethod
    def build(cls, split: RunSplit, graph: DependencyGraph, waits: ExposedWaits) -> Charges:
        """An empty table for these waits, of all steps."""
        ranks = tuple(rank.trace.rank for rank in split.ranks)
        steps = tuple(np.unique(graph.steps.step).tolist())
        full = np.isin(steps, list(find_full_numbers(split)))
        table = np.zeros((len(ranks), len(steps), waits.origins, len(BLAME_CAUSES)))
        return cls(ranks, steps, full, table)

    def add(
        self, waits: ExposedWaits, pairs: PathPairs, paths: BindingPaths, amount: Float
    ) -> None:
        """Distributes the amounts of these waits over the paths of the ranks waited for, and over
        the steps of these, in proportion to their time."""
        total, recorded = pairs.waited_for, amount[:, : len(BLAME_CAUSES)]
        density = np.divide(recorded, total, out=np.zeros_like(recorded), where=total > 0)
        step = np.searchsorted(self.steps, waits.step)
        flat = self.table.reshape(-1)
        for piece in pairs.parts:
            part, cause = np.nonzero(piece.spent_ns)
            row = piece.row[part]
            own = piece.step[part]
            own = np.where((own >= 0) & (self.full[own] == self.full[step[row]]), own, step[row])
            cell = (piece.rank[part], own, waits.origin[row], cause)
            spent = density[row, cause] * piece.spent_ns[part, cause]
            np.add.at(flat, np.ravel_multi_index(cell, self.table.shape), spent)
        rest = np.flatnonzero(waits.traced & ((recorded > 0) & (total <= 0)).any(axis=1))
        cells = (paths.rank[waits.last_arrival[rest]], step[rest], waits.origin[rest])
        np.add.at(self.table, cells, np.where(total[rest] > 0, 0.0, recorded[rest]))

    def drop_steps_without_waits(self, waits: ExposedWaits) -> Charges:
        """The table of the steps that have or caused a wait."""
        has_waits = np.isin(self.steps, waits.step) | self.table.any(axis=(0, 2, 3))
        steps = tuple(compress(self.steps, has_waits.tolist()))
        return Charges(self.ranks, steps, self.full[has_waits], self.table[:, has_waits])


class KnownDelay(NamedTuple):
    """That a rank is known to lose time in a step, in one of the buckets."""

    rank: int
    step: int
    bucket: str


_CAUSES_OF_BUCKET = {
    "compute": ("compute", "slower"),
    "skew": ("compute", "slower", "imbalance"),
    "bubble": ("compute", "slower", "imbalance"),
    "idle": ("host",),
    "copy": ("copy",),
}


def find_significant(
    graph: DependencyGraph,
    charges: Charges,
    slow_ranks: frozenset[int],
    known: Collection[KnownDelay] = (),
) -> Bool:
    """Which (rank, step, cause) are more than variation, shape (ranks, steps, BLAME_CAUSES); all
    of them where one step has waits.

    A rank causes waits in all steps if their mean is significant, or that of its work: a step of
    which the waits are not known has work too. It causes waits in one step if its work there is an
    outlier. Steps that a rank did not record say nothing about it. Ranks with slow kernels are
    slow in all steps: of two equally slow ones each causes waits in some steps only, by chance. So
    do ranks that are known to lose time, in the steps in which they do.
    """
    caused = charges.table.sum(axis=2)
    if caused.shape[1] < 2:
        return np.ones(caused.shape, dtype=np.bool_)
    # Work is known of all steps, charges only of those with waits.
    steps = np.unique(graph.steps.step)
    with_waits = np.searchsorted(steps, charges.steps)
    work = _sum_work(graph, len(charges.ranks), steps)
    recorded: Bool = np.asarray(~np.isnan(work).all(axis=2))
    in_all_steps = _find_lasting_causes(caused, recorded[:, with_waits])
    in_all_steps |= _find_lasting_work(work, recorded)
    in_all_steps[np.isin(charges.ranks, sorted(slow_ranks)), :COMPUTES] = True
    in_one_step = _find_outliers(work, recorded)[:, with_waits]
    significant = np.asarray(in_all_steps[:, np.newaxis] | in_one_step)
    for one in known:
        if one.rank in charges.ranks and one.step in charges.steps:
            at = charges.ranks.index(one.rank), charges.steps.index(one.step)
            for cause in _CAUSES_OF_BUCKET.get(one.bucket, ()):
                significant[*at, BLAME_CAUSES.index(cause)] = True
    return significant


def _find_lasting_causes(caused: Float, recorded: Bool) -> Bool:
    """Which (rank, cause) cause significantly more than the median rank; caused has shape (ranks,
    steps, BLAME_CAUSES). The standard error is that of the rank's steps or, if larger, of all
    ranks."""
    known, steps = recorded[:, :, np.newaxis], recorded.sum(axis=1)[:, np.newaxis]
    mean = _divide(caused.sum(axis=1, where=known), steps)
    squares = ((caused - mean[:, np.newaxis]) ** 2).sum(axis=1, where=known)
    variance, several = _divide(squares, steps - 1), steps[:, 0] > 1
    usual = variance[several].mean(axis=0) if several.any() else np.zeros(len(BLAME_CAUSES))
    error = np.sqrt(_divide(np.maximum(variance, usual), steps))
    return np.asarray(mean - np.median(mean[steps[:, 0] > 0], axis=0) > _SIGNIFICANCE * error)


def _find_lasting_work(work: Float, recorded: Bool) -> Bool:
    """Which (rank, cause) have significantly more work than the median of the other ranks in the
    same steps, and nearly always: of two steps twice as much, of five a quarter more. Work that
    varies by a quarter is so in fewer than 1 % of recordings. A transfer is no work of one member
    more than of another."""
    lasting = np.zeros((len(work), len(BLAME_CAUSES)), dtype=np.bool_)
    ranks = np.flatnonzero(recorded.any(axis=1))
    common = np.flatnonzero(recorded[ranks].all(axis=0))
    if len(ranks) < 2 or len(common) < 2:
        return lasting
    known = work[np.ix_(ranks, common)]
    # Each rank against the median of the others, not of all: of two ranks that would be the mean.
    others = len(known) - 1
    place = known.argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    ordered = np.sort(known, axis=0)
    low, high = (
        np.take_along_axis(ordered, middle + (middle >= place), axis=0)
        for middle in ((others - 1) // 2, others // 2)
    )
    peers = (low + high) / 2
    excess = known - peers
    error = excess.std(axis=1, ddof=1) / math.sqrt(len(common))
    is_large = (excess > peers / (len(common) - 1)).mean(axis=1) >= _NEARLY_ALL
    own = np.array([cause != "transfer" for cause in BLAME_CAUSES])
    lasting[ranks] = (excess.mean(axis=1) > _SIGNIFICANCE * error) & is_large & own
    return lasting


def _find_outliers(work: Float, recorded: Bool) -> Bool:
    """Which (rank, step, cause) have far more work than the rank's median step. The deviation is
    that of all ranks together, as one rank may have few steps."""
    excess, has_steps = np.full(work.shape, np.nan), recorded.any(axis=1)
    if not has_steps.any():
        return np.zeros(work.shape, dtype=np.bool_)
    usual = np.nanmedian(work[has_steps], axis=1, keepdims=True)
    excess[has_steps] = work[has_steps] - usual
    deviation = SIGMA_OF_MAD * np.nanmedian(np.abs(excess), axis=(0, 1))
    return np.asarray(excess > _OUTLIER * deviation)


def _divide(amount: Float, count: Int64) -> Float:
    """The amount over the count, 0 where that is not positive."""
    return np.divide(amount, count, out=np.zeros_like(amount), where=count > 0)


def _sum_work(graph: DependencyGraph, ranks: int, steps: Int64) -> Float:
    """The time that each rank spends per step on what each cause is about, shape (ranks, steps,
    BLAME_CAUSES); nan for a step that a rank does not have."""
    kernels, ends = graph.kernels, graph.rest_ns[graph.kernels.end]
    of_row = np.zeros((len(graph.steps.rank), len(WORK) + 1))
    nodes = np.flatnonzero(graph.step >= 0)
    for column in range(len(WORK)):
        np.add.at(of_row[:, column], graph.step[nodes], graph.work_ns[nodes, column])
    moved = np.flatnonzero((kernels.step >= 0) & (ends > 0))
    np.add.at(of_row[:, -1], kernels.step[moved], ends[moved])
    table = np.full((ranks, len(steps), len(WORK) + 1), np.nan)
    table[graph.steps.rank, np.searchsorted(steps, graph.steps.step)] = of_row
    compute, copy, idle = (WORK.index(kind) for kind in ("compute", "copy", "idle"))
    return table[:, :, [compute, compute, compute, copy, idle, len(WORK), idle]]
