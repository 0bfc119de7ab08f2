"""The exposed waits of all ranks in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import group_ids, group_max, join_tables, select_rows
from stepsplit.analyzer.buckets import TRANSFERS, WAITS, Bucket
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import Bool, Int64

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
        waits = select_rows(all_rows, np.isin(all_rows.bucket, WAITS))
        axes = tuple(dict.fromkeys(waits.axis.tolist()))
        number = {axis: i for i, axis in enumerate(axes)}
        axis = np.array([number[name] for name in waits.axis.tolist()], dtype=np.int64)
        arrival = _find_owner_arrivals(split, graph, waits)
        gap = group_ids(waits.place, waits.gap)
        count = int(gap.max(initial=-1)) + 1
        order = np.lexsort((waits.end_ns, arrival >= 0, gap))
        last = order[np.append(np.diff(gap[order]) > 0, True)[: len(order)]]
        moves = select_rows(all_rows, np.isin(all_rows.bucket, TRANSFERS))
        # The exposed transfer time of each gap before its last wait ends.
        wait_key = waits.place[last] << 32 | waits.gap[last]
        found = _look_up(wait_key, np.arange(len(last)), moves.place << 32 | moves.gap)
        before = np.flatnonzero((found >= 0) & (moves.start_ns < waits.end_ns[last[found]]))
        moved_ns = np.zeros(len(last), dtype=np.int64)
        np.add.at(moved_ns, found[before], moves.length_ns[before])
        return cls(
            rank=np.array([rank.trace.rank for rank in split.ranks])[waits.place],
            owner=waits.owner,
            step=waits.step,
            bucket=waits.bucket,
            origin=2 * axis + (waits.bucket == Bucket.BUBBLE),
            length_ns=waits.length_ns,
            begin=-group_max(gap, -waits.node, count)[gap],
            last_arrival=np.where(arrival >= 0, arrival[last][gap], -1),
            moved_ns=moved_ns[gap],
            axes=axes,
        )


class _ExposedRows(Struct, frozen=True):
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
        return join_tables(*parts)

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
