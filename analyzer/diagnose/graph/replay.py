"""Replay of a dependency graph, as recorded or with some of its durations changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from stepsplit.analyzer.arrays import group_ids, group_rows, is_inside, union
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.topological_order import NEVER, Levels
from stepsplit.analyzer.report.diagnosis_rows import SlowKernel
from stepsplit.analyzer.report.report import EventRef
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Bool, Float, Int64
from stepsplit.collectors.formats.rank_record import RankRecord

# A graph with something changed.

Change = Callable[[DependencyGraph], DependencyGraph]
"""Changes a graph, as a fix would."""


def scale_work(graph: DependencyGraph, work: str, times: Float) -> DependencyGraph:
    """Scale the durations of one kind of WORK by a factor per row of the steps."""
    changed = graph.work_ns.copy(order="K")
    column = WORK.index(work)
    nodes = np.flatnonzero(np.append(times != 1, False)[graph.step])
    changed[nodes, column] = np.rint(changed[nodes, column] * times[graph.step[nodes]])
    return structs.replace(graph, work_ns=changed)


def limit_work(graph: DependencyGraph, work: str, least_ns: Float) -> DependencyGraph:
    """Limit the total of one kind of WORK per row of the steps, shortening the longest parts."""
    changed = graph.work_ns.copy(order="K")
    column = WORK.index(work)
    working = np.flatnonzero(graph.step >= 0)
    total = np.bincount(graph.step[working], changed[working, column], minlength=len(least_ns))
    working = working[(total > least_ns)[graph.step[working]]]
    order, first = group_rows(graph.step[working])
    for begin, end in pairwise([*first.tolist(), len(order)]):
        nodes = working[order[begin:end]]
        least = float(least_ns[graph.step[nodes[0]]])
        values = changed[nodes, column]
        if values.sum() <= least:
            continue
        # Clipped at the height at which they add up to the total: if all below a value stay as
        # they are, the others share the rest equally.
        rising = np.sort(values)
        below = np.concatenate(([0], np.cumsum(rising)[:-1]))
        heights = (least - below) / np.arange(len(rising), 0, -1)
        fits = np.flatnonzero(heights <= rising)
        changed[nodes, column] = np.minimum(values, np.int64(max(0.0, heights[fits[0]])))
    return structs.replace(graph, work_ns=changed)


def measure_excess(graph: DependencyGraph, work: str, least_ns: Float) -> Int64:
    """For each node, what `limit_work` takes from it."""
    limited = limit_work(graph, work, least_ns)
    return (graph.work_ns - limited.work_ns)[:, WORK.index(work)]


def reduce_work(graph: DependencyGraph, work: str, cut_ns: Int64) -> DependencyGraph:
    """Take this much of one kind of WORK from each node, at most what it has.

    Nodes that another change has added keep theirs.
    """
    changed = graph.work_ns.copy(order="K")
    own = changed[: len(cut_ns), WORK.index(work)]
    own -= np.clip(cut_ns, 0, own)
    return structs.replace(graph, work_ns=changed)


class WeightedSpans(Struct, frozen=True):
    """Sorted disjoint spans of one rank on the common clock, each with a weight."""

    start_ns: Int64
    end_ns: Int64
    weight: Float

    @classmethod
    def cover(cls, start_ns: Int64, end_ns: Int64) -> WeightedSpans:
        """The instants that these spans of the common clock cover, each counted once."""
        covered = union(start_ns, end_ns)
        return cls(covered.start_ns, covered.end_ns, np.ones(len(covered)))


def measure_spans(graph: DependencyGraph, spans: Sequence[WeightedSpans]) -> Float:
    """For each node, the measured time since the one before it on its rank's timeline that lies in
    these spans of the rank, in ns times their weights."""
    covered = np.zeros(len(graph))
    for index, own in enumerate(spans):
        nodes = graph.timelines.slice_rank(index)
        # The weighted time before each node in whole spans, without what of the last one is later.
        times = graph.at_ns[nodes]
        before_ns = np.concatenate(([0.0], np.cumsum((own.end_ns - own.start_ns) * own.weight)))
        begun = np.searchsorted(own.start_ns, times, side="right")
        ends = np.concatenate(([times.min(initial=0)], own.end_ns))[begun]
        weight = np.concatenate(([0.0], own.weight))[begun]
        total = before_ns[begun] - np.maximum(ends - times, 0) * weight
        covered[nodes] = np.diff(total, prepend=total[:1])
    return covered


def scale_transfers(graph: DependencyGraph, kernels: Int64, times: Float) -> DependencyGraph:
    """Scale the transfer times of these collectives and messages."""
    rest = graph.rest_ns.copy()
    ends = graph.kernels.end[kernels]
    rest[ends] = np.where(rest[ends] > 0, np.rint(rest[ends] * times), rest[ends])
    return structs.replace(graph, rest_ns=rest)


def remove_calls(graph: DependencyGraph, kernels: Int64) -> DependencyGraph:
    """Remove these collectives and messages on all their ranks."""
    rest = graph.rest_ns.copy()
    rest[graph.kernels.start[kernels]] = NEVER
    rest[graph.kernels.end[kernels]] = NEVER
    return structs.replace(graph, rest_ns=rest)


# Collectives that start as soon as their data is ready; the rank waits for all of them at the end.


class HoistedCalls(Struct, frozen=True):
    """Collectives of one rank in one step, in order, and the time at which each could start.

    The rank waited for at least one of them.
    """

    kernels: Int64
    ready_ns: Int64


def hoist_collectives(graph: DependencyGraph, moves: Sequence[HoistedCalls]) -> DependencyGraph:
    """Start the collectives as early as possible, one after the other and after what was queued
    before the first of them; the rank waits for all of them where it waited for the last one."""
    times = compute_times(graph)
    needs: dict[int, list[int]] = {}
    branches: list[_Branch] = []
    is_end = np.zeros(len(graph), dtype=np.bool_)
    is_end[graph.kernels.end] = True

    def change_needs(node: int) -> list[int]:
        return needs.setdefault(node, graph.needs.of_node(node))

    for move in moves:
        # The rank resumes after all of them where it resumed after the last one.
        resumes = graph.kernels.resume[move.kernels].tolist()
        moved_ends = graph.kernels.end[move.kernels].tolist()
        for resume, end in zip(resumes, moved_ends, strict=True):
            if resume >= 0:
                change_needs(resume).remove(end)
        change_needs(max(resumes)).extend(moved_ends)
        moved = set(moved_ends)
        first = int(graph.kernels.start[move.kernels[0]])
        # It began when one of another stream ended, since the backward did: no longer.
        followed = int(graph.kernels.follows[move.kernels[0]])
        if followed >= 0:
            moved.add(int(graph.kernels.end[followed]))
        prior = [node for node in change_needs(first) if is_end[node] and node not in moved]
        for kernel, ready in zip(move.kernels.tolist(), move.ready_ns.tolist(), strict=True):
            needs[int(graph.kernels.start[kernel])] = [len(graph) + len(branches), *prior]
            # A node at ready_ns on the rank's timeline; the work there is split in proportion to
            # time.
            rank = int(graph.kernels.rank[kernel])
            own = graph.timelines.slice_rank(rank)
            at = own.start + int(np.searchsorted(times[own], ready, side="right")) - 1
            after = min(at + 1, own.stop - 1)
            span = int(times[after] - times[at])
            part = (ready - int(times[at])) / span if span > 0 else 0.0
            work = np.rint(graph.work_ns[after] * part).astype(np.int64)
            branches.append(_Branch(at, work, int(graph.step[after])))
            prior = [int(graph.kernels.end[kernel])]
    every = graph.needs.with_changed(needs, len(branches))
    anchors = np.array([one.before for one in branches], dtype=np.int32)
    work = np.array([one.work_ns for one in branches], dtype=np.int64).reshape(-1, len(WORK))
    steps = np.array([one.step for one in branches], dtype=np.int32)
    before = np.concatenate((graph.before, anchors))
    measured = np.concatenate((times, times[anchors]))
    return structs.replace(
        graph,
        before=before,
        work_ns=np.concatenate((graph.work_ns, work)),
        step=np.concatenate((graph.step, steps)),
        needs=every,
        rest_ns=np.concatenate((graph.rest_ns, np.zeros(len(branches), dtype=np.int64))),
        at_ns=measured,
        binding=np.concatenate((graph.binding, anchors)),
        levels=Levels.build(before, every, measured),
    )


class _Branch(Struct, frozen=True):
    """A new node of a timeline, work_ns after the node before it."""

    before: int
    work_ns: Int64
    step: int


# The input of every bottleneck analysis: the split, its graph, and the steps as a table.

_MOST_EVENTS = 3
"""Examples that a finding gives of a rank's intervals or calls; chosen, not measured."""


