"""Inference of mesh axes from group usage, if neither names nor run.json define them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import Intervals, is_inside, union
from stepsplit.analyzer.split.classify import collect_work, parse_marks
from stepsplit.analyzer.split.mesh_groups import (
    RankLine,
    fit_line,
    parse_group_name,
    parse_single_axis,
)
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Events, Group, Int64, RankTrace

# Axes of groups without a known name, from their ranks and usage.


@dataclass(frozen=True, slots=True)
class _AxisEvidence:
    """Shapes of groups that reduce gradients, shapes with an axis, and the smallest stride."""

    summed: Set[frozenset[int]]
    axes: Set[tuple[frozenset[int], str]]
    closest: int


def infer_axes(
    traces: Sequence[RankTrace], rings: Collection[tuple[int, ...]], stage: Mapping[int, int]
) -> dict[Group, str]:
    """The axis of each group without a known name whose usage and ranks are unambiguous.

    A group gets the axis for which all groups of its shape are used. Groups across stages get none:
    embeddings of the first and last stage are reduced like gradients.
    """
    groups = [group for trace in traces for group in trace.groups if len(group.ranks) > 1]
    mesh = [group for group in groups if not parse_group_name(group.description).experts]
    named_axes = {g: axis for g in mesh if (axis := parse_single_axis(g.description)) is not None}
    named_axes |= {group: "cp" for group in _list_message_groups(traces) if group.ranks in rings}
    used = {
        g: u for g, u in measure_usage(traces).items() if g not in named_axes and len(g.ranks) > 1
    }
    unnamed = {g: u for g, u in used.items() if not parse_group_name(g.description).axes}
    axes = _infer_by_shape(unnamed, stage)
    evidence = _AxisEvidence(
        summed={_compute_shape(group) for group, usage in used.items() if usage.sums_gradients},
        axes={(_compute_shape(group), axis) for group, axis in (axes | named_axes).items()},
        closest=min((_compute_stride(group) for group in [*used, *named_axes]), default=1),
    )
    clear = {group: axis for group, axis in axes.items() if not _is_doubtful(group, axis, evidence)}
    lines: dict[str, set[RankLine | None]] = defaultdict(set)
    for group, axis in (named_axes | clear).items():
        lines[axis].add(fit_line(group.ranks))
    one_line = {g: axis for g, axis in clear.items() if axis == "ep" or len(lines[axis]) == 1}
    return one_line | {
        g: axis for g, axis in named_axes.items() if not parse_group_name(g.description).axes
    }


def infer_lines(
    axes: Mapping[Group, str], traffic: Exchanges, present: Collection[int]
) -> dict[str, RankLine]:
    """The line of each mesh axis from groups and messages; ambiguous ones are dropped.

    A chain counts only if all its ranks are recorded, otherwise it may continue.
    """
    candidates: dict[str, set[RankLine | None]] = defaultdict(set)
    for group, axis in axes.items():
        candidates[axis].add(fit_line(group.ranks))
    for axis, exchanged in (("pp", traffic.pipelines), ("cp", traffic.rings)):
        for ranks in exchanged:
            candidates[axis].add(fit_line(ranks) if set(ranks) <= set(present) else None)
    only = {axis: next(iter(lines)) for axis, lines in candidates.items() if len(lines) == 1}
    return {axis: line for axis, line in only.items() if line is not None and axis != "ep"}


def _infer_by_shape(used: Mapping[Group, Usage], stage: Mapping[int, int]) -> dict[Group, str]:
    """The axes of groups by usage, if all groups of a shape within a stage agree."""
    axes_by_line: dict[RankLine, set[str]] = defaultdict(set)
    axes: dict[Group, str] = {}
    for group, usage in used.items():
        axis, line = usage.infer_axis(), fit_line(group.ranks)
        if axis == "ep":
            axes[group] = axis
        elif axis is not None and line and len({stage.get(rank) for rank in group.ranks}) == 1:
            axes[group] = axis
            axes_by_line[line].add(axis)
    lines = {group: fit_line(group.ranks) for group in axes}
    return {
        g: a
        for g, a in axes.items()
        if a == "ep" or len(axes_by_line[lines[g] or RankLine(1, 1)]) == 1
    }


def _is_doubtful(group: Group, axis: str, evidence: _AxisEvidence) -> bool:
    """Whether the ranks of other groups contradict the axis.

    tp has the smallest stride. If a larger group also reduces gradients, this one may gather keys
    and values of attention instead of weights. A group that contains a whole line of another axis
    lies along several axes.
    """
    shape = _compute_shape(group)
    if axis == "ep":
        return False
    if axis == "tp":
        return _compute_stride(group) > evidence.closest
    if axis == "dp_shard" and any(shape < other for other in evidence.summed):
        return True
    return any(other < shape for other, of in evidence.axes if of not in (axis, "ep"))


def _compute_shape(group: Group) -> frozenset[int]:
    """The offsets from the first rank; the groups of an axis share few shapes."""
    return frozenset(rank - group.ranks[0] for rank in group.ranks)


def _compute_stride(group: Group) -> int:
    line = fit_line(group.ranks)
    return line.stride if line is not None else 1


def _list_message_groups(traces: Sequence[RankTrace]) -> list[Group]:
    """The groups with messages."""
    return [
        trace.groups[group_id]
        for trace in traces
        for group_id in sorted(set(trace.calls.group_id[trace.calls.is_message].tolist()))
        if group_id >= 0
    ]


# Usage of each group in a step: collectives before and after the first backward.

SCALAR_BYTES = 1024
"""Collectives of at most this many bytes reduce a loss, a norm or a flag, not a tensor."""

MIN_REPEATS = 4
"""Minimum all_reduces before the first backward of a step: two per layer for two layers."""

_GATHERS = "FSDP::all_gather"

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Usage:
    """Mean calls per step and rank, shape (ops,), before the first backward of a step and after it.

    sizes: number of distinct all_to_all sizes on the group. sharded: the group's gathers carry FSDP
    annotations.
    """

    early: Counts
    late: Counts
    sizes: int
    sharded: bool

    def infer_axis(self) -> str | None:
        """The axis of a group with this usage; None if several axes are possible.

        Layers of tp reduce, or gather and scatter, activations in both passes. Sharded weights are
        gathered in both passes and reduce-scattered only in the backward. Replicated weights have
        no collective before the backward. Expert all_to_alls vary in size, all_to_alls of attention
        heads do not.
        """
        if self.sharded:
            return "dp_shard"
        if self._is_frequent("all_to_all", early=0, late=0):
            return "ep" if self.sizes > MIN_REPEATS else None
        if self._is_frequent("all_reduce", early=MIN_REPEATS, late=MIN_REPEATS):
            return "tp"
        if self._is_frequent("reduce_scatter", early=MIN_REPEATS, late=MIN_REPEATS):
            return "tp" if self.early[OP_CODE["all_gather"]] >= MIN_REPEATS else None
        if self.early[[OP_CODE["all_reduce"], OP_CODE["reduce_scatter"]]].any():
            return None
        gathers, scatters = OP_CODE["all_gather"], OP_CODE["reduce_scatter"]
        both_late = bool(self.late[gathers] and self.late[scatters])
        if self.early[gathers]:
            return "dp_shard" if both_late else None
        return "dp_replicate" if self.late[OP_CODE["all_reduce"]] or both_late else None

    def _is_frequent(self, op: str, *, early: float, late: float) -> bool:
        """Whether the op is called, and at least this often in both parts of a step."""
        code = OP_CODE[op]
        called = bool(self.early[code] or self.late[code])
        return called and bool(self.early[code] >= early and self.late[code] >= late)

    @property
    def sums_gradients(self) -> bool:
        """Whether tensors are reduced after the start of the first backward."""
        return bool(self.late[[OP_CODE["all_reduce"], OP_CODE["reduce_scatter"]]].any())


def measure_usage(traces: Sequence[RankTrace]) -> dict[Group, Usage]:
    """The usage of groups, from traces that show which calls precede the first backward."""
    counts: dict[Group, list[Counts]] = defaultdict(list)
    sizes: dict[Group, set[int]] = defaultdict(set)
    sharded: dict[Group, bool] = {}
    for trace in traces:
        parts, marked = _classify_parts(trace), _find_marked_gathers(trace)
        for group_id in np.unique(trace.calls.group_id[parts >= 0]).tolist():
            rows = (parts >= 0) & (trace.calls.group_id == group_id)
            if group_id >= 0:
                group = trace.groups[group_id]
                counts[group].append(_count_calls_per_step(trace, rows, parts))
                gathers = marked[rows & (trace.calls.op == OP_CODE["all_gather"])]
                sharded[group] = sharded.get(group, True) and bool(len(gathers) and gathers.all())
                exchanged = rows & (trace.calls.op == OP_CODE["all_to_all"])
                sizes[group] |= set(trace.calls.message_bytes[exchanged].tolist())
    means = {group: np.mean(found, axis=0) for group, found in counts.items()}
    return {g: Usage(m[0], m[1], len(sizes[g]), sharded[g]) for g, m in means.items()}


def _find_marked_gathers(trace: RankTrace) -> Bool:
    """Which calls the host issued within an FSDP2 all_gather."""
    events, calls = trace.events, trace.calls
    marks = events.match_prefix(_GATHERS) & events.is_category(Category.OP, Category.ANNOTATION)
    spans = union(events.start_ns[marks], events.end_ns[marks])
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, events.start_ns[calls.event])
    return is_inside(spans, when)


def _count_calls_per_step(trace: RankTrace, rows: Bool, parts: Int64) -> Counts:
    """Calls per step in the early and late part, shape (2, ops)."""
    place = parts[rows] * len(OPS) + trace.calls.op[rows]
    steps = max(1, len(_find_step_starts(trace.events)))
    return np.bincount(place, minlength=2 * len(OPS)).reshape(2, len(OPS)) / steps


def _classify_parts(trace: RankTrace) -> Int64:
    """0 for calls before the first backward of their step, 1 for later ones, -1 for ignored ones.

    Ignored are messages, scalars, calls of unknown time, and calls outside steps with a backward.
    """
    calls, events = trace.calls, trace.events
    starts = events.start_ns[calls.event]
    known = calls.issued_ns >= 0
    when = np.where(known, calls.issued_ns, starts)
    tensors = (calls.message_bytes < 0) | (calls.message_bytes > SCALAR_BYTES)
    counts = tensors & ~calls.is_message & (known | (not trace.on_device))
    backward = _find_first_backward_ns(events, when)
    return np.where(counts & (backward >= 0), (when >= backward).astype(np.int64), -1)


def _find_first_backward_ns(events: Events, when: Int64) -> Int64:
    """The first backward in the step of each instant; -1 if there is none."""
    marks = events.match_prefix("autograd::engine") & events.is_category(
        Category.OP, Category.ANNOTATION
    )
    backward = events.start_ns[marks]
    steps = _find_step_starts(events)
    steps = steps if len(steps) else events.start_ns[:1]
    if not len(backward) or not len(steps):
        return np.full(len(when), -1, dtype=np.int64)
    ends = np.append(steps[1:], np.iinfo(np.int64).max)
    first = np.searchsorted(backward, steps)
    start = backward[np.minimum(first, len(backward) - 1)]
    of_step = np.where((first < len(backward)) & (start < ends), start, -1)
    step = np.searchsorted(steps, when, side="right") - 1
    return np.where(step >= 0, of_step[np.maximum(step, 0)], -1)


def _find_step_starts(events: Events) -> Int64:
    mask = events.match_prefix("ProfilerStep#") & events.is_category(
        Category.OP, Category.ANNOTATION
    )
    return events.start_ns[mask]


# Pipelines and rings in the messages between ranks.

Ranks = tuple[int, ...]

_ONE_WAY = (OP_CODE["send"], OP_CODE["recv"])


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Ranks of each pipeline (first stage first) and of each ring (ascending).

    doubtful: ranks whose messages fit neither pattern, or both.
    """

    pipelines: tuple[Ranks, ...] = ()
    rings: tuple[Ranks, ...] = ()
    doubtful: Ranks = ()


