"""Steps in which a rank computes longer than in its others, and no rank with it: what happens now
and then, such as a throttled device, an evaluation on one rank, or one slow kernel."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.diagnose.counted_work import WorkLaw
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import (
    ReplayContext,
    WeightedSpans,
    measure_spans,
    reduce_work,
    scale_work,
)
from stepsplit.analyzer.diagnose.graph.segments import WorkSegments
from stepsplit.analyzer.report.report import EventRef
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.trace import Bool, Float, Int32, Int64

_MIN_STEPS = 3
"""Of fewer steps, none is compared with the rank's others."""

_SLOW_STEP_RATIO, _SLOW_STEP_SIGMAS = 0.05, 6.0
"""In such a step a rank's compute exceeds its usual one by this fraction, and by so many standard
deviations of all ranks and steps."""

_UNEVEN_STEP_RATIO = 0.25
"""The fraction for ranks with different counted work: as many tokens in longer sequences take
longer."""

_MOSTLY = 0.5
"""Kernels that exceed their usual time by this share of what their step does explain it, and so do
more kernels than usual."""

_MORE_KERNELS = 1.1
"""So many times the kernels of a usual step are more work, however much its time varies."""

_FEW = 4
"""A standard deviation from so few rank steps may be half of what it is."""

_MAX_MORE_KERNELS = 0.02
"""As many kernels: at most this fraction more, or of other kinds."""


class UnusualSteps(Struct, frozen=True):
    """The steps in which one rank computes longer than in its others.

    Attributes:
        index: The index of the rank.
        rows: These steps among the rows of the graph's.
        steps: The number of its steps that were compared.
        ratio: Its compute in them over what it usually is.
        equal_work: Whether it runs as many kernels for its work in them, of the same kinds.
        kernels: Its kernels in such a step, and in a usual one.
        segments: The compute between the calls of each row.
        target_ns: The usual compute of each segment, in these rows; zeros where no usual step has
            as many calls.
        cut_ns: What the kernels of each node of the graph exceed their usual time, in rows without
            a target whose compute these explain.
        pace: The time that each row should take over that it takes.
        longest: The kernels that exceed their usual time most.
    """

    index: int
    rows: Bool
    steps: int
    ratio: float
    equal_work: bool
    kernels: tuple[float, float]
    segments: WorkSegments
    target_ns: Float
    cut_ns: Int64
    pace: Float
    longest: tuple[EventRef, ...]

    def restore(self, graph: DependencyGraph) -> DependencyGraph:
        """The graph with the usual compute in these steps: between the same calls where the rank
        made as many in a usual step, else that of usual kernels, or of the whole step."""
        known = self.target_ns.sum(axis=1) > 0
        pace = np.where(known, 1.0, self.pace)
        pace[graph.step[: len(self.cut_ns)][self.cut_ns > 0]] = 1.0
        graph = scale_work(reduce_work(graph, "compute", self.cut_ns), "compute", pace)
        graph = self.segments.set_work(graph, np.asarray(known), self.target_ns)
        return replace(graph, has_lasting_leads=False)


def find_unusual_steps(
    context: ReplayContext, law: WorkLaw | None = None
) -> tuple[UnusualSteps, ...]:
    """Find the ranks that compute longer in fewer than half of their steps.

    On a CPU only if they run more ops in them: of equal ones other processes are a reason as well.
    law: what compute and how many kernels the work explains that ranks counted.
    """
    rows = np.flatnonzero(context.counted)
    place = np.unique(context.graph.steps.step[rows], return_inverse=True)[1]
    count = int(place.max(initial=-1)) + 1
    compute = np.full((len(context.ranks), count), np.nan)
    factor = np.ones(len(context.split_ns)) if law is None else law.factor
    work = np.ones(len(factor)) if law is None else np.nan_to_num(law.of_row)
    measured = context.select_bucket_ns("compute") * factor
    compute[context.graph.steps.rank[rows], place] = measured[rows]
    compute = np.where(compute > 0, compute, np.nan)
    is_known = np.isfinite(compute)
    if not (is_known.any(axis=1).all() and is_known.any(axis=0).all()):
        return ()
    if len(compute) < 2 or count < _MIN_STEPS:
        return ()
    # By how much each rank exceeds its median step, without what the median rank has in the same
    # step: of two ranks, the one that exceeds its usual step by less.
    beyond = compute / np.nanmedian(compute, axis=1, keepdims=True) - 1
    beyond -= np.nanquantile(beyond, 0.5, axis=0, method="lower")
    # Without the median rank of each step, which differs from itself by nothing.
    apart = np.sort(np.abs(beyond[np.isfinite(beyond)]))[count:]
    sigma = SIGMA_OF_MAD * float(np.median(apart)) if len(apart) else 0.0
    sigma *= 1 + _FEW / max(len(apart), 1)
    least = _SLOW_STEP_RATIO if law is None else _UNEVEN_STEP_RATIO
    slow = beyond > max(least, _SLOW_STEP_SIGMAS * sigma)
    numbers = np.unique(context.graph.steps.step[rows])
    # What a rank runs more needs no spread between steps to be seen.
    for index in np.flatnonzero((beyond > least).any(axis=1)).tolist():
        rank = context.split.ranks[index]
        step = rank.kernels.compute.step
        at = np.searchsorted(numbers, step[np.isin(step, numbers)])
        kernels = np.bincount(at, minlength=count)
        is_more = kernels >= _MORE_KERNELS * np.median(kernels)
        slow[index] |= is_more & (beyond[index] > least)
    found = []
    segments: WorkSegments | None = None
    for index in np.flatnonzero(slow.any(axis=1)).tolist():
        if 2 * int(slow[index].sum()) >= count:
            continue
        segments = segments or WorkSegments.measure(context.graph, "compute")
        one = _describe(
            context, index, rows, place, beyond[index], slow[index], segments, factor, work
        )
        if context.split.ranks[index].trace.on_device or not one.equal_work:
            found.append(one)
    return tuple(found)