class ReplayContext(Struct, frozen=True):
    """A recording with its graph. mean_ns is the mean full step; rows are the steps of all ranks.

    ranks holds the rank numbers; stage (shape (rows,)) and split_ns (shape (rows, BUCKETS)) are the
    pp coordinate and the buckets of each row. origin_ns is the report's t0; records are the state
    of each rank's device during the recording.
    """

    split: RunSplit
    graph: DependencyGraph
    replayed: ReplayedSteps
    ranks: Int64
    stage: Int64
    split_ns: Int64
    slow_kernels: tuple[SlowKernel, ...]
    origin_ns: int
    records: tuple[RankRecord, ...] = ()

    @classmethod
    def build(
        cls,
        split: RunSplit,
        graph: DependencyGraph,
        slow_kernels: Sequence[SlowKernel],
        origin_ns: int = 0,
        records: Sequence[RankRecord] = (),
    ) -> Self:
        """Build the context of a recording with at least one step."""
        splits = [step.split.buckets_ns for rank in split.ranks for step in rank.steps]
        numbers = np.array([rank.trace.rank for rank in split.ranks], dtype=np.int64)
        stages = [split.layout.find_stage(rank) for rank in numbers.tolist()]
        return cls(
            split=split,
            graph=graph,
            replayed=replay(graph),
            ranks=numbers,
            stage=np.array(stages, dtype=np.int64)[graph.steps.rank],
            split_ns=np.array(splits, dtype=np.int64).reshape(-1, len(BUCKETS)),
            slow_kernels=tuple(slow_kernels),
            origin_ns=origin_ns,
            records=tuple(records),
        )

    @property
    def mean_ns(self) -> float:
        """The mean step of the replayed graph."""
        return self.replayed.mean_ns

    @property
    def counted(self) -> Bool:
        """The rows that enter the mean step: the full ones, or all if none is full."""
        full = self.graph.steps.full
        return full if full.any() else np.ones_like(full)

    @property
    def compared(self) -> Bool:
        """The rows that are compared with others of their step: the counted ones, as a rank may
        lack events in others; of a step without any, all."""
        label = group_ids(self.graph.steps.step)
        return np.asarray(self.counted | (np.bincount(label, self.counted)[label] == 0))

    def average_peers(self, label: Int64, values: Float, *, others: bool = False) -> Float:
        """For each row the mean of the compared rows with its label, or of the others among them;
        its own value if there is none. Labels are from 0 without gaps."""
        compared = self.compared.astype(np.float64)
        own = compared if others else 0.0
        count = np.bincount(label, compared)[label] - own
        total = np.bincount(label, values * compared)[label] - values * own
        return np.where(count > 0, total / np.maximum(count, 1), values)

    def list_records(self, index: int) -> list[RankRecord]:
        """What the rank of this index recorded about its own device."""
        return [one for one in self.records if one.rank.rank == self.ranks[index]]

    def select_bucket_ns(self, bucket: str) -> Int64:
        """One bucket of every row, in ns."""
        return self.split_ns[:, BUCKETS.index(bucket)]

    def sum_work_ns(self, work: str) -> Int64:
        """The time of one kind of WORK in every row, overlapped communication included."""
        nodes = np.flatnonzero(self.graph.step >= 0)
        spent = self.graph.work_ns[nodes, WORK.index(work)]
        total = np.zeros(len(self.split_ns), dtype=np.int64)
        np.add.at(total, self.graph.step[nodes], spent)
        return total

    def classify_phases(self) -> Int64:
        """The phase of each timeline node by the pipeline's boxes: forward (0), backward (1) or
        neither (2)."""
        times = compute_times(self.graph)
        phases = np.full(len(self.graph), 2)
        for index, rank in enumerate(self.split.ranks):
            nodes = self.graph.timelines.slice_rank(index)
            middle = (times[nodes] + np.concatenate((times[nodes][:1], times[nodes][:-1]))) // 2
            boxes = [box for grid in rank.grids for box in grid.slots]
            for phase, backward in enumerate((False, True)):
                spans = [
                    (b.start_ns, b.end_ns) for b in boxes if (b.phase != "forward") == backward
                ]
                edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
                covered = union(edges[:, 0], edges[:, 1])
                phases[nodes][is_inside(covered, middle)] = phase
        return phases

    def measure_events(self, rows: Sequence[Int64]) -> Float:
        """For each node, the measured time before it that these events of each rank cover, in ns;
        one item per rank of the split."""
        spans = []
        for rank, own in zip(self.split.ranks, rows, strict=True):
            events, to_common = rank.trace.events, rank.clock.map_to_common_ns
            start, end = to_common(events.start_ns[own]), to_common(events.ends_of(own))
            spans.append(WeightedSpans.cover(start, end))
        return measure_spans(self.graph, spans)

    def average_step_ns(self, spent_ns: Float) -> float:
        """The mean over the counted steps of time by node, of ranks that have any of it."""
        step = self.graph.step
        of_step = np.bincount(step[step >= 0], spent_ns[step >= 0], minlength=len(self.split_ns))
        counted = of_step[self.counted & (of_step > 0)]
        return float(counted.mean()) if len(counted) else 0.0

    def sum_exposed_ns(self) -> Int64:
        """The exposed time of each collective or message, shape (kernels,)."""
        kernels = self.graph.kernels
        total = np.zeros(len(kernels), dtype=np.int64)
        for index, rank in enumerate(self.split.ranks):
            exposed = rank.attribution.exposed
            per_call = np.zeros(len(rank.trace.calls), dtype=np.int64)
            np.add.at(per_call, exposed.call, exposed.end_ns - exposed.start_ns)
            mine = kernels.list_rows(index)
            total[mine] = per_call[kernels.call[mine]]
        return total

    def find_kernels(self, chosen: Callable[[frozenset[str]], bool]) -> Int64:
        """The collectives and messages whose group axes match; unknown groups never match."""
        matched, axes_of = self.split.matched, self.split.layout.find_axes
        of_group = np.array([*(chosen(axes_of(group)) for group in matched.groups), False])
        return np.flatnonzero(of_group[matched.group[self.graph.kernels.row]])

    def compute_gain_ns(self, changed: DependencyGraph) -> int:
        """The reduction of the mean step with the changed graph, in ns."""
        return round(self.mean_ns - replay(changed).mean_ns)

    def compute_step_gains(self, changed: DependencyGraph) -> StepGains:
        """The reduction of each counted step with the changed graph."""
        rows_ns = (self.replayed.step_ns - replay(changed).step_ns)[self.counted].astype(np.float64)
        numbers, place = np.unique(self.graph.steps.step[self.counted], return_inverse=True)
        return StepGains(numbers, rows_ns, np.bincount(place, rows_ns) / np.bincount(place))

    def replay_with(self, changed: DependencyGraph) -> Self:
        """The same context with the changed graph."""
        return structs.replace(self, graph=changed, replayed=replay(changed))

    def list_steps(self, rows: npt.NDArray[np.bool_]) -> tuple[int, ...]:
        """The step numbers of the full steps among these rows."""
        steps = self.graph.steps
        return tuple(np.unique(steps.step[rows & steps.full]).tolist())

    def make_event_ref(self, index: int, row: int) -> EventRef:
        """A reference to an event of a rank, for a finding."""
        rank = self.split.ranks[index]
        events = rank.trace.events
        start = rank.clock.map_instant_to_common_ns(int(events.start_ns[row])) - self.origin_ns
        return EventRef(rank.trace.rank, start, int(events.dur_ns[row]), events.name_of(row))

    def list_longest(self, index: int, bucket: str) -> tuple[EventRef, ...]:
        """The longest intervals of a rank in one bucket."""
        rank, number = self.split.ranks[index], BUCKETS.index(bucket)
        band = rank.attribution.band
        rows = np.flatnonzero(band.bucket == number)
        length = (band.end_ns - band.start_ns)[rows]
        chosen = rows[np.argsort(-length, kind="stable")[:_MOST_EVENTS]]
        starts = rank.clock.map_to_common_ns(band.start_ns[chosen]) - self.origin_ns
        lengths = (band.end_ns - band.start_ns)[chosen]
        return tuple(
            EventRef(rank.trace.rank, start, took, bucket)
            for start, took in zip(starts.tolist(), lengths.tolist(), strict=True)
        )

    def list_longest_calls(self, kernels: Int64) -> tuple[EventRef, ...]:
        """The longest of these collectives and messages."""
        table, ranks = self.graph.kernels, self.split.ranks
        events = [
            (int(rank), int(ranks[int(rank)].trace.calls.event[call]))
            for rank, call in zip(table.rank[kernels], table.call[kernels], strict=True)
        ]
        longest = sorted(events, key=lambda at: -int(ranks[at[0]].trace.events.dur_ns[at[1]]))
        return tuple(self.make_event_ref(*at) for at in longest[:_MOST_EVENTS])


