"""The topological order of a dependency graph, and the times that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import list_ranges
from stepsplit.analyzer.trace import Bool, Int64

NEVER = -(1 << 61)
"""The time of an event that does not happen; no event waits for it."""

_WIDE = 16
"""Mean number of nodes in a level, about that of ranks, from which a level is computed at once."""


class Needs(Struct, frozen=True):
    """The dependencies between nodes other than along a timeline: node i needs the nodes
    source[first[i] : first[i + 1]]."""

    first: Int64
    source: Int64

    @classmethod
    def build(cls, needs: Sequence[Sequence[int]]) -> Needs:
        """From the nodes that each node needs."""
        first = np.cumsum([0, *map(len, needs)], dtype=np.int64)
        return cls(first, np.fromiter(chain.from_iterable(needs), np.int64, int(first[-1])))

    def list_by_node(self) -> list[list[int]]:
        """The nodes that each node needs."""
        source = self.source.tolist()
        return [source[low:high] for low, high in pairwise(self.first.tolist())]


class Levels(Struct, frozen=True):
    """The nodes in topological order, level by level: a node depends on earlier levels only.

    node[i] is the node of row i; level k has the rows from first[k] to first[k + 1]. Row i depends
    on the rows source[edge[i] : edge[i + 1]]: the one before it on the timeline, then those that it
    needs. Instead of a row that does not exist, source has the number of rows.
    """

    node: Int64
    first: Int64
    edge: Int64
    source: Int64

    @classmethod
    def build(cls, before: Int64, needs: Needs, measured_ns: Int64) -> Levels:
        """The levels of the nodes.

        Small clock errors can create cycles between ranks; they are broken at the earliest node.
        """
        every, first = _list_predecessors(before, needs)
        level = _find_levels(every, first, measured_ns)
        node = np.argsort(level, kind="stable")
        row = np.empty(len(node) + 1, dtype=np.int64)
        row[node] = np.arange(len(node))
        row[-1] = len(node)
        edge = np.concatenate(([0], np.cumsum(np.diff(first)[node])))
        moved = every[list_ranges(first[node], np.diff(edge))]
        earlier = np.append(level, -1)[moved] < np.repeat(level[node], np.diff(edge))
        return cls(
            node=node,
            first=np.searchsorted(level[node], np.arange(level.max(initial=-1) + 2)),
            edge=edge,
            source=np.where(earlier, row[moved], len(node)),
        )

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

    def compute_times(self, work_ns: Int64, rest_ns: Int64, known_ns: Int64 | None = None) -> Int64:
        """The time of each node: the latest of the one before it on its timeline plus the work in
        between, and of those that it needs, plus the rest; NEVER if all of these never happen.

        known_ns has the times of nodes that need not be computed, else NEVER. All are by node.
        """
        known_ns = np.full(len(work_ns), NEVER) if known_ns is None else known_ns
        compute = self._compute_by_level if self.is_wide else self._compute_by_row
        times = np.empty(len(self.node), dtype=np.int64)
        times[self.node] = compute(work_ns[self.node], rest_ns[self.node], known_ns[self.node])
        return times

    def find_latest(self, times: Int64, work_ns: Int64) -> tuple[Int64, Int64]:
        """(the time at which the last dependency of each node is met, that node); NEVER and -1
        without dependencies. Of several the first; all are by node."""
        at = self._add_work(np.append(times[self.node], NEVER), work_ns[self.node])
        latest = np.maximum.reduceat(at, self.edge[:-1]) if len(at) else at
        is_last = np.flatnonzero(at == np.repeat(latest, np.diff(self.edge)))
        first = is_last[np.searchsorted(is_last, self.edge[:-1])]
        latest_ns, last = np.empty_like(times), np.empty_like(times)
        latest_ns[self.node] = np.maximum(latest, NEVER)
        last[self.node] = np.append(self.node, -1)[self.source[first]]
        return latest_ns, last

    def _add_work(self, times: Int64, work_ns: Int64) -> Int64:
        """The time of the source of each edge, by row, and the work after it."""
        at = times[self.source]
        at[self.edge[:-1]] += work_ns
        return at

    def _compute_by_level(self, work_ns: Int64, rest_ns: Int64, known_ns: Int64) -> Int64:
        times = np.append(known_ns, NEVER)
        added = np.zeros(len(self.source), dtype=np.int64)
        added[self.edge[:-1]] = work_ns
        for rows, edges in zip(
            pairwise(self.first.tolist()),
            pairwise(self.edge[self.first].tolist()),
            strict=True,
        ):
            among, own = slice(*edges), slice(*rows)
            at = times[self.source[among]] + added[among]
            latest = np.maximum.reduceat(at, self.edge[own] - edges[0])
            computed = np.maximum(latest + rest_ns[own], NEVER)
            times[own] = np.where(known_ns[own] > NEVER, known_ns[own], computed)
        return times[:-1]

    def _compute_by_row(self, work_ns: Int64, rest_ns: Int64, known_ns: Int64) -> Int64:
        source = self.source.tolist()
        times = [*known_ns.tolist(), NEVER]
        for row, ((first, last), work, rest) in enumerate(
            zip(pairwise(self.edge.tolist()), work_ns.tolist(), rest_ns.tolist(), strict=True)
        ):
            if times[row] > NEVER:
                continue
            at = times[source[first]] + work
            for needed in source[first + 1 : last]:
                if times[needed] > at:
                    at = times[needed]
            times[row] = at + rest if at + rest > NEVER else NEVER
        return np.array(times[:-1], dtype=np.int64)


def _list_predecessors(before: Int64, needs: Needs) -> tuple[Int64, Int64]:
    """(predecessors of all nodes, first of each node): the one before it, then what it needs."""
    first = needs.first + np.arange(len(needs.first))
    every = np.empty(int(first[-1]), dtype=np.int64)
    needed = np.ones(len(every), dtype=np.bool_)
    needed[first[:-1]] = False
    every[first[:-1]] = before
    every[needed] = needs.source
    return every, first


class _Followers(Struct, frozen=True):
    """The nodes that depend on each node: target[first[i] : first[i + 1]] on node i; open_count is
    the number of nodes on which each node depends."""

    first: Int64
    target: Int64
    open_count: Int64

    @classmethod
    def build(cls, every: Int64, first: Int64) -> _Followers:
        count = len(first) - 1
        target = np.repeat(np.arange(count), np.diff(first))[every >= 0]
        source = every[every >= 0]
        by_source = np.argsort(source, kind="stable")
        begin = np.searchsorted(source[by_source], np.arange(count + 1))
        return cls(begin, target[by_source], np.bincount(target, minlength=count))


def _find_levels(every: Int64, first: Int64, measured_ns: Int64) -> Int64:
    """The level of each node, from the predecessors of all nodes and the first of each; at a cycle,
    the earliest node waits for none of its other nodes."""
    followers = _Followers.build(every, first)
    wide = np.count_nonzero(followers.open_count == 0) >= _WIDE
    return (_find_levels_at_once if wide else _find_levels_by_node)(followers, measured_ns)


def _find_levels_at_once(followers: _Followers, measured_ns: Int64) -> Int64:
    """The levels, from the followers of all nodes that are ready."""
    missing, level = followers.open_count.copy(), np.zeros(len(measured_ns), dtype=np.int64)
    counts = np.diff(followers.first)
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
        ready = np.unique(after[missing[after] == 0])
    return level


def _find_levels_by_node(followers: _Followers, measured_ns: Int64) -> Int64:
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
    return np.array(level, dtype=np.int64)


def _release_node(node: int, missing: Int64 | list[int]) -> list[int]:
    """Drop the open dependencies of a node; returns it, or no node if it was done already."""
    if missing[node] <= 0:
        return []
    missing[node] = 0
    return [node]
