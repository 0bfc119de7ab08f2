"""Blame: which rank caused each wait, and why.

A wait ends when the last rank arrives. The begin of the wait and that arrival each have a chain of
events that determined them, back to their last common event: paths of the dependency graph along
its binding dependencies. They begin at the same instant, so the wait is what the path of the last
rank has in addition: compute, copies, idle time (late host) or transfers, of whichever rank they
are. A rank that waited itself is thus not blamed for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import first_rows, group_ids, group_max, group_rows
from stepsplit.analyzer.buckets import TRANSFERS, WAITS, Bucket
from stepsplit.analyzer.diagnose.graph.dependency_graph import (
    LAUNCH_LATENCY_NS,
    WORK,
    DependencyGraph,
)
from stepsplit.analyzer.diagnose.graph.topological_order import Levels
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.kernels import KernelWork, compute_self_ns, find_kernel_work
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import Bool, Int32, Int64, RankTrace

Float = npt.NDArray[np.float64]

CAUSES = ("compute", "slower", "imbalance", "copy", "host", "transfer", "unexplained")
"""Kinds of time on a path. Compute is that of a usual rank; beside it stands what the rank computes
longer because it is slower, which is blamed as compute as well, or because it has more work. A
collective or message that starts late, though it was launched, its stream was free and the work
launched before it was done, is unexplained."""

_COMPUTES = 3
"""So many of the causes, the first ones, are compute."""


class Blame(Struct, frozen=True):
    """Waits that one rank (None: no single rank) caused on one axis in one step."""

    rank: int | None
    cause: str
    axis: str | None
    step: int
    skew_ns: int
    bubble_ns: int


def blame(split: RunSplit, graph: DependencyGraph) -> tuple[Blame, ...]:
    """Attributes all skew and bubble of all ranks to causes, each instant once.

    As much of a rank's bubble as its schedule makes inevitable is attributed to the schedule,
    starting with waits that no rank caused by above-average work. Delays that are no larger than
    their variation between steps are summed in rows of no rank, `variation`.
    """
    splits = [step.split for rank in split.ranks for step in rank.steps]
    if not any(one.skew_ns or one.bubble_ns for one in splits):
        return ()
    waits = ExposedWaits.collect(split, graph)
    paths = BindingPaths.build(split, graph)
    tree = PathTree.build(graph.levels, paths) if graph.levels.is_wide else None
    ideal_ns = _compute_ideal_ns(split)
    charges = _Charges.build(split, waits)
    unrecorded, schedule = np.zeros(len(waits)), np.zeros(len(waits))
    for rows in waits.list_parts():
        some = waits.select(rows)
        pairs = _compare_paths(graph, paths, tree, some)
        amount = _divide_by_cause(some, pairs.added)
        inevitable = _take_schedule_part(some, amount, ideal_ns)
        charges.add(some, pairs, paths, amount - inevitable)
        unrecorded[rows] = (amount - inevitable)[:, -1]
        schedule[rows] = inevitable.sum(axis=1)
    significant = _find_significant(graph, charges)
    shares = _collect_shares(
        waits, charges, significant, unrecorded, schedule, any(ideal_ns.values())
    )
    blamed = _build_rows(waits, shares)
    _check_blame(split.ranks, blamed)
    return blamed


def _compute_ideal_ns(split: RunSplit) -> Mapping[tuple[int, int], int]:
    """The ideal bubble of the schedule for each (rank, step), in ns."""
    ideal = (split.schedule.ideal_bubble_fraction if split.schedule else None) or 0.0
    return {
        (bubble.rank, bubble.step): int(bubble.window_ns * ideal) for bubble in split.stage_bubbles
    }


def _check_blame(ranks: Sequence[RankSplit], blamed: Sequence[Blame]) -> None:
    """Asserts that every instant of skew and bubble is blamed exactly once."""
    splits = [step.split for rank in ranks for step in rank.steps]
    for bucket, caused in (
        (Bucket.SKEW, [b.skew_ns for b in blamed]),
        (Bucket.BUBBLE, [b.bubble_ns for b in blamed]),
    ):
        total_ns = sum(split.buckets_ns[bucket] for split in splits)
        assert sum(caused) == total_ns, f"{bucket.label}: blamed {sum(caused)} of {total_ns} ns"


# The exposed waits of all ranks in one table.


_MOST_WAITS = 1 << 16
"""About so many waits are compared at once."""


class ExposedWaits(Struct, frozen=True):
    """The exposed waits of all ranks, by rank and time; columns of one length.

    A rank whose compute stands still may wait for several calls, one after the other. begin and
    last_arrival are nodes of the graph: where the rank's work stopped, and the arrival of the rank
    that it waited for last, both the same for all waits of a gap of compute; last_arrival is -1
    where the rank waited for is not recorded. moved_ns is the exposed transfer time in between.
    owner is the number of the rank waited for, -1 if unknown; origin numbers the pairs of axis and
    bucket.
    """

    rank: Int64
    owner: Int64
    step: Int64
    bucket: Int64
    origin: Int64
    length_ns: Int64
    begin: Int64
    last_arrival: Int64
    moved_ns: Int64
    axes: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def origins(self) -> int:
        """The number of pairs of axis and bucket."""
        return 2 * len(self.axes)

    @property
    def traced(self) -> Bool:
        """Which waits are for a recorded rank."""
        return self.last_arrival >= 0

    def iterate_by_axis(self, amounts: Sequence[int]) -> Iterator[tuple[str | None, int, int]]:
        """Yields (axis, skew, bubble) from amounts by origin."""
        for i, axis in enumerate(self.axes):
            yield axis, amounts[2 * i], amounts[2 * i + 1]

    def list_parts(self) -> list[slice]:
        """The rows of some ranks after the other, so few that their paths need little memory."""
        after_rank = np.flatnonzero(np.append(np.diff(self.rank) != 0, True)[: len(self)]) + 1
        _, first = np.unique((after_rank - 1) // _MOST_WAITS, return_index=True)
        ends = [*after_rank[first[1:] - 1].tolist(), len(self)]
        return [slice(*edges) for edges in pairwise([0, *ends])]

    def select(self, rows: slice) -> ExposedWaits:
        """Some of the waits."""
        *names, _ = self.__struct_fields__
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **columns)

    @classmethod
    def collect(cls, split: RunSplit, graph: DependencyGraph) -> ExposedWaits:
        """Collects the waits of all ranks."""
        all_rows = _ExposedRows.concatenate(split, graph)
        waits = all_rows.select(np.isin(all_rows.bucket, WAITS))
        axes = tuple(dict.fromkeys(waits.axis.tolist()))
        number = {axis: i for i, axis in enumerate(axes)}
        axis = np.array([number[name] for name in waits.axis.tolist()], dtype=np.int64)
        arrival = _find_owner_arrivals(split, graph, waits)
        gap = group_ids(waits.place, waits.gap)
        count = int(gap.max(initial=-1)) + 1
        order = np.lexsort((waits.end_ns, arrival >= 0, gap))
        last = order[np.append(np.diff(gap[order]) > 0, True)[: len(order)]]
        moves = all_rows.select(np.isin(all_rows.bucket, TRANSFERS))
        return cls(
            rank=np.array([rank.trace.rank for rank in split.ranks])[waits.place],
            owner=waits.owner,
            step=waits.step,
            bucket=waits.bucket,
            origin=2 * axis + (waits.bucket == Bucket.BUBBLE),
            length_ns=waits.length_ns,
            begin=-group_max(gap, -waits.node, count)[gap],
            last_arrival=np.where(arrival >= 0, arrival[last][gap], -1),
            moved_ns=_sum_moved_ns(moves, waits, last)[gap],
            axes=axes,
        )


@dataclass(frozen=True, slots=True)
class _ExposedRows:
    """Exposed communication of all ranks; columns of one length.

    place indexes the ranks, row all calls; gap numbers the gaps of compute of a rank. start_ns and
    end_ns are on the common clock, length_ns on the rank's own. node is the timeline node at the
    start.
    """

    place: Int64
    row: Int64
    gap: Int64
    bucket: Int64
    owner: Int64
    step: Int64
    node: Int64
    start_ns: Int64
    end_ns: Int64
    length_ns: Int64
    axis: npt.NDArray[np.object_]

    @classmethod
    def concatenate(cls, split: RunSplit, graph: DependencyGraph) -> _ExposedRows:
        """The rows of all ranks."""
        parts = [cls._list_rows(split, graph, i, rank) for i, rank in enumerate(split.ranks)]
        columns: list[Any] = [
            np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)
        ]
        return cls(*columns)

    @classmethod
    def _list_rows(
        cls, split: RunSplit, graph: DependencyGraph, place: int, rank: RankSplit
    ) -> _ExposedRows:
        exposed, to_common = rank.attribution.exposed, rank.clock.map_to_common_ns
        return cls(
            place=np.full(len(exposed.call), place, dtype=np.int64),
            row=exposed.call + split.matched.slice_trace(place).start,
            gap=rank.attribution.gap[exposed.call],
            bucket=exposed.bucket.astype(np.int64),
            owner=exposed.owner.astype(np.int64),
            step=np.array(rank.numbers, dtype=np.int64)[exposed.window],
            node=graph.timelines.find(place, to_common(exposed.start_ns)),
            start_ns=to_common(exposed.start_ns),
            end_ns=to_common(exposed.end_ns),
            length_ns=exposed.end_ns - exposed.start_ns,
            axis=np.array(rank.axis, dtype=np.object_),
        )

    def select(self, rows: Bool) -> _ExposedRows:
        """Some of the rows."""
        columns: list[Any] = [getattr(self, one.name)[rows] for one in fields(self)]
        return _ExposedRows(*columns)


def _sum_moved_ns(moves: _ExposedRows, waits: _ExposedRows, last: Int64) -> Int64:
    """The exposed transfer time of each gap before the end of its last wait."""
    found = _look_up(
        waits.place[last] << 32 | waits.gap[last],
        np.arange(len(last)),
        moves.place << 32 | moves.gap,
    )
    before = np.flatnonzero((found >= 0) & (moves.start_ns < waits.end_ns[last[found]]))
    total = np.zeros(len(last), dtype=np.int64)
    np.add.at(total, found[before], moves.length_ns[before])
    return total


def _find_owner_arrivals(split: RunSplit, graph: DependencyGraph, waits: _ExposedRows) -> Int64:
    """The arrival of the rank waited for at each wait's call, -1 if it is not recorded.

    A kernel of several messages waits for the peer of one of them, whichever the wait is part of.
    """
    matched, of_row = split.matched, graph.kernels.of_row
    index = {rank.trace.rank: i for i, rank in enumerate(split.ranks)}
    who = np.array([index.get(rank, -1) for rank in waits.owner.tolist()], dtype=np.int64)
    many, known = len(split.ranks), np.flatnonzero((matched.shared >= 0) & matched.leads)
    call = matched.shared[waits.row]
    member = matched.shared[known] * many + matched.trace[known]
    found = _look_up(member, known, np.where(call >= 0, call * many + who, -1))
    messages = known[matched.is_message[known]]
    order = messages[np.argsort(matched.shared[messages], kind="stable")]
    pair = np.flatnonzero(matched.shared[order][1:] == matched.shared[order][:-1])
    end = np.concatenate((order[pair], order[pair + 1]))
    other = np.concatenate((order[pair + 1], order[pair]))
    peer = _look_up(
        of_row[end] * many + matched.trace[other], other, of_row[waits.row] * many + who
    )
    found = np.where(who >= 0, np.where(found >= 0, found, peer), -1)
    return np.where(found >= 0, graph.kernels.start[of_row[found]], -1)


def _look_up(keys: Int64, values: Int64, wanted: Int64) -> Int64:
    """The value of the first of the keys that equals each wanted one, -1 for none."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    return np.where(keys[order][at] == wanted, values[order][at], -1)


