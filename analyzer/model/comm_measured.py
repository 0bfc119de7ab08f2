"""Collective times from measurements: nccl-tests sweeps and NCCL's own tuning tables."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_time import PLATEAU, time_of
from stepsplit.analyzer.model.config import KEY, HardwareConfig, Span
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.prediction import Band

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.nccl import nccl_tests
    from stepsplit.analyzer.readers.nccl.records import Communicator, CostTable, NcclLog


# What a cluster's own measurements say of a collective, before any closed form.

INTERPOLATED = (0.8, 1.25)
"""Measured / interpolated, 10th and 90th percentile with one point left out, over the sweeps of
1x8 A100, 1x8 B200 and Alps GH200 on 1 to 64 nodes (0.80 to 1.14; as wide upward)."""

BORROWED = (0.6, 1.7)
"""The same for a sweep of other ranks: Alps GH200, 16 nodes from 64 and 64 from 16."""

TUNED = (0.6, 2.0)
"""NCCL's own expectation: as wide as BORROWED, and more where its protocols disappoint."""

FARTHEST = 4
"""A sweep of up to so many times more or fewer ranks is borrowed."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured sweeps and NCCL's tables of one cluster; none of either is the closed form."""

    sweeps: tuple[TransferSweep, ...] = ()
    tables: tuple[TunerTable, ...] = ()

    def time_of(self, op: str, message_bytes: float, span: Span, hardware: HardwareConfig) -> Band:
        """One call in ns, by the first of these that is there. Raises UsageError.

        A sweep of the same op, ranks and ranks a node; the sweep of the op that is nearest in
        ranks, scaled by the closed forms of both; NCCL's table of these ranks; the closed form.
        """
        closed = time_of(op, message_bytes, span, hardware)
        if closed.ns == 0:
            return closed
        name = "send" if op == "recv" else op
        sweep = self._nearest(name, span)
        if sweep is not None:
            band = _of_sweep(sweep, op, message_bytes, closed, span, hardware)
            return self._chosen(band, SWEEP, closed)
        ns = self._tuned_ns(name, message_bytes, span)
        if ns is not None:
            return self._chosen(_band(ns, TUNED), TUNER, closed)
        return self._chosen(closed, closed.formulas[0], closed) if self._sources else closed

    def _chosen(self, band: Band, formula: Formula, closed: Band) -> Band:
        """The band by this formula, chosen from those of the closed form and of measured times."""
        among = (*closed.formulas, *self._sources)
        others = tuple(each for each in among if each is not formula)
        return replace(band, formulas=(formula, *others))

    @property
    def _sources(self) -> tuple[Formula, ...]:
        """By which measured times there are, whether or not one is near enough to a call."""
        return (SWEEP,) * bool(self.sweeps) + (TUNER,) * bool(self.tables)

    def _nearest(self, op: str, span: Span) -> TransferSweep | None:
        """The sweep of the op on the same side of the node's edge with the nearest ranks."""
        near = [
            (_distance(sweep, span), i)
            for i, sweep in enumerate(self.sweeps)
            if sweep.op == op and (sweep.ranks > sweep.ranks_per_node) == (span.nodes > 1)
        ]
        distance, i = min(near, default=((math.inf, 0.0), -1))
        return self.sweeps[i] if distance[0] <= math.log(FARTHEST) + 1e-9 else None

    def _tuned_ns(self, op: str, message_bytes: float, span: Span) -> float | None:
        for table in self.tables:
            if (table.ranks, table.ranks_per_node) == (span.ranks, span.ranks_per_node):
                return table.time_of(op, message_bytes)
        return None


def _distance(sweep: TransferSweep, span: Span) -> tuple[float, float]:
    """How many times the ranks differ, and those of a node, as logarithms."""
    per_node = abs(math.log(sweep.ranks_per_node / span.ranks_per_node))
    return abs(math.log(sweep.ranks / span.ranks)), per_node


def _of_sweep(
    sweep: TransferSweep,
    op: str,
    message_bytes: float,
    closed: Band,
    span: Span,
    hardware: HardwareConfig,
) -> Band:
    there = Span(sweep.ranks, sweep.ranks_per_node)
    ns = _within(sweep, op, message_bytes, there, hardware)
    if there == span:
        return _band(ns, INTERPOLATED)
    scale = closed.ns / time_of(op, message_bytes, there, hardware).ns
    return _band(ns * scale, BORROWED)


def _within(
    sweep: TransferSweep, op: str, message_bytes: float, there: Span, hardware: HardwareConfig
) -> float:
    """The sweep's time; beyond the sizes of recorded runs the closed form, scaled to the edge."""
    edge = min(max(message_bytes, sweep.sizes_bytes[0]), sweep.sizes_bytes[-1])
    if sweep.swept or edge == message_bytes:
        return sweep.time_of(message_bytes)
    at_edge = time_of(op, edge, there, hardware).ns
    return sweep.time_of(edge) * time_of(op, message_bytes, there, hardware).ns / at_edge


def _band(ns: float, spread: tuple[float, float]) -> Band:
    return Band(ns, ns * spread[0], ns * spread[1])


# Times between the points of a measured sweep.

SWEEP = Formula(
    "comm.sweep",
    "log t is linear in log S between two measured sizes; constant below the first,"
    " t_last S / S_last beyond the last",
    "arithmetic; leave one out on the sweeps of one node: 2 to 8 % (A100, B200, Alps GH200)",
)

