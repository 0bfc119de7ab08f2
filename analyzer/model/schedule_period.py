"""The steady state of a pipeline schedule: its time with any number of microbatches, exactly.

A schedule is a warm-up, equal periods and a cool-down. The times of a period are sums and maxima of
those of the periods before. Once every pass ends a constant time after that of some periods ago,
all further periods are known until another input becomes the later one of some pass, so that nearly
all of them can be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule import build_orders
from stepsplit.analyzer.model.schedule_graph import (
    Costs,
    ScheduleGraph,
    build_graph,
    compute_node_ends,
    group_by_rank,
    list_costs,
)
from stepsplit.analyzer.model.schedule_names import Schedule

MAX_STEADY_PASSES = 1_000_000
"""Passes of further periods that are simulated or compared in search of a steady state: about a
second. Jobs need some thousands."""


def compute_makespan_ns(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    transfer_ns: float,
    blocking: bool,
) -> float:
    """The makespan of a simulation of all microbatches, from no more of them than the schedule
    needs for warm-up, some periods and cool-down.

    Raises UsageError for costs without a steady state within MAX_STEADY_PASSES.
    """
    repeat = count_period_microbatches(schedule, stages)
    few = more = reduce_microbatches(schedule, stages, microbatches)
    while more == few or more * len(costs) <= _FLOAT_FORWARDS:
        if more == microbatches:
            graph = build_graph(schedule, stages, microbatches, chunks)
            return max(compute_node_ends(graph, list_costs(graph, costs), transfer_ns, blocking))
        steady = _extrapolate(schedule, stages, more, chunks, costs, transfer_ns, blocking)
        if steady is not None:
            more_makespan_ns, period_ns = steady
            return more_makespan_ns + (microbatches - more) // repeat * period_ns
        more = min(microbatches, 2 * more + (microbatches - 2 * more) % repeat)
    cut = _cut_into_periods(schedule, stages, few, chunks)
    # Whole multiples of a power of two: sums have no rounding, so that equal times are equal.
    stated = [each.as_integer_ratio() for each in (*list_costs(cut.graph, costs), transfer_ns)]
    unit = max(denominator for _, denominator in stated)
    *times, transfer = (count * (unit // denominator) for count, denominator in stated)
    more_periods = (microbatches - few) // repeat
    return _simulate_periods(cut, times, transfer, blocking, more_periods) / unit


def count_period_microbatches(schedule: Schedule, stages: int) -> int:
    """Number of microbatches after which the order of every rank repeats."""
    return {"interleaved": stages, "dualpipe": 2}.get(schedule, 1)


def reduce_microbatches(schedule: Schedule, stages: int, microbatches: int) -> int:
    """The fewest microbatches for warm-up, cool-down and some periods between them, or all.

    Its remainder modulo the period is that of all.
    """
    repeat = count_period_microbatches(schedule, stages)
    few = (3 if schedule == "1f1b" else 5) * stages + repeat
    few += (microbatches - few) % repeat
    repeats = schedule not in ("naive", "gpipe")
    repeats = repeats and (schedule != "interleaved" or microbatches % stages == 0)
    return few if few < microbatches and repeats else microbatches


_FLOAT_FORWARDS = 1 << 13
"""Forwards of schedules whose steady state is looked for in plain floats: a tenth of a second."""

_ALIKE = 1e-12
"""Relative difference up to which times are equal except for rounding."""


def _extrapolate(
    schedule: Schedule,
    stages: int,
    few: int,
    chunks: int,
    costs: Costs,
    transfer_ns: float,
    blocking: bool,
) -> tuple[float, float] | None:
    """The makespan of few microbatches, and what each further period adds if all ranks are in
    their steady state already: the usual case, without the search and in plain floats."""
    graph, repeat = (
        build_graph(schedule, stages, few, chunks),
        count_period_microbatches(schedule, stages),
    )
    ends = compute_node_ends(graph, list_costs(graph, costs), transfer_ns, blocking)
    shifts: list[float] = []
    orders = build_orders(schedule, stages, few, chunks)
    for rank_ends, order in zip(group_by_rank(graph, ends), orders, strict=True):
        # Up to the first chunk's last forward the order does not depend on what follows.
        last = {one.chunk: at for at, one in enumerate(order) if one.kind == "F"}
        until, length = 1 + min(last.values()), len(order) * repeat // few
        since = max(length, until - length * (stages // repeat + 1))
        shifts += [rank_ends[at] - rank_ends[at - length] for at in range(since, until)]
    if max(shifts) - min(shifts) > _ALIKE * max(ends):
        return None
    return max(ends), shifts[0]


# The graph of a schedule, cut into a warm-up, periods and a cool-down.


@dataclass(frozen=True, slots=True)
class _PeriodicPass:
    """A pass and what it waits for: the pass before it on its rank (own), and one on another rank
    (far). Any other input on its own rank is never later than own.

    Both are positions relative to the pass in the list of all periods; in the cool-down they are
    relative to its begin.
    """

    cost: int
    own: int
    own_sends: bool
    far: int | None


@dataclass(frozen=True, slots=True)
class _PeriodicGraph:
    """The graph of few microbatches: the nodes of its periods, first to last, the passes of any
    further period, and those of the cool-down.

    reach is how far back in the list of the periods an input may be.
    """

    graph: ScheduleGraph
    nodes: tuple[int, ...]
    period: tuple[_PeriodicPass, ...]
    cool_down: tuple[_PeriodicPass, ...]
    reach: int


@lru_cache(maxsize=128)
def _cut_into_periods(schedule: Schedule, stages: int, few: int, chunks: int) -> _PeriodicGraph:
    """Cut the graph of few microbatches.

    On each rank the last period ends with the last forward of some chunk: up to there the order
    does not depend on the number of microbatches that follow.
    """
    graph = build_graph(schedule, stages, few, chunks)
    orders = build_orders(schedule, stages, few, chunks)
    nodes, repeat = graph.nodes, count_period_microbatches(schedule, stages)
    length = [len(order) * repeat // few for order in orders]
    until = list[int]()
    for order in orders:
        last_forwards = {one.chunk: at for at, one in enumerate(order) if one.kind == "F"}
        until.append(1 + min(last_forwards.values()))
    rank_nodes, at = [list[int]() for _ in orders], list[int]()
    position_if_late, late = list[int](), list[int]()
    for node, (rank, _, before, _, _) in enumerate(nodes):
        # A pass that waits for the cool-down of another rank belongs to it too.
        if before >= 0 and position_if_late[before] >= 0:
            until[rank] = min(until[rank], len(rank_nodes[rank]))
        at.append(len(rank_nodes[rank]))
        rank_nodes[rank].append(node)
        position_if_late.append(len(late) if at[-1] >= until[rank] else -1)
        if at[-1] >= until[rank]:
            late.append(node)

    newest = sorted(
        node
        for rank, own in enumerate(rank_nodes)
        for node in own[until[rank] - length[rank] : until[rank]]
    )
    size, slot_of = len(newest), {node: slot for slot, node in enumerate(newest)}

    def find_position(node: int) -> int:
        """In the cool-down; or in the list of the periods, from its end, below 0."""
        if position_if_late[node] >= 0:
            return position_if_late[node]
        rank = nodes[node][0]
        periods_ago = (until[rank] - 1 - at[node]) // length[rank]
        in_newest = rank_nodes[rank][at[node] + periods_ago * length[rank]]
        return slot_of[in_newest] - (periods_ago + 1) * size

    def describe(node: int, begin: int) -> _PeriodicPass:
        rank, cost, before, far, _ = nodes[node]
        own = rank_nodes[rank][at[node] - 1]
        far_input = find_position(before) - begin if far else None
        return _PeriodicPass(cost, find_position(own) - begin, nodes[own][4], far_input)

    period = tuple(describe(node, find_position(node)) for node in newest)
    cool_down = tuple(describe(node, 0) for node in late)
    inputs = [one.own for one in (*period, *cool_down)]
    inputs += [one.far for one in (*period, *cool_down) if one.far is not None]
    reach = -min(inputs)
    # The graph has this many equal periods.
    periods = list(newest)
    while len(periods) < reach + size:
        oldest = [(nodes[node][0], at[node]) for node in periods[:size]]
        periods[:0] = [rank_nodes[rank][where - length[rank]] for rank, where in oldest]
    return _PeriodicGraph(graph, tuple(periods), period, cool_down, reach)


# Further periods: simulated until all of them are known.

_Input = tuple[int, int, int, int | None]
"""Of a pass: its time, own, the time that own's rank is blocked after it, and far."""