# Paths back along the binding dependencies.


class BindingPaths(Struct, frozen=True):
    """The binding dependencies of a graph, with the time that each node adds to its path.

    spent_ns, shape (nodes + 1, CAUSES), is the time from the binding predecessor to the node, of
    rank (an index, -1 for a synchronization). The last row stands for the begin of the recording:
    previous leads to it from all nodes without a predecessor.
    """

    previous: Int32
    rank: Int32
    spent_ns: Float

    @classmethod
    def build(cls, split: RunSplit, graph: DependencyGraph) -> BindingPaths:
        """The paths of the recording, as measured."""
        begin, kernels = len(graph), graph.kernels
        spent = np.zeros((begin + 1, len(CAUSES)))
        along = np.flatnonzero((graph.binding == graph.before) & (graph.before >= 0))
        work = {kind: graph.work_ns[along, i] for i, kind in enumerate(WORK)}
        slower, more = _list_workloads(split)[graph.step[along]].T
        spent[along, CAUSES.index("compute")] = work["compute"] * (1 - slower - more)
        spent[along, CAUSES.index("slower")] = work["compute"] * slower
        spent[along, CAUSES.index("imbalance")] = work["compute"] * more
        spent[along, CAUSES.index("copy")] = work["copy"]
        spent[along, CAUSES.index("host")] = work["idle"]
        bound = graph.binding >= 0
        late, moved = (nodes[bound[nodes]] for nodes in (kernels.start, kernels.end))
        launched = _find_launches_ns(split, graph)[bound[kernels.start]]
        host = np.clip(launched + LAUNCH_LATENCY_NS - graph.at_ns[graph.binding[late]], 0, None)
        delay = np.maximum(graph.rest_ns[late], 0)
        host = np.where(delay <= LAUNCH_LATENCY_NS, delay, np.minimum(host, delay))
        spent[late, CAUSES.index("host")] += host
        spent[late, CAUSES.index("unexplained")] += delay - host
        spent[moved, CAUSES.index("transfer")] += np.maximum(graph.rest_ns[moved], 0)
        previous = np.append(np.where(bound, graph.binding, begin), begin).astype(np.int32)
        rank = np.append(graph.find_ranks(np.arange(begin)), -1).astype(np.int32)
        return cls(previous, rank, spent)


