"""Expert load: the tokens of expert parallel groups, measured and evenly on their ranks."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import group_ids, group_max, group_mean, is_inside, union
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext, scale_transfers
from stepsplit.analyzer.diagnose.slow_devices import find_slow_devices
from stepsplit.analyzer.split.protocols import find_call_roles
from stepsplit.analyzer.trace import OP_CODE, Bool, Float, Int64, RankTrace

# Exchanges of tokens: all_to_alls of expert parallel groups, which last as long as the rank with
# most tokens needs.

_LEAST_IMBALANCE = 0.02
"""An exchange is more uneven than another by at least this fraction of the mean."""


MORE_TOKENS = 0.02
"""A rank's experts receive more tokens if it sends more than the others by this fraction."""

_EXPLAINED = 0.25
"""A rank computes longer because of its tokens if it sends at least this share of that more, which
is half of what its experts receive more: routers are never quite even, and a slow device has a few
more tokens by chance."""

MORE_COMPUTE = 0.05
"""Where no size was recorded, they do if they compute longer than the others by this fraction."""


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
        # A call of a library may be several kernels, of one size: a barrier on either side.
        same_call = np.append(False, place[1:] == place[:-1])[: len(kernels)]
        same_call[1:] &= (size[1:] == size[:-1]) & (imbalance[1:] == imbalance[:-1])
        brought = np.flatnonzero(returns) - 1
        while len(brought):
            imbalance[brought] = imbalance[brought + 1]
            brought = brought[same_call[brought]] - 1
        group = matched.group[row].astype(np.int64)
        return cls(
            kernels, table.rank[kernels], group, np.rint(mean).astype(np.int64), imbalance, returns
        )

    @classmethod
    def infer(cls, context: ReplayContext) -> TokenExchanges:
        """The exchanges by a library whose sizes are unknown, as uneven as what experts compute."""
        spans = _ExpertSpans.measure(context)
        most = group_max(spans.call, np.rint(spans.spent_ns).astype(np.int64), len(spans.call))
        mean = np.maximum(group_mean(spans.call, spans.spent_ns), 1.0)
        imbalance = np.maximum(most[spans.call] / mean, 1.0)[spans.span]
        unknown = np.full(len(spans.kernels), -1, dtype=np.int64)
        return cls(spans.kernels, spans.rank, spans.group, unknown, imbalance, spans.returns)

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


