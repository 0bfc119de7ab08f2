"""Pairs of paths: what the path of the last rank has that the path of the waiting rank has not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.diagnose.graph.binding_paths import BLAME_CAUSES, BindingPaths
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.exposed_waits import ExposedWaits
from stepsplit.analyzer.diagnose.graph.path_tree import PathPieces, PathTree
from stepsplit.analyzer.trace import Float, Int64


class PathPairs(Struct, frozen=True):
    """The two paths of each wait, back to their last common node.

    added is the time that the path of the rank waited for has in addition, waited_for the time of
    that path alone; both of shape (waits, BLAME_CAUSES). parts are (rows of waits, ranks, times by
    cause): parts of the paths of the ranks waited for.
    """

    added: Float
    waited_for: Float
    parts: Iterator[PathPieces]


def compare_paths(
    graph: DependencyGraph, paths: BindingPaths, tree: PathTree | None, waits: ExposedWaits
) -> PathPairs:
    """The paths of these waits: node by node, or with a tree, if there are many ranks."""
    if tree is None:
        pairs = _compare_by_node(graph, paths, waits)
    else:
        # The time of a path is the difference of two sums from the root of the tree.
        own = tree.place[waits.begin]
        other = np.where(waits.traced, tree.place[waits.last_arrival], own)
        common = tree.find_common(own, other)
        waited_for = tree.total_ns[other] - tree.total_ns[common]
        added = waited_for - (tree.total_ns[own] - tree.total_ns[common])
        pairs = PathPairs(added, waited_for, tree.follow(other, common))
    # Transfers that are exposed between the two ends of a wait are not waiting.
    pairs.added[:, BLAME_CAUSES.index("transfer")] -= waits.moved_ns
    return pairs


def _compare_by_node(graph: DependencyGraph, paths: BindingPaths, waits: ExposedWaits) -> PathPairs:
    """Follows both paths of each wait back, always that of the later node in topological order."""
    position = np.full(len(graph) + 1, -1)
    position[graph.levels.node] = np.arange(len(graph))
    common = waits.begin.copy()
    added, waited_for = (np.zeros((len(common), len(BLAME_CAUSES))) for _ in range(2))
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
    return PathPairs(added, waited_for, follow_paths(paths, waits, common))


def follow_paths(paths: BindingPaths, waits: ExposedWaits, common: Int64) -> Iterator[PathPieces]:
    """The nodes of ranks on the paths of the ranks waited for."""
    rows = np.flatnonzero(waits.traced)
    node = waits.last_arrival[rows]
    while len(rows := rows[(ahead := node != common[rows])]):
        node = node[ahead]
        of_rank = paths.rank[node] >= 0
        own = node[of_rank]
        yield PathPieces(rows[of_rank], paths.rank[own], paths.step[own], paths.spent_ns[own])
        node = paths.previous[node]
