"""Whose arrival the end of each collective and message needed."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.arrays import labels_of
from stepsplit.analyzer.compare.replay.graph import Kernels
from stepsplit.analyzer.split.matching import TOGETHER, Matched
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import OP_CODE, Bool, Int64

_NEED_ALL = [OP_CODE[op] for op in (*TOGETHER, "all_to_all", "barrier", "unknown")]
Edges = tuple[Int64, Int64]
"""(nodes that are needed, nodes that need them), of one length."""


def meetings_of(found: RunSplit, kernels: Kernels, kernel: Int64, first: int) -> Edges:
    """The edges from arrivals to ends; kernel is that of each row of Matched.

    Members of a call that all needs meet in a node of their own, numbered from first on. From a
    root, or to it, an event needs the rank that came last before its end alone; a message needs
    its other end, unless the sender left before the receiver came.
    """
    matched = found.matched
    alone = (kernels.start, kernels.end)
    rooted = _rooted(found, kernels, kernel)
    meet = np.flatnonzero((matched.shared >= 0) & _meets(matched, found))
    node = first + labels_of(matched.shared[meet])
    who = kernel[meet]
    return (
        np.concatenate((alone[0], rooted[0], kernels.start[who], node)),
        np.concatenate((alone[1], rooted[1], node, kernels.end[who])),
    )


def _meets(matched: Matched, found: RunSplit) -> Bool:
    """Which rows are of calls in which everybody needs everybody."""
    early = found.arrivals.end_ns < found.arrivals.moves_ns
    return np.asarray(np.isin(matched.op, _NEED_ALL) | (matched.is_message & ~early))


def _rooted(found: RunSplit, kernels: Kernels, kernel: Int64) -> Edges:
    matched, last = found.matched, found.arrivals.last
    place = {rank.trace.rank: i for i, rank in enumerate(found.ranks)}
    rows = np.flatnonzero(
        (matched.shared >= 0) & ~matched.is_message & ~np.isin(matched.op, _NEED_ALL)
    )
    lead = {
        (call, trace): row
        for row, call, trace in zip(
            rows.tolist(), matched.shared[rows].tolist(), matched.trace[rows].tolist(), strict=True
        )
        if matched.leads[row]
    }
    pairs = [
        (lead[key], row)
        for row, call, rank in zip(
            rows.tolist(), matched.shared[rows].tolist(), last[rows].tolist(), strict=True
        )
        if (key := (call, place.get(rank, -1))) in lead
    ]
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return kernels.start[kernel[both[:, 0]]], kernels.end[kernel[both[:, 1]]]
