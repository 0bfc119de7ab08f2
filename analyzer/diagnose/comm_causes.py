"""Communication bottlenecks: slow links, unneeded or small collectives, exposed gradient sync."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_max, group_mean, group_rows, is_inside, union
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import (
    Float,
    HoistedCalls,
    Remedy,
    ReplayContext,
    compute_times,
    hoist_collectives,
    remove_calls,
    scale_transfers,
)
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.significance import run_welch_test
from stepsplit.analyzer.split.call_purposes import find_issue_ns
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.phases import list_gradient_sync_ops
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.split.strategy import count_accumulated_microbatches
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Int64

# When the gradients of a step are ready.

_FORWARD_SHARE = 1 / 3
"""Forward share of forward + backward if they are not marked: a backward takes twice as long."""


class BackwardPasses(Struct, frozen=True):
    """The backward passes of a rank.

    begun_ns: start of each autograd kernel (CPU runs: op) on the common clock; launched_ns: when
    the host launched it. is_marked: whether the trace says which kernels are autograd's; else they
    are all compute. passes: number of backward passes per step if the run has no pipeline.
    """

    rank: RankSplit
    begun_ns: Int64
    launched_ns: Int64
    is_marked: bool
    passes: int

    @classmethod
    def find(cls, rank: RankSplit, passes: int) -> BackwardPasses:
        """Find the backward passes of a rank."""
        events, on_device = rank.trace.events, rank.trace.on_device
        spans = events.is_category(Category.OP) & events.match_prefix("autograd::engine")
        if not spans.any():
            works = np.flatnonzero(rank.trace.kinds.computes)
        else:
            works = np.flatnonzero(events.is_category(Category.KERNEL) if on_device else spans)
        launched = events.find_launch_ns(works) if on_device else events.start_ns[works]
        if spans.any():
            own = is_inside(union(events.start_ns[spans], events.ends_of(spans)), launched)
            works, launched = works[own], launched[own]
        begun = rank.clock.map_to_common_ns(events.start_ns[works])
        return cls(rank, begun, launched, bool(spans.any()), passes)

    def find_before(self, window: int, until: int) -> tuple[int, int]:
        """(begin, end) of the last backward of a step before `until`, on the common clock.

        Taken from the pipeline's boxes or from autograd; otherwise estimated as the last part of
        the time since the start of the step.
        """
        boxes = self.rank.grids[window].slots
        last = [box for box in boxes if box.phase != "forward" and box.end_ns <= until]
        if last:
            return max((box.start_ns, box.end_ns) for box in last)
        start, _ = self._find_edges_ns(window)
        begun = self.begun_ns[(self.begun_ns >= start) & (self.begun_ns < until)]
        is_known = self.is_marked and len(begun)
        begin = int(begun.min()) if is_known else start + round((until - start) * _FORWARD_SHARE)
        return until - (until - begin) // self.passes, until

    def measure_left(self, window: int, issued_ns: Int64) -> Float:
        """Of the last backward of a step, the share of the kernels that the host launched after
        each of these times.

        If it is not known which are the backward's, those after the last of these times are left
        out: they may be the optimizer's.
        """
        start, end = self._find_edges_ns(window)
        own = (self.begun_ns >= start) & (self.begun_ns < end)
        launched, share = np.sort(self.launched_ns[own]), 1.0
        if not self.is_marked:
            launched, share = launched[launched <= issued_ns.max(initial=0)], 1 - _FORWARD_SHARE
        after = len(launched) - np.searchsorted(launched, issued_ns, side="right")
        return np.asarray(after * self.passes / max(1.0, len(launched) * share))

    def _find_edges_ns(self, window: int) -> tuple[int, int]:
        """Start and end of a step on the common clock."""
        own, clock = self.rank.windows.windows[window], self.rank.clock
        start, end = (clock.map_instant_to_common_ns(at) for at in (own.start_ns, own.end_ns))
        return start, end


# Exchanges of tokens: all_to_alls of expert parallel groups, which last as long as the rank with
# most tokens needs.

_LEAST_IMBALANCE = 0.02
"""An exchange is more uneven than another by at least this fraction of the mean."""


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


# Links that are slower than comparable links with the same traffic.

_SLOW_RATIO = 1.15
"""A link is slow above this multiple of the transfer time of comparable links."""

_MIN_CALLS = 4


class _Link(Struct, frozen=True):
    """Calls of one kind between the same ranks: their kernels, steps and transfer times, which are
    those of even exchanges."""

    ranks: tuple[int, ...]
    kernels: Int64
    step: Int64
    took_ns: Int64


def find_slow_links(context: ReplayContext) -> list[Remedy]:
    """A finding for each set of ranks with slow links; links that share a rank are one finding.

    Compared are links with the same op, message size, number of ranks and number of hosts; the gain
    is that of a transfer time as on the other links. Of an exchange of tokens the size is the mean
    of the ranks, and its time counts as if all had that many.
    """
    slow: dict[tuple[int, ...], list[tuple[Int64, Float]]] = defaultdict(list)
    for alike in _collect_links(context).values():
        for link, ratio in _select_slow_links(alike):
            slow[link.ranks].append((link.kernels, np.full(len(link.kernels), 1 / ratio)))
    return [
        _build_link_remedy(context, ranks, [part for one in links for part in slow[one]])
        for ranks, links in _join_links(slow).items()
    ]


def _join_links(
    links: Iterable[tuple[int, ...]],
) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """The links by the ranks that they connect, directly or through each other."""
    joined: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for link in links:
        touching = [ranks for ranks in joined if not set(ranks).isdisjoint(link)]
        members = [member for ranks in touching for member in joined.pop(ranks)]
        together = {rank for member in (*members, link) for rank in member}
        joined[tuple(sorted(together))] = [*members, link]
    return joined


def _collect_links(context: ReplayContext) -> dict[tuple[int, ...], list[_Link]]:
    """The links grouped by (op, message size, number of ranks, number of hosts)."""
    kernels, matched, steps = context.graph.kernels, context.split.matched, context.graph.steps
    took, carries = context.graph.rest_ns[kernels.end], _find_carried_rows(context)
    exchanges = TokenExchanges.find(context)
    even, size = took.copy(), matched.message_bytes[carries]
    even[exchanges.kernels] = np.rint(took[exchanges.kernels] / exchanges.imbalance)
    size[exchanges.kernels] = exchanges.mean_bytes
    ranks, link = _number_links(context, carries)
    hosts = {rank.trace.rank: rank.trace.host for rank in context.split.ranks}
    nodes = [len({hosts.get(rank) for rank in of_link}) for of_link in ranks]
    op = np.minimum(matched.op[carries], OPS.index("send"))
    known = np.flatnonzero((matched.key[carries] >= 0) & (took > 0) & (size >= 0) & (link >= 0))
    order, first = group_rows(group_ids(op[known], size[known], link[known]))
    links: dict[tuple[int, ...], list[_Link]] = defaultdict(list)
    for rows in sorted(np.split(known[order], first[1:]), key=lambda rows: rows[:1].tolist()):
        if len(rows):
            number = int(link[rows[0]])
            kind = int(op[rows[0]]), int(size[rows[0]]), len(ranks[number]), nodes[number]
            step = steps.step[kernels.step[rows]]
            links[kind].append(_Link(ranks[number], rows, step, even[rows]))
    return links


def _find_carried_rows(context: ReplayContext) -> Int64:
    """For each kernel the row that determined its end: of several messages the last transfer."""
    kernels, found = context.graph.kernels, context.split
    rows = kernels.row.copy()
    event = np.concatenate([rank.trace.calls.event for rank in found.ranks])
    last = (event[1:] != event[:-1]) | (found.matched.trace[1:] != found.matched.trace[:-1])
    ends = np.append(np.flatnonzero(last) + 1, len(event))
    end = ends[np.searchsorted(ends, rows, side="right")]
    several = (end - rows > 1) & (found.matched.op[rows] >= OPS.index("send"))
    for i in np.flatnonzero(several).tolist():
        rows[i] += int(found.arrivals.moved_ns[rows[i] : end[i]].argmax())
    return rows


def _number_links(context: ReplayContext, rows: Int64) -> tuple[tuple[tuple[int, ...], ...], Int64]:
    """(the ranks of each link, the link over which the call of each row moves data), -1 for a call
    that moves none."""
    matched, ranks = context.split.matched, [rank.trace for rank in context.split.ranks]
    numbers: dict[tuple[int, ...], int] = {}
    of_group = [
        numbers.setdefault(group.ranks, len(numbers)) if len(group.ranks) > 1 else -1
        for group in matched.groups
    ]
    link = np.array([*of_group, -1], dtype=np.int64)[matched.group[rows]]
    message = np.flatnonzero(matched.is_message[rows])
    own = np.array([trace.rank for trace in ranks])[matched.trace[rows[message]]]
    peer = np.concatenate([trace.calls.peer for trace in ranks])[rows[message]]
    ends, end = np.unique(
        np.stack((np.minimum(own, peer), np.maximum(own, peer)), axis=1),
        axis=0,
        return_inverse=True,
    )
    of_pair = [numbers.setdefault(pair, len(numbers)) for pair in map(tuple, ends.tolist())]
    link[message] = np.array([*of_pair, -1], dtype=np.int64)[end.ravel()]
    return tuple(numbers), link


def _select_slow_links(links: list[_Link]) -> list[tuple[_Link, float]]:
    """The links slower than the median link, with the ratio of their median transfer times.

    The 25th percentile of a slow link must exceed the 75th percentile of the median link, and the
    difference what chance makes of as many steps.
    """
    known = [link for link in links if len(link.took_ns) >= _MIN_CALLS]
    if len(known) < 2:
        return []
    middle = [float(np.median(link.took_ns)) for link in known]
    usual = int(np.argsort(middle, kind="stable")[(len(known) - 1) // 2])
    most = float(np.percentile(known[usual].took_ns, 75))
    return [
        (link, at / middle[usual])
        for link, at in zip(known, middle, strict=True)
        if at > _SLOW_RATIO * middle[usual]
        and np.percentile(link.took_ns, 25) > most
        and run_welch_test(_list_samples(known[usual]), _list_samples(link)).p < _CHANCE
    ]


_MIN_STEPS = 3
"""From so many steps on, the calls of a step count as one: what slows one down slows the next."""

_CHANCE = 0.001
"""So often, a link that is as fast as the other passes for slower."""


def _list_samples(link: _Link) -> list[float]:
    """The logarithm of the transfer times: the median of each step, or of each call if the steps
    are few."""
    times = np.log(link.took_ns)
    steps = np.unique(link.step)
    if len(steps) < _MIN_STEPS:
        return [float(time) for time in times]
    return [float(np.median(times[link.step == step])) for step in steps.tolist()]


def _build_link_remedy(
    context: ReplayContext, ranks: tuple[int, ...], parts: list[tuple[Int64, Float]]
) -> Remedy:
    kernels, times = (np.concatenate(side) for side in zip(*parts, strict=True))
    took = context.graph.rest_ns[context.graph.kernels.end[kernels]]
    rows = np.isin(context.ranks[context.graph.steps.rank], ranks)
    ratio = float(took.sum() / (took * times).sum())
    count = max(1, int((rows & context.graph.steps.full).sum()))

    def speed_up(graph: DependencyGraph) -> DependencyGraph:
        return scale_transfers(graph, kernels, times)

    finding = Finding(
        code="slow_link",
        bucket="collective",
        gain_ns=context.compute_gain_ns(speed_up(context.graph)),
        measured_ns=int(took.sum()) // count,
        predicted_ns=int((took * times).sum()) // count,
        ranks=ranks,
        steps=context.list_steps(rows),
        events=context.list_longest_calls(kernels),
        message=(
            f"slow link between ranks {units.format_number_list(ranks)}: transfers "
            f"are {ratio:.1f}x slower "
            "than between other ranks with the same traffic"
        ),
    )
    return Remedy(finding, speed_up)


# Redundant all-gathers: weights and activations that the layout does not require to be gathered.

_PRECISIONS = (0.25, 0.5, 1.0, 2.0)

_PADDING = 1e-3
"""Possible ratios of weight bytes to gradient bytes, and the tolerance for padding."""


def find_redundant_gathers(context: ReplayContext) -> list[Finding]:
    """A finding for each axis with more all-gathers than its reductions require.

    The gain is that of a run without the redundant all-gathers.
    """
    gathers: dict[str, list[Int64]] = defaultdict(list)
    row, matched = context.graph.kernels.row, context.split.matched
    tensors = np.flatnonzero(
        (matched.group[row] >= 0) & (matched.message_bytes[row] > SCALAR_BYTES)
    )
    order, first = group_rows(matched.group[row[tensors]])
    for kernels in np.split(tensors[order], first[1:]) if len(tensors) else []:
        axes = context.split.layout.find_axes(matched.groups[matched.group[row[kernels[0]]]])
        redundant = _Gathers(context, kernels).find_redundant(axes)
        if len(redundant):
            gathers[" x ".join(sorted(axes))].append(redundant)
    return [
        _build_gather_finding(context, axis, np.concatenate(parts))
        for axis, parts in gathers.items()
    ]


class _Gathers:
    """The tensor all-gathers and reductions of a group in all steps.

    Holds the kernels of all its ranks in order of start, with op and message_bytes; `_one` marks
    those of the first rank.
    """

    def __init__(self, context: ReplayContext, kernels: Int64) -> None:
        table, matched = context.graph.kernels, context.split.matched
        self._scene, self._kernels = context, kernels
        row = table.row[kernels]
        self._op, self._bytes, self._call = (
            matched.op[row],
            matched.message_bytes[row],
            matched.shared[row],
        )
        self._one = table.rank[kernels] == table.rank[kernels[0]]
        self._step = context.graph.steps.step[table.step[kernels]]

    def find_redundant(self, axes: frozenset[str]) -> Int64:
        """The kernels of redundant all-gathers on all ranks."""
        gathers = self._match_op("all_gather")
        if not axes or not gathers.any():
            return self._kernels[:0]
        if self._match_op("reduce_scatter").any():
            return self._kernels[self._find_beyond_scatters(gathers)]
        if axes == {"tp"}:
            # All-gathers of a size that occurs more often than once per microbatch (the logits).
            schedule = self._scene.split.schedule
            allowed = (schedule.microbatches if schedule else 1) * len(np.unique(self._step))
            sizes, count = np.unique(self._bytes[gathers & self._one], return_counts=True)
            return self._kernels[gathers & np.isin(self._bytes, sizes[count > allowed])]
        if axes <= DATA_AXES and self._match_op("all_reduce").any():
            # All-gathers before the last gradient reduction of their step; ZeRO-1 gathers after
            # it.
            redundant = np.zeros_like(gathers)
            for step in np.unique(self._step).tolist():
                mine = np.flatnonzero(self._one & (self._step == step))
                sums = np.flatnonzero(self._match_op("all_reduce")[mine])
                early = mine[: sums[-1]] if len(sums) else mine[:0]
                redundant |= gathers & np.isin(self._call, self._call[early])
            return self._kernels[redundant]
        return self._kernels[:0]

    def _match_op(self, op: str) -> Bool:
        return np.asarray(self._op == OP_CODE[op])

    def _find_beyond_scatters(self, gathers: Bool) -> Bool:
        """All-gathers beyond two per reduce_scatter.

        Chosen are sizes without a matching reduce_scatter, else the most exposed calls. With
        gradient accumulation there are more all-gathers than reduce-scatters: none is redundant.
        """
        scatters = self._match_op("reduce_scatter") & self._one
        excess = int((gathers & self._one).sum()) - 2 * int(scatters.sum())
        accumulates = count_accumulated_microbatches(self._scene.split.strategies) is not None
        if accumulates or excess < len(np.unique(self._step)):
            return np.zeros_like(gathers)
        # Which calls match the size of weights whose gradients are scattered, except padding.
        scattered = np.unique(self._bytes[scatters])
        weights = np.multiply.outer(scattered, _PRECISIONS).ravel()
        apart = np.abs(self._bytes[:, np.newaxis] / weights - 1)
        odd: Bool = gathers & ~np.asarray((apart < _PADDING).any(axis=1))
        if 0 < int((odd & self._one).sum()) <= excess + int(scatters.sum()):
            return odd
        names, place = np.unique(self._call[gathers], return_inverse=True)
        exposed_ns = np.bincount(place, self._scene.sum_exposed_ns()[self._kernels[gathers]])
        chosen = names[np.argsort(-exposed_ns, kind="stable")[:excess]]
        return gathers & np.isin(self._call, chosen) & (self._call >= 0)


def _build_gather_finding(context: ReplayContext, axis: str, kernels: Int64) -> Finding:
    table, matched = context.graph.kernels, context.split.matched
    steps = max(1, len(np.unique(table.step[kernels])))
    size = int(matched.message_bytes[table.row[kernels]].sum()) // steps
    message = (
        f"redundant all-gathers on {axis}: {len(kernels) / steps:.0f} per step "
        f"({units.format_size(size)} per rank) that the layout does not require"
    )
    return _build_removal_finding(context, "redundant_calls", kernels, steps, message)


def _build_removal_finding(
    context: ReplayContext, code: str, kernels: Int64, steps: int, message: str
) -> Finding:
    """A finding whose gain is that of a run without these calls of so many steps."""
    rows = np.isin(context.graph.steps.rank, context.graph.kernels.rank[kernels])
    return Finding(
        code=code,
        bucket="collective",
        gain_ns=context.compute_gain_ns(remove_calls(context.graph, kernels)),
        measured_ns=int(context.sum_exposed_ns()[kernels].sum()) // steps,
        predicted_ns=0,
        ranks=(),
        steps=context.list_steps(rows),
        events=context.list_longest_calls(kernels),
        message=message,
    )


_REDUCTION_OPS = ("all_reduce", "reduce_scatter")

# Extra reductions: data parallelism reduces only gradients, and a pipeline sends messages.

_STAGE_AXIS = frozenset({"pp"})


def find_extra_reductions(context: ReplayContext) -> list[Finding]:
    """A finding for each axis with exposed reductions that its parallelism does not need.

    These are reductions of data parallel ranks in the forward, and all-reduces of tensors across
    pipeline stages. The gain is that of a run without them.
    """
    row, matched = context.graph.kernels.row, context.split.matched
    forward_sums = _find_forward_kernels(context) & _find_ops(context, _REDUCTION_OPS)
    tensors = _find_ops(context, ("all_reduce",)) & (matched.message_bytes[row] > SCALAR_BYTES)
    findings = []
    for axes in dict.fromkeys(map(context.split.layout.find_axes, matched.groups)):
        if axes == _STAGE_AXIS:
            extra = tensors
        elif axes and axes <= DATA_AXES and axes != {"cp"}:
            extra = forward_sums
        else:
            continue
        on_axes = context.find_kernels(axes.__eq__)
        own = on_axes[extra[on_axes]]
        if len(own):
            findings.append(_build_extra_finding(context, " x ".join(sorted(axes)), own))
    return findings


def _find_ops(context: ReplayContext, ops: Iterable[str]) -> Bool:
    """Which collectives and messages are one of these ops."""
    codes = [OP_CODE[op] for op in ops]
    return np.isin(context.split.matched.op[context.graph.kernels.row], codes)


def _find_forward_kernels(context: ReplayContext) -> Bool:
    """Which collectives a rank waited for that its host issued in a forward."""
    kernels = context.graph.kernels
    found = np.zeros(len(kernels), dtype=np.bool_)
    for index, rank in enumerate(context.split.ranks):
        forward = np.array([phase == "forward" for phase in rank.phase], dtype=np.bool_)
        mine = kernels.list_rows(index)
        found[mine] = np.isin(kernels.call[mine], rank.attribution.exposed.call[forward])
    shared = context.split.matched.shared[kernels.row]
    return found | ((shared >= 0) & np.isin(shared, shared[found]))


def _build_extra_finding(context: ReplayContext, axis: str, kernels: Int64) -> Finding:
    table, matched = context.graph.kernels, context.split.matched
    steps = max(1, len(np.unique(table.step[kernels])))
    size = int(np.median(matched.message_bytes[table.row[kernels]]))
    why = (
        "across pipeline stages, which only tied embeddings need"
        if axis == "pp"
        else f"on {axis} in the forward, where data parallelism needs none"
    )
    each = f" of {units.format_size(size)}" if size >= 0 else ""
    message = f"extra reductions {why}: {len(kernels) / steps:.0f} per step{each}"
    return _build_removal_finding(context, "extra_reductions", kernels, steps, message)


# Small collectives: their time is latency, not bandwidth.

_BUCKET_BYTES = 25 << 20
"""The size of torch's gradient buckets."""