class _ExpertSpans(Struct, frozen=True):
    """The compute of experts between a library's dispatch and combine without sizes.

    The columns kernels to span have a row for each kernel of a dispatch or combine, by rank, group
    and time; returns marks the first one of a combine, span numbers the spans. spent_ns has what is
    computed in each span at the speed of the rank's other compute. load is, for each rank, what its
    experts compute over those of the average rank of its group; 1 where it is not known.
    """

    kernels: Int64
    rank: Int64
    group: Int64
    returns: Bool
    span: Int64
    call: Int64
    spent_ns: Float
    load: Float

    @classmethod
    def measure(cls, context: ReplayContext) -> _ExpertSpans:
        graph, table, matched = context.graph, context.graph.kernels, context.split.matched
        step = np.concatenate([np.empty(0, dtype=np.int64), *(
            _classify_steps(rank.trace) for rank in context.split.ranks
        )])[matched.carrier]  # fmt: skip
        kernels = context.find_kernels(lambda axes: "ep" in axes)
        row = table.row[kernels]
        unsized = (step[row] > 0) & (matched.shared[row] >= 0) & (matched.message_bytes[row] <= 0)
        kernels = kernels[unsized]
        at = graph.at_ns[table.start[kernels]]
        kernels = kernels[np.lexsort((at, matched.group[table.row[kernels]], table.rank[kernels]))]
        row, group = table.row[kernels], matched.group[table.row[kernels]].astype(np.int64)
        place = group_ids(table.step[kernels], group)
        begins, returns = (np.ones(len(kernels), dtype=np.bool_) for _ in range(2))
        begins[1:] = place[1:] != place[:-1]
        returns[:] = ~begins & (step[row] == _COMBINE) & (np.roll(step[row], 1) == _DISPATCH)
        first = begins.copy()
        begins |= (step[row] == _DISPATCH) & (np.roll(step[row], 1) == _COMBINE)
        span = np.cumsum(begins) - 1
        # The number of each span in its step.
        number = (span - np.maximum.accumulate(np.where(first, span, 0)))[begins]
        spans = int(span.max(initial=-1)) + 1
        back = np.flatnonzero(returns)
        begin_ns, end_ns = np.zeros((2, spans), dtype=np.int64)
        begin_ns[span[back]] = graph.at_ns[table.end[kernels[back - 1]]]
        end_ns[span[back]] = graph.at_ns[table.start[kernels[back]]]
        spent, owner = np.zeros(spans), table.rank[kernels][begins]
        inside, total = np.zeros((2, len(context.ranks)))
        of_step, counted = table.step[kernels][begins], context.counted
        compute = graph.work_ns[:, WORK.index("compute")]
        for index in range(len(context.ranks)):
            nodes = np.arange(len(graph))[graph.timelines.slice_rank(index)]
            end = graph.at_ns[nodes]
            middle = (end + np.concatenate((end[:1], end[:-1]))) // 2
            mine = np.flatnonzero((owner == index) & (end_ns > begin_ns))
            mine = mine[np.argsort(begin_ns[mine])]
            if not len(mine):
                continue
            at = mine[np.maximum(np.searchsorted(begin_ns[mine], middle, side="right") - 1, 0)]
            within = (middle >= begin_ns[at]) & (middle < end_ns[at])
            np.add.at(spent, at[within], compute[nodes[within]])
            full = (graph.step[nodes] >= 0) & counted[graph.step[nodes]]
            inside[index] = compute[nodes[within & full]].sum()
            total[index] = compute[nodes[full]].sum()
        group_of = np.full(len(context.ranks), -1, dtype=np.int64)
        group_of[owner] = group[begins]
        load, pace = np.ones((2, len(context.ranks)))
        slow = find_slow_devices(context.split)
        for one in np.unique(group_of[group_of >= 0]).tolist():
            members = np.flatnonzero(group_of == one)
            other = total[members] - inside[members]
            if min(inside[members].min(), other.min()) > 0:
                pace[members] = other / other.mean()
                own = inside[members] / pace[members]
                load[members] = own / own.mean()
        load[list(slow)] = 1.0
        call = group_ids(group[begins], graph.steps.step[of_step], number)
        return cls(
            kernels, table.rank[kernels], group, returns, span, call, spent / pace[owner], load
        )


_DISPATCH, _COMBINE = 1, 2


def _classify_steps(trace: RankTrace) -> Int64:
    """For each call of a rank whether its kernel dispatches or combines; 0 for others."""
    roles = find_call_roles(trace)
    codes = {"dispatch": _DISPATCH, "combine": _COMBINE}
    kinds = [codes.get(kind.step, 0) if kind.axis else 0 for kind in roles.kinds]
    return np.array(kinds, dtype=np.int64)[roles.of]


def measure_expert_loads(context: ReplayContext) -> Float:
    """For each rank what its experts compute over those of the average rank of their group, where a
    library moves their tokens and no size was recorded; 1 where it is not known.

    Compute elsewhere is the measure of the rank's speed: what is as long there, and longer between
    dispatch and combine, is of more tokens. A rank whose device is slow in all kernels has load 1.
    """
    return _ExpertSpans.measure(context).load


def balance_experts(context: ReplayContext, graph: DependencyGraph) -> DependencyGraph:
    """The graph with as many tokens for the experts of each rank of an expert parallel group.

    Compute between the all_to_all that brings tokens and the one that returns them is that of the
    average rank of the group. Both last as long as the rank with most bytes needs, so they shorten
    by its bytes over those of the average rank; of unknown size, by what its experts compute.
    """
    exchanges = TokenExchanges.find(context)
    if not len(exchanges.kernels):
        exchanges = TokenExchanges.infer(context)
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


def explain_by_tokens(more_tokens: float, longer: float) -> bool:
    """Whether so many more tokens than the others have are why a rank computes longer than they do,
    both as fractions."""
    return more_tokens > max(MORE_TOKENS, _EXPLAINED * longer)


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
