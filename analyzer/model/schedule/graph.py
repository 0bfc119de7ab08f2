"""Which pass waits for which: the orders of all ranks as one sequence that can be timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule.orders import Places, orders, places
from stepsplit.analyzer.model.schedule.passes import Kind, Order, Pass
from stepsplit.analyzer.model.spec.layout import Schedule

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
Node = tuple[int, int, int, bool, bool]
"""rank, cost, the node it waits for (-1: none), whether that is on another rank, whether another
rank waits for this one. Cost is 4 position + kind, or counts on from there through pairs."""


@dataclass(frozen=True, slots=True)
class Graph:
    """nodes in an order in which each comes after what it waits for.

    positions is the number of model stages; pairs are the two costs of joined passes, which share
    a node; node_of and cost_of give node and cost of each rank's passes.
    """

    positions: int
    nodes: tuple[Node, ...]
    pairs: tuple[tuple[int, int], ...]
    node_of: tuple[tuple[int, ...], ...]
    cost_of: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=128)
def graph(schedule: Schedule, stages: int, microbatches: int, chunks: int = 1) -> Graph:
    """The graph of a schedule's own orders. Raises UsageError as orders does."""
    held = places(schedule, stages, chunks)
    return linked(orders(schedule, stages, microbatches, chunks), held)


def linked(orders: Sequence[Order], places: Places) -> Graph:
    """The graph of these orders, with the stages of each rank at these places of the model.

    A forward waits for that of the stage before, a backward for that of the stage behind and for
    its own forward, a weight gradient for its input gradient. Raises UsageError where some pass
    waits forever.
    """
    building = _Building(orders, places)
    while sum(building.advances(rank) for rank in range(len(orders))):
        pass
    building.check()
    return building.graph()


_UNDONE, _NOTHING = -2, -1


@dataclass(frozen=True, slots=True)
class _Shape:
    """What passes of one kind and chunk have in common; slots are those of microbatch 0.

    Every forward and backward of the model has a slot for its node; own is the pass of the same
    rank that must be done before, need the one that the start is counted from.
    """

    cost: int
    done: int
    need: int
    own: int
    far: bool
    sends: bool


class _Building:
    """The nodes so far, and how far each rank has come."""

    def __init__(self, orders: Sequence[Order], places: Places) -> None:
        self.orders = orders
        self.positions = 1 + max(place for held in places for place in held)
        self.microbatches = 1 + max(one.microbatch for order in orders for one in order)
        size = self.positions * self.microbatches
        self.slots = [_UNDONE] * (3 * size) + [_NOTHING] * self.microbatches
        self.shapes = [self._shapes(held) for held in places]
        self.nodes: list[Node] = []
        self.pairs: dict[tuple[int, int], int] = {}
        self.node_of: list[list[int]] = [[] for _ in orders]

    def advances(self, rank: int) -> bool:
        """Places the passes of a rank until one must wait; whether there was any."""
        placed, order, shapes = self.node_of[rank], self.orders[rank], self.shapes[rank]
        slots, nodes, before = self.slots, self.nodes, len(self.node_of[rank])
        while (at := len(placed)) < len(order):
            one = order[at]
            shape, nth = shapes[one.kind, one.chunk], one.microbatch
            waits = slots[shape.need + nth]
            if waits == _UNDONE or slots[shape.own + nth] == _UNDONE:
                break
            if one.joined:
                if not self._joined(rank, shape, order[at], order[at + 1]):
                    break
                continue
            slots[shape.done + nth] = len(nodes)
            placed.append(len(nodes))
            nodes.append((rank, shape.cost, waits, shape.far, shape.sends))
        return len(placed) > before

    def check(self) -> None:
        for rank, order in enumerate(self.orders):
            at = len(self.node_of[rank])
            if at < len(order):
                raise UsageError(
                    f"rank {rank} never gets past its pass {at + 1} of {len(order)}, "
                    f"{order[at].kind} of microbatch {order[at].microbatch}: what that waits for "
                    "comes later; mend the order"
                )

    def graph(self) -> Graph:
        costs = tuple(
            tuple([shapes[one.kind, one.chunk].cost for one in order])
            for order, shapes in zip(self.orders, self.shapes, strict=True)
        )
        node_of = tuple(map(tuple, self.node_of))
        return Graph(self.positions, tuple(self.nodes), tuple(self.pairs), node_of, costs)

    def _joined(self, rank: int, first: _Shape, one: Pass, other: Pass) -> bool:
        """A gate that waits for what the first needs, and a node of both after it."""
        second = self.shapes[rank][other.kind, other.chunk]
        slot = second.need + other.microbatch
        if _UNDONE in (self.slots[slot], self.slots[second.own + other.microbatch]):
            return False
        both = self.pairs.setdefault((first.cost, second.cost), len(self.pairs))
        gate = (rank, -1, self.slots[first.need + one.microbatch], first.far, False)
        sends = first.sends or second.sends
        node = (rank, 4 * self.positions + both, self.slots[slot], second.far, sends)
        self.nodes += [gate, node]
        for shape, done in ((first, one), (second, other)):
            self.slots[shape.done + done.microbatch] = len(self.nodes) - 1
            self.node_of[rank].append(len(self.nodes) - 1)
        return True

    def _shapes(self, held: tuple[int, ...]) -> dict[tuple[Kind, int], _Shape]:
        kinds = [(kind, chunk) for kind in KINDS for chunk in range(len(held))]
        return {(kind, chunk): self._shape(kind, held[chunk], held) for kind, chunk in kinds}

    def _shape(self, kind: Kind, at: int, held: tuple[int, ...]) -> _Shape:
        m, p = self.microbatches, self.positions
        forward, backward, nothing = at * m, (p + at) * m, 3 * p * m
        to, since = {"F": (at + 1, at - 1), "W": (p, p)}.get(kind, (at - 1, at + 1))
        done, own = {"F": (forward, nothing), "W": (backward + p * m, backward)}.get(
            kind, (backward, forward)
        )
        beside = 0 <= since < p
        need = (since if kind == "F" else p + since) * m if beside else own
        sends = 0 <= to < p and to not in held
        cost = 4 * at + KINDS.index(kind)
        return _Shape(cost, done, need, own, beside and since not in held, sends)