# Replay: the time of each node of a graph.


class StepGains(Struct, frozen=True):
    """By how much a change shortens the counted steps: of each rank (rows), and in the mean of each
    number (by_step), in ns."""

    numbers: Int64
    rows: Float
    by_step: Float

    @property
    def mean_ns(self) -> int:
        """By how much it shortens the mean step."""
        return round(float(self.rows.mean()))


class ReplayedSteps(Struct, frozen=True):
    """The steps of a replay: step_ns in the order of DependencyGraph.steps."""

    step_ns: Int64
    full: npt.NDArray[np.bool_]

    @property
    def mean_ns(self) -> float:
        """The mean full step over all ranks (all steps if none is full); 0 without steps."""
        rows = self.step_ns[self.full] if self.full.any() else self.step_ns
        return float(rows.mean()) if len(rows) else 0.0


_LEAST_LEAD = 0.002
"""Leads below this fraction of the mean step are not carried into the first step."""


def replay(graph: DependencyGraph) -> ReplayedSteps:
    """Replay a graph and return its steps.

    The recorded begin of the first step shows what happened before it: a rank that a change makes
    earlier than the others in every step would have begun earlier. So the lead that the replayed
    ranks have at the begin of the later steps is given to them at the begin of the first one.
    """
    begin_ns, end_ns = _compute_step_times(graph)
    step_ns = end_ns - begin_ns
    lead = _find_lasting_leads(graph, begin_ns)
    if np.abs(lead).max(initial=0) > _LEAST_LEAD * max(float(step_ns.mean()), 1.0):
        rest = graph.rest_ns.copy()
        first = graph.timelines.first
        led = np.flatnonzero(np.diff(first) > 0)
        rest[first[led]] += lead[led]
        begin_ns, end_ns = _compute_step_times(structs.replace(graph, rest_ns=rest))
    return ReplayedSteps(end_ns - begin_ns, graph.steps.full)