def _describe(
    context: ReplayContext,
    index: int,
    rows: Int64,
    place: Int64,
    beyond: Float,
    slow: Bool,
    segments: WorkSegments,
    factor: Float,
    work: Float,
) -> UnusualSteps:
    own = context.graph.steps.rank[rows] == index
    mine, others = rows[own & slow[place]], rows[own & ~slow[place]]
    is_mine = np.zeros(len(context.graph.steps.rank), dtype=np.bool_)
    is_mine[mine] = True
    pace = np.ones(len(is_mine))
    pace[mine] = 1 / (1 + beyond[place[own & slow[place]]])
    compute_ns = context.select_bucket_ns("compute")[mine]
    target_ns = np.zeros_like(segments.spent_ns)
    for row in mine.tolist():
        alike = others[segments.calls[others] == segments.calls[row]]
        if len(alike):
            usual = segments.spent_ns[alike] * factor[alike, np.newaxis]
            target_ns[row] = np.median(usual, axis=0) / factor[row]
    rank = context.split.ranks[index]
    kinds, kind, compute = rank.kernels.work, rank.kernels.work_id, rank.kernels.compute
    step = context.graph.steps.step
    in_mine = np.isin(compute.step, step[mine])
    count = np.bincount(np.searchsorted(compute.steps, compute.step), minlength=len(compute.steps))
    is_slow = np.isin(compute.steps, step[mine])
    most, usual = float(count[is_slow].max()), float(np.median(count[~is_slow]))
    is_new = ~np.isin(kind[in_mine], kind[~in_mine])
    # More tokens may be more kernels, as of one for each sequence: those are no other work.
    usual_work = float(np.median(work[others]))
    times = np.maximum(work[mine], usual_work) / usual_work if usual_work else np.ones(len(mine))
    allowed = (1 + _MAX_MORE_KERNELS) * max(usual * float(times.max()), 1.0)
    equal = most <= allowed and is_new.mean() <= _MAX_MORE_KERNELS
    # Few more kernels may be long: what more runs of their kind than usual take.
    runs = np.bincount(kind[in_mine], minlength=len(kinds))
    usual_runs = np.bincount(kind[~in_mine], minlength=len(kinds)) / max(int((~is_slow).sum()), 1)
    more = np.maximum(runs - usual_runs * times.sum(), 0) / np.maximum(runs, 1)
    more_ns = float(more[kind[in_mine]] @ compute.took_ns[in_mine])
    equal = equal and more_ns <= _MOSTLY * float((compute_ns * (1 - pace[mine])).sum())
    typical = np.zeros(len(kinds))
    for one in np.unique(kind[in_mine]).tolist():
        elsewhere = compute.took_ns[(kind == one) & ~in_mine]
        typical[one] = float(np.median(elsewhere)) if len(elsewhere) else 0.0
    excess = np.where(in_mine, compute.took_ns - typical[kind], 0)
    longest = np.argsort(-excess, kind="stable")[:3]
    return UnusualSteps(
        index=index,
        rows=is_mine,
        steps=len(slow),
        ratio=float(compute_ns.sum() / (compute_ns * pace[mine]).sum()),
        equal_work=bool(equal),
        kernels=(most, usual),
        segments=segments,
        target_ns=target_ns,
        cut_ns=_cut_excess(context, index, compute.row, excess, target_ns, pace),
        pace=pace,
        longest=tuple(context.make_event_ref(index, int(compute.row[one])) for one in longest),
    )


def _cut_excess(
    context: ReplayContext, index: int, row: Int32, excess_ns: Float, target_ns: Float, pace: Float
) -> Int64:
    """For each node of the graph, by how much its kernels exceed their usual time in the rows that
    have no target and a pace; together what the row exceeds its pace by.

    row and excess_ns are the events of the rank's kernels and their times beyond what is usual.
    """
    graph, rank = context.graph, context.split.ranks[index]
    meant = (pace < 1) & ~target_ns.any(axis=1)
    longer = excess_ns > 0
    if not meant.any() or not longer.any():
        return np.zeros(len(graph), dtype=np.int64)
    events, row = rank.trace.events, row[longer]
    # Of kernels on several streams that overlap, what is not under one before.
    starts, ends = events.start_ns[row], events.ends_of(row)
    since = np.minimum(np.maximum(starts, np.append(0, np.maximum.accumulate(ends)[:-1])), ends)
    weight = excess_ns[longer] / np.maximum(events.dur_ns[row], 1)
    own = WeightedSpans(
        rank.clock.map_to_common_ns(since), rank.clock.map_to_common_ns(ends), weight
    )
    nothing = WeightedSpans(*(np.zeros(0, dtype=np.int64),) * 2, np.zeros(0))
    spans = [own if other == index else nothing for other in range(len(context.ranks))]
    cut_ns = measure_spans(graph, spans)
    cut_ns *= np.append(meant, False)[graph.step]
    explained = np.bincount(np.maximum(graph.step, 0), cut_ns, minlength=len(pace))
    wanted = context.select_bucket_ns("compute") * (1 - pace)
    factor = np.zeros(len(pace))
    np.divide(wanted, explained, out=factor, where=explained > _MOSTLY * wanted)
    share: Int64 = np.rint(cut_ns * np.append(factor, 0.0)[graph.step]).astype(np.int64)
    return share