def _find_launches_ns(split: RunSplit, graph: DependencyGraph) -> Int64:
    """When each collective and message was launched, on the common clock; the smallest int64 / 2 if
    unknown."""
    kernels = graph.kernels
    launched = np.full(len(kernels), np.iinfo(np.int64).min // 2)
    for i, rank in enumerate(split.ranks):
        mine = kernels.list_rows(i)
        own = rank.trace.events.find_launch_ns(rank.trace.calls.event[kernels.call[mine]])
        launched[mine] = np.where(own >= 0, rank.clock.map_to_common_ns(own), launched[mine])
    return launched


def _list_workloads(split: RunSplit) -> Float:
    """The slower and the additional fraction of compute in each step of all ranks."""
    loads = compute_workloads(
        [rank.trace for rank in split.ranks],
        [rank.windows.windows for rank in split.ranks],
        [split.layout.find_stage(rank.trace.rank) for rank in split.ranks],
    )
    both: Float = np.concatenate([np.stack((one.slower, one.more), axis=1) for one in loads])
    return both


class _PathPairs(Struct, frozen=True):
    """The two paths of each wait, back to their last common node.

    added is the time that the path of the rank waited for has in addition, waited_for the time of
    that path alone; both of shape (waits, CAUSES). parts are (rows of waits, ranks, times by
    cause): parts of the paths of the ranks waited for.
    """

    added: Float
    waited_for: Float
    parts: Iterator[tuple[Int64, Int64, Float]]


def _compare_paths(
    graph: DependencyGraph, paths: BindingPaths, tree: PathTree | None, waits: ExposedWaits
) -> _PathPairs:
    """The paths of these waits: node by node, or with a tree, if there are many ranks."""
    pairs = _compare_in_tree(tree, waits) if tree else _compare_by_node(graph, paths, waits)
    pairs.added[:, CAUSES.index("transfer")] -= waits.moved_ns
    return pairs


def _compare_in_tree(tree: PathTree, waits: ExposedWaits) -> _PathPairs:
    own = tree.place[waits.begin]
    other = np.where(waits.traced, tree.place[waits.last_arrival], own)
    common = tree.find_common(own, other)
    waited_for = tree.total_ns[other] - tree.total_ns[common]
    added = waited_for - (tree.total_ns[own] - tree.total_ns[common])
    return _PathPairs(added, waited_for, tree.follow(other, common))


def _compare_by_node(
    graph: DependencyGraph, paths: BindingPaths, waits: ExposedWaits
) -> _PathPairs:
    """Follows both paths of each wait back, always that of the later node in topological order."""
    position = np.full(len(graph) + 1, -1)
    position[graph.levels.node] = np.arange(len(graph))
    common = waits.begin.copy()
    added, waited_for = (np.zeros((len(common), len(CAUSES))) for _ in range(2))
    rows = np.flatnonzero(waits.traced & (waits.begin != waits.last_arrival))
    first, other = waits.begin[rows], waits.last_arrival[rows]
    while len(rows):
        later = position[other] > position[first]
        spent_ns = paths.spent_ns[other[later]]
        added[rows[later]] += spent_ns
        waited_for[rows[later]] += spent_ns
        added[rows[~later]] -= paths.spent_ns[first[~later]]
        first = np.where(later, first, paths.previous[first])
        other = np.where(later, paths.previous[other], other)
        apart = first != other
        common[rows[~apart]] = first[~apart]
        rows, first, other = rows[apart], first[apart], other[apart]
    return _PathPairs(added, waited_for, _follow_paths(paths, waits, common))


def _divide_by_cause(waits: ExposedWaits, added: Float) -> Float:
    """The length of each wait by cause, shape (waits, CAUSES + 1); the last column is a wait for a
    rank that is not recorded."""
    share: Float = np.append(np.maximum(added, 0.0), np.zeros((len(added), 1)), axis=1)
    share[:, :_COMPUTES] = _divide_compute(added[:, :_COMPUTES])
    share[~waits.traced] = np.arange(len(CAUSES) + 1) == len(CAUSES)
    share[share.sum(axis=1) <= 0, CAUSES.index("transfer")] = 1.0
    share *= (waits.length_ns / share.sum(axis=1))[:, np.newaxis]
    return share


def _divide_compute(added: Float) -> Float:
    """Additional compute: what is due to a slower rank or more work first, the rest usual."""
    total = np.maximum(added.sum(axis=1, keepdims=True), 0.0)
    excess = np.maximum(added[:, 1:], 0.0)
    excess *= np.minimum(1.0, total / np.maximum(excess.sum(axis=1, keepdims=True), 1e-9))
    divided: Float = np.append(total - excess.sum(axis=1, keepdims=True), excess, axis=1)
    return divided


def _take_schedule_part(
    waits: ExposedWaits, amount: Float, ideal_ns: Mapping[tuple[int, int], int]
) -> Float:
    """The part of each amount that the schedule itself causes, first from usual compute."""
    part = np.zeros_like(amount)
    usual = CAUSES.index("compute")
    bubble = np.flatnonzero(waits.bucket == Bucket.BUBBLE)
    order, first = group_rows(group_ids(waits.rank[bubble], waits.step[bubble]))
    for rows in np.split(bubble[order], first[1:]) if len(bubble) else []:
        ideal = ideal_ns.get((int(waits.rank[rows[0]]), int(waits.step[rows[0]])), 0)
        free = float(amount[rows, usual].sum())
        part[rows, usual] = amount[rows, usual] * (min(ideal, free) / free if free else 0.0)
        rest = amount[rows] - part[rows]
        left = min(float(ideal), float(amount[rows].sum())) - float(part[rows].sum())
        part[rows] += rest * (left / float(rest.sum()) if left > 0 and rest.any() else 0.0)
    return part


# Waits charged to the ranks on the paths.


class _Charges(Struct, frozen=True):
    """The waits that each rank caused; table has the shape (ranks, steps, origins, CAUSES)."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    table: Float

    @classmethod
    def build(cls, split: RunSplit, waits: ExposedWaits) -> _Charges:
        """An empty table for these waits."""
        ranks = tuple(rank.trace.rank for rank in split.ranks)
        steps = tuple(np.unique(waits.step).tolist())
        return cls(ranks, steps, np.zeros((len(ranks), len(steps), waits.origins, len(CAUSES))))

    def add(
        self, waits: ExposedWaits, pairs: _PathPairs, paths: BindingPaths, amount: Float
    ) -> None:
        """Distributes the amounts of these waits over the paths of the ranks waited for, in
        proportion to their time."""
        total, recorded = pairs.waited_for, amount[:, : len(CAUSES)]
        density = np.divide(recorded, total, out=np.zeros_like(recorded), where=total > 0)
        step = np.searchsorted(self.steps, waits.step)
        flat = self.table.reshape(-1)
        for rows, rank, spent_ns in pairs.parts:
            part, cause = np.nonzero(spent_ns)
            row = rows[part]
            cell = (rank[part], step[row], waits.origin[row], cause)
            spent = density[row, cause] * spent_ns[part, cause]
            np.add.at(flat, np.ravel_multi_index(cell, self.table.shape), spent)
        rest = np.flatnonzero(waits.traced & ((recorded > 0) & (total <= 0)).any(axis=1))
        cells = (paths.rank[waits.last_arrival[rest]], step[rest], waits.origin[rest])
        np.add.at(self.table, cells, np.where(total[rest] > 0, 0.0, recorded[rest]))


def _follow_paths(
    paths: BindingPaths, waits: ExposedWaits, common: Int64
) -> Iterator[tuple[Int64, Int64, Float]]:
    """Yields (rows of waits, ranks, times by cause) for the nodes of ranks on the paths of the
    ranks waited for."""
    rows = np.flatnonzero(waits.traced)
    node = waits.last_arrival[rows]
    while len(rows := rows[(ahead := node != common[rows])]):
        node = node[ahead]
        of_rank = paths.rank[node] >= 0
        yield rows[of_rank], paths.rank[node[of_rank]], paths.spent_ns[node[of_rank]]
        node = paths.previous[node]


# A cause counts only beyond its variation between steps.

_SIGNIFICANCE = 3.0
"""A rank is blamed if what it causes exceeds that of the median rank by this many standard errors,
or its work that of the median of its peers."""

_NEARLY_ALL = 0.9
"""Its work must exceed theirs in this share of the steps, too: of a few steps the error is hardly
known."""

_OUTLIER = 6.0
"""A rank is blamed in a step in which its work exceeds its median step by this many standard
deviations."""


def _find_significant(graph: DependencyGraph, charges: _Charges) -> Bool:
    """Which (rank, step, cause) are more than variation, shape (ranks, steps, CAUSES); all of them
    in a recording of one step.

    A rank causes waits in all steps if their mean is significant, or that of its work: a step of
    which the waits are not known has work too. It causes waits in one step if its work there is an
    outlier. Steps that a rank did not record say nothing about it.
    """
    per_step = charges.table.sum(axis=2)
    if per_step.shape[1] < 2:
        return np.ones(per_step.shape, dtype=np.bool_)
    steps = np.unique(graph.steps.step)
    work = _sum_work(graph, len(charges.ranks), steps)
    recorded: Bool = np.asarray(~np.isnan(work).all(axis=2))
    charged = np.searchsorted(steps, charges.steps)
    lasting = _find_lasting_causes(per_step, recorded[:, charged])
    lasting |= _find_lasting_work(work, recorded)
    return np.asarray(lasting[:, np.newaxis] | _find_outliers(work, recorded)[:, charged])


def _find_lasting_causes(caused: Float, recorded: Bool) -> Bool:
    """Which (rank, cause) cause significantly more than the median rank; caused has shape (ranks,
    steps, CAUSES). The standard error is that of the rank's steps or, if larger, of all ranks."""
    known, steps = recorded[:, :, np.newaxis], recorded.sum(axis=1)[:, np.newaxis]
    mean = _divide(caused.sum(axis=1, where=known), steps)
    squares = ((caused - mean[:, np.newaxis]) ** 2).sum(axis=1, where=known)
    variance, several = _divide(squares, steps - 1), steps[:, 0] > 1
    usual = variance[several].mean(axis=0) if several.any() else np.zeros(len(CAUSES))
    error = np.sqrt(_divide(np.maximum(variance, usual), steps))
    return np.asarray(mean - np.median(mean[steps[:, 0] > 0], axis=0) > _SIGNIFICANCE * error)


def _find_lasting_work(work: Float, recorded: Bool) -> Bool:
    """Which (rank, cause) have significantly more work than the median of the other ranks in the
    same steps, and nearly always: of two steps twice as much, of five a quarter more. Work that
    varies by a quarter is so in fewer than 1 % of recordings. A transfer is no work of one member
    more than of another."""
    lasting = np.zeros((len(work), len(CAUSES)), dtype=np.bool_)
    ranks = np.flatnonzero(recorded.any(axis=1))
    common = np.flatnonzero(recorded[ranks].all(axis=0))
    if len(ranks) < 2 or len(common) < 2:
        return lasting
    known = work[np.ix_(ranks, common)]
    peers = _take_median_of_others(known)
    excess = known - peers
    error = excess.std(axis=1, ddof=1) / math.sqrt(len(common))
    is_large = (excess > peers / (len(common) - 1)).mean(axis=1) >= _NEARLY_ALL
    own = np.array([cause != "transfer" for cause in CAUSES])
    lasting[ranks] = (excess.mean(axis=1) > _SIGNIFICANCE * error) & is_large & own
    return lasting


def _take_median_of_others(values: Float) -> Float:
    """For each of two or more rows the median of the other rows, by column."""
    others = len(values) - 1
    place = values.argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    ordered = np.sort(values, axis=0)
    low, high = (
        np.take_along_axis(ordered, middle + (middle >= place), axis=0)
        for middle in ((others - 1) // 2, others // 2)
    )
    return np.asarray((low + high) / 2)


def _divide(amount: Float, count: Int64) -> Float:
    """The amount over the count, 0 where that is not positive."""
    return np.divide(amount, count, out=np.zeros_like(amount), where=count > 0)


def _find_outliers(work: Float, recorded: Bool) -> Bool:
    """Which (rank, step, cause) have far more work than the rank's median step."""
    known = recorded.any(axis=1)
    if not known.any():
        return np.zeros(work.shape, dtype=np.bool_)
    beyond = np.full(work.shape, np.nan)
    beyond[known] = work[known] - np.nanmedian(work[known], axis=1, keepdims=True)
    deviation = SIGMA_OF_MAD * np.nanmedian(np.abs(beyond), axis=(0, 1))
    return np.asarray(beyond > _OUTLIER * deviation)


def _sum_work(graph: DependencyGraph, ranks: int, steps: Int64) -> Float:
    """The time that each rank spends per step on what each cause is about, shape (ranks, steps,
    CAUSES); nan for a step that a rank does not have."""
    kernels, ends = graph.kernels, graph.rest_ns[graph.kernels.end]
    of_row = np.zeros((len(graph.steps.rank), len(WORK) + 1))
    nodes = np.flatnonzero(graph.step >= 0)
    for column in range(len(WORK)):
        np.add.at(of_row[:, column], graph.step[nodes], graph.work_ns[nodes, column])
    moved = np.flatnonzero((kernels.step >= 0) & (ends > 0))
    np.add.at(of_row[:, -1], kernels.step[moved], ends[moved])
    table = np.full((ranks, len(steps), len(WORK) + 1), np.nan)
    table[graph.steps.rank, np.searchsorted(steps, graph.steps.step)] = of_row
    compute, copy, idle = (WORK.index(kind) for kind in ("compute", "copy", "idle"))
    return table[:, :, [compute, compute, compute, copy, idle, len(WORK), idle]]


_Key = tuple[int | None, str, int]


def _collect_shares(
    waits: ExposedWaits,
    charges: _Charges,
    significant: Bool,
    unrecorded: Float,
    schedule: Float,
    has_ideal: bool,
) -> dict[_Key, Float]:
    """The caused waits of each (rank, cause, step) by origin; unrecorded and schedule have one
    amount per wait. Without an ideal bubble, how much of a bubble is the schedule's is unknown."""
    shares: dict[_Key, Float] = {}
    for who, at, kind in zip(*np.nonzero(charges.table.any(axis=2)), strict=True):
        key = _name_cause(charges.ranks[who], CAUSES[kind], bool(significant[who, at, kind]))
        amount, step = charges.table[who, at, :, kind], charges.steps[at]
        if key == (None, "variation") and CAUSES[kind] == "compute" and not has_ideal:
            bubble = np.arange(waits.origins) % 2 == 1
            _add_share(shares, (None, "unknown", step), np.where(bubble, amount, 0.0))
            amount = np.where(bubble, 0.0, amount)
        _add_share(shares, (*key, step), amount)
    missing = np.where(waits.owner >= 0, unrecorded, 0.0)
    _add_waits(shares, waits, waits.owner, "missing", missing)
    no_rank = np.full(len(waits.owner), -1)
    _add_waits(shares, waits, no_rank, "unknown", unrecorded - missing)
    _add_waits(shares, waits, no_rank, "schedule", schedule)
    return shares


def _name_cause(rank: int, kind: str, significant: bool) -> tuple[int | None, str]:
    """(rank, cause) as reported; rank None for what is not the fault of one rank."""
    if kind == "unexplained":
        return None, kind
    if not significant:
        return None, "variation"
    return rank, "compute" if kind == "slower" else kind


def _add_waits(
    shares: dict[_Key, Float], waits: ExposedWaits, owner: Int64, cause: str, amount: Float
) -> None:
    """Adds an amount of each wait to the shares of its owner (-1: no rank)."""
    label = group_ids(owner, waits.step)
    first = first_rows(label)
    sums = np.zeros((len(first), waits.origins))
    np.add.at(sums, (label, waits.origin), amount)
    for rank, step, row in zip(
        owner[first].tolist(), waits.step[first].tolist(), sums, strict=True
    ):
        if row.any():
            _add_share(shares, (None if rank < 0 else rank, cause, step), row)


def _add_share(shares: dict[_Key, Float], key: _Key, amount: Float) -> None:
    shares[key] = shares[key] + amount if key in shares else amount


# Whole nanoseconds.


def _build_rows(waits: ExposedWaits, shares: Mapping[_Key, Float]) -> tuple[Blame, ...]:
    """The shares in whole ns, which add up exactly to the waits of each origin."""
    keys = list(shares)
    table = np.stack([shares[key] for key in keys])
    whole = np.zeros(table.shape, dtype=np.int64)
    for origin in range(waits.origins):
        total = int(waits.length_ns[waits.origin == origin].sum())
        whole[:, origin] = _round_to_total(table[:, origin], total)
    rows = []
    for key, row in zip(keys, whole, strict=True):
        for axis, skew, bubble in waits.iterate_by_axis(row.tolist()):
            if skew or bubble:
                rows.append(Blame(key[0], key[1], axis, key[2], skew, bubble))
    return tuple(rows)


def _round_to_total(amount: Float, total: int) -> Int64:
    """Rounds the amounts to whole numbers that add up to total (largest remainders)."""
    scale = total / float(amount.sum()) if amount.any() else 0.0
    exact = amount * scale
    whole = np.floor(exact).astype(np.int64)
    short = total - int(whole.sum())
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: max(short, 0)]] += 1
    for row in order[::-1][: max(-short, 0)].tolist():
        whole[row] -= 1
    return whole


