"""Replay of a dependency graph, as recorded or with some of its durations changed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import inside, runs_of, union
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.dependency_graph import (
    NEVER,
    WORK,
    DependencyGraph,
    graph_of,
    in_order,
)
from stepsplit.analyzer.report.report import EventRef
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Bool, Int64
from stepsplit.collectors.rank_record import RankRecord

# A graph with something changed.

Float = npt.NDArray[np.float64]


def paced(graph: DependencyGraph, work: str, times: Float) -> DependencyGraph:
    """One kind of WORK takes so many times as long, a factor each row of the steps."""
    changed = graph.work_ns.copy()
    column = WORK.index(work)
    nodes = np.flatnonzero(graph.step >= 0)
    changed[nodes, column] = np.rint(changed[nodes, column] * times[graph.step[nodes]])
    return replace(graph, work_ns=changed)


def capped(graph: DependencyGraph, work: str, least_ns: Float) -> DependencyGraph:
    """One kind of WORK shortened where it is longest, to so much in each row of the steps."""
    changed = graph.work_ns.copy()
    column = WORK.index(work)
    working = np.flatnonzero(graph.step >= 0)
    order, first = runs_of(graph.step[working])
    for begin, end in pairwise([*first.tolist(), len(order)]):
        nodes = working[order[begin:end]]
        least = float(least_ns[graph.step[nodes[0]]])
        changed[nodes, column] = _level(changed[nodes, column], least)
    return replace(graph, work_ns=changed)


def _level(values: Int64, total: float) -> Int64:
    """The values, cut off at such a height that they add up to the total at most."""
    if values.sum() <= total:
        return values
    rising = np.sort(values)
    below = np.concatenate(([0], np.cumsum(rising)[:-1]))
    heights = (total - below) / np.arange(len(rising), 0, -1)
    fits = np.flatnonzero(heights <= rising)
    return np.minimum(values, np.int64(max(0.0, heights[fits[0]])))


def moved_faster(graph: DependencyGraph, kernels: Int64, times: Float) -> DependencyGraph:
    """The data of these collectives and messages takes so many times as long."""
    rest = graph.rest_ns.copy()
    ends = graph.kernels.end[kernels]
    rest[ends] = np.where(rest[ends] > 0, np.rint(rest[ends] * times), rest[ends])
    return replace(graph, rest_ns=rest)


def left_out(graph: DependencyGraph, kernels: Int64) -> DependencyGraph:
    """Without these collectives and messages, on all their ranks."""
    rest = graph.rest_ns.copy()
    rest[graph.kernels.start[kernels]] = NEVER
    rest[graph.kernels.end[kernels]] = NEVER
    return replace(graph, rest_ns=rest)


# Collectives that begin as soon as they could, and are waited for together.


@dataclass(frozen=True, slots=True)
class Earlier:
    """Collectives of one rank in one step, in order, and when each could begin instead; the rank
    waited for one of them at least."""

    kernels: Int64
    ready_ns: Int64


def earlier(graph: DependencyGraph, moves: Sequence[Earlier]) -> DependencyGraph:
    """The collectives begin when they can, one after the other; the rank waits for all of them
    where it waited for the last one."""
    times = times_of(graph)
    needs = list(map(list, graph.needs))
    branches: list[_Branch] = []
    for move in moves:
        _wait_at_the_end(graph, needs, move)
        prior: list[int] = []
        for kernel, ready in zip(move.kernels.tolist(), move.ready_ns.tolist(), strict=True):
            needs[int(graph.kernels.start[kernel])] = [len(graph) + len(branches), *prior]
            branches.append(_branch(graph, times, int(graph.kernels.rank[kernel]), ready))
            prior = [int(graph.kernels.end[kernel])]
    return _with_branches(graph, needs, branches, times)


@dataclass(frozen=True, slots=True)
class _Branch:
    """An instant of a time line between two of its nodes: so much work behind the node before."""

    before: int
    work_ns: Int64
    step: int


def _wait_at_the_end(graph: DependencyGraph, needs: list[list[int]], move: Earlier) -> None:
    resumes = graph.kernels.resume[move.kernels].tolist()
    ends = graph.kernels.end[move.kernels].tolist()
    for resume, end in zip(resumes, ends, strict=True):
        if resume >= 0:
            needs[resume].remove(end)
    needs[max(resumes)] += ends


def _branch(graph: DependencyGraph, times: list[int], rank: int, ready_ns: int) -> _Branch:
    """The instant of the rank's time line, its work cut in proportion to time."""
    own = graph.mains.of_rank(rank)
    at = bisect_right(times, ready_ns, own.start, own.stop) - 1
    after = min(at + 1, own.stop - 1)
    span = times[after] - times[at]
    part = (ready_ns - times[at]) / span if span > 0 else 0.0
    work = np.rint(graph.work_ns[after] * part).astype(np.int64)
    return _Branch(at, work, int(graph.step[after]))


