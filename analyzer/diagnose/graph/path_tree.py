"""The tree of binding dependencies, along which the waits of many ranks are blamed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.diagnose.graph.binding_paths import BindingPaths
from stepsplit.analyzer.diagnose.graph.topological_order import Levels
from stepsplit.analyzer.trace import Float, Int32, Int64

_MANTISSA_BITS = 52
"""Of a float64: sums of multiples of a unit are exact as long as they are below 2^52 units."""


class PathPieces(Struct, frozen=True):
    """Parts of paths, in columns: the row of each path, the rank and the step (indexes; a step may
    be -1) that it is on, and its time by cause."""

    row: Int64
    rank: Int64
    step: Int32
    spent_ns: Float


class PathTree(Struct, frozen=True):
    """A tree whose places are numbered from the begin of the recording, 0, so that each follows its
    parent; columns by place.

    place is by node. jump is an ancestor at a distance that allows a search in a logarithmic number
    of steps (a skew-binary jump pointer), and leave the first ancestor on another rank
    or in another step. total_ns,
    shape (places, causes), is the time from the begin, in a unit in which sums are exact.
    """

    place: Int32
    parent: Int32
    depth: Int32
    jump: Int32
    leave: Int32
    rank: Int32
    step: Int32
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
        # The times as multiples of a power of two, so small that rounding does not count and so
        # large that the time along any path is exact; no path takes longer than some rank was
        # recorded.
        longest = 4 * np.bincount(rank[order] + 1, spent_ns.sum(axis=1)).max(initial=1.0)
        unit = 2.0 ** (np.ceil(np.log2(longest)) - _MANTISSA_BITS)
        spent_ns /= unit
        np.rint(spent_ns, out=spent_ns)
        spent_ns *= unit
        total_ns = spent_ns  # the sums along the path, in place, from parents to children
        depth, jump, leave = (np.zeros(count, dtype=np.int32) for _ in range(3))
        own_rank, own_step = rank[order], paths.step[order]
        for low, high in pairwise((levels.first + 1).tolist()):
            here, before = slice(low, high), parent[low:high]
            far = jump[before]
            depth[here] = depth[before] + 1
            even = depth[before] - depth[far] == depth[far] - depth[jump[far]]
            jump[here] = np.where(even, jump[far], before)
            stays = own_rank[here] == own_rank[before]
            stays &= own_step[here] == own_step[before]
            leave[here] = np.where(stays, leave[before], before)
            total_ns[here] += total_ns[before]
        return cls(place, parent, depth, jump, leave, own_rank, own_step, total_ns)

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

    def follow(self, place: Int32, until: Int32) -> Iterator[PathPieces]:
        """What the path of each row spends on one rank, and in one of its steps, after the other,
        back to a place of it."""
        rows = np.flatnonzero(place != until)
        at, end = place[rows], until[rows]
        while len(rows):
            left = np.maximum(self.leave[at], end)
            spent_ns = self.total_ns[at] - self.total_ns[left]
            yield PathPieces(rows, self.rank[at].astype(np.int64), self.step[at], spent_ns)
            ahead = left != end
            rows, at, end = rows[ahead], left[ahead], end[ahead]
