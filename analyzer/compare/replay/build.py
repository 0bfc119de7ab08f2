"""RunSplit -> Graph: what every instant of the run hung on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from stepsplit.analyzer.compare.replay.graph import (
    NEVER,
    WORK,
    Graph,
    Kernels,
    Mains,
    Needs,
    StepEdges,
)
from stepsplit.analyzer.compare.replay.mains import Main, main_of
from stepsplit.analyzer.compare.replay.meetings import Edges, meetings_of
from stepsplit.analyzer.compare.replay.order import in_order
from stepsplit.analyzer.compare.replay.rank_calls import RankCalls, rank_calls
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Int64


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a graph is made of, rank by rank; the nodes of all time lines come first, then those of
    the events, two each, and of the meetings.

    node, kernel and step are where each rank's nodes, events and steps begin among all.
    """

    mains: tuple[Main, ...]
    calls: tuple[RankCalls, ...]
    node: tuple[int, ...]
    kernel: tuple[int, ...]
    step: tuple[int, ...]

    @classmethod
    def of(cls, found: RunSplit) -> _Parts:
        rows = [found.matched.of_trace(i) for i in range(len(found.ranks))]
        calls = tuple(
            rank_calls(rank, found.arrivals, own)
            for rank, own in zip(found.ranks, rows, strict=True)
        )
        mains = tuple(main_of(rank, made) for rank, made in zip(found.ranks, calls, strict=True))
        return cls(
            mains,
            calls,
            _begins([len(main.at_ns) for main in mains]),
            _begins([len(made.call) for made in calls]),
            _begins([len(main.begin) for main in mains]),
        )

    @property
    def main_nodes(self) -> int:
        return self.node[-1]

    @property
    def measured_ns(self) -> Int64:
        """When each node of the time lines and of the events was."""
        events = [np.stack((m.start_ns, m.end_ns), axis=1).ravel() for m in self.calls]
        return np.concatenate([*(main.at_ns for main in self.mains), *events])


def _begins(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each begins, and where the last ends."""
    return tuple(np.cumsum([0, *counts]).tolist())


def graph_of(found: RunSplit) -> Graph:
    """The graph of a recording whose ranks have steps."""
    parts = _Parts.of(found)
    kernels = _kernels(parts, found)
    edges = _edges(parts, kernels, found)
    measured = parts.measured_ns
    count = int(max(len(measured) - 1, edges[0].max(initial=-1), edges[1].max(initial=-1))) + 1
    before, needs = _before(parts, count), _needs(edges, count)
    work = np.zeros((count, len(WORK)), dtype=np.int64)
    work[: parts.main_nodes] = np.concatenate([main.work_ns for main in parts.mains])
    step = np.full(count, -1)
    step[: parts.main_nodes] = np.concatenate(
        [main.window + first for main, first in zip(parts.mains, parts.step, strict=False)]
    )
    guessed = _guessed_ns(measured, edges, count)
    graph = Graph(
        before=before,
        work_ns=work,
        step=step,
        needs=needs,
        rest_ns=np.zeros(count, dtype=np.int64),
        order=np.array(in_order(before, needs, guessed), dtype=np.int64),
        mains=Mains(np.array(parts.node)),
        kernels=kernels,
        steps=_steps(parts, found),
    )
    return replace(graph, rest_ns=_rest_ns(graph, measured))


def _kernels(parts: _Parts, found: RunSplit) -> Kernels:
    calls, mains = parts.calls, parts.mains
    start = parts.main_nodes + 2 * np.arange(parts.kernel[-1], dtype=np.int64)
    resume = [
        np.where(made.held, main.cut_at(made.end_ns) + first, -1)
        for made, main, first in zip(calls, mains, parts.node, strict=False)
    ]
    step = [
        main.window_at(made.start_ns) + first
        for made, main, first in zip(calls, mains, parts.step, strict=False)
    ]
    row = [made.call + found.matched.of_trace(i).start for i, made in enumerate(calls)]
    return Kernels(
        rank=np.repeat(np.arange(len(calls)), np.diff(parts.kernel)),
        call=np.concatenate([made.call for made in calls]),
        row=np.concatenate(row),
        start=start,
        end=start + 1,
        resume=np.concatenate(resume),
        step=np.concatenate(step),
    )


def _edges(parts: _Parts, kernels: Kernels, found: RunSplit) -> Edges:
    """What needs what, but for the time lines themselves."""
    hangs, behind, kernel = [], [], []
    for made, main, node, first in zip(
        parts.calls, parts.mains, parts.node, parts.kernel, strict=False
    ):
        cut = main.cut_at(made.hangs_ns)
        hangs.append(np.where(cut >= 0, cut + node, -1))
        behind.append(np.where(made.behind >= 0, made.behind + first, -1))
        kernel.append(made.of_call + first)
    hung_on, prior = np.concatenate(hangs), np.concatenate(behind)
    held, hung, queued = (np.flatnonzero(part >= 0) for part in (kernels.resume, hung_on, prior))
    first_meeting = parts.main_nodes + 2 * len(kernels)
    met = meetings_of(found, kernels, np.concatenate(kernel), first_meeting)
    return (
        np.concatenate((kernels.end[held], hung_on[hung], kernels.end[prior[queued]], met[0])),
        np.concatenate((kernels.resume[held], kernels.start[hung], kernels.start[queued], met[1])),
    )


def _guessed_ns(measured: Int64, edges: Edges, count: int) -> Int64:
    """When each node was: a meeting when its last member arrived."""
    at = np.concatenate((measured, np.full(count - len(measured), NEVER)))
    into = edges[1] >= len(measured)
    np.maximum.at(at, edges[1][into], at[edges[0][into]])
    return at


def _before(parts: _Parts, count: int) -> Int64:
    before = np.full(count, -1)
    before[1 : parts.main_nodes] = np.arange(parts.main_nodes - 1)
    before[list(parts.node[:-1])] = -1
    return before


def _needs(edges: Edges, count: int) -> Needs:
    order = np.argsort(edges[1], kind="stable")
    source = edges[0][order].tolist()
    cut = np.searchsorted(edges[1][order], np.arange(count + 1)).tolist()
    return tuple(tuple(source[low:high]) for low, high in pairwise(cut))


def _steps(parts: _Parts, found: RunSplit) -> StepEdges:
    windows = [rank.windows.windows for rank in found.ranks]
    first = parts.node[:-1]
    return StepEdges(
        rank=np.repeat(np.arange(len(windows)), [len(own) for own in windows]),
        step=np.array([w.step for own in windows for w in own], dtype=np.int64),
        full=np.array([w.kind == "full" for own in windows for w in own], dtype=np.bool_),
        begin=np.concatenate([m.begin + f for m, f in zip(parts.mains, first, strict=True)]),
        end=np.concatenate([m.end + f for m, f in zip(parts.mains, first, strict=True)]),
    )


def _rest_ns(graph: Graph, measured: Int64) -> Int64:
    """How long after all that it needs each arrival and each end came, as measured."""
    times, before, needs = [0] * len(graph), graph.before.tolist(), graph.needs
    work, known = graph.work_ns.sum(axis=1).tolist(), measured.tolist()
    mains, events = int(graph.mains.first[-1]), len(known)
    rest = [0] * len(graph)
    for node in graph.order.tolist():
        at = times[before[node]] + work[node] if before[node] >= 0 else NEVER
        for needed in needs[node]:
            if times[needed] > at:
                at = times[needed]
        if mains <= node < events or at == NEVER:
            rest[node] = known[node] - at
            at = known[node]
        times[node] = at
    return np.array(rest, dtype=np.int64)
