"""The idle time of devices that their hosts cause, and how much of it has a cause with a name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import Intervals, intersect, select_rows, union
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import (
    ReplayContext,
    StepGains,
    WeightedSpans,
    measure_spans,
    reduce_work,
)
from stepsplit.analyzer.report.report import MIN_GAIN_SHARE
from stepsplit.analyzer.split.idle import CAUSES, IdleCause
from stepsplit.analyzer.trace import Bool, Float, Int64, UInt8

NAMED = ("data_loading", "compilation", "allocation", "gc_pause", "synchronize")
"""Causes of idle time that are findings of their own; what is left is compared between ranks."""

_NOT_OF_HOST = ("launch_latency", "dependency", "late_start", "unknown")

_SPECIFIC = ("data_loading", "compilation", "allocation", "synchronize")
"""A garbage collection inside of these is part of them."""

_CAUSES = (*CAUSES, "gc_pause")

MIN_LATE_SHARE = 0.005
"""Ranks that idle or copy less than this fraction of the mean step beyond their peers are fine."""


class HostIdle(Struct, frozen=True):
    """Idle time caused by hosts, on each rank's own clock and sorted by rank and start; columns.

    rank is an index of the context's ranks, step a row of its steps, cause an index of _CAUSES.
    """

    rank: Int64
    step: Int64
    start_ns: Int64
    end_ns: Int64
    cause: UInt8

    def list_spans(self, ranks: int | None = None) -> dict[int, Intervals]:
        """The idle time of each rank that has some; of so many ranks, of those without as well."""
        indexes = np.unique(self.rank) if ranks is None else np.arange(ranks)
        return {
            index: Intervals(self.start_ns[self.rank == index], self.end_ns[self.rank == index])
            for index in indexes.tolist()
        }


class NamedIdle(Struct, frozen=True):
    """The idle time with one named cause.

    Attributes:
        idle: Where it is.
        removed_ns: How much of it would go in each row of the steps.
        mean_ns: The mean of that over the counted steps of each rank.
        cut_ns: How much would go before each node of the graph.
        gains: What the steps gain without it.
    """

    idle: HostIdle
    removed_ns: Float
    mean_ns: Float
    cut_ns: Int64
    gains: StepGains

    def remove(self, graph: DependencyGraph) -> DependencyGraph:
        """The graph without it."""
        return reduce_work(graph, "idle", self.cut_ns)


class HostTime(Struct, frozen=True):
    """The idle time that hosts cause: all of it, that with named causes, and the graph without
    those of them that are findings."""

    idle: HostIdle
    named: dict[str, NamedIdle]
    rest: DependencyGraph

    @classmethod
    def measure(cls, context: ReplayContext) -> HostTime:
        """The idle time of all ranks by cause."""
        first = np.cumsum([0, *(len(rank.steps) for rank in context.split.ranks)])
        parts = [
            _collect_rank_idle(context, rank, int(first[rank]))
            for rank in range(len(context.ranks))
        ]
        idle = HostIdle(
            rank=np.concatenate([part.rank for part in parts]),
            step=np.concatenate([part.step for part in parts]),
            start_ns=np.concatenate([part.start_ns for part in parts]),
            end_ns=np.concatenate([part.end_ns for part in parts]),
            cause=np.concatenate([part.cause for part in parts]),
        )
        found = {cause: _measure_named(context, idle, cause) for cause in NAMED}
        least_ns = MIN_GAIN_SHARE * context.mean_ns
        named = {
            cause: one for cause, one in found.items() if one and one.gains.mean_ns >= least_ns
        }
        rest = context.graph
        for one in named.values():
            rest = one.remove(rest)
        return cls(idle, named, rest)

    def sum_rest_ns(self, context: ReplayContext) -> Float:
        """The idle time of each step without that of the named causes."""
        total = _sum_steps_ns(context, self.idle)
        for one in self.named.values():
            total = total - one.removed_ns
        return total

    def select_rest(self) -> HostIdle:
        """The idle time without named causes."""
        return select_rows(self.idle, ~_has_cause(self.idle.cause, tuple(self.named)))

    def list_causes(self, causes: Sequence[IdleCause]) -> list[IdleCause]:
        """Those that are of the host and have no finding of their own."""
        return [one for one in causes if one.cause not in (*_NOT_OF_HOST, *self.named)]


def _collect_rank_idle(context: ReplayContext, rank: int, first_step: int) -> HostIdle:
    """The idle time of one rank; first_step is the row of its first step."""
    split, parts = context.split.ranks[rank], context.split.detail.idle_parts[rank]
    order = np.argsort(parts.start_ns, kind="stable")
    cause = parts.cause[order]
    window = split.attribution.band.window[parts.gap[order]]
    # All time is cut at the begin and end of each garbage collection: every second cell is one.
    pauses = [p for one in context.list_records(rank) for p in one.host.gc_pauses]
    starts = np.array([one.at_unix_ns for one in pauses], dtype=np.int64) - split.trace.t0_unix_ns
    covered = union(starts, starts + np.array([one.took_ns for one in pauses], dtype=np.int64))
    limits = np.iinfo(np.int64)
    inner = np.column_stack((covered.start_ns, covered.end_ns)).ravel()
    edges = np.concatenate(([limits.min], inner, [limits.max]))
    cut = intersect(
        Intervals(parts.start_ns[order], parts.end_ns[order]), Intervals(edges[:-1], edges[1:])
    )
    in_pause = (cut.right % 2 == 1) & ~_has_cause(cause[cut.left], _SPECIFIC)
    cut_cause = np.where(in_pause, _CAUSES.index("gc_pause"), cause[cut.left]).astype(np.uint8)
    of_host = np.flatnonzero(~_has_cause(cut_cause, _NOT_OF_HOST))
    return HostIdle(
        rank=np.full(len(of_host), rank),
        step=first_step + window[cut.left[of_host]].astype(np.int64),
        start_ns=cut.start_ns[of_host],
        end_ns=cut.end_ns[of_host],
        cause=cut_cause[of_host],
    )


def _has_cause(cause: UInt8, names: Sequence[str]) -> Bool:
    return np.isin(cause, [_CAUSES.index(name) for name in names])


def _sum_steps_ns(context: ReplayContext, idle: HostIdle) -> Float:
    """The sum of idle time in each row of the steps."""
    spent = (idle.end_ns - idle.start_ns).astype(np.float64)
    sums = np.bincount(idle.step, spent, minlength=len(context.stage))
    return np.asarray(sums, dtype=np.float64)


def compute_step_median(context: ReplayContext, values: Float) -> Float:
    """For each row, the lower median over the ranks of its step that are compared."""
    steps, compared = context.graph.steps, context.compared
    medians = np.zeros(len(values))
    for step in np.unique(steps.step).tolist():
        rows = np.flatnonzero(steps.step == step)
        own = values[rows[compared[rows]]]
        medians[rows] = np.sort(own)[(len(own) - 1) // 2]
    return medians


def compute_rank_means(context: ReplayContext, values: Float) -> Float:
    """The mean of a column over the counted steps of each rank."""
    rank, counted = context.graph.steps.rank, context.counted
    sums = np.bincount(rank, values * counted, minlength=len(context.ranks))
    return sums / np.maximum(np.bincount(rank, counted, minlength=len(context.ranks)), 1)


def _measure_named(context: ReplayContext, idle: HostIdle, cause: str) -> NamedIdle | None:
    """All idle time with this cause; None where no rank has much.

    Of synchronization only what all ranks have: a host that stalls after it is late, and not
    because of it.
    """
    idle = select_rows(idle, idle.cause == _CAUSES.index(cause))
    if not len(idle.rank):
        return None
    spent_ns = _sum_steps_ns(context, idle)
    removed_ns = spent_ns
    if cause == "synchronize":
        removed_ns = np.minimum(spent_ns, compute_step_median(context, spent_ns))
    mean_ns = compute_rank_means(context, removed_ns)
    if not (mean_ns > MIN_LATE_SHARE * context.mean_ns).any():
        return None
    # A host may also be late while communication moves data, which is not idle time of the split:
    # it then has the causes of the idle time in the same gap between kernels.
    shares = [_measure_gap_shares(context, idle, index) for index in range(len(context.ranks))]
    whole = [replace(one, weight=np.ones(len(one.weight))) for one in shares]
    covered = np.maximum(measure_spans(context.graph, whole), 1.0)
    ratio = measure_spans(context.graph, shares) / covered
    part = removed_ns / np.maximum(spent_ns, 1)
    step, work_ns = context.graph.step, context.graph.work_ns[:, WORK.index("idle")]
    cut_ns = np.rint(ratio * work_ns * np.where(step >= 0, part[step], 0)).astype(np.int64)
    gains = context.compute_step_gains(reduce_work(context.graph, "idle", cut_ns))
    return NamedIdle(idle, removed_ns, mean_ns, cut_ns, gains)


def _measure_gap_shares(context: ReplayContext, idle: HostIdle, index: int) -> WeightedSpans:
    """The gaps between kernels of a rank that have idle time, and what share of it this is."""
    rank = context.split.ranks[index]
    band = rank.attribution.band
    busy = np.isin(band.bucket, (Bucket.COMPUTE, Bucket.COPY))
    gaps = union(band.start_ns[~busy], band.end_ns[~busy])
    is_idle = band.bucket == Bucket.IDLE
    idle_ns = _sum_overlaps(gaps, Intervals(band.start_ns[is_idle], band.end_ns[is_idle]))
    own = idle.rank == index
    own_ns = _sum_overlaps(gaps, Intervals(idle.start_ns[own], idle.end_ns[own]))
    rows = idle_ns > 0
    to_common = rank.clock.map_to_common_ns
    return WeightedSpans(
        to_common(gaps.start_ns[rows]), to_common(gaps.end_ns[rows]), own_ns[rows] / idle_ns[rows]
    )


def _sum_overlaps(spans: Intervals, others: Intervals) -> Float:
    """For each span, its overlap with the others."""
    both = intersect(spans, others)
    lengths = (both.end_ns - both.start_ns).astype(np.float64)
    return np.asarray(np.bincount(both.left, lengths, minlength=len(spans)), dtype=np.float64)
