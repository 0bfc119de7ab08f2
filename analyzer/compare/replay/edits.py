"""A graph with something changed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import runs_of
from stepsplit.analyzer.compare.replay.graph import NEVER, WORK, Graph
from stepsplit.analyzer.trace import Int64

Float = npt.NDArray[np.float64]


def paced(graph: Graph, work: str, times: Float) -> Graph:
    """One kind of WORK takes so many times as long, a factor each row of the steps."""
    changed = graph.work_ns.copy()
    column = WORK.index(work)
    nodes = np.flatnonzero(graph.step >= 0)
    changed[nodes, column] = np.rint(changed[nodes, column] * times[graph.step[nodes]])
    return replace(graph, work_ns=changed)


def capped(graph: Graph, work: str, least_ns: Float) -> Graph:
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


def moved_faster(graph: Graph, kernels: Int64, times: Float) -> Graph:
    """The data of these collectives and messages takes so many times as long."""
    rest = graph.rest_ns.copy()
    ends = graph.kernels.end[kernels]
    rest[ends] = np.where(rest[ends] > 0, np.rint(rest[ends] * times), rest[ends])
    return replace(graph, rest_ns=rest)


def left_out(graph: Graph, kernels: Int64) -> Graph:
    """Without these collectives and messages, on all their ranks."""
    rest = graph.rest_ns.copy()
    rest[graph.kernels.start[kernels]] = NEVER
    rest[graph.kernels.end[kernels]] = NEVER
    return replace(graph, rest_ns=rest)