# Why a rank computes longer than others: slower kernels, or more work.


class Workload(Struct, frozen=True):
    """The fraction of a rank's compute beyond that of its peers, per window, 0..1.

    slower: the same kernels took longer than on the median rank; more: it ran more kernels, or the
    same on larger inputs. Both of shape (windows,).
    """

    slower: Float
    more: Float


def compute_workloads(
    traces: Sequence[RankTrace], windows: Sequence[Sequence[StepWindow]], stages: Sequence[int]
) -> list[Workload]:
    """The workload of every rank; stages has one entry per trace.

    Kernels are identified by name and shapes; without shapes, the kernels of the only rank of a
    stage are compared with no others.
    """
    peers = Counter(stages)
    tables = [
        _build_kernel_table(trace, own, None if peers[stage] > 1 or len(peers) == 1 else stage)
        for trace, own, stage in zip(traces, windows, stages, strict=True)
    ]
    usual_ns = _compute_median_ns(tables)
    work = [table.count @ usual for table, usual in zip(tables, usual_ns, strict=True)]
    fair = _compute_expected_ns(work, windows)
    return [
        _compute_workload(table.total_ns.sum(axis=1), done, expected)
        for table, done, expected in zip(tables, work, fair, strict=True)
    ]


class _KernelTable(Struct, frozen=True):
    """Number of runs and total time of each kernel of a rank per window, shape (windows, work).

    work holds what ranks have in common: the kernel, and its stage if it is comparable only there.
    """

    work: tuple[tuple[KernelWork, int | None], ...]
    count: Int64
    total_ns: Int64


