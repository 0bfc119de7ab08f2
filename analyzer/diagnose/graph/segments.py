"""The work between the calls of a step: what the n-th segment holds on each rank and in each step.

Ranks that make the same calls in the same order, and the steps of one rank, are compared by
segments: work that one of them has in addition lies in some of these, and only there a replay may
shorten it.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.trace import Bool, Float, Int64


class WorkSegments(Struct, frozen=True):
    """One kind of WORK between the calls of each step, or a part of it.

    Attributes:
        work: The kind of WORK.
        calls: The number of calls of each row of the steps.
        spent_ns: The work of each segment, shape (rows, segments); rows with fewer calls end in
            zeros.
        node: The nodes that have work of steps.
        segment: The segment of each of these.
        part_ns: The work of each of these.
        ends_with: The call that ends each segment, of the graph's kernels, shape (rows, segments);
            -1 of the last one of a row, and behind it.
    """

    work: str
    calls: Int64
    spent_ns: Float
    node: Int64
    segment: Int64
    part_ns: Int64
    ends_with: Int64

    @classmethod
    def measure(
        cls, graph: DependencyGraph, work: str, part_ns: Int64 | None = None
    ) -> WorkSegments:
        """A segment ends where the next call's start depends on the rank's timeline.

        Args:
            graph: the graph.
            work: the kind of WORK.
            part_ns: of each node of the timelines, how much of this work is meant; None for all.
        """
        kernels, needs = graph.kernels, graph.needs
        timelines = int(graph.timelines.first[-1])
        # The last node of the timeline that each call's start needs.
        needing = np.repeat(np.arange(len(graph)), np.diff(needs.first))
        anchor_of = np.full(len(graph), -1, dtype=np.int64)
        own = needs.source < timelines
        np.maximum.at(anchor_of, needing[own], needs.source[own])
        anchor = anchor_of[kernels.start]
        call = np.argsort(anchor, kind="stable")[np.count_nonzero(anchor < 0) :]
        anchor = anchor[call]
        node = np.flatnonzero(graph.step[:timelines] >= 0)
        row = graph.step[node].astype(np.int64)
        # The anchors before a node, without those before the first node of its step.
        before = np.searchsorted(anchor, node, side="left")
        rows = len(graph.steps.step)
        first = np.full(rows, len(anchor), dtype=np.int64)
        np.minimum.at(first, row, before)
        segment = before - first[row]
        calls = np.zeros(rows, dtype=np.int64)
        np.maximum.at(calls, row, segment)
        spent = np.zeros((rows, int(calls.max(initial=0)) + 1))
        part = graph.work_ns[node, WORK.index(work)]
        part = part if part_ns is None else np.minimum(part, part_ns[node])
        np.add.at(spent, (row, segment), part)
        column = np.arange(spent.shape[1])
        ends_with = np.append(call, -1)[np.minimum(first[:, np.newaxis] + column, len(call))]
        ends_with = np.where(column < calls[:, np.newaxis], ends_with, -1)
        return cls(work, calls, spent, node, segment, part, ends_with)

    def set_work(
        self,
        graph: DependencyGraph,
        rows: Bool,
        target_ns: Float,
        *,
        is_equal: bool = False,
    ) -> DependencyGraph:
        """The graph in which these rows have this much work in each segment.

        target_ns has the shape of spent_ns. is_equal: the nodes of a segment that have work of it
        have as much each, as of rounds; else in proportion to what they have. Work that a row has
        not is added where the segment begins, or where the next one does that has a node in this
        row.
        """
        row = graph.step[self.node].astype(np.int64)
        chosen = rows[row]
        factor = np.ones_like(self.spent_ns)
        np.divide(target_ns, self.spent_ns, out=factor, where=self.spent_ns > 0)
        changed, column = graph.work_ns.copy(order="K"), WORK.index(self.work)
        more = self.part_ns * (factor[row, self.segment] - 1)
        if is_equal:
            count, has = np.zeros(self.spent_ns.shape), self.part_ns > 0
            np.add.at(count, (row, self.segment), has)
            share = (target_ns / np.maximum(count, 1))[row, self.segment]
            more = np.where(has, share - self.part_ns, 0.0)
        # Nodes ascend, those of one segment with them. Where a segment begins, what the row lacks
        # of it and of those before it that have no node.
        begins = np.append(True, (np.diff(row) != 0) | (np.diff(self.segment) != 0))[: len(row)]
        first = np.flatnonzero(begins)
        lacks = np.cumsum(np.where(self.spent_ns > 0, 0.0, target_ns), axis=1)
        lacking = lacks[row[first], self.segment[first]]
        before = np.append(0.0, lacking[:-1])[: len(first)]
        same_row = np.append(False, np.diff(row[first]) == 0)[: len(first)]
        more[first] += lacking - np.where(same_row, before, 0.0)
        changed[self.node[chosen], column] += np.rint(more[chosen]).astype(np.int64)
        return replace(graph, work_ns=changed)
