"""When each pass of a pipeline of unequal stages runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule.graph import Graph

Costs = tuple[tuple[float, float, float], ...]
"""For each model stage, first to last: forward, input gradient and weight gradient of one
microbatch, in ns."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each pass of each rank starts and ends, in ns from the first forward of any rank."""

    starts_ns: tuple[tuple[float, ...], ...]
    ends_ns: tuple[tuple[float, ...], ...]
    busy_ns: tuple[float, ...]

    @property
    def makespan_ns(self) -> float:
        """First forward to last backward over all ranks: the window of the bubble."""
        return max(ends[-1] for ends in self.ends_ns)

    @property
    def holes_ns(self) -> tuple[float, ...]:
        """For each rank the window less its passes."""
        return tuple(self.makespan_ns - busy for busy in self.busy_ns)


def simulate(
    graph: Graph, costs: Costs, transfer_ns: float = 0.0, blocking: bool = False
) -> Timeline:
    """Every pass starts when its rank is free and what it waits for is there.

    What one rank sends to another arrives transfer_ns later. Meanwhile the sender goes on, unless
    blocking holds it up. Raises UsageError where costs are not those of the graph's stages.
    """
    check(graph, costs)
    times = table(graph, costs)
    ends = node_ends(graph, times, transfer_ns, blocking)
    starts = [end - times[node[1]] for end, node in zip(ends, graph.nodes, strict=True)]
    return Timeline(
        starts_ns=tuple(map(tuple, by_rank(graph, starts))),
        ends_ns=tuple(map(tuple, by_rank(graph, ends))),
        busy_ns=busy_ns(graph, times),
    )


def check(graph: Graph, costs: Costs) -> None:
    """Raises UsageError where costs are not one for each model stage."""
    if len(costs) != graph.positions:
        raise UsageError(
            f"costs of {len(costs)} stages for a pipeline of {graph.positions}; give one a stage"
        )


def busy_ns(graph: Graph, times: Sequence[float]) -> tuple[float, ...]:
    """What the passes of each rank take together."""
    return tuple(sum(times[cost] for cost in costs) for costs in graph.cost_of)


def node_ends(
    graph: Graph, times: Sequence[float], transfer_ns: float, blocking: bool
) -> list[float]:
    """The end of each node: the longest path to it."""
    free = [0.0] * len(graph.node_of)
    ends: list[float] = []
    held_ns = transfer_ns if blocking else 0.0
    for rank, cost, before, far, sends in graph.nodes:
        start = free[rank]
        if before >= 0:
            ready = ends[before] + transfer_ns if far else ends[before]
            if ready > start:
                start = ready
        end = start + times[cost]
        ends.append(end)
        free[rank] = end + held_ns if sends else end
    return ends


def table(graph: Graph, costs: Costs) -> list[float]:
    """The time of every cost of the graph, and 0 at the end for gates."""
    each = [t for f, i, w in costs for t in (f, i + w, i, w)]
    return [*each, *(each[one] + each[other] for one, other in graph.pairs), 0.0]


def by_rank(graph: Graph, values: Sequence[float]) -> Iterator[list[float]]:
    """The values of each rank's passes, from those of the nodes."""
    return ([values[node] for node in nodes] for nodes in graph.node_of)