def _build_kernel_table(
    trace: RankTrace, windows: Sequence[StepWindow], only_stage: int | None
) -> _KernelTable:
    events = trace.events
    rows = np.flatnonzero(trace.kinds.computes)
    took = events.dur_ns[rows] if trace.on_device else compute_self_ns(events, rows)
    window = np.searchsorted([w.start_ns for w in windows], events.start_ns[rows], side="right") - 1
    rows, took, window = rows[window >= 0], took[window >= 0], window[window >= 0]
    work, work_id = find_kernel_work(trace, rows)
    shape = (len(windows), len(work))
    cell = window * shape[1] + work_id
    count = np.bincount(cell, minlength=shape[0] * shape[1])
    total = np.bincount(cell, weights=took, minlength=shape[0] * shape[1])
    comparable = ((one, only_stage if one.shapes is None else None) for one in work)
    return _KernelTable(
        tuple(comparable), count.reshape(shape), total.astype(np.int64).reshape(shape)
    )


def _compute_median_ns(tables: Sequence[_KernelTable]) -> list[Float]:
    """For each rank, the duration of each of its kernels on the median rank that runs it."""
    numbers: dict[tuple[KernelWork, int | None], int] = {}
    place = [
        np.array([numbers.setdefault(one, len(numbers)) for one in table.work], dtype=np.int64)
        for table in tables
    ]
    label = np.concatenate(place)
    mean = np.concatenate([t.total_ns.sum(axis=0) / t.count.sum(axis=0) for t in tables])
    order = np.lexsort((mean, label))
    first = np.searchsorted(label[order], np.arange(len(numbers) + 1))
    low, high = (first[:-1] + first[1:] - 1) // 2, (first[:-1] + first[1:]) // 2
    usual = (mean[order][low] + mean[order][high]) / 2
    return [usual[own] for own in place]


