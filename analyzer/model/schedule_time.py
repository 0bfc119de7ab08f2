"""Time of a pipeline schedule: closed forms, steady state and an event simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import SCHEDULES, Schedule
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.schedule import (
    ChunkPositions,
    Kind,
    Order,
    Pass,
    build_orders,
    list_chunk_positions,
)

# Time and bubbles of a pipeline, by the fastest method.

FRACTION = Formula(
    "pipeline.bubble_fraction",
    "bubble / (bubble + useful time); equal stages: (p-1)/(m+p-1), interleaved (p-1)/(v m + p-1)",
    "Narayanan et al., SC'21, arXiv:2104.04473, sections 2.2.1 and 2.2.2",
)

OVERHEAD = Formula(
    "pipeline.bubble_overhead",
    "bubble / useful time; equal stages: (p-1)/m, interleaved (p-1)/(v m)",
    "Narayanan et al., SC'21, arXiv:2104.04473, sections 2.2.1 and 2.2.2",
)

_ALIKE = 1e-12
"""Relative difference up to which times are equal except for rounding."""


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """makespan_ns is the time from the first forward to the last backward of all ranks, holes_ns
    the bubble of each rank within it."""

    makespan_ns: float
    bubbles_ns: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Bubble / window, over all ranks (FRACTION)."""
        return sum(self.bubbles_ns) / (self.makespan_ns * len(self.bubbles_ns))

    @property
    def bubble_overhead(self) -> float:
        """Bubble / useful time, over all ranks (OVERHEAD)."""
        bubble_ns = sum(self.bubbles_ns)
        return bubble_ns / (self.makespan_ns * len(self.bubbles_ns) - bubble_ns)


@lru_cache(maxsize=4096)
def compute_pipeline_time(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    transfer_ns: float = 0.0,
    blocking: bool = False,
) -> PipelineTime:
    """Time a schedule on a number of ranks (stages), with costs for each model stage.

    Gives the result of a simulation of all microbatches up to rounding: from a closed form if the
    longest path is known, by extrapolation if the schedule reaches a steady state, else by
    simulation. Raises UsageError for an invalid schedule or number of costs.
    """
    few_microbatches = _reduce_microbatches(schedule, stages, microbatches)
    few_graph = build_graph(schedule, stages, few_microbatches, chunks)
    check(few_graph, costs)
    makespan_ns = None
    if not blocking:
        makespan_ns = _compute_closed_form(schedule, costs, stages, microbatches, transfer_ns)
    if makespan_ns is None:
        makespan_ns = _compute_periodic_makespan(
            schedule, stages, microbatches, chunks, costs, transfer_ns, blocking
        )
    if makespan_ns is None:
        full_graph = build_graph(schedule, stages, microbatches, chunks)
        makespan_ns = max(
            compute_node_ends(full_graph, list_costs(full_graph, costs), transfer_ns, blocking)
        )
    busy = (
        each * (microbatches / few_microbatches)
        for each in sum_busy_ns(few_graph, list_costs(few_graph, costs))
    )
    return PipelineTime(makespan_ns, tuple(max(0.0, makespan_ns - each) for each in busy))


def _compute_periodic_makespan(
    schedule: Schedule,
    p: int,
    m: int,
    chunks: int,
    costs: Costs,
    transfer_ns: float,
    blocking: bool,
) -> float | None:
    """Extrapolate the makespan from fewer microbatches, doubled until there is a steady state.

    None if there is none: in some schedules ranks keep running ahead of a slower one.
    """
    few, repeat = _reduce_microbatches(schedule, p, m), _count_period_microbatches(schedule, p)
    while few < m:
        few_graph = build_graph(schedule, p, few, chunks)
        ends = compute_node_ends(few_graph, list_costs(few_graph, costs), transfer_ns, blocking)
        period_ns = _find_period_ns(
            few_graph, build_orders(schedule, p, few, chunks), schedule, ends
        )
        if period_ns is not None:
            return max(ends) + (m - few) // repeat * period_ns
        few += few + (m - 2 * few) % repeat
    return None


def _compute_closed_form(
    schedule: Schedule, costs: Costs, p: int, m: int, transfer_ns: float
) -> float | None:
    """The longest path in closed form, without blocking sends; None if there is no closed form.

    One rank and naive: m times the whole path. GPipe: m equal jobs through p machines in a row,
    forward and then backward.
    """
    forwards = [forward for forward, _, _ in costs]
    backwards = [inputs + weights for _, inputs, weights in costs]
    single_ns = sum(forwards) + sum(backwards) + 2 * (p - 1) * transfer_ns
    if p == 1 or schedule == "naive":
        return m * single_ns
    if schedule == "gpipe":
        return single_ns + (m - 1) * (max(forwards) + max(backwards))
    return None


