"""Times by NCCL's own table of costs, as its log prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepsplit.analyzer.model.comm.rates import PLATEAU
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.span import Span

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.nccl.records import Communicator, CostTable, NcclLog

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