@dataclass(slots=True)
class _Traffic:
    """The messages within one group: peers, counts, and which ranks start with a send."""

    neighbors: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    sent: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    first_is_send: dict[int, bool] = field(default_factory=dict)
    first_peer: dict[int, int] = field(default_factory=dict)


def find_exchanges(traces: Sequence[RankTrace]) -> Exchanges:
    """Finds pipelines and rings in the messages of all ranks; ranks in two pipelines are in
    none."""
    by_rank = {trace.rank: trace for trace in traces}
    pipelines: dict[Ranks, None] = {}
    rings: dict[Ranks, None] = {}
    doubtful: set[int] = set()
    for traffic in _collect_traffic(traces):
        for ranks in _find_components(traffic.neighbors):
            marked = _order_by_marks(ranks, by_rank)
            line = _order_pipeline(ranks, traffic, by_rank) if marked is None else marked
            if line:
                pipelines[line] = None
            elif _is_ring(ranks, traffic) or (marked == () and len(ranks) == 2):
                rings[tuple(sorted(ranks))] = None
            else:
                doubtful |= set(ranks)
    members = [rank for line in pipelines for rank in line]
    if len(set(members)) < len(members):
        return Exchanges(rings=tuple(rings), doubtful=tuple(sorted({*doubtful, *members})))
    return Exchanges(tuple(pipelines), tuple(rings), tuple(sorted(doubtful)))