def _count_period_microbatches(schedule: Schedule, p: int) -> int:
    """Number of microbatches after which the order of every rank repeats."""
    return {"interleaved": p, "dualpipe": 2}.get(schedule, 1)


def _reduce_microbatches(schedule: Schedule, p: int, m: int) -> int:
    """The fewest microbatches for start, end and some repeats between them, or m.

    Its remainder modulo the repeat is that of m.
    """
    repeat = _count_period_microbatches(schedule, p)
    few = (3 if schedule == "1f1b" else 5) * p + repeat
    few += (m - few) % repeat
    repeats = schedule not in ("naive", "gpipe") and (schedule != "interleaved" or m % p == 0)
    return few if few < m and repeats else m


def _find_period_ns(
    schedule_graph: ScheduleGraph,
    order_of: tuple[Order, ...],
    schedule: Schedule,
    ends: list[float],
) -> float | None:
    """Time that each repeat adds in the steady state; None if there is no steady state yet.

    Times are sums and maxima of earlier ones. If a stretch longer than any dependency is shifted by
    the same time on all ranks, everything after it is too.
    """
    shifts: list[float] = []
    for ends_of, order in zip(group_by_rank(schedule_graph, ends), order_of, strict=True):
        shifts += _compute_shifts(ends_of, order, schedule, len(order_of))
    return shifts[0] if max(shifts) - min(shifts) <= _ALIKE * max(ends) else None


