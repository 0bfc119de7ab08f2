"""The topological order of a dependency graph, and the times that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import list_ranges
from stepsplit.analyzer.trace import Bool, Int32, Int64

NEVER = -(1 << 61)
"""The time of an event that does not happen; no event waits for it."""

_WIDE = 16
"""Mean number of nodes in a level, about that of ranks, from which a level is computed at once."""


class Needs(Struct, frozen=True):
    """The dependencies between nodes other than along a timeline: node i needs the nodes
    source[first[i] : first[i + 1]]."""

    first: Int32
    source: Int32

    def of_node(self, node: int) -> list[int]:
        """The nodes that this node needs."""
        source: list[int] = self.source[self.first[node] : self.first[node + 1]].tolist()
        return source

    def with_changed(self, needs: Mapping[int, Sequence[int]], added: int = 0) -> Needs:
        """These dependencies, of some nodes the given ones, and `added` further nodes with none.

        Lists are made for the changed nodes alone: a graph has a million nodes.
        """
        nodes = np.fromiter(needs, np.int64, len(needs))
        before = np.append(np.diff(self.first), np.zeros(added, dtype=np.int32))
        counts, is_kept = before.copy(), np.ones(len(before), dtype=np.bool_)
        counts[nodes] = [len(own) for own in needs.values()]
        is_kept[nodes] = False
        first = np.append(0, np.cumsum(counts)).astype(np.int32)
        source = np.empty(int(first[-1]), dtype=np.int32)
        source[np.repeat(is_kept, counts)] = self.source[np.repeat(is_kept, before)]
        for node, own in needs.items():
            source[first[node] : first[node + 1]] = own
        return Needs(first, source)


class Levels(Struct, frozen=True):
    """The nodes in topological order, level by level: a node depends on earlier levels only.

    node[i] is the node of row i and row[j] the row of node j; level k has the rows from first[k] to
    first[k + 1]. Row i depends on the rows source[edge[i] : edge[i + 1]]: the one before it on the
    timeline, then those that it needs. Instead of a row that does not exist, source has the number
    of rows.
    """

    node: Int32
    row: Int32
    first: Int64
    edge: Int32
    source: Int64

    @classmethod
    def build(cls, before: Int32, needs: Needs, measured_ns: Int64) -> Levels:
        """The levels of the nodes.

        Small clock errors can create cycles between ranks; they are broken at the earliest node.
        """
        # The predecessors of all nodes, and the first of each: the one before it on its timeline,
        # then those that it needs.
        places = np.arange(len(needs.first))
        first = np.add(needs.first, places, dtype=np.int32, casting="same_kind")
        every = np.empty(int(first[-1]), dtype=np.int32)
        needed = np.ones(len(every), dtype=np.bool_)
        needed[first[:-1]] = False
        every[first[:-1]] = before
        every[needed] = needs.source
        # The level of each node; at a cycle, the earliest node waits for none of its other nodes.
        followers = _Followers.build(every, first)
        wide = np.count_nonzero(followers.open_count == 0) >= _WIDE
        level = (_find_levels_at_once if wide else _find_levels_by_node)(followers, measured_ns)
        # What is large goes as soon as it can: the peak of an analysis is here.
        del followers
        node = np.argsort(level, kind="stable").astype(np.int32)
        row = np.empty(len(node) + 1, dtype=np.int32)
        row[node] = np.arange(len(node))
        row[-1] = len(node)
        counts = np.diff(first)[node]
        edge = np.cumsum(np.append(0, counts), dtype=np.int32)
        at = np.repeat(first[:-1][node] - edge[:-1], counts)
        at += np.arange(len(at), dtype=np.int32)
        before_each = every[at]
        del at, every
        source = row[before_each]
        del before_each
        # What is in the same level or a later one, on a cycle, is not waited for.
        begin = np.append(0, np.cumsum(np.bincount(level)))
        source[source >= np.repeat(begin[level[node]].astype(np.int32), counts)] = len(node)
        return cls(node, row[:-1], begin, edge, source.astype(np.int64))

    @property
    def width(self) -> float:
        """The mean number of nodes per level."""
        return len(self.node) / max(len(self.first) - 1, 1)

    @property
    def is_wide(self) -> bool:
        """Whether a level has so many nodes that it is computed at once."""
        return self.width >= _WIDE

    @property
    def has_sources(self) -> Bool:
        """Whether each node depends on another one."""
        has_sources = np.zeros(len(self.node), dtype=np.bool_)
        if len(self.node):
            known = self.source < len(self.node)
            has_sources[self.node] = np.logical_or.reduceat(known, self.edge[:-1])
        return has_sources

    def compute_times(
        self,
        work_ns: Int64,
        rest_ns: Int64,
        known_ns: Int64 | None = None,
        nodes: Int64 | None = None,
    ) -> Int64:
        """The time of each of these nodes, of all by default: the latest of the one before it on
        its timeline plus the work in between, and of those that it needs, plus the rest; NEVER if
        all of these never happen.

        known_ns has the times of nodes that need not be computed, else NEVER; it, work_ns and
        rest_ns are by node.
        """
        compute = self._compute_by_level if self.is_wide else self._compute_by_row
        known_by_row = None if known_ns is None else known_ns[self.node]
        times = compute(work_ns[self.node], rest_ns[self.node], known_by_row)
        times[times < NEVER // 2] = NEVER
        return times[self.row if nodes is None else self.row[nodes]]

    def find_latest(self, times: Int64, work_ns: Int64) -> tuple[Int64, Int32]:
        """(the time at which the last dependency of each node is met, that node); NEVER and -1
        without dependencies. Of several the first; all are by node."""
        # When each dependency is met: of the one before on the timeline, the first edge of a row,
        # with the work in between.
        at = np.append(times[self.node], NEVER)[self.source]
        at[self.edge[:-1]] += work_ns[self.node]
        latest = np.maximum.reduceat(at, self.edge[:-1]) if len(at) else at
        is_last = np.flatnonzero(at == np.repeat(latest, np.diff(self.edge)))
        first = is_last[np.searchsorted(is_last, self.edge[:-1])]
        latest_ns, last = np.empty_like(times), np.empty_like(self.node)
        latest_ns[self.node] = np.maximum(latest, NEVER)
        last[self.node] = np.append(self.node, np.int32(-1))[self.source[first]]
        return latest_ns, last

    def _compute_by_level(self, work_ns: Int64, rest_ns: Int64, known_ns: Int64 | None) -> Int64:
        added_ns = np.zeros(len(self.source), dtype=np.int64)
        added_ns[self.edge[:-1]] = work_ns
        times = np.full(len(work_ns) + 1, NEVER)
        first, first_edge = self.first.tolist(), self.edge[self.first]
        begin = self.edge[:-1] - np.repeat(first_edge[:-1], np.diff(self.first))
        source, latest_of = self.source, np.maximum.reduceat
        for (low, high), (begins, ends) in zip(
            pairwise(first), pairwise(first_edge.tolist()), strict=True
        ):
            at = times.take(source[begins:ends])
            at += added_ns[begins:ends]
            latest = times[low:high]
            latest_of(at, begin[low:high], out=latest)
            latest += rest_ns[low:high]
            if known_ns is not None:
                known = known_ns[low:high]
                np.copyto(latest, known, where=known > NEVER)
        return times[:-1]

    def _compute_by_row(self, work_ns: Int64, rest_ns: Int64, known_ns: Int64 | None) -> Int64:
        source = self.source.tolist()
        times = [NEVER] * (len(work_ns) + 1) if known_ns is None else [*known_ns.tolist(), NEVER]
        for row, ((first, last), work, rest) in enumerate(
            zip(pairwise(self.edge.tolist()), work_ns.tolist(), rest_ns.tolist(), strict=True)
        ):
            if times[row] > NEVER:
                continue
            at = times[source[first]] + work
            for needed in source[first + 1 : last]:
                if times[needed] > at:
                    at = times[needed]
            times[row] = at + rest
        return np.array(times[:-1], dtype=np.int64)


_NO_NODES = np.empty(0, dtype=np.int32)

NO_LEVELS = Levels(
    _NO_NODES, _NO_NODES, np.zeros(1, np.int64), np.zeros(1, np.int32), np.empty(0, np.int64)
)
"""The levels of a graph without nodes."""


class _Followers(Struct, frozen=True):
    """The nodes that depend on each node: target[first[i] : first[i + 1]] on node i; open_count is
    the number of nodes on which each node depends."""

    first: Int64
    target: Int32
    open_count: Int32

    @classmethod
    def build(cls, every: Int32, first: Int32) -> _Followers:
        count = len(first) - 1
        known = every >= 0
        target = np.repeat(np.arange(count, dtype=np.int32), np.diff(first))[known]
        source = every[known]
        begin = np.append(0, np.cumsum(np.bincount(source, minlength=count)))
        open_count = np.bincount(target, minlength=count).astype(np.int32)
        return cls(begin, target[np.argsort(source, kind="stable")], open_count)


def _find_levels_at_once(followers: _Followers, measured_ns: Int64) -> Int32:
    """The levels, from the followers of all nodes that are ready."""
    missing, level = followers.open_count.copy(), np.zeros(len(measured_ns), dtype=np.int32)
    counts, mark = np.diff(followers.first), np.empty(len(measured_ns), dtype=np.int32)
    stuck: Iterator[int] | None = None
    ready, left = np.flatnonzero(missing == 0), len(level)
    while left:
        while not len(ready):
            stuck = stuck or iter(np.argsort(measured_ns, kind="stable").tolist())
            ready = np.array(_release_node(next(stuck), missing), dtype=np.int64)
        left -= len(ready)
        after = followers.target[list_ranges(followers.first[ready], counts[ready])]
        following = missing[after] > 0
        after, next_level = after[following], np.repeat(level[ready] + 1, counts[ready])[following]
        np.maximum.at(level, after, next_level)
        np.subtract.at(missing, after, 1)
        ready = after[missing[after] == 0]
        mark[ready] = np.arange(len(ready))
        ready = ready[mark[ready] == np.arange(len(ready))]
    return level


def _find_levels_by_node(followers: _Followers, measured_ns: Int64) -> Int32:
    """The levels, node by node."""
    missing, level = followers.open_count.tolist(), [0] * len(measured_ns)
    first, target = followers.first.tolist(), followers.target.tolist()
    stuck: Iterator[int] | None = None
    ready, left = [node for node, count in enumerate(missing) if not count], len(level)
    while left:
        while not ready:
            stuck = stuck or iter(np.argsort(measured_ns, kind="stable").tolist())
            ready = _release_node(next(stuck), missing)
        node = ready.pop()
        left -= 1
        for after in target[first[node] : first[node + 1]]:
            if missing[after] > 0:
                level[after] = max(level[after], level[node] + 1)
                missing[after] -= 1
                if not missing[after]:
                    ready.append(after)
    return np.array(level, dtype=np.int32)


def _release_node(node: int, missing: Int32 | list[int]) -> list[int]:
    """Drop the open dependencies of a node; returns it, or no node if it was done already."""
    if missing[node] <= 0:
        return []
    missing[node] = 0
    return [node]