def _compute_step_times(graph: DependencyGraph) -> tuple[Int64, Int64]:
    """The begins and the ends of the steps, in ns of the common clock."""
    steps = graph.steps
    nodes = np.concatenate([steps.begin, steps.end])
    times = compute_times(graph, nodes)
    return times[: len(steps.begin)], times[len(steps.begin) :]


def _find_lasting_leads(graph: DependencyGraph, begin_ns: Int64) -> Int64:
    """By how much each rank begins the later steps later than recorded, beyond the median rank: the
    median over the steps; 0 for a recording of one step, and after a change of single ones.
    begin_ns has the begins of all steps."""
    steps, ranks = graph.steps, len(graph.timelines.first) - 1
    numbers = np.unique(steps.step)
    if len(numbers) < 2 or not graph.has_lasting_leads:
        return np.zeros(ranks, dtype=np.int64)
    shift = np.full((ranks, len(numbers)), np.nan)
    column = np.searchsorted(numbers, steps.step)
    shift[steps.rank, column] = begin_ns - graph.at_ns[steps.begin]
    later = shift[:, 1:] - np.nanmedian(shift[:, 1:], axis=0)
    known = ~np.isnan(later).all(axis=1)
    lead = np.zeros(ranks)
    lead[known] = np.nanmedian(later[known], axis=1)
    return np.rint(lead).astype(np.int64)


def compute_times(graph: DependencyGraph, nodes: Int64 | None = None) -> Int64:
    """The time of each of these nodes, of all by default, in ns of the common clock."""
    return graph.levels.compute_times(graph.work_ns.sum(axis=1), graph.rest_ns, nodes=nodes)