def _with_branches(
    graph: DependencyGraph, needs: list[list[int]], branches: Sequence[_Branch], times: list[int]
) -> DependencyGraph:
    """The graph with these nodes behind its own, and other needs."""
    every = tuple(map(tuple, needs)) + ((),) * len(branches)
    before = np.concatenate((graph.before, [one.before for one in branches])).astype(np.int64)
    work = np.array([one.work_ns for one in branches], dtype=np.int64).reshape(-1, len(WORK))
    measured = np.array([*times, *(times[one.before] for one in branches)], dtype=np.int64)
    return replace(
        graph,
        before=before,
        work_ns=np.concatenate((graph.work_ns, work)),
        step=np.concatenate((graph.step, [one.step for one in branches])).astype(np.int64),
        needs=every,
        rest_ns=np.concatenate((graph.rest_ns, np.zeros(len(branches), dtype=np.int64))),
        order=np.array(in_order(before, every, measured), dtype=np.int64),
    )


# What every cause is looked for in: the split, its graph, and the steps as a table.


@dataclass(frozen=True, slots=True)
class ReplayContext:
    """A recording with its graph. mean_ns is the mean full step; the steps of all ranks are rows.

    ranks holds the numbers of the ranks, stage and split_ns are of the rows: their pp coordinate
    and buckets, shape (rows,) and (rows, BUCKETS). origin_ns is the report's t0, records what the
    ranks told of themselves.
    """

    found: RunSplit
    graph: DependencyGraph
    mean_ns: float
    ranks: Int64
    stage: Int64
    split_ns: Int64
    origin_ns: int
    records: tuple[RankRecord, ...] = ()

    @property
    def counted(self) -> Bool:
        """Which rows the mean step is of: the full ones, all where none is full."""
        full = self.graph.steps.full
        return full if full.any() else np.ones_like(full)

    def bucket_ns(self, bucket: str) -> Int64:
        """One bucket of every row."""
        return self.split_ns[:, BUCKETS.index(bucket)]

    def work_ns(self, work: str) -> Int64:
        """What every row did of one kind of its own, behind communication too."""
        nodes = np.flatnonzero(self.graph.step >= 0)
        spent = self.graph.work_ns[nodes, WORK.index(work)]
        total = np.zeros(len(self.split_ns), dtype=np.int64)
        np.add.at(total, self.graph.step[nodes], spent)
        return total

    def phases(self) -> Int64:
        """For each node of the time lines whether its work was a forward's (0), a backward's (1) or
        neither's (2), by the boxes of the pipeline."""
        times = np.array(times_of(self.graph), dtype=np.int64)
        found = np.full(len(self.graph), 2)
        for index, rank in enumerate(self.found.ranks):
            nodes = self.graph.mains.of_rank(index)
            middle = (times[nodes] + np.concatenate((times[nodes][:1], times[nodes][:-1]))) // 2
            boxes = [box for grid in rank.grids for box in grid.boxes]
            for phase, backward in enumerate((False, True)):
                spans = [
                    (b.start_ns, b.end_ns) for b in boxes if (b.phase != "forward") == backward
                ]
                edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
                covered = union(edges[:, 0], edges[:, 1])
                found[nodes][inside(covered, middle)] = phase
        return found

    def exposed_ns(self) -> Int64:
        """How long each collective or message held its rank up, shape (kernels,)."""
        kernels = self.graph.kernels
        found = np.zeros(len(kernels), dtype=np.int64)
        for index, rank in enumerate(self.found.ranks):
            exposed = rank.attribution.exposed
            held = np.zeros(len(rank.trace.calls), dtype=np.int64)
            np.add.at(held, exposed.call, exposed.end_ns - exposed.start_ns)
            mine = np.flatnonzero(kernels.rank == index)
            found[mine] = held[kernels.call[mine]]
        return found

    def kernels_on(self, chosen: Callable[[frozenset[str]], bool]) -> Int64:
        """The collectives and messages whose group has such axes; none of a group unknown."""
        matched, axes_of = self.found.matched, self.found.layout.axes_of
        of_group = np.array([*(chosen(axes_of(group)) for group in matched.groups), False])
        return np.flatnonzero(of_group[matched.group[self.graph.kernels.row]])

    def gain_ns(self, changed: DependencyGraph) -> int:
        """How much shorter the mean step is with the graph changed."""
        return round(self.mean_ns - play(changed).mean_ns)

    def over(self, changed: DependencyGraph) -> ReplayContext:
        """The scene as it were with the graph changed."""
        return replace(self, graph=changed, mean_ns=play(changed).mean_ns)

    def steps_of(self, rows: npt.NDArray[np.bool_]) -> tuple[int, ...]:
        """The numbers of the full steps among these rows."""
        steps = self.graph.steps
        return tuple(np.unique(steps.step[rows & steps.full]).tolist())

    def event(self, index: int, row: int) -> EventRef:
        """An event of a rank for people to look at."""
        rank = self.found.ranks[index]
        events = rank.trace.events
        start = rank.clock.common_at(int(events.start_ns[row])) - self.origin_ns
        return EventRef(rank.trace.rank, start, int(events.dur_ns[row]), events.name_of(row))

    def longest(self, index: int, bucket: str, most: int = 3) -> tuple[EventRef, ...]:
        """The longest stretches of a rank in one bucket."""
        rank, number = self.found.ranks[index], BUCKETS.index(bucket)
        band = rank.attribution.band
        rows = np.flatnonzero(band.bucket == number)
        length = (band.end_ns - band.start_ns)[rows]
        chosen = rows[np.argsort(-length, kind="stable")[:most]]
        starts = rank.clock.common_ns(band.start_ns[chosen]) - self.origin_ns
        lengths = (band.end_ns - band.start_ns)[chosen]
        return tuple(
            EventRef(rank.trace.rank, start, took, bucket)
            for start, took in zip(starts.tolist(), lengths.tolist(), strict=True)
        )

    def calls(self, kernels: Int64, most: int = 3) -> tuple[EventRef, ...]:
        """The longest of these collectives and messages."""
        table, found = self.graph.kernels, self.found.ranks
        events = [
            (int(rank), int(found[int(rank)].trace.calls.event[call]))
            for rank, call in zip(table.rank[kernels], table.call[kernels], strict=True)
        ]
        longest = sorted(events, key=lambda at: -int(found[at[0]].trace.events.dur_ns[at[1]]))
        return tuple(self.event(*at) for at in longest[:most])


