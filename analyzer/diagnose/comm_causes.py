"""Communication bottlenecks: slow links, redundant all-gathers, exposed gradient reduction."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import inside, union
from stepsplit.analyzer.diagnose.replay import (
    Earlier,
    Float,
    ReplayContext,
    earlier,
    left_out,
    moved_faster,
)
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.split.strategy_evidence import accumulated_microbatches
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Int64

# When the gradients of a step are ready.

_FORWARD = 1 / 3
"""Forward share of forward + backward if they are not marked: a backward takes twice as long."""


@dataclass(frozen=True, slots=True)
class Backwards:
    """The backward passes of a rank.

    autograd_ns: start of each autograd kernel (CPU runs: op) on the common clock. passes: number of
    backward passes per step if the run has no pipeline.
    """

    rank: RankSplit
    autograd_ns: Int64
    passes: int

    @classmethod
    def of(cls, rank: RankSplit, passes: int) -> Backwards:
        """Find the backward passes of a rank."""
        events = rank.trace.events
        spans = events.of(Category.OP) & events.named("autograd::engine")
        marked = union(events.start_ns[spans], events.end_ns[spans])
        launched = events.launch_ns() if rank.trace.on_device else events.start_ns
        works = events.of(Category.KERNEL) if rank.trace.on_device else spans
        begun = events.start_ns[works & inside(marked, launched)]
        return cls(rank, rank.clock.common_ns(begun), passes)

    def before(self, window: int, until: int) -> tuple[int, int]:
        """(begin, end) of the last backward of a step before `until`, on the common clock.

        Taken from the pipeline's boxes or from autograd; otherwise estimated as the last part of
        the time since the start of the step.
        """
        boxes = self.rank.grids[window].boxes
        last = [box for box in boxes if box.phase != "forward" and box.end_ns <= until]
        if last:
            return max((box.start_ns, box.end_ns) for box in last)
        start = self.rank.clock.common_at(self.rank.windows.windows[window].start_ns)
        begun = self.autograd_ns[(self.autograd_ns >= start) & (self.autograd_ns < until)]
        begin = int(begun.min()) if len(begun) else start + round((until - start) * _FORWARD)
        return until - (until - begin) // self.passes, until


# Links that are slower than comparable links with the same traffic.

_SLOW = 1.15
"""A link is slow above this multiple of the transfer time of comparable links."""

_LEAST_COUNT = 4


@dataclass(frozen=True, slots=True)
class _Link:
    """Calls of one kind between the same ranks: their kernels and transfer times."""

    ranks: tuple[int, ...]
    kernels: Int64
    took_ns: Int64


def slow_links(scene: ReplayContext) -> list[Finding]:
    """A finding for each set of ranks with a slow link.

    Compared are links with the same op, message size, number of ranks and number of hosts; the gain
    is that of a transfer time as on the other links.
    """
    slow: dict[tuple[int, ...], list[tuple[Int64, Float]]] = defaultdict(list)
    for alike in _alike(scene).values():
        for link, ratio in _slower(alike):
            slow[link.ranks].append((link.kernels, np.full(len(link.kernels), 1 / ratio)))
    return [_slow_link_finding(scene, ranks, parts) for ranks, parts in slow.items()]


def _alike(scene: ReplayContext) -> dict[tuple[int, ...], list[_Link]]:
    """The links grouped by (op, message size, number of ranks, number of hosts)."""
    kernels, matched = scene.graph.kernels, scene.found.matched
    took = scene.graph.rest_ns[kernels.end]
    links: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    hosts = {rank.trace.rank: rank.trace.host for rank in scene.found.ranks}
    carries = _carries(scene)
    known = (matched.key[carries] >= 0) & (took > 0) & (matched.message_bytes[carries] >= 0)
    for i in np.flatnonzero(known).tolist():
        row = int(carries[i])
        ranks = _ends(scene, i, row)
        if len(ranks) > 1:
            op = min(int(matched.op[row]), OPS.index("send"))
            nodes = len({hosts.get(rank) for rank in ranks})
            links[op, int(matched.message_bytes[row]), len(ranks), nodes][ranks].append(i)
    return {
        kind: [_Link(ranks, np.array(rows), took[rows]) for ranks, rows in of_kind.items()]
        for kind, of_kind in links.items()
    }


def _carries(scene: ReplayContext) -> Int64:
    """For each kernel the row that determined its end: of several messages the last transfer."""
    kernels, found = scene.graph.kernels, scene.found
    rows = kernels.row.copy()
    for i in np.flatnonzero(found.matched.op[rows] >= OPS.index("send")).tolist():
        event = found.ranks[int(kernels.rank[i])].trace.calls.event
        call = int(kernels.call[i])
        count = int(np.searchsorted(event[call:], event[call], side="right"))
        rows[i] += int(found.arrivals.moved_ns[rows[i] : rows[i] + count].argmax())
    return rows


def _ends(scene: ReplayContext, kernel: int, row: int) -> tuple[int, ...]:
    """The ranks between which a call moves data."""
    matched, found = scene.found.matched, scene.found
    if matched.op[row] < OPS.index("send"):
        group = int(matched.group[row])
        return matched.groups[group].ranks if group >= 0 else ()
    trace = found.ranks[int(scene.graph.kernels.rank[kernel])].trace
    peer = int(trace.calls.peer[int(matched.call[row])])
    return tuple(sorted((trace.rank, peer)))


def _slower(links: list[_Link]) -> list[tuple[_Link, float]]:
    """The links slower than the median link, with the ratio of their median transfer times.

    The 25th percentile of a slow link must exceed the 75th percentile of the median link.
    """
    known = [link for link in links if len(link.took_ns) >= _LEAST_COUNT]
    if len(known) < 2:
        return []
    middle = [float(np.median(link.took_ns)) for link in known]
    usual = int(np.argsort(middle, kind="stable")[(len(known) - 1) // 2])
    most = float(np.percentile(known[usual].took_ns, 75))
    return [
        (link, at / middle[usual])
        for link, at in zip(known, middle, strict=True)
        if at > _SLOW * middle[usual] and np.percentile(link.took_ns, 25) > most
    ]


def _slow_link_finding(
    scene: ReplayContext, ranks: tuple[int, ...], parts: list[tuple[Int64, Float]]
) -> Finding:
    kernels, times = (np.concatenate(side) for side in zip(*parts, strict=True))
    took = scene.graph.rest_ns[scene.graph.kernels.end[kernels]]
    rows = np.isin(scene.ranks[scene.graph.steps.rank], ranks)
    ratio = float(took.sum() / (took * times).sum())
    count = max(1, int((rows & scene.graph.steps.full).sum()))
    return Finding(
        code="slow_link",
        bucket="collective",
        gain_ns=scene.gain_ns(moved_faster(scene.graph, kernels, times)),
        measured_ns=int(took.sum()) // count,
        predicted_ns=int((took * times).sum()) // count,
        ranks=ranks,
        steps=scene.steps_of(rows),
        events=scene.calls(kernels),
        message=(
            f"slow link between ranks {units.listed(ranks)}: transfers are {ratio:.1f}x slower "
            "than between other ranks with the same traffic"
        ),
    )


# Redundant all-gathers: weights and activations that the layout does not require to be gathered.

_PRECISIONS = (0.25, 0.5, 1.0, 2.0)

_PADDING = 1e-3
"""Possible ratios of weight bytes to gradient bytes, and the tolerance for padding."""


def needless_calls(scene: ReplayContext) -> list[Finding]:
    """A finding for each axis with more all-gathers than its reductions require.

    The gain is that of a run without the redundant all-gathers.
    """
    found: dict[str, list[Int64]] = defaultdict(list)
    for number, group in enumerate(scene.found.matched.groups):
        axes = scene.found.layout.axes_of(group)
        kernels = _Gathers.of(scene, number).needless(axes)
        if len(kernels):
            found[" x ".join(sorted(axes))].append(kernels)
    return [
        _redundant_call_finding(scene, axis, np.concatenate(parts)) for axis, parts in found.items()
    ]


class _Gathers:
    """The tensor all-gathers and reductions of a group in all steps.

    Holds the kernels of all its ranks in order of start, with op and message_bytes; `_one` marks
    those of the first rank.
    """

    def __init__(self, scene: ReplayContext, kernels: Int64) -> None:
        table, matched = scene.graph.kernels, scene.found.matched
        self._scene, self._kernels = scene, kernels
        row = table.row[kernels]
        self._op, self._bytes, self._call = (
            matched.op[row],
            matched.message_bytes[row],
            matched.shared[row],
        )
        self._one = table.rank[kernels] == (table.rank[kernels[0]] if len(kernels) else -1)
        self._step = scene.graph.steps.step[table.step[kernels]]

    @classmethod
    def of(cls, scene: ReplayContext, group: int) -> _Gathers:
        row = scene.graph.kernels.row
        matched = scene.found.matched
        large = matched.message_bytes[row] > SCALAR_BYTES
        return cls(scene, np.flatnonzero((matched.group[row] == group) & large))

    def needless(self, axes: frozenset[str]) -> Int64:
        """The kernels of redundant all-gathers on all ranks."""
        gathers = self._of("all_gather")
        if not axes or not gathers.any():
            return self._kernels[:0]
        if self._of("reduce_scatter").any():
            return self._kernels[self._beyond_scattered(gathers)]
        if axes == {"tp"}:
            return self._kernels[self._beyond_logits(gathers)]
        if axes <= DATA_AXES and self._of("all_reduce").any():
            return self._kernels[self._before_sums(gathers)]
        return self._kernels[:0]

    def _of(self, op: str) -> Bool:
        return np.asarray(self._op == OP_CODE[op])

    def _beyond_scattered(self, gathers: Bool) -> Bool:
        """All-gathers beyond two per reduce_scatter.

        Chosen are sizes without a matching reduce_scatter, else the most exposed calls. With
        gradient accumulation there are more all-gathers than reduce-scatters: none is redundant.
        """
        scatters = self._of("reduce_scatter") & self._one
        excess = int((gathers & self._one).sum()) - 2 * int(scatters.sum())
        accumulates = accumulated_microbatches(self._scene.found.strategies) is not None
        if accumulates or excess < len(np.unique(self._step)):
            return np.zeros_like(gathers)
        odd = gathers & ~self._fits(np.unique(self._bytes[scatters]))
        if 0 < int((odd & self._one).sum()) <= excess + int(scatters.sum()):
            return odd
        return self._most_exposed(gathers, excess)

    def _fits(self, scattered: Int64) -> Bool:
        """Which calls match the size of weights whose gradients are scattered, except padding."""
        weights = np.multiply.outer(scattered, _PRECISIONS).ravel()
        apart = np.abs(self._bytes[:, np.newaxis] / weights - 1)
        return np.asarray((apart < _PADDING).any(axis=1))

    def _beyond_logits(self, gathers: Bool) -> Bool:
        """All-gathers of a size that occurs more often than once per microbatch (the logits)."""
        schedule = self._scene.found.schedule
        allowed = (schedule.microbatches if schedule else 1) * len(np.unique(self._step))
        sizes, count = np.unique(self._bytes[gathers & self._one], return_counts=True)
        return gathers & np.isin(self._bytes, sizes[count > allowed])

    def _before_sums(self, gathers: Bool) -> Bool:
        """All-gathers before the last gradient reduction of their step; ZeRO-1 gathers after it."""
        found = np.zeros_like(gathers)
        for step in np.unique(self._step).tolist():
            mine = np.flatnonzero(self._one & (self._step == step))
            sums = np.flatnonzero(self._of("all_reduce")[mine])
            early = mine[: sums[-1]] if len(sums) else mine[:0]
            found |= gathers & np.isin(self._call, self._call[early])
        return found

    def _most_exposed(self, gathers: Bool, excess: int) -> Bool:
        names, place = np.unique(self._call[gathers], return_inverse=True)
        held = np.bincount(place, self._scene.exposed_ns()[self._kernels[gathers]])
        chosen = names[np.argsort(-held, kind="stable")[:excess]]
        return gathers & np.isin(self._call, chosen) & (self._call >= 0)


def _redundant_call_finding(scene: ReplayContext, axis: str, kernels: Int64) -> Finding:
    table, matched = scene.graph.kernels, scene.found.matched
    steps = max(1, len(np.unique(table.step[kernels])))
    size = int(matched.message_bytes[table.row[kernels]].sum()) // steps
    rows = np.isin(scene.graph.steps.rank, table.rank[kernels])
    return Finding(
        code="needless_calls",
        bucket="collective",
        gain_ns=scene.gain_ns(left_out(scene.graph, kernels)),
        measured_ns=int(scene.exposed_ns()[kernels].sum()) // steps,
        predicted_ns=0,
        ranks=(),
        steps=scene.steps_of(rows),
        events=scene.calls(kernels),
        message=(
            f"redundant all-gathers on {axis}: {len(kernels) / steps:.0f} per step "
            f"({units.size(size)} per rank) that the layout does not require"
        ),
    )


# Exposed gradient reduction that could overlap with the backward.

_SUMS = ("all_reduce", "reduce_scatter")

_HIDDEN = 0.1
"""Gradient reduction counts as overlapped if at least this fraction is hidden by compute."""


def lost_overlap(scene: ReplayContext) -> list[Finding]:
    """The finding for exposed gradient reduction.

    The replay starts each bucket as soon as its gradients are ready, in the recorded order.
    """
    if _hidden_share(scene) >= _HIDDEN:
        return []
    moves = moves_of(scene)
    if not moves:
        return []
    kernels = np.concatenate([move.kernels for move in moves])
    rows = np.isin(scene.graph.steps.rank, scene.graph.kernels.rank[kernels])
    spent = int(scene.exposed_ns()[kernels].sum()) // max(1, int(rows.sum()))
    return [
        Finding(
            code="no_overlap",
            bucket="collective",
            gain_ns=scene.gain_ns(earlier(scene.graph, moves)),
            measured_ns=spent,
            predicted_ns=None,
            ranks=(),
            steps=scene.steps_of(rows),
            events=scene.calls(kernels),
            message=(
                f"exposed gradient reduction: {units.milliseconds(spent)} per step; reducing "
                "bucket by bucket during the backward would overlap most of it with compute"
            ),
        )
    ]


def moves_of(scene: ReplayContext) -> list[Earlier]:
    """The exposed gradient reductions, and when the gradients of each bucket were ready."""
    return [move for index in range(len(scene.found.ranks)) for move in _moves(scene, index)]


def _hidden_share(scene: ReplayContext) -> float:
    overlaps = scene.found.detail.overlaps
    rows = [row for row in overlaps if row.op in _SUMS and row.axis in DATA_AXES]
    moved = sum(row.moved_ns for row in rows)
    return sum(row.hidden_ns for row in rows) / moved if moved else 1.0


def _moves(scene: ReplayContext, index: int) -> list[Earlier]:
    """The gradient reductions that one rank could start earlier, one item per step."""
    rank, kernels = scene.found.ranks[index], scene.graph.kernels
    exposed = rank.attribution.exposed
    syncs = {
        call for call, phase in zip(exposed.call.tolist(), rank.phase, strict=True)
        if phase == "grad_sync"
    }  # fmt: skip
    sums = np.isin(rank.trace.calls.op, [OP_CODE[op] for op in _SUMS])
    large = rank.trace.calls.message_bytes > SCALAR_BYTES
    mine = np.flatnonzero(kernels.rank == index)
    call = kernels.call[mine]
    mine = mine[np.isin(call, list(syncs)) & sums[call] & large[call]]
    if not len(mine):
        return []
    backwards = Backwards.of(rank, _passes(scene))
    first = int(np.flatnonzero(scene.graph.steps.rank == index)[0])
    steps = np.unique(kernels.step[mine]).tolist()
    of_step = [(step - first, mine[kernels.step[mine] == step]) for step in steps]
    return [
        _of_step(rank, backwards, window, here, kernels.call)
        for window, here in of_step
        if (kernels.resume[here] >= 0).any()
    ]


def _passes(scene: ReplayContext) -> int:
    """Backward passes per step without a pipeline; gradients are complete after the last."""
    return accumulated_microbatches(scene.found.strategies) or 1


def _of_step(
    rank: RankSplit, backwards: Backwards, window: int, mine: Int64, call: Int64
) -> Earlier:
    calls = rank.trace.calls
    starts = rank.clock.common_ns(rank.trace.events.start_ns[calls.event[call[mine]]])
    begin, end = backwards.before(window, int(starts.min()))
    size = calls.message_bytes[call[mine]].astype(np.float64)
    ready = begin + np.rint((end - begin) * np.cumsum(size) / size.sum()).astype(np.int64)
    return Earlier(mine, ready)
