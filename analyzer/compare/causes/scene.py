"""What every cause is looked for in: the split, its graph, and the steps as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import inside, union
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.compare.replay.build import graph_of
from stepsplit.analyzer.compare.replay.graph import WORK, Graph
from stepsplit.analyzer.compare.replay.play import play, times_of
from stepsplit.analyzer.report.report import EventRef
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Bool, Int64
from stepsplit.collectors.rank_record import RankRecord

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scene:
    """A recording with its graph. mean_ns is the mean full step; the steps of all ranks are rows.

    ranks holds the numbers of the ranks, stage and split_ns are of the rows: their pp coordinate
    and buckets, shape (rows,) and (rows, BUCKETS). origin_ns is the report's t0, records what the
    ranks told of themselves.
    """

    found: RunSplit
    graph: Graph
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

    def gain_ns(self, changed: Graph) -> int:
        """How much shorter the mean step is with the graph changed."""
        return round(self.mean_ns - play(changed).mean_ns)

    def over(self, changed: Graph) -> Scene:
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


def scene_of(found: RunSplit, origin_ns: int = 0, records: Sequence[RankRecord] = ()) -> Scene:
    """The scene of a recording with at least one step."""
    graph = graph_of(found)
    splits = [step.split.buckets_ns for rank in found.ranks for step in rank.steps]
    numbers = np.array([rank.trace.rank for rank in found.ranks], dtype=np.int64)
    stages = np.array([found.layout.stage(rank) for rank in numbers.tolist()], dtype=np.int64)
    return Scene(
        found=found,
        graph=graph,
        mean_ns=play(graph).mean_ns,
        ranks=numbers,
        stage=stages[graph.steps.rank],
        split_ns=np.array(splits, dtype=np.int64).reshape(-1, len(BUCKETS)),
        origin_ns=origin_ns,
        records=tuple(records),
    )
