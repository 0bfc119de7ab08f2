"""Communication bottlenecks: slow links, redundant all-gathers, exposed gradient reduction."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import is_inside, union
from stepsplit.analyzer.diagnose.replay import (
    Float,
    HoistedCalls,
    ReplayContext,
    hoist_collectives,
    remove_calls,
    scale_transfers,
)
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.split.strategy_evidence import count_accumulated_microbatches
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Int64

# When the gradients of a step are ready.

_FORWARD_SHARE = 1 / 3
"""Forward share of forward + backward if they are not marked: a backward takes twice as long."""


@dataclass(frozen=True, slots=True)
class BackwardPasses:
    """The backward passes of a rank.

    autograd_ns: start of each autograd kernel (CPU runs: op) on the common clock. passes: number of
    backward passes per step if the run has no pipeline.
    """

    rank: RankSplit
    autograd_ns: Int64
    passes: int

    @classmethod
    def find(cls, rank: RankSplit, passes: int) -> BackwardPasses:
        """Find the backward passes of a rank."""
        events = rank.trace.events
        spans = events.is_category(Category.OP) & events.match_prefix("autograd::engine")
        marked = union(events.start_ns[spans], events.end_ns[spans])
        launched = events.launch_ns() if rank.trace.on_device else events.start_ns
        works = events.is_category(Category.KERNEL) if rank.trace.on_device else spans
        begun = events.start_ns[works & is_inside(marked, launched)]
        return cls(rank, rank.clock.map_to_common_ns(begun), passes)

    def find_before(self, window: int, until: int) -> tuple[int, int]:
        """(begin, end) of the last backward of a step before `until`, on the common clock.

        Taken from the pipeline's boxes or from autograd; otherwise estimated as the last part of
        the time since the start of the step.
        """
        boxes = self.rank.grids[window].slots
        last = [box for box in boxes if box.phase != "forward" and box.end_ns <= until]
        if last:
            return max((box.start_ns, box.end_ns) for box in last)
        start = self.rank.clock.map_instant_to_common_ns(self.rank.windows.windows[window].start_ns)
        begun = self.autograd_ns[(self.autograd_ns >= start) & (self.autograd_ns < until)]
        begin = int(begun.min()) if len(begun) else start + round((until - start) * _FORWARD_SHARE)
        return until - (until - begin) // self.passes, until


# Links that are slower than comparable links with the same traffic.

_SLOW_RATIO = 1.15
"""A link is slow above this multiple of the transfer time of comparable links."""

_MIN_CALLS = 4


@dataclass(frozen=True, slots=True)
class _Link:
    """Calls of one kind between the same ranks: their kernels and transfer times."""

    ranks: tuple[int, ...]
    kernels: Int64
    took_ns: Int64


def find_slow_links(context: ReplayContext) -> list[Finding]:
    """A finding for each set of ranks with a slow link.

    Compared are links with the same op, message size, number of ranks and number of hosts; the gain
    is that of a transfer time as on the other links.
    """
    slow: dict[tuple[int, ...], list[tuple[Int64, Float]]] = defaultdict(list)
    for alike in _collect_links(context).values():
        for link, ratio in _select_slow_links(alike):
            slow[link.ranks].append((link.kernels, np.full(len(link.kernels), 1 / ratio)))
    return [_build_link_finding(context, ranks, parts) for ranks, parts in slow.items()]


def _collect_links(context: ReplayContext) -> dict[tuple[int, ...], list[_Link]]:
    """The links grouped by (op, message size, number of ranks, number of hosts)."""
    kernels, matched = context.graph.kernels, context.split.matched
    took = context.graph.rest_ns[kernels.end]
    links: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    hosts = {rank.trace.rank: rank.trace.host for rank in context.split.ranks}
    carries = _find_carried_rows(context)
    known = (matched.key[carries] >= 0) & (took > 0) & (matched.message_bytes[carries] >= 0)
    for i in np.flatnonzero(known).tolist():
        row = int(carries[i])
        ranks = _find_link_ranks(context, i, row)
        if len(ranks) > 1:
            op = min(int(matched.op[row]), OPS.index("send"))
            nodes = len({hosts.get(rank) for rank in ranks})
            links[op, int(matched.message_bytes[row]), len(ranks), nodes][ranks].append(i)
    return {
        kind: [_Link(ranks, np.array(rows), took[rows]) for ranks, rows in of_kind.items()]
        for kind, of_kind in links.items()
    }


def _find_carried_rows(context: ReplayContext) -> Int64:
    """For each kernel the row that determined its end: of several messages the last transfer."""
    kernels, found = context.graph.kernels, context.split
    rows = kernels.row.copy()
    for i in np.flatnonzero(found.matched.op[rows] >= OPS.index("send")).tolist():
        event = found.ranks[int(kernels.rank[i])].trace.calls.event
        call = int(kernels.call[i])
        count = int(np.searchsorted(event[call:], event[call], side="right"))
        rows[i] += int(found.arrivals.moved_ns[rows[i] : rows[i] + count].argmax())
    return rows


def _find_link_ranks(context: ReplayContext, kernel: int, row: int) -> tuple[int, ...]:
    """The ranks between which a call moves data."""
    matched, found = context.split.matched, context.split
    if matched.op[row] < OPS.index("send"):
        group = int(matched.group[row])
        return matched.groups[group].ranks if group >= 0 else ()
    trace = found.ranks[int(context.graph.kernels.rank[kernel])].trace
    peer = int(trace.calls.peer[int(matched.call[row])])
    return tuple(sorted((trace.rank, peer)))


def _select_slow_links(links: list[_Link]) -> list[tuple[_Link, float]]:
    """The links slower than the median link, with the ratio of their median transfer times.

    The 25th percentile of a slow link must exceed the 75th percentile of the median link.
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
        if at > _SLOW_RATIO * middle[usual] and np.percentile(link.took_ns, 25) > most
    ]


