"""Expert load: the tokens of expert parallel groups, measured and evenly on their ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import group_ids, group_max, group_mean, is_inside, union
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext, scale_transfers
from stepsplit.analyzer.trace import OP_CODE, Bool, Float, Int64

# Exchanges of tokens: all_to_alls of expert parallel groups, which last as long as the rank with
# most tokens needs.

_LEAST_IMBALANCE = 0.02
"""An exchange is more uneven than another by at least this fraction of the mean."""


MORE_TOKENS = 0.02
"""A rank's experts receive more tokens if it sends more than the others by this fraction."""


class TokenExchanges(Struct, frozen=True):
    """The all_to_alls of expert parallel groups by rank, group and time; columns of one length.

    mean_bytes is what the average rank sends, and imbalance the tokens of the rank with most over
    those of the average one. returns marks
    those that return the tokens that the one before them has brought: only what they send differs
    between the ranks.
    """

    kernels: Int64
    rank: Int64
    group: Int64
    mean_bytes: Int64
    imbalance: Float
    returns: Bool

    @classmethod
    def find(cls, context: ReplayContext) -> TokenExchanges:
        """The exchanges whose members and sizes are known."""
        table, matched = context.graph.kernels, context.split.matched
        kernels = context.find_kernels(lambda axes: "ep" in axes)
        row = table.row[kernels]
        known = (matched.op[row] == OP_CODE["all_to_all"]) & (matched.shared[row] >= 0)
        kernels = kernels[known & (matched.message_bytes[row] > 0)]
        at = context.graph.at_ns[table.start[kernels]]
        kernels = kernels[np.lexsort((at, matched.group[table.row[kernels]], table.rank[kernels]))]
        row = table.row[kernels]
        call, size = group_ids(matched.shared[row]), matched.message_bytes[row]
        most = group_max(call, size, int(call.max(initial=-1)) + 1)[call]
        mean = group_mean(call, size)
        imbalance = most / mean
        place = group_ids(table.step[kernels], matched.group[row])
        returns = np.zeros(len(kernels), dtype=np.bool_)
        returns[1:] = place[1:] == place[:-1]
        returns[1:] &= imbalance[1:] > imbalance[:-1] + _LEAST_IMBALANCE
        brought = np.flatnonzero(returns) - 1
        imbalance[brought] = imbalance[brought + 1]
        group = matched.group[row].astype(np.int64)
        return cls(
            kernels, table.rank[kernels], group, np.rint(mean).astype(np.int64), imbalance, returns
        )

    def list_groups(self, ranks: int) -> Int64:
        """The expert parallel group of each rank, -1 if it has none."""
        group = np.full(ranks, -1, dtype=np.int64)
        group[self.rank] = self.group
        return group

    def list_expert_nodes(self, context: ReplayContext) -> Int64:
        """The nodes of the timelines between tokens that are brought and returned."""
        graph, back = context.graph, np.flatnonzero(self.returns)
        begin = graph.at_ns[graph.kernels.end[self.kernels[back - 1]]]
        end = graph.at_ns[graph.kernels.start[self.kernels[back]]]
        found = []
        for index in range(len(context.ranks)):
            nodes = np.arange(len(graph))[graph.timelines.slice_rank(index)]
            at, mine = graph.at_ns[nodes], self.rank[back] == index
            middle = (at + np.concatenate((at[:1], at[:-1]))) // 2
            inside = is_inside(union(begin[mine], end[mine]), middle)
            found.append(nodes[inside & (graph.step[nodes] >= 0)])
        return np.concatenate(found)


def balance_experts(context: ReplayContext, graph: DependencyGraph) -> DependencyGraph:
    """The graph with as many tokens for the experts of each rank of an expert parallel group.

    Compute between the all_to_all that brings tokens and the one that returns them is that of the
    average rank of the group. Both last as long as the rank with most bytes needs, so they shorten
    by its bytes over those of the average rank.
    """
    exchanges = TokenExchanges.find(context)
    graph = scale_transfers(graph, exchanges.kernels, 1 / exchanges.imbalance)
    changed, column = graph.work_ns.copy(order="K"), WORK.index("compute")
    nodes = exchanges.list_expert_nodes(context)
    row = graph.step[nodes]
    total = np.bincount(row, changed[nodes, column], minlength=len(graph.steps.step))
    busy = np.flatnonzero(total > 0)
    group = exchanges.list_groups(len(context.ranks))[graph.steps.rank[busy]]
    factor = np.ones(len(total))
    factor[busy] = group_mean(group_ids(group, graph.steps.step[busy]), total[busy]) / total[busy]
    changed[nodes, column] = np.rint(changed[nodes, column] * factor[row])
    return replace(graph, work_ns=changed)


def compare_sent_tokens(context: ReplayContext, rank: int) -> float:
    """How much more a rank sends in the all_to_alls of its expert parallel group than the others,
    as a fraction of what they send; 0 if it is not known.

    What each rank sends to the experts is alike; what it returns is what its experts received.
    """
    split, sent = context.split, {}
    groups = [
        number
        for number, group in enumerate(split.matched.groups)
        if rank in group.ranks and "ep" in split.layout.find_axes(group)
    ]
    for index, one in enumerate(split.ranks):
        own = split.matched.slice_trace(index)
        rows = np.isin(split.matched.group[own], groups)
        rows &= split.matched.op[own] == OP_CODE["all_to_all"]
        sizes = one.trace.calls.input_bytes[split.matched.call[own][rows]]
        if len(sizes) and (sizes >= 0).all():
            sent[one.trace.rank] = float(sizes.mean())
    others = [size for other, size in sent.items() if other != rank]
    if rank not in sent or not others:
        return 0.0
    return sent[rank] / max(sum(others) / len(others), 1.0) - 1
