"""Paths back along the binding dependencies."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.diagnose.counted_work import WorkLaw
from stepsplit.analyzer.diagnose.graph.dependency_graph import (
    LAUNCH_LATENCY_NS,
    WORK,
    DependencyGraph,
)
from stepsplit.analyzer.diagnose.graph.workload import compute_workloads
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Float, Int32, Int64

BLAME_CAUSES = ("compute", "slower", "imbalance", "copy", "host", "transfer", "unexplained")
"""Kinds of time on a path. Compute is that of a usual rank; beside it stands what the rank computes
longer because it is slower, which is blamed as compute as well, or because it has more work. A
collective or message that starts late, though it was launched, its stream was free and the work
launched before it was done, is unexplained; so is one without a match, which may have waited."""


COMPUTES = 3
"""So many of the causes, the first ones, are compute."""


class BindingPaths(Struct, frozen=True):
    """The binding dependencies of a graph, with the time that each node adds to its path.

    spent_ns, shape (nodes + 1, BLAME_CAUSES), is the time from the binding predecessor to the node,
    of rank (an index, -1 for a synchronization), in step (an index of the distinct steps of the
    graph, -1 if unknown). The last row stands for the begin of the
    recording: previous leads to it from all nodes without a predecessor.
    """

    previous: Int32
    rank: Int32
    step: Int32
    spent_ns: Float

    @classmethod
    def build(
        cls, split: RunSplit, graph: DependencyGraph, law: WorkLaw | None = None
    ) -> BindingPaths:
        """The paths of the recording, as measured; law is of the counted work."""
        begin, kernels = len(graph), graph.kernels
        spent = np.zeros((begin + 1, len(BLAME_CAUSES)))
        along = np.flatnonzero((graph.binding == graph.before) & (graph.before >= 0))
        work = {kind: graph.work_ns[along, i] for i, kind in enumerate(WORK)}
        slower, more = _list_workloads(split, law, graph.steps.rank)[graph.step[along]].T
        spent[along, BLAME_CAUSES.index("compute")] = work["compute"] * (1 - slower - more)
        spent[along, BLAME_CAUSES.index("slower")] = work["compute"] * slower
        spent[along, BLAME_CAUSES.index("imbalance")] = work["compute"] * more
        spent[along, BLAME_CAUSES.index("copy")] = work["copy"]
        spent[along, BLAME_CAUSES.index("host")] = work["idle"]
        bound = graph.binding >= 0
        late, moved = (nodes[bound[nodes]] for nodes in (kernels.start, kernels.end))
        # When each collective and message was launched, on the common clock; long ago if unknown,
        # so that none of its delay is the host's.
        launch_ns = np.full(len(kernels), np.iinfo(np.int64).min // 2)
        for i, one in enumerate(split.ranks):
            mine = kernels.list_rows(i)
            own_ns = one.trace.events.find_launch_ns(one.trace.calls.event[kernels.call[mine]])
            known = own_ns >= 0
            launch_ns[mine[known]] = one.clock.map_to_common_ns(own_ns[known])
        launched = launch_ns[bound[kernels.start]]
        # A call that starts late is the host's fault as far as it was launched late, or within
        # the usual latency of a launch; the rest has no recorded cause.
        host = np.clip(launched + LAUNCH_LATENCY_NS - graph.at_ns[graph.binding[late]], 0, None)
        delay = np.maximum(graph.rest_ns[late], 0)
        host = np.where(delay <= LAUNCH_LATENCY_NS, delay, np.minimum(host, delay))
        spent[late, BLAME_CAUSES.index("host")] += host
        spent[late, BLAME_CAUSES.index("unexplained")] += delay - host
        is_matched = split.matched.shared[kernels.row[bound[kernels.end]]] >= 0
        for own, cause in ((is_matched, "transfer"), (~is_matched, "unexplained")):
            nodes = moved[own]
            spent[nodes, BLAME_CAUSES.index(cause)] += np.maximum(graph.rest_ns[nodes], 0)
        previous = np.append(np.where(bound, graph.binding, begin), begin).astype(np.int32)
        rank = np.append(graph.find_ranks(np.arange(begin)), -1).astype(np.int32)
        steps = np.append(np.unique(graph.steps.step, return_inverse=True)[1], -1)
        row = np.append(graph.step, -1)
        row[kernels.start] = np.where(row[kernels.start] < 0, kernels.step, row[kernels.start])
        return cls(previous, rank, steps[row].astype(np.int32), spent)


def _list_workloads(split: RunSplit, law: WorkLaw | None, of_rank: Int64) -> Float:
    """The slower and the additional fraction of compute in each step of all ranks: by their kernels
    or, where ranks counted different work, by that."""
    loads = compute_workloads(
        [rank.trace for rank in split.ranks],
        [rank.windows.windows for rank in split.ranks],
        [split.layout.find_stage(rank.trace.rank) for rank in split.ranks],
    )
    both: Float = np.concatenate([np.stack((one.slower, one.more), axis=1) for one in loads])
    if law is not None:
        slower = 1 - 1 / np.array([law.slow.get(index, 1.0) for index in of_rank.tolist()])
        # Of ranks that the law does not judge, what exceeds the most that their work explains.
        times = np.array([law.unjudged.get(index, np.inf) for index in of_rank.tolist()])
        slower = np.maximum(slower, np.clip(1 - (1 - both[:, 0]) * times, 0, None))
        more = np.clip(1 - law.factor, 0, None) * (1 - slower)
        both[law.uneven] = np.stack((slower, more), axis=1)[law.uneven]
    return both