def _compute_shifts(ends: list[float], order: Order, schedule: Schedule, p: int) -> list[float]:
    """Delays of passes relative to one repeat before, over a stretch of at least p microbatches.

    The stretch ends with the first chunk's last forward: up to there the order does not depend on
    the number of microbatches that follow.
    """
    last = {one.chunk: at for at, one in enumerate(order) if one.kind == "F"}
    until, repeat = 1 + min(last.values()), _count_period_microbatches(schedule, p)
    microbatches = 1 + max(one.microbatch for one in order)
    length = len(order) * repeat // microbatches
    since = max(length, until - length * (p // repeat + 1))
    return [ends[at] - ends[at - length] for at in range(since, until)]


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


# Bubbles of pipelines of equal stages in closed form, with the time of messages.

ONE_AT_A_TIME = Formula(
    "schedule.naive",
    "bubble = m (p-1) (T + 2 Tc), with T = TF + TB + TW",
    "Narayanan et al., SC'21, section 2.2: one microbatch at a time",
)

GPIPE = Formula(
    "schedule.gpipe",
    "bubble = (p-1) (T + 2 Tc)",
    "Narayanan et al., SC'21, section 2.2.1; Tc: the first microbatch there, the last one back",
)

ONE_F_ONE_B = Formula(
    "schedule.1f1b",
    "bubble = (p-1) T + (2 (p-1) (m+p) / p - 2) Tc where p divides m",
    "Narayanan et al., SC'21, section 2.2.1; Tc: Qi et al., arXiv:2401.10241, tables 5 and 9",
)

INTERLEAVED = Formula(
    "schedule.interleaved",
    "bubble = (p-1) T / v + (2 p v - p - 2) Tc where p divides m",
    "Narayanan et al., SC'21, section 2.2.2; Tc: Qi et al., arXiv:2401.10241, tables 5 and 9",
)

ZB_H1 = Formula(
    "schedule.zb-h1",
    "bubble = (p-1) (TF + TB - TW + 4 Tc) where m > p, with m-1 for p-1 TWs below",
    "Qi et al., arXiv:2401.10241, table 2 and appendix H; Tc: tables 5 and 9",
)

ZB_H2 = Formula(
    "schedule.zb-h2",
    "bubble = (p-1) (TF + TB - 2 TW + 2 Tc) where m >= 2p-1, with m-1 TWs below",
    "Qi et al., arXiv:2401.10241, table 2 and appendix H; Tc: tables 5 and 9",
)


def compute_bubble_ns(
    schedule: str,
    stages: int,
    microbatches: int,
    times_ns: Times,
    chunks: int = 1,
    transfer_ns: float = 0.0,
) -> float | None:
    """Largest bubble of any rank between its own first forward and its own last pass.

    times_ns are forward, input gradient and weight gradient (TF, TB, TW) of one microbatch in all
    chunks of a rank. transfer_ns (Tc) is the time of one message, which delays only the receiver
    and is short compared with a pass. Weight gradients are assumed not to be longer than forwards
    and input gradients. None if there is no closed form: V shapes, DualPipe, unequal groups of
    interleaved.

    It equals the bubble in the window of all ranks except in zb-h2, where the last rank ends
    (p-1) (TF + Tc) after the first. In interleaved the paper counts p fewer Tc than a simulation of
    Megatron-LM's order, whose longest path has 2 (p v - 1) messages.
    """
    p, m, v = stages, microbatches, chunks
    forward, inputs, weights = times_ns
    total_ns = sum(times_ns)
    match schedule:
        case "naive":
            return m * (p - 1) * (total_ns + 2 * transfer_ns)
        case "gpipe":
            return (p - 1) * (total_ns + 2 * transfer_ns)
        case "1f1b":
            return (p - 1) * total_ns + _count_1f1b_messages(p, m) * transfer_ns
        case "interleaved" if m % p == 0:
            return (p - 1) * total_ns / v + (2 * p * v - p - 2) * transfer_ns
        case "zb-h1":
            messages = 2 * (p - 1) + 2 * max(0, min(m - 2, p - 1))
            filled = min(m - 1, p - 1) * weights
            return (p - 1) * (forward + inputs) - filled + messages * transfer_ns
        case "zb-h2":
            filled = min(m - 1, 2 * (p - 1)) * weights
            return (p - 1) * (forward + inputs + 2 * transfer_ns) - filled
    return None


def compute_bubble_rate(
    schedule: str,
    stages: int,
    microbatches: int,
    times_ns: Times,
    chunks: int = 1,
    transfer_ns: float = 0.0,
) -> float | None:
    """bubble / (bubble + m T), as in Qi et al. (arXiv:2401.10241); None without a closed form."""
    idle_ns = compute_bubble_ns(schedule, stages, microbatches, times_ns, chunks, transfer_ns)
    if idle_ns is None:
        return None
    return idle_ns / (idle_ns + microbatches * sum(times_ns))


def _count_1f1b_messages(p: int, m: int) -> int:
    """Messages on the longest path: forward and backward, and p-1 more in each direction for each
    further p microbatches; 2 (p-1) (m+p) / p - 2 if p divides m."""
    rounds, rest = divmod(m - 1, p)
    return 2 * (p - 1) + 2 * (rounds * (p - 1) + max(0, rest - 1))


# Bubble of a schedule with equal stages, in the window of all ranks.

Times = tuple[float, float, float]
"""One microbatch on one stage: its forward, input gradient and weight gradient, in one unit."""


def compute_ideal_bubble_fraction(
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    times_ns: Times | None = None,
) -> float | None:
    """Bubble / window of the schedule with equal stages and no communication, a ratio.

    stages is the number of pipeline ranks (p), chunks the number of stages on each (v);
    microbatches (m) counts both directions in dualpipe. The window is from the first forward to the
    last backward of all ranks: of a schedule that splits the backward, by a simulation of its order
    with times_ns. None if the schedule is not modelled, or if it splits the backward and times_ns
    is unknown.
    """
    if min(stages, microbatches, chunks) < 1:
        return None
    passes = _count_bubble_passes(schedule, stages, microbatches, chunks)
    if passes is not None:
        return passes / (chunks * microbatches + passes)
    known = next((one for one in SCHEDULES if one == schedule), None)
    if known is None or times_ns is None or sum(times_ns) <= 0:
        return None
    model_stages = 1 + max(map(max, list_chunk_positions(known, stages, chunks)))
    costs = (times_ns,) * model_stages
    try:
        return compute_pipeline_time(known, stages, microbatches, chunks, costs).bubble_fraction
    except UsageError:
        return None


def _count_bubble_passes(schedule: str, p: int, m: int, v: int) -> int | None:
    """A rank's bubble in forward-backward passes of one stage; None for other schedules.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM, SC'21: sections 2.2.1 (GPipe and 1F1B: p-1) and 2.2.2 (interleaved: p-1 passes of
    a stage that is v times smaller). Fewer microbatches than ranks leave a bubble in each further
    round of chunks. naive runs one microbatch at a time: each rank works 1/p of the time.
    """
    match schedule:
        case "naive":
            return (p - 1) * v * m
        case "gpipe" | "1f1b":
            return p - 1
        case "interleaved":
            return p - 1 + (v - 1) * max(0, p - m)
    return None
