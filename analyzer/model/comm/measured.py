"""What a cluster's own measurements say of a collective, before any closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepsplit.analyzer.model.comm.sweep import Sweep
from stepsplit.analyzer.model.comm.table import TunerTable
from stepsplit.analyzer.model.comm.time import time_of
from stepsplit.analyzer.model.prediction import Band
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.span import Span

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

    sweeps: tuple[Sweep, ...] = ()
    tables: tuple[TunerTable, ...] = ()

    def time_of(self, op: str, message_bytes: float, span: Span, hardware: Hardware) -> Band:
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
            return _of_sweep(sweep, op, message_bytes, closed, span, hardware)
        ns = self._tuned_ns(name, message_bytes, span)
        return closed if ns is None else _band(ns, TUNED)

    def _nearest(self, op: str, span: Span) -> Sweep | None:
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


def _distance(sweep: Sweep, span: Span) -> tuple[float, float]:
    """How many times the ranks differ, and those of a node, as logarithms."""
    per_node = abs(math.log(sweep.ranks_per_node / span.ranks_per_node))
    return abs(math.log(sweep.ranks / span.ranks)), per_node


def _of_sweep(
    sweep: Sweep, op: str, message_bytes: float, closed: Band, span: Span, hardware: Hardware
) -> Band:
    there = Span(sweep.ranks, sweep.ranks_per_node)
    ns = _within(sweep, op, message_bytes, there, hardware)
    if there == span:
        return _band(ns, INTERPOLATED)
    scale = closed.ns / time_of(op, message_bytes, there, hardware).ns
    return _band(ns * scale, BORROWED)


def _within(sweep: Sweep, op: str, message_bytes: float, there: Span, hardware: Hardware) -> float:
    """The sweep's time; beyond the sizes of recorded runs the closed form, scaled to the edge."""
    edge = min(max(message_bytes, sweep.sizes_bytes[0]), sweep.sizes_bytes[-1])
    if sweep.swept or edge == message_bytes:
        return sweep.time_of(message_bytes)
    at_edge = time_of(op, edge, there, hardware).ns
    return sweep.time_of(edge) * time_of(op, message_bytes, there, hardware).ns / at_edge


def _band(ns: float, spread: tuple[float, float]) -> Band:
    return Band(ns, ns * spread[0], ns * spread[1])
