"""Which forward and which backward belong together, by autograd's sequence numbers."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.arrays import is_inside
from stepsplit.analyzer.split.call_purposes import ENGINE, find_backward_spans
from stepsplit.analyzer.trace import Category, Int64, RankTrace


def find_partner_ns(trace: RankTrace, launch_ns: Int64) -> Int64:
    """For each launch a time in the other pass of its microbatch, -1 if unknown: of one in a
    forward the start of the autograd node of its op, of one in a backward that of its node's op.

    Args:
        trace: The rank.
        launch_ns: When the host launched what is asked for.
    """
    events = trace.events
    numbered = np.flatnonzero(events.is_category(Category.OP) & (events.correlation >= 0))
    is_node = events.match_prefix(ENGINE)[numbered]
    # What a node runs has its number too.
    keeps = is_node | ~is_inside(find_backward_spans(trace), events.start_ns[numbered])
    numbered, is_node = numbered[keeps], is_node[keeps]
    # Ops that make no node have the number of the next one that does: the last op before a node.
    order = np.lexsort((events.start_ns[numbered], events.correlation[numbered]))
    numbered, is_node = numbered[order], is_node[order]
    same = np.diff(events.correlation[numbered]) == 0
    links = np.flatnonzero(same & ~is_node[:-1] & is_node[1:])
    ops, nodes = numbered[links], numbered[links + 1]
    partner_ns = np.full(len(launch_ns), -1, dtype=np.int64)
    if not len(links):
        return partner_ns
    for own, other in ((ops, nodes), (nodes, ops)):
        order = np.argsort(events.start_ns[own], kind="stable")
        own, other = own[order], other[order]
        last = np.searchsorted(events.start_ns[own], launch_ns, side="right") - 1
        # Ops are nested: those that began earlier may still run.
        runs = (last >= 0) & (launch_ns < np.maximum.accumulate(events.ends_of(own))[last])
        partner_ns[runs] = events.start_ns[other[last[runs]]]
    return partner_ns
