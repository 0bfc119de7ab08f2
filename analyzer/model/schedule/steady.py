"""How long a pipeline takes and how long each rank stands still in it, as fast as may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.schedule.engine import (
    Costs,
    busy_ns,
    by_rank,
    check,
    node_ends,
    table,
)
from stepsplit.analyzer.model.schedule.graph import Graph, graph
from stepsplit.analyzer.model.schedule.orders import orders
from stepsplit.analyzer.model.schedule.passes import Order
from stepsplit.analyzer.model.spec.layout import Schedule

FRACTION = Formula(
    "pipeline.bubble_fraction",
    "holes / (holes + useful time); equal stages: (p-1)/(m+p-1), interleaved (p-1)/(v m + p-1)",
    "Narayanan et al., SC'21, arXiv:2104.04473, sections 2.2.1 and 2.2.2",
)
OVERHEAD = Formula(
    "pipeline.bubble_overhead",
    "holes / useful time; equal stages: (p-1)/m, interleaved (p-1)/(v m)",
    "Narayanan et al., SC'21, arXiv:2104.04473, sections 2.2.1 and 2.2.2",
)
_ALIKE = 1e-12
"""Times this close in relation to their size are the same but for rounding."""


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """makespan_ns is first forward to last backward over all ranks, holes_ns what each rank does
    not work of it."""

    makespan_ns: float
    holes_ns: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Holes / window, over all ranks (FRACTION)."""
        return sum(self.holes_ns) / (self.makespan_ns * len(self.holes_ns))

    @property
    def bubble_overhead(self) -> float:
        """Holes / useful time, over all ranks (OVERHEAD)."""
        holes_ns = sum(self.holes_ns)
        return holes_ns / (self.makespan_ns * len(self.holes_ns) - holes_ns)


@lru_cache(maxsize=4096)
def pipeline_ns(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    transfer_ns: float = 0.0,
    blocking: bool = False,
) -> PipelineTime:
    """The time of the schedule on so many ranks (stages), with costs for each model stage.

    The result is that of engine.simulate on all microbatches up to rounding: by arithmetic where
    the longest path is known, by repetition where the ranks have fallen into step, else by
    simulation of all. Raises UsageError for what orders or simulate refuse.
    """
    few = _fewer(schedule, stages, microbatches)
    start = graph(schedule, stages, few, chunks)
    check(start, costs)
    whole_ns = None
    if not blocking:
        whole_ns = _known(schedule, costs, stages, microbatches, transfer_ns)
    if whole_ns is None:
        whole_ns = _repeated(schedule, stages, microbatches, chunks, costs, transfer_ns, blocking)
    if whole_ns is None:
        whole = graph(schedule, stages, microbatches, chunks)
        whole_ns = max(node_ends(whole, table(whole, costs), transfer_ns, blocking))
    busy = (each * (microbatches / few) for each in busy_ns(start, table(start, costs)))
    return PipelineTime(whole_ns, tuple(max(0.0, whole_ns - each) for each in busy))


def _repeated(
    schedule: Schedule,
    p: int,
    m: int,
    chunks: int,
    costs: Costs,
    transfer_ns: float,
    blocking: bool,
) -> float | None:
    """The makespan by that of fewer microbatches, and of twice as many until one will do.

    None where the ranks drift apart as long as there are microbatches: those that run ahead of a
    slower one, in schedules that let them.
    """
    few, repeat = _fewer(schedule, p, m), _repeats(schedule, p)
    while few < m:
        start = graph(schedule, p, few, chunks)
        ends = node_ends(start, table(start, costs), transfer_ns, blocking)
        every_ns = _period_ns(start, orders(schedule, p, few, chunks), schedule, ends)
        if every_ns is not None:
            return max(ends) + (m - few) // repeat * every_ns
        few += few + (m - 2 * few) % repeat
    return None


def _known(schedule: Schedule, costs: Costs, p: int, m: int, transfer_ns: float) -> float | None:
    """The longest path where it is the same for all costs, if senders are not held up.

    One rank, and naive: all of it, m times. GPipe: equal jobs through p machines in a row, all of
    them there and then back.
    """
    forwards = [forward for forward, _, _ in costs]
    backwards = [inputs + weights for _, inputs, weights in costs]
    once = sum(forwards) + sum(backwards) + 2 * (p - 1) * transfer_ns
    if p == 1 or schedule == "naive":
        return m * once
    if schedule == "gpipe":
        return once + (m - 1) * (max(forwards) + max(backwards))
    return None


def _repeats(schedule: Schedule, p: int) -> int:
    """Microbatches after which the order of every rank repeats."""
    return {"interleaved": p, "dualpipe": 2}.get(schedule, 1)


def _fewer(schedule: Schedule, p: int, m: int) -> int:
    """As few microbatches as the start, the end and some repeats between them need, or m.

    The rest of a division by the repeat stays.
    """
    repeat = _repeats(schedule, p)
    few = (3 if schedule == "1f1b" else 5) * p + repeat
    few += (m - few) % repeat
    repeats = schedule not in ("naive", "gpipe") and (schedule != "interleaved" or m % p == 0)
    return few if few < m and repeats else m


def _period_ns(
    of: Graph, order_of: tuple[Order, ...], schedule: Schedule, ends: list[float]
) -> float | None:
    """How much later everything happens with each repeat; None while ranks still drift apart.

    Times are sums and maxima of earlier ones. Where a whole stretch, longer than any pass reaches
    back, comes later by the same time on all ranks, whatever follows does.
    """
    shifts: list[float] = []
    for ends_of, order in zip(by_rank(of, ends), order_of, strict=True):
        shifts += _shifts(ends_of, order, schedule, len(order_of))
    return shifts[0] if max(shifts) - min(shifts) <= _ALIKE * max(ends) else None


def _shifts(ends: list[float], order: Order, schedule: Schedule, p: int) -> list[float]:
    """By how much passes come later than those one repeat before, over p microbatches and more.

    The stretch ends with the last forward of some chunk: up to there a rank does the same however
    many microbatches follow.
    """
    last = {one.chunk: at for at, one in enumerate(order) if one.kind == "F"}
    until, repeat = 1 + min(last.values()), _repeats(schedule, p)
    microbatches = 1 + max(one.microbatch for one in order)
    length = len(order) * repeat // microbatches
    since = max(length, until - length * (p // repeat + 1))
    return [ends[at] - ends[at - length] for at in range(since, until)]