def scene_of(
    found: RunSplit, origin_ns: int = 0, records: Sequence[RankRecord] = ()
) -> ReplayContext:
    """The scene of a recording with at least one step."""
    graph = graph_of(found)
    splits = [step.split.buckets_ns for rank in found.ranks for step in rank.steps]
    numbers = np.array([rank.trace.rank for rank in found.ranks], dtype=np.int64)
    stages = np.array([found.layout.stage(rank) for rank in numbers.tolist()], dtype=np.int64)
    return ReplayContext(
        found=found,
        graph=graph,
        mean_ns=play(graph).mean_ns,
        ranks=numbers,
        stage=stages[graph.steps.rank],
        split_ns=np.array(splits, dtype=np.int64).reshape(-1, len(BUCKETS)),
        origin_ns=origin_ns,
        records=tuple(records),
    )


# A graph played through: when each of its instants comes.


@dataclass(frozen=True, slots=True)
class Played:
    """The steps of a replay: step_ns in the order of Graph.steps."""

    step_ns: Int64
    full: npt.NDArray[np.bool_]

    @property
    def mean_ns(self) -> float:
        """The mean full step of all ranks, of all steps where none is full; 0 without any."""
        rows = self.step_ns[self.full] if self.full.any() else self.step_ns
        return float(rows.mean()) if len(rows) else 0.0


def play(graph: DependencyGraph) -> Played:
    """The steps as they would have been."""
    times = np.array(times_of(graph), dtype=np.int64)
    steps = graph.steps
    return Played(times[steps.end] - times[steps.begin], steps.full)


def times_of(graph: DependencyGraph) -> list[int]:
    """When each node comes, in ns of the common clock."""
    before, needs, rest = graph.before.tolist(), graph.needs, graph.rest_ns.tolist()
    work = graph.work_ns.sum(axis=1).tolist()
    times = [0] * len(before)
    for node in graph.order.tolist():
        at = times[before[node]] + work[node] if before[node] >= 0 else NEVER
        for needed in needs[node]:
            if times[needed] > at:
                at = times[needed]
        times[node] = at + rest[node]
    return times
