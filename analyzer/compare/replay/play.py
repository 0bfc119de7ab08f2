"""A graph played through: when each of its instants comes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.compare.replay.graph import NEVER, Graph
from stepsplit.analyzer.trace import Int64


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


def play(graph: Graph) -> Played:
    """The steps as they would have been."""
    times = np.array(times_of(graph), dtype=np.int64)
    steps = graph.steps
    return Played(times[steps.end] - times[steps.begin], steps.full)


def times_of(graph: Graph) -> list[int]:
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