def _compute_expected_ns(
    work: Sequence[Float], windows: Sequence[Sequence[StepWindow]]
) -> list[Float]:
    """The work of the median rank in the steps of each rank's windows."""
    done: dict[int, list[float]] = {}
    for own, amounts in zip(windows, work, strict=True):
        for window, amount in zip(own, amounts.tolist(), strict=True):
            done.setdefault(window.step, []).append(amount)
    fair = {step: float(np.median(amounts)) for step, amounts in done.items()}
    return [np.array([fair[window.step] for window in own]) for own in windows]


def _compute_workload(actual_ns: Int64, work_ns: Float, fair_ns: Float) -> Workload:
    whole = np.maximum(actual_ns, 1)
    slower = np.clip((actual_ns - work_ns) / whole, 0, 1)
    more = np.clip((work_ns - fair_ns) / whole, 0, 1 - slower)
    return Workload(slower, more)


# The tree of binding dependencies, along which the waits of many ranks are blamed.

_MANTISSA_BITS = 52


class PathTree(Struct, frozen=True):
    """A tree whose places are numbered from the begin of the recording, 0, so that each follows its
    parent; columns by place.

    place is by node. jump is an ancestor at a distance that allows a search in a logarithmic number
    of steps (a skew-binary jump pointer), and leave the first ancestor on another rank. total_ns,
    shape (places, causes), is the time from the begin, in a unit in which sums are exact.
    """

    place: Int32
    parent: Int32
    depth: Int32
    jump: Int32
    leave: Int32
    rank: Int32
    total_ns: Float

    @classmethod
    def build(cls, levels: Levels, paths: BindingPaths) -> PathTree:
        """The tree of the nodes in these levels; takes over the memory of paths.spent_ns, of which
        there are hundreds of megabytes."""
        previous, rank, spent_ns = paths.previous, paths.rank, paths.spent_ns
        count = len(previous)
        order = np.append(np.int32(count - 1), levels.node)
        place = np.empty(count, dtype=np.int32)
        place[order] = np.arange(count)
        parent = place[previous[order]]
        for cause in range(spent_ns.shape[1]):
            spent_ns[:, cause] = spent_ns[order, cause]
        total_ns = _round_to_unit(spent_ns, rank[order])
        depth, jump, leave = (np.zeros(count, dtype=np.int32) for _ in range(3))
        own_rank = rank[order]
        for low, high in pairwise((levels.first + 1).tolist()):
            here, before = slice(low, high), parent[low:high]
            far = jump[before]
            depth[here] = depth[before] + 1
            even = depth[before] - depth[far] == depth[far] - depth[jump[far]]
            jump[here] = np.where(even, jump[far], before)
            leave[here] = np.where(own_rank[here] == own_rank[before], leave[before], before)
            total_ns[here] += total_ns[before]
        return cls(place, parent, depth, jump, leave, own_rank, total_ns)

    def find_common(self, first: Int32, second: Int32) -> Int32:
        """The last common place of the paths of each pair of places."""
        depth, first, second = self.depth, first.copy(), second.copy()
        swap = depth[first] > depth[second]
        first[swap], second[swap] = second[swap], first[swap]
        rows = np.flatnonzero(depth[second] > depth[first])
        while len(rows):
            deep, wanted = second[rows], depth[first[rows]]
            far = self.jump[deep]
            second[rows] = np.where(depth[far] >= wanted, far, self.parent[deep])
            rows = rows[depth[second[rows]] > wanted]
        rows = np.flatnonzero(first != second)
        while len(rows):
            one, other = first[rows], second[rows]
            apart = self.jump[one] != self.jump[other]
            first[rows] = np.where(apart, self.jump[one], self.parent[one])
            second[rows] = np.where(apart, self.jump[other], self.parent[other])
            rows = rows[first[rows] != second[rows]]
        return first

    def follow(self, place: Int32, until: Int32) -> Iterator[tuple[Int64, Int64, Float]]:
        """Yields (rows, ranks, times by cause): what the path of each row spends on one rank after
        the other, back to a place of it."""
        rows = np.flatnonzero(place != until)
        at, end = place[rows], until[rows]
        while len(rows):
            left = np.maximum(self.leave[at], end)
            yield rows, self.rank[at].astype(np.int64), self.total_ns[at] - self.total_ns[left]
            ahead = left != end
            rows, at, end = rows[ahead], left[ahead], end[ahead]


def _round_to_unit(spent_ns: Float, rank: Int32) -> Float:
    """The times as multiples of a power of two, so small that rounding does not count and so large
    that the time along any path is exact; no path takes longer than some rank was recorded."""
    longest = 4 * np.bincount(rank + 1, spent_ns.sum(axis=1)).max(initial=1.0)
    unit = 2.0 ** (np.ceil(np.log2(longest)) - _MANTISSA_BITS)
    spent_ns /= unit
    np.rint(spent_ns, out=spent_ns)
    spent_ns *= unit
    return spent_ns