def _collect_traffic(traces: Sequence[RankTrace]) -> list[_Traffic]:
    """The messages of each group; both ends may have recorded a message."""
    by_group: dict[Ranks, _Traffic] = defaultdict(_Traffic)
    for trace in traces:
        for group_id, op, peer, count in _count_messages(trace):
            traffic = by_group[trace.groups[group_id].ranks if group_id >= 0 else ()]
            sends = op == OP_CODE["send"]
            traffic.first_is_send.setdefault(trace.rank, sends)
            traffic.first_peer.setdefault(trace.rank, peer)
            traffic.neighbors[trace.rank].add(peer)
            traffic.neighbors[peer].add(trace.rank)
            ends = (trace.rank, peer) if sends else (peer, trace.rank)
            traffic.sent[ends] = max(traffic.sent[ends], count)
    return list(by_group.values())


def _count_messages(trace: RankTrace) -> list[tuple[int, int, int, int]]:
    """(group, op, peer, count) of the rank's messages, by first occurrence."""
    calls = trace.calls
    known = np.isin(calls.op, _ONE_WAY) & (calls.peer >= 0) & (calls.peer != trace.rank)
    columns = np.stack((calls.group_id[known], calls.op[known], calls.peer[known]), axis=1)
    kinds, first, count = np.unique(columns, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)
    return [(*kinds[i].tolist(), int(count[i])) for i in order.tolist()]