SWEEP_OPS = {"send_recv": "send"}


@dataclass(frozen=True, slots=True)
class TransferSweep:
    """One op on one set of ranks: its time in ns at each size, sizes rising.

    swept: sizes were swept from the least to the largest; else they are those of recorded runs,
    beyond which the closed form goes on from the nearest. Raises UsageError where sizes and times
    are no sweep.
    """

    op: str
    ranks: int
    ranks_per_node: int
    sizes_bytes: tuple[int, ...]
    times_ns: tuple[float, ...]
    swept: bool = field(default=True, metadata={KEY: ""})

    def __post_init__(self) -> None:
        sizes, times = self.sizes_bytes, self.times_ns
        if len(sizes) != len(times) or not sizes:
            raise UsageError(
                f"a sweep of {self.op} has {len(sizes)} sizes and {len(times)} times;"
                " give each size its time"
            )
        rising = all(one < following for one, following in pairwise(sizes))
        if not rising or sizes[0] <= 0 or min(times) <= 0:
            raise UsageError(
                f"a sweep of {self.op} needs rising sizes and times above 0; leave other rows out"
            )

    def time_of(self, message_bytes: float) -> float:
        """The time of a message of that size in ns (SWEEP)."""
        sizes, times = self.sizes_bytes, self.times_ns
        after = bisect_right(sizes, message_bytes)
        if after == 0:
            return times[0]
        if after == len(sizes):
            return times[-1] * message_bytes / sizes[-1]
        before = after - 1
        part = math.log(message_bytes / sizes[before]) / math.log(sizes[after] / sizes[before])
        return times[before] * math.exp(part * math.log(times[after] / times[before]))


def sweeps_of(
    read: Sequence[nccl_tests.Sweep], ranks_per_node: int | None = None
) -> tuple[TransferSweep, ...]:
    """The tables of nccl-tests as sweeps; without ranks_per_node all ranks share a node.

    A table without op, or of fewer than two known ranks, is left out; so are rows with wrong
    results. Out of place counts where both are there, and of one size its first row.
    """
    found = []
    for table in read:
        points = _points(table)
        if table.op and table.nranks > 1 and points:
            here = min(table.nranks, ranks_per_node or table.nranks)
            sizes, times = zip(*sorted(points.items()), strict=True)
            found.append(
                TransferSweep(SWEEP_OPS.get(table.op, table.op), table.nranks, here, sizes, times)
            )
    return tuple(found)


def _points(table: nccl_tests.Sweep) -> dict[int, float]:
    points: dict[int, float] = {}
    for row in table.rows:
        timing = row.out_of_place or row.in_place
        if timing and timing.wrong <= 0 and timing.time_ns > 0 and row.message_bytes > 0:
            points.setdefault(row.message_bytes, float(timing.time_ns))
    return points


# Times by NCCL's own table of costs, as its log prints it.

TUNER = Formula(
    "comm.tuner",
    "t = min over algorithms and protocols of latency + S / bandwidth; the latency of a ring with"
    " Simple between nodes x 1.4 (all_reduce)",
    "NVIDIA/nccl src/graph/tuning.cc; its correction of trees by size is left out",
)


@dataclass(frozen=True, slots=True)
class Cost:
    """One cell: an op by one algorithm and protocol."""

    op: str
    latency_ns: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TunerTable:
    """What NCCL expects of one communicator; it decides by this and has measured none of it."""

    ranks: int
    ranks_per_node: int
    costs: tuple[Cost, ...]

    def time_of(self, op: str, message_bytes: float) -> float | None:
        """The time of a call in ns (TUNER); None where the table does not name the op."""
        each = (
            c.latency_ns + message_bytes / c.bytes_per_s * 1e9 for c in self.costs if c.op == op
        )
        return min(each, default=None)


def tuner_table(table: CostTable, span: Span) -> TunerTable:
    """The table of a communicator that spans these ranks."""
    costs = tuple(
        Cost(
            cell.op,
            cell.latency_ns * _plateau(cell.op, cell.algorithm, cell.protocol, span.nodes),
            cell.bandwidth_bytes_per_s,
        )
        for cell in table.cells
        if cell.bandwidth_bytes_per_s > 0
    )
    return TunerTable(span.ranks, span.ranks_per_node, costs)


def tuner_tables(log: NcclLog) -> tuple[TunerTable, ...]:
    """The log's cost tables whose communicator and nodes are known, the first of each span."""
    found: dict[Span, TunerTable] = {}
    for table in log.costs:
        span = _span(log.communicators[table.comm]) if table.comm >= 0 else None
        if span is not None:
            found.setdefault(span, tuner_table(table, span))
    return tuple(found.values())


def _span(comm: Communicator) -> Span | None:
    nodes = _nodes(comm)
    return Span(comm.nranks, -(-comm.nranks // nodes)) if comm.nranks > 1 and nodes > 0 else None


def _nodes(comm: Communicator) -> int:
    """As NCCL says it or, where it does not, the hosts of all members; -1 unknown."""
    if comm.nodes > 0 or len(comm.members) < comm.nranks:
        return comm.nodes
    return len({member.host for member in comm.members})


def _plateau(op: str, algorithm: str, protocol: str, nodes: int) -> float:
    large_ring = (op, algorithm, protocol) == ("all_reduce", "Ring", "Simple")
    return PLATEAU.value if large_ring and nodes > 1 else 1.0