_SMALL_BYTES = 256 << 10
"""Collectives of less on average are small: a quarter of torch's first bucket."""

_MIN_SMALL_CALLS = 8
"""Fewer collectives per step are not worth merging."""

_LATENCY_SHARE = 0.5
"""Collectives are latency-bound if latency is at least this fraction of their time."""


def find_small_collectives(context: ReplayContext) -> list[Finding]:
    """A finding for each data axis on which many collectives take time regardless of their size.

    The gain is that of the same bytes in buckets of torch's default size.
    """
    kernels = context.graph.kernels
    large = context.split.matched.message_bytes[kernels.row] > 0
    own = np.flatnonzero(large & find_sync_kernels(context))
    group = context.split.matched.group[kernels.row[own]]
    times = compute_times(context.graph)
    merged: dict[str, list[_MergedCalls]] = defaultdict(list)
    order, first = group_rows(group)
    for rows in np.split(order, first[1:]) if len(order) else ():
        axes = context.split.layout.find_axes(context.split.matched.groups[group[rows[0]]])
        calls = _MergedCalls.build(context, times, own[rows])
        if calls.are_small:
            merged[" x ".join(sorted(axes))].append(calls)
    return [_build_small_finding(context, axis, parts) for axis, parts in merged.items()]


def find_sync_kernels(context: ReplayContext) -> Bool:
    """Which collectives reduce gradients or gather weights on a data axis."""
    sums = _find_ops(context, _REDUCTION_OPS)
    data = np.zeros(len(sums), dtype=np.bool_)
    data[context.find_kernels(lambda axes: bool(axes) and axes <= DATA_AXES)] = True
    ops = sums | _find_ops(context, ("all_gather",))
    return ops & data & ~(_find_forward_kernels(context) & sums)