def _find_components(neighbors: Mapping[int, set[int]]) -> list[Ranks]:
    """Connected components of ranks that exchange messages; chains are ordered from end to end."""
    components, visited = [], set[int]()
    for start in sorted(neighbors, key=lambda rank: (len(neighbors[rank]), rank)):
        if start in visited:
            continue
        ranks, ahead = [], [start]
        while ahead:
            rank = ahead.pop()
            if rank not in visited:
                visited.add(rank)
                ranks.append(rank)
                ahead += sorted(neighbors[rank] - visited, reverse=True)
        components.append(tuple(ranks))
    return components


def _order_pipeline(
    ranks: Ranks, traffic: _Traffic, by_rank: Mapping[int, RankTrace]
) -> Ranks | None:
    """The ranks in stage order; None if ambiguous.

    Two ranks with messages in both directions may be a ring, since some rings also start with one
    sender and one receiver. Then the compute between the messages of the later rank decides.
    """
    degrees = sorted(len(traffic.neighbors[rank]) for rank in ranks)
    if degrees[-1] > 2:
        return None
    if degrees[0] == 2:
        return _order_loop(ranks, traffic)
    first, last = traffic.first_is_send.get(ranks[0]), traffic.first_is_send.get(ranks[-1])
    if len(ranks) == 2 and _is_two_way(ranks, traffic):
        starter, later = ranks if first else ranks[::-1]
        if {first, last} != {True, False} or is_ring_exchange(by_rank[later], starter):
            return None
    backward = first is False or (first is None and last is True)
    return ranks[::-1] if backward else ranks