def _build_link_finding(
    context: ReplayContext, ranks: tuple[int, ...], parts: list[tuple[Int64, Float]]
) -> Finding:
    kernels, times = (np.concatenate(side) for side in zip(*parts, strict=True))
    took = context.graph.rest_ns[context.graph.kernels.end[kernels]]
    rows = np.isin(context.ranks[context.graph.steps.rank], ranks)
    ratio = float(took.sum() / (took * times).sum())
    count = max(1, int((rows & context.graph.steps.full).sum()))
    return Finding(
        code="slow_link",
        bucket="collective",
        gain_ns=context.compute_gain_ns(scale_transfers(context.graph, kernels, times)),
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


# Redundant all-gathers: weights and activations that the layout does not require to be gathered.

_PRECISIONS = (0.25, 0.5, 1.0, 2.0)

_PADDING = 1e-3
"""Possible ratios of weight bytes to gradient bytes, and the tolerance for padding."""


def find_redundant_gathers(context: ReplayContext) -> list[Finding]:
    """A finding for each axis with more all-gathers than its reductions require.

    The gain is that of a run without the redundant all-gathers.
    """
    gathers: dict[str, list[Int64]] = defaultdict(list)
    for number, group in enumerate(context.split.matched.groups):
        axes = context.split.layout.find_axes(group)
        kernels = _Gathers.build(context, number).find_redundant(axes)
        if len(kernels):
            gathers[" x ".join(sorted(axes))].append(kernels)
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
        self._one = table.rank[kernels] == (table.rank[kernels[0]] if len(kernels) else -1)
        self._step = context.graph.steps.step[table.step[kernels]]

    @classmethod
    def build(cls, context: ReplayContext, group: int) -> _Gathers:
        row = context.graph.kernels.row
        matched = context.split.matched
        large = matched.message_bytes[row] > SCALAR_BYTES
        return cls(context, np.flatnonzero((matched.group[row] == group) & large))

    def find_redundant(self, axes: frozenset[str]) -> Int64:
        """The kernels of redundant all-gathers on all ranks."""
        gathers = self._match_op("all_gather")
        if not axes or not gathers.any():
            return self._kernels[:0]
        if self._match_op("reduce_scatter").any():
            return self._kernels[self._find_beyond_scatters(gathers)]
        if axes == {"tp"}:
            return self._kernels[self._find_beyond_logits(gathers)]
        if axes <= DATA_AXES and self._match_op("all_reduce").any():
            return self._kernels[self._find_before_reductions(gathers)]
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
        odd = gathers & ~self._match_weights(np.unique(self._bytes[scatters]))
        if 0 < int((odd & self._one).sum()) <= excess + int(scatters.sum()):
            return odd
        return self._select_most_exposed(gathers, excess)

    def _match_weights(self, scattered: Int64) -> Bool:
        """Which calls match the size of weights whose gradients are scattered, except padding."""
        weights = np.multiply.outer(scattered, _PRECISIONS).ravel()
        apart = np.abs(self._bytes[:, np.newaxis] / weights - 1)
        return np.asarray((apart < _PADDING).any(axis=1))

    def _find_beyond_logits(self, gathers: Bool) -> Bool:
        """All-gathers of a size that occurs more often than once per microbatch (the logits)."""
        schedule = self._scene.split.schedule
        allowed = (schedule.microbatches if schedule else 1) * len(np.unique(self._step))
        sizes, count = np.unique(self._bytes[gathers & self._one], return_counts=True)
        return gathers & np.isin(self._bytes, sizes[count > allowed])

    def _find_before_reductions(self, gathers: Bool) -> Bool:
        """All-gathers before the last gradient reduction of their step; ZeRO-1 gathers after it."""
        redundant = np.zeros_like(gathers)
        for step in np.unique(self._step).tolist():
            mine = np.flatnonzero(self._one & (self._step == step))
            sums = np.flatnonzero(self._match_op("all_reduce")[mine])
            early = mine[: sums[-1]] if len(sums) else mine[:0]
            redundant |= gathers & np.isin(self._call, self._call[early])
        return redundant

    def _select_most_exposed(self, gathers: Bool, excess: int) -> Bool:
        names, place = np.unique(self._call[gathers], return_inverse=True)
        exposed_ns = np.bincount(place, self._scene.sum_exposed_ns()[self._kernels[gathers]])
        chosen = names[np.argsort(-exposed_ns, kind="stable")[:excess]]
        return gathers & np.isin(self._call, chosen) & (self._call >= 0)


def _build_gather_finding(context: ReplayContext, axis: str, kernels: Int64) -> Finding:
    table, matched = context.graph.kernels, context.split.matched
    steps = max(1, len(np.unique(table.step[kernels])))
    size = int(matched.message_bytes[table.row[kernels]].sum()) // steps
    rows = np.isin(context.graph.steps.rank, table.rank[kernels])
    return Finding(
        code="redundant_calls",
        bucket="collective",
        gain_ns=context.compute_gain_ns(remove_calls(context.graph, kernels)),
        measured_ns=int(context.sum_exposed_ns()[kernels].sum()) // steps,
        predicted_ns=0,
        ranks=(),
        steps=context.list_steps(rows),
        events=context.list_longest_calls(kernels),
        message=(
            f"redundant all-gathers on {axis}: {len(kernels) / steps:.0f} per step "
            f"({units.format_size(size)} per rank) that the layout does not require"
        ),
    )


# Exposed gradient reduction that could overlap with the backward.

_REDUCTION_OPS = ("all_reduce", "reduce_scatter")

_OVERLAPPED_SHARE = 0.1
"""Gradient reduction counts as overlapped if at least this fraction is hidden by compute."""


def find_lost_overlap(context: ReplayContext) -> list[Finding]:
    """The finding for exposed gradient reduction.

    The replay starts each bucket as soon as its gradients are ready, in the recorded order.
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
            ),
        )
    ]


def list_hoistable_calls(context: ReplayContext) -> list[HoistedCalls]:
    """The exposed gradient reductions, and when the gradients of each bucket were ready."""
    return [
        move
        for index in range(len(context.split.ranks))
        for move in _list_rank_hoistable(context, index)
    ]


def _compute_overlapped_share(context: ReplayContext) -> float:
    overlaps = context.split.detail.overlaps
    rows = [row for row in overlaps if row.op in _REDUCTION_OPS and row.axis in DATA_AXES]
    moved = sum(row.moved_ns for row in rows)
    return sum(row.hidden_ns for row in rows) / moved if moved else 1.0


def _list_rank_hoistable(context: ReplayContext, index: int) -> list[HoistedCalls]:
    """The gradient reductions that one rank could start earlier, one item per step."""
    rank, kernels = context.split.ranks[index], context.graph.kernels
    exposed = rank.attribution.exposed
    syncs = {
        call for call, phase in zip(exposed.call.tolist(), rank.phase, strict=True)
        if phase == "grad_sync"
    }  # fmt: skip
    sums = np.isin(rank.trace.calls.op, [OP_CODE[op] for op in _REDUCTION_OPS])
    large = rank.trace.calls.message_bytes > SCALAR_BYTES
    mine = np.flatnonzero(kernels.rank == index)
    call = kernels.call[mine]
    mine = mine[np.isin(call, list(syncs)) & sums[call] & large[call]]
    if not len(mine):
        return []
    backwards = BackwardPasses.find(rank, _count_backwards(context))
    first = int(np.flatnonzero(context.graph.steps.rank == index)[0])
    steps = np.unique(kernels.step[mine]).tolist()
    of_step = [(step - first, mine[kernels.step[mine] == step]) for step in steps]
    return [
        _hoist_step(rank, backwards, window, here, kernels.call)
        for window, here in of_step
        if (kernels.resume[here] >= 0).any()
    ]


def _count_backwards(context: ReplayContext) -> int:
    """Backward passes per step without a pipeline; gradients are complete after the last."""
    return count_accumulated_microbatches(context.split.strategies) or 1


def _hoist_step(
    rank: RankSplit, backwards: BackwardPasses, window: int, mine: Int64, call: Int64
) -> HoistedCalls:
    calls = rank.trace.calls
    starts = rank.clock.map_to_common_ns(rank.trace.events.start_ns[calls.event[call[mine]]])
    begin, end = backwards.find_before(window, int(starts.min()))
    size = calls.message_bytes[call[mine]].astype(np.float64)
    ready = begin + np.rint((end - begin) * np.cumsum(size) / size.sum()).astype(np.int64)
    return HoistedCalls(mine, ready)
