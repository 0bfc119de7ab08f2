"""Collectives that begin as soon as they could, and are waited for together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.compare.replay.graph import WORK, Graph
from stepsplit.analyzer.compare.replay.order import in_order
from stepsplit.analyzer.compare.replay.play import times_of
from stepsplit.analyzer.trace import Int64


@dataclass(frozen=True, slots=True)
class Earlier:
    """Collectives of one rank in one step, in order, and when each could begin instead; the rank
    waited for one of them at least."""

    kernels: Int64
    ready_ns: Int64


def earlier(graph: Graph, moves: Sequence[Earlier]) -> Graph:
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


def _wait_at_the_end(graph: Graph, needs: list[list[int]], move: Earlier) -> None:
    resumes = graph.kernels.resume[move.kernels].tolist()
    ends = graph.kernels.end[move.kernels].tolist()
    for resume, end in zip(resumes, ends, strict=True):
        if resume >= 0:
            needs[resume].remove(end)
    needs[max(resumes)] += ends


def _branch(graph: Graph, times: list[int], rank: int, ready_ns: int) -> _Branch:
    """The instant of the rank's time line, its work cut in proportion to time."""
    own = graph.mains.of_rank(rank)
    at = bisect_right(times, ready_ns, own.start, own.stop) - 1
    after = min(at + 1, own.stop - 1)
    span = times[after] - times[at]
    part = (ready_ns - times[at]) / span if span > 0 else 0.0
    work = np.rint(graph.work_ns[after] * part).astype(np.int64)
    return _Branch(at, work, int(graph.step[after]))


def _with_branches(
    graph: Graph, needs: list[list[int]], branches: Sequence[_Branch], times: list[int]
) -> Graph:
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