def _order_by_marks(ranks: Ranks, by_rank: Mapping[int, RankTrace]) -> Ranks | None:
    """The ranks in the order of their marked stages.

    () if ranks of one stage exchange messages, None without marks.
    """
    stages = {rank: read_marked_stage(by_rank[rank].events) for rank in ranks if rank in by_rank}
    numbers = {stage for stage in stages.values() if stage is not None}
    if len(stages) < len(ranks) or None in stages.values():
        return None
    return tuple(sorted(ranks, key=lambda r: stages[r] or 0)) if len(numbers) == len(ranks) else ()


def _is_two_way(ranks: Ranks, traffic: _Traffic) -> bool:
    return bool(traffic.sent[ranks[0], ranks[1]] and traffic.sent[ranks[1], ranks[0]])


def _order_loop(ranks: Ranks, traffic: _Traffic) -> Ranks | None:
    """The stages of an interleaved schedule: only one rank starts with a send, to the second
    stage."""
    starters = [rank for rank in ranks if traffic.first_is_send.get(rank, True)]
    if len(starters) != 1 or len(ranks) != len(traffic.first_is_send.keys() & set(ranks)):
        return None
    line = [starters[0], traffic.first_peer[starters[0]]]
    while len(line) < len(ranks):
        (following,) = traffic.neighbors[line[-1]] - {line[-2]}
        line.append(following)
    two_way = all(traffic.sent[b, a] for a, b in pairwise(line))
    return tuple(line) if two_way else None


def _is_ring(ranks: Ranks, traffic: _Traffic) -> bool:
    """Three or more ranks, each of which sends to one neighbor as much as it receives from the
    other."""
    if len(ranks) < 3 or any(len(traffic.neighbors[rank]) != 2 for rank in ranks):
        return False
    counts = {count for (source, _), count in traffic.sent.items() if source in ranks and count}
    ways = [ends for ends, count in traffic.sent.items() if ends[0] in ranks and count]
    starters = [rank for rank in ranks if traffic.first_is_send.get(rank, False)]
    one_way = len(ways) == len(ranks) == len({source for source, _ in ways})
    return one_way and len(counts) == 1 and len(starters) > 1


# The pipeline stage in a rank's own annotations.


def read_marked_stage(events: Events) -> int | None:
    """The first stage with marked work; None without marks."""
    return min((mark.stage for name in events.names for mark in parse_marks(name)), default=None)


# Distinguishing a ring of two ranks from a pipeline of two stages.

MIN_SHARE = 0.8
"""In a ring, at least this fraction of the compute between messages follows a send; the last stage
of a pipeline computes between receive and send."""


def is_ring_exchange(trace: RankTrace, peer: int) -> bool:
    """Whether nearly all compute between messages with the peer follows a send, as in a ring.

    Each round of a ring starts with an exchange. The last stage of a pipeline computes forward and
    backward between receive and send. Also true without any compute.
    """
    calls, events = trace.calls, trace.events
    rows = np.flatnonzero(calls.is_message & (calls.peer == peer))
    sends = calls.op[rows] == OP_CODE["send"]
    event = calls.event[rows]
    when = np.where(sends, events.start_ns[event], events.end_ns[event])
    order = np.lexsort((~sends, when))
    when, sends = when[order], sends[order]
    worked = np.diff(_sum_compute_until(collect_work(trace).compute, when))
    after_sending = sends[:-1] & ~sends[1:]
    return bool(worked[after_sending].sum() >= MIN_SHARE * worked.sum())


def _sum_compute_until(compute: Intervals, when: Int64) -> Int64:
    """The cumulative compute before each instant in ns."""
    done = np.concatenate(([0], np.cumsum(compute.end_ns - compute.start_ns)))
    last = np.searchsorted(compute.start_ns, when, side="right")
    if not len(compute.start_ns):
        return np.zeros(len(when), dtype=np.int64)
    running = np.clip(compute.end_ns[np.maximum(last - 1, 0)] - when, 0, None)
    return done[last] - np.where(last > 0, running, 0)
