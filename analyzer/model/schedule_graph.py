"""The dependency graph of a pipeline schedule's passes, and the simulation of its times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule import (
    ChunkPositions,
    Kind,
    Order,
    Pass,
    build_orders,
    list_chunk_positions,
)
from stepsplit.analyzer.model.schedule_names import Schedule

# Simulation of a pipeline with unequal stages.

Costs = tuple[tuple[float, float, float], ...]
"""For each model stage, first to last: forward, input gradient and weight gradient of one
microbatch, in ns."""


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """When each pass of each rank starts and ends, in ns from the first forward of any rank."""

    starts_ns: tuple[tuple[float, ...], ...]
    ends_ns: tuple[tuple[float, ...], ...]
    busy_ns: tuple[float, ...]

    @property
    def makespan_ns(self) -> float:
        """First forward to last backward of all ranks: the window of the bubble."""
        return max(ends[-1] for ends in self.ends_ns)

    @property
    def bubbles_ns(self) -> tuple[float, ...]:
        """The bubble of each rank: the window less its passes."""
        return tuple(self.makespan_ns - busy for busy in self.busy_ns)


def simulate(
    graph: ScheduleGraph, costs: Costs, transfer_ns: float = 0.0, blocking: bool = False
) -> ScheduleTimeline:
    """Simulate the graph: a pass starts when its rank is free and its input has arrived.

    Messages between ranks take transfer_ns; the sender continues meanwhile, unless blocking is set.
    Raises UsageError if there is not one cost per stage of the graph.
    """
    check(graph, costs)
    times = list_costs(graph, costs)
    ends = compute_node_ends(graph, times, transfer_ns, blocking)
    starts = [end - times[node[1]] for end, node in zip(ends, graph.nodes, strict=True)]
    return ScheduleTimeline(
        starts_ns=tuple(map(tuple, group_by_rank(graph, starts))),
        ends_ns=tuple(map(tuple, group_by_rank(graph, ends))),
        busy_ns=sum_busy_ns(graph, times),
    )


def check(graph: ScheduleGraph, costs: Costs) -> None:
    """Raise UsageError if there is not one cost per model stage."""
    if len(costs) != graph.positions:
        raise UsageError(
            f"{len(costs)} costs for a pipeline of {graph.positions} stages; give one per stage"
        )


def sum_busy_ns(graph: ScheduleGraph, times: Sequence[float]) -> tuple[float, ...]:
    """Total time of the passes of each rank."""
    return tuple(sum(times[cost] for cost in costs) for costs in graph.cost_of)


def compute_node_ends(
    graph: ScheduleGraph, times: Sequence[float], transfer_ns: float, blocking: bool
) -> list[float]:
    """End time of each node: the longest path to it."""
    free_ns = [0.0] * len(graph.node_of)
    ends: list[float] = []
    blocked_ns = transfer_ns if blocking else 0.0
    for rank, cost, before, far, sends in graph.nodes:
        start = free_ns[rank]
        if before >= 0:
            ready = ends[before] + transfer_ns if far else ends[before]
            if ready > start:
                start = ready
        end = start + times[cost]
        ends.append(end)
        free_ns[rank] = end + blocked_ns if sends else end
    return ends


def list_costs(graph: ScheduleGraph, costs: Costs) -> list[float]:
    """The time of every cost of the graph, and a final 0 for gates."""
    times = [t for f, i, w in costs for t in (f, i + w, i, w)]
    return [*times, *(times[one] + times[other] for one, other in graph.pairs), 0.0]


def group_by_rank(graph: ScheduleGraph, values: Sequence[float]) -> Iterator[list[float]]:
    """Group the values of nodes by rank."""
    return ([values[node] for node in nodes] for nodes in graph.node_of)


# The dependency graph of all ranks' passes, in an order in which it can be timed.

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

Node = tuple[int, int, int, bool, bool]
"""rank, cost, the node it waits for (-1: none), whether that is on another rank, whether another
rank waits for this one. cost is 4 position + kind; the costs of pairs follow after those."""


@dataclass(frozen=True, slots=True)
class ScheduleGraph:
    """The dependency graph, with nodes in topological order.

    positions is the number of model stages; pairs are the two costs of overlapped passes, which
    share a node; node_of and cost_of are node and cost of each rank's passes.
    """

    positions: int
    nodes: tuple[Node, ...]
    pairs: tuple[tuple[int, int], ...]
    node_of: tuple[tuple[int, ...], ...]
    cost_of: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=128)
def build_graph(
    schedule: Schedule, stages: int, microbatches: int, chunks: int = 1
) -> ScheduleGraph:
    """The graph of a schedule. Raises UsageError if the schedule is not valid."""
    positions = list_chunk_positions(schedule, stages, chunks)
    return link_orders(build_orders(schedule, stages, microbatches, chunks), positions)


def link_orders(orders: Sequence[Order], places: ChunkPositions) -> ScheduleGraph:
    """The graph of the ranks' orders, with their chunks at the given positions of the model.

    A forward waits for the forward of the stage before, a backward for the backward of the stage
    after and for its own forward, a weight gradient for its input gradient. Raises UsageError for
    a deadlock.
    """
    builder = _GraphBuilder(orders, places)
    while sum(builder.advance(rank) for rank in range(len(orders))):
        pass
    builder.check()
    return builder.build()


_UNDONE, _NOTHING = -2, -1


@dataclass(frozen=True, slots=True)
class _NodeTemplate:
    """Dependencies of passes of one kind and chunk, as slots of microbatch 0.

    Every forward and backward of the model has a slot for its node; own is the pass of the same
    rank that must be done before, need the pass whose end the start depends on.
    """

    cost: int
    done: int
    need: int
    own: int
    far: bool
    sends: bool


class _GraphBuilder:
    """Builds the graph rank by rank, as far as dependencies allow."""

    def __init__(self, orders: Sequence[Order], places: ChunkPositions) -> None:
        self.orders = orders
        self.positions = 1 + max(place for held in places for place in held)
        self.microbatches = 1 + max(one.microbatch for order in orders for one in order)
        size = self.positions * self.microbatches
        self.slots = [_UNDONE] * (3 * size) + [_NOTHING] * self.microbatches
        self.shapes = [self._build_templates(held) for held in places]
        self.nodes: list[Node] = []
        self.pairs: dict[tuple[int, int], int] = {}
        self.node_of: list[list[int]] = [[] for _ in orders]

    def advance(self, rank: int) -> bool:
        """Add the passes of a rank until one must wait. Returns whether any was added."""
        rank_nodes, order, shapes = self.node_of[rank], self.orders[rank], self.shapes[rank]
        slots, nodes, before = self.slots, self.nodes, len(self.node_of[rank])
        while (at := len(rank_nodes)) < len(order):
            next_pass = order[at]
            shape, nth = shapes[next_pass.kind, next_pass.chunk], next_pass.microbatch
            ready_node = slots[shape.need + nth]
            if ready_node == _UNDONE or slots[shape.own + nth] == _UNDONE:
                break
            if next_pass.joined:
                if not self._add_overlapped(rank, shape, order[at], order[at + 1]):
                    break
                continue
            slots[shape.done + nth] = len(nodes)
            rank_nodes.append(len(nodes))
            nodes.append((rank, shape.cost, ready_node, shape.far, shape.sends))
        return len(rank_nodes) > before

    def check(self) -> None:
        for rank, order in enumerate(self.orders):
            at = len(self.node_of[rank])
            if at < len(order):
                raise UsageError(
                    f"deadlock: rank {rank} blocks at pass {at + 1} of {len(order)}, "
                    f"{order[at].kind} of microbatch {order[at].microbatch}, which needs a later "
                    "pass; fix the order"
                )

    def build(self) -> ScheduleGraph:
        costs = tuple(
            tuple([shapes[one.kind, one.chunk].cost for one in order])
            for order, shapes in zip(self.orders, self.shapes, strict=True)
        )
        node_of = tuple(map(tuple, self.node_of))
        return ScheduleGraph(self.positions, tuple(self.nodes), tuple(self.pairs), node_of, costs)

    def _add_overlapped(
        self, rank: int, first: _NodeTemplate, first_pass: Pass, second_pass: Pass
    ) -> bool:
        """Add a gate for the first pass's dependency, and after it one node for both passes."""
        second = self.shapes[rank][second_pass.kind, second_pass.chunk]
        slot = second.need + second_pass.microbatch
        if _UNDONE in (self.slots[slot], self.slots[second.own + second_pass.microbatch]):
            return False
        both = self.pairs.setdefault((first.cost, second.cost), len(self.pairs))
        gate = (rank, -1, self.slots[first.need + first_pass.microbatch], first.far, False)
        sends = first.sends or second.sends
        node = (rank, 4 * self.positions + both, self.slots[slot], second.far, sends)
        self.nodes += [gate, node]
        for shape, done in ((first, first_pass), (second, second_pass)):
            self.slots[shape.done + done.microbatch] = len(self.nodes) - 1
            self.node_of[rank].append(len(self.nodes) - 1)
        return True

    def _build_templates(
        self, rank_positions: tuple[int, ...]
    ) -> dict[tuple[Kind, int], _NodeTemplate]:
        kinds = [(kind, chunk) for kind in KINDS for chunk in range(len(rank_positions))]
        return {
            (kind, chunk): self._build_template(kind, rank_positions[chunk], rank_positions)
            for kind, chunk in kinds
        }

    def _build_template(
        self, kind: Kind, at: int, rank_positions: tuple[int, ...]
    ) -> _NodeTemplate:
        m, p = self.microbatches, self.positions
        forward, backward, no_slot = at * m, (p + at) * m, 3 * p * m
        to, since = {"F": (at + 1, at - 1), "W": (p, p)}.get(kind, (at - 1, at + 1))
        done, own_slot = {"F": (forward, no_slot), "W": (backward + p * m, backward)}.get(
            kind, (backward, forward)
        )
        has_neighbor = 0 <= since < p
        need = (since if kind == "F" else p + since) * m if has_neighbor else own_slot
        sends = 0 <= to < p and to not in rank_positions
        cost = 4 * at + KINDS.index(kind)
        return _NodeTemplate(
            cost, done, need, own_slot, has_neighbor and since not in rank_positions, sends
        )