def _simulate_periods(
    cut: _PeriodicGraph, times: Sequence[int], transfer: int, blocking: bool, more_periods: int
) -> int:
    """The end of the last pass with more periods than the graph has."""
    few_ends = compute_node_ends(cut.graph, times, transfer, blocking)
    ends = [int(few_ends[node]) for node in cut.nodes]
    blocked = transfer if blocking else 0
    period, cool_down = (
        [(times[one.cost], one.own, blocked * one.own_sends, one.far) for one in passes]
        for passes in (cut.period, cut.cool_down)
    )
    size, work, until_search, simulated = len(period), 0, 0, 0
    while more_periods:
        if until_search == 0:
            steady, compared = _find_steady_state(ends, period, cut.reach, transfer)
            work += compared
            if steady is not None and (
                skipped := min(steady.repeats, more_periods // steady.periods)
            ):
                ends = steady.skip(ends, skipped, cut.reach)
                more_periods -= skipped * steady.periods
                simulated = 0
            # Each search is twice as far from the last one that found a steady state.
            until_search = max(simulated, len(cut.nodes) // size)
            continue
        for cost, own, wait, far in period:
            start = ends[own] + wait
            if far is not None and (arrival := ends[far] + transfer) > start:
                start = arrival
            ends.append(start + cost)
        more_periods, until_search, simulated = more_periods - 1, until_search - 1, simulated + 1
        work += size
        if work > MAX_STEADY_PASSES:
            raise UsageError(
                f"the pipeline has no steady state within {MAX_STEADY_PASSES:,} passes, and too "
                "many microbatches to simulate them all; use fewer microbatches"
            )
    late: list[int] = []
    for cost, own, wait, far in cool_down:
        start = (ends if own < 0 else late)[own] + wait
        if far is not None:
            start = max(start, (ends if far < 0 else late)[far] + transfer)
        late.append(start + cost)
    return max(*late, *ends[-size:])


@dataclass(frozen=True, slots=True)
class _SteadyState:
    """Every pass ends a constant time (shifts) after the pass some periods before, for a number of
    repeats from now."""

    periods: int
    shifts: tuple[int, ...]
    repeats: int

    def skip(self, ends: list[int], repeats: int, reach: int) -> list[int]:
        """The newest ends, as far back as passes reach, after some repeats."""
        span = len(self.shifts)
        newest = ends[-max(span, reach) :]
        first = -len(newest)
        return [
            end + repeats * self.shifts[where % span] for where, end in enumerate(newest, first)
        ]


_ENDLESS = 1 << 62


def _find_steady_state(
    ends: list[int], period: Sequence[_Input], reach: int, transfer: int
) -> tuple[_SteadyState | None, int]:
    """The steady state of the fewest periods, and how many passes were compared to find it."""
    size, count, compared = len(period), len(ends), 0
    for periods in range(1, count // (3 * size) + 1):
        span, compared = periods * size, compared + 1
        # Most spans are refuted by the newest passes.
        if span + reach > count or any(
            ends[at] - ends[at - span] != ends[at - span] - ends[at - 2 * span]
            for at in range(-1, -size - 1, -1)
        ):
            continue
        compared += span
        shifts = tuple(ends[at] - ends[at - span] for at in range(-span, 0))
        repeats = _count_repeats(ends, period, reach, transfer, shifts)
        if repeats:
            return _SteadyState(periods, shifts, repeats), compared
    return None, compared


def _count_repeats(
    ends: list[int], period: Sequence[_Input], reach: int, transfer: int, shifts: tuple[int, ...]
) -> int:
    """How often the newest passes repeat with these shifts: until the earlier input of one of them
    becomes the later one. 0 if they are not in a steady state."""
    span, size, repeats = len(shifts), len(period), _ENDLESS
    for at in range(-max(span, reach), -span):
        if ends[at] - ends[at - span] != shifts[at % span]:
            return 0
    for at in range(-span, 0):
        _, own, wait, far = period[at % size]
        shift = shifts[(at + own) % span]
        if far is not None:
            far_shift = shifts[(at + far) % span]
            lead = ends[at + own] + wait - ends[at + far] - transfer
            # The later input decides; of two at once the one that becomes later.
            if lead < 0 or (lead == 0 and far_shift > shift):
                lead, shift, far_shift = -lead, far_shift, shift
            if far_shift > shift:
                repeats = min(repeats, lead // (far_shift - shift))
        if shifts[at] != shift:
            return 0
    return repeats
