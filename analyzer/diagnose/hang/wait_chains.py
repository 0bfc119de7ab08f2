"""The wait-for graph: the ranks at which the chains of waits end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from stepsplit.analyzer.diagnose.hang.result import Stuck


class ChainEnd(Struct, frozen=True):
    """Ranks that wait only for each other through calls (indices), and the ranks they block."""

    ranks: tuple[int, ...]
    calls: tuple[int, ...]
    blocked: tuple[int, ...]


def find_chain_ends(stuck: Sequence[Stuck]) -> tuple[ChainEnd, ...]:
    """The ends of the chains of waits: strongly connected parts of the wait-for graph that wait for
    no other part. Its nodes are ranks, and calls as ~index."""
    edges = [
        edge
        for place, call in enumerate(stuck)
        if call.waits_for
        for edge in (
            *((rank, ~place) for rank in call.waiting),
            *((~place, rank) for rank in call.waits_for),
        )
    ]
    if not edges:
        return ()
    nodes, at = np.unique(np.array(edges, dtype=np.int64), return_inverse=True)
    source, target = at.reshape(-1, 2).T
    graph = coo_array((np.ones(len(edges)), (source, target)), (len(nodes), len(nodes))).tocsr()
    count, part = connected_components(graph, connection="strong")
    leaves = part[source] != part[target]
    back, ends = graph.T.tocsr(), []
    for one in sorted(set(range(count)) - set(part[source[leaves]].tolist())):
        own = np.flatnonzero(part == one)
        reached = breadth_first_order(back, own[0], return_predecessors=False)
        above = np.setdiff1d(nodes[reached], nodes[own])
        ranks = tuple(nodes[own][nodes[own] >= 0].tolist())
        calls = tuple(sorted(~node for node in nodes[own].tolist() if node < 0))
        if ranks and (len(above) or calls):
            ends.append(ChainEnd(ranks, calls, tuple(above[above >= 0].tolist())))
    return tuple(sorted(ends, key=lambda end: (-len(end.blocked), end.ranks)))