class _MergedCalls(Struct, frozen=True):
    """The collectives of a group: their kernels, calls and bytes per step of a rank, and their time
    in larger buckets as a fraction of the measured one."""

    kernels: Int64
    calls: float
    bytes: float
    fraction: float

    @property
    def are_small(self) -> bool:
        return (
            self.calls >= _MIN_SMALL_CALLS
            and self.bytes < _SMALL_BYTES * self.calls
            and self.fraction <= 1 - _LATENCY_SHARE
        )

    @classmethod
    def build(cls, context: ReplayContext, times: Int64, kernels: Int64) -> _MergedCalls:
        """Their latency is what they take beyond the time of their bytes at the usual rate.

        times are those of the nodes of the replay, in ns.
        """
        table, matched = context.graph.kernels, context.split.matched
        shared = matched.shared[table.row[kernels]]
        known, shared = kernels[shared >= 0], shared[shared >= 0]
        calls, first = np.unique(shared, return_index=True)
        if not len(calls):
            return cls(kernels, 0.0, 0.0, 1.0)
        size = matched.message_bytes[table.row[known[first]]].astype(np.float64)
        took = compute_service_ns(context, times, known, shared)
        steps = len(np.unique(context.graph.steps.step[table.step[known]]))
        count, total = len(calls) / steps, float(took.sum())
        # The time of all these bytes at their usual rate: half of the bytes move at least as
        # fast. What some calls wait for a thread or a link is latency, as is all that small ones
        # take.
        order = np.argsort(took / size, kind="stable")
        moved = np.cumsum(size[order])
        usual = order[int(np.searchsorted(moved, moved[-1] / 2))]
        moving = min(float(moved[-1] * took[usual] / size[usual]), total)
        buckets = -(-size.sum() / steps // _BUCKET_BYTES)
        merged = moving + (total - moving) * min(1.0, buckets / count)
        return cls(kernels, count, float(size.sum()) / steps, merged / max(total, 1.0))


def compute_service_ns(
    context: ReplayContext, times: Int64, kernels: Int64, shared: Int64
) -> Float:
    """For each collective, in order of number, its time since its last member arrived and since the
    one before it on the group ended, by the times of the replay's nodes."""
    label, table = group_ids(shared), context.graph.kernels
    count = int(label.max(initial=-1)) + 1
    begin = group_max(label, times[table.start[kernels]], count)
    end = -group_max(label, -times[table.end[kernels]], count)
    order = np.lexsort((end, begin))
    last = np.maximum.accumulate(np.concatenate(([begin.min(initial=0)], end[order][:-1])))
    took = np.zeros(count)
    took[order] = np.maximum(end[order] - np.maximum(begin[order], last), 0)
    return took


def _build_small_finding(context: ReplayContext, axis: str, parts: list[_MergedCalls]) -> Finding:
    kernels = np.concatenate([part.kernels for part in parts])
    fractions = np.concatenate([np.full(len(part.kernels), part.fraction) for part in parts])
    exposed = context.sum_exposed_ns()[kernels]
    rows = np.isin(context.graph.steps.rank, context.graph.kernels.rank[kernels])
    count = max(1, int((rows & context.graph.steps.full).sum()))
    part = max(parts, key=lambda one: one.calls)
    return Finding(
        code="small_collectives",
        bucket="collective",
        gain_ns=context.compute_gain_ns(scale_transfers(context.graph, kernels, fractions)),
        measured_ns=int(exposed.sum()) // count,
        predicted_ns=int((exposed * fractions).sum()) // count,
        ranks=(),
        steps=context.list_steps(rows),
        events=context.list_longest_calls(kernels),
        message=(
            f"small collectives on {axis}: {part.calls:.0f} per step of "
            f"{units.format_size(int(part.bytes / part.calls))} on average, "
            f"{units.format_percent(1 - part.fraction)} of their time is latency; "
            "merge them into larger buckets"
        ),
    )


# Exposed gradient reduction that could overlap with the backward.

_OVERLAPPED_SHARE = 0.1
"""Gradient reduction counts as overlapped if at least this fraction is hidden by compute."""

_LEFT_SHARE = 0.1
"""A reduction is launched in time if at least this share of the backward is launched after it."""


def find_lost_overlap(context: ReplayContext) -> list[Finding]:
    """The finding for exposed gradient reduction.

    The replay starts each bucket as soon as its gradients are ready, in the recorded order. None
    where most of it is launched during the backward already: then the link is the limit.
    """
    if _compute_overlapped_share(context) >= _OVERLAPPED_SHARE:
        return []
    moves = list_hoistable_calls(context)
    if not moves:
        return []
    kernels = np.concatenate([move.kernels for move in moves])
    rows = np.isin(context.graph.steps.rank, context.graph.kernels.rank[kernels])
    spent = int(context.sum_exposed_ns()[kernels].sum()) // max(1, int(rows.sum()))
    return [
        Finding(
            code="no_overlap",
            bucket="collective",
            gain_ns=context.compute_gain_ns(hoist_collectives(context.graph, moves)),
            measured_ns=spent,
            predicted_ns=None,
            ranks=(),
            steps=context.list_steps(rows),
            events=context.list_longest_calls(kernels),
            message=(
                f"exposed gradient reduction: {units.format_milliseconds(spent)} per "
                "step; reducing "
                "bucket by bucket during the backward would overlap most of it with compute"
                f"{_describe_queues(context)}"
            ),
        )
    ]


def _describe_queues(context: ReplayContext) -> str:
    """The doubt that the reduction is launched in time, and one queue to the GPU holds it up."""
    if not _has_one_queue(context):
        return ""
    return "; CUDA_DEVICE_MAX_CONNECTIONS is 1, which may hold it up: try it unset"


def _has_one_queue(context: ReplayContext) -> bool:
    is_one = {record.max_connections for record in context.records} == {1}
    return is_one and context.split.ranks[0].trace.on_device


def list_hoistable_calls(context: ReplayContext) -> list[HoistedCalls]:
    """The exposed gradient reductions, and when the gradients of each bucket were ready."""
    return [
        move
        for index in range(len(context.split.ranks))
        for move in _list_rank_hoistable(context, index)
    ]


def _compute_overlapped_share(context: ReplayContext) -> float:
    overlaps = context.split.detail.overlaps
    rows = [
        row
        for row in overlaps
        if row.axis in DATA_AXES and row.op in list_gradient_sync_ops(frozenset({row.axis}))
    ]
    moved = sum(row.moved_ns for row in rows)
    return sum(row.hidden_ns for row in rows) / moved if moved else 1.0


def _list_rank_hoistable(context: ReplayContext, index: int) -> list[HoistedCalls]:
    """The gradient reductions that one rank could start earlier, one item per step.

    None in a pipeline whose backwards are not known: gradients are complete in the last of them.
    """
    rank, kernels = context.split.ranks[index], context.graph.kernels
    if context.split.layout.pipelines and not any(grid.slots for grid in rank.grids):
        return []
    exposed = rank.attribution.exposed
    syncs = {
        call for call, phase in zip(exposed.call.tolist(), rank.phase, strict=True)
        if phase == "grad_sync"
    }  # fmt: skip
    sums = np.isin(rank.trace.calls.op, [OP_CODE[op] for op in _REDUCTION_OPS])
    large = rank.trace.calls.message_bytes > SCALAR_BYTES
    mine = kernels.list_rows(index)
    call = kernels.call[mine]
    mine = mine[np.isin(call, list(syncs)) & sums[call] & large[call]]
    if not len(mine):
        return []
    # Backward passes per step without a pipeline; gradients are complete after the last.
    backwards = BackwardPasses.find(
        rank, count_accumulated_microbatches(context.split.strategies) or 1
    )
    first = int(np.flatnonzero(context.graph.steps.rank == index)[0])
    steps = np.unique(kernels.step[mine]).tolist()
    of_step = [(step - first, mine[kernels.step[mine] == step]) for step in steps]
    may_be_held_up = _has_one_queue(context)
    return [
        _hoist_step(rank, backwards, window, here, kernels.call)
        for window, here in of_step
        if (kernels.resume[here] >= 0).any()
        and (may_be_held_up or not _is_in_time(backwards, window, kernels.call[here]))
    ]


def _is_in_time(backwards: BackwardPasses, window: int, call: Int64) -> bool:
    """Whether the host launches most bytes of the reductions while much of the last backward is
    still to be launched."""
    trace = backwards.rank.trace
    size = trace.calls.message_bytes[call]
    early = backwards.measure_left(window, find_issue_ns(trace)[call]) >= _LEFT_SHARE
    return bool(2 * size[early].sum() > size.sum())


def _hoist_step(
    rank: RankSplit, backwards: BackwardPasses, window: int, mine: Int64, call: Int64
) -> HoistedCalls:
    calls = rank.trace.calls
    starts = rank.clock.map_to_common_ns(rank.trace.events.start_ns[calls.event[call[mine]]])
    begin, end = backwards.find_before(window, int(starts.min()))
    size = calls.message_bytes[call[mine]].astype(np.float64)
    ready = begin + np.rint((end - begin) * np.cumsum(size) / size.sum()).astype(np.int64)
    return HoistedCalls(mine, ready)
