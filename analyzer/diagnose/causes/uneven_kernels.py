"""Uneven kernels: those that some ranks of a stage run for longer than others, and how much compute
each node of the graph has in them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.trace import Int64

_UNEVEN_RATIO = 1.02
"""A rank with more of a kernel than this multiple of the mean rank's makes it uneven."""


def measure_uneven_work(context: CauseContext) -> Int64 | None:
    """For each node of the graph, its compute in kernels of which a rank of the stage has more than
    the others; None where all kernels are meant: on a CPU, or if no name has more.

    In a ring of causal attention this is attention, whose parts can move between ranks, and not the
    rest of the layer.
    """
    if not context.split.ranks[0].trace.on_device:
        return None
    by_rank: list[dict[str, float]] = []
    for index, rank in enumerate(context.split.ranks):
        # At the speed of its peers: on a slow device the same work would look like more.
        pace = context.peer_speed[context.counted & (context.graph.steps.rank == index)]
        compute = rank.kernels.compute
        took = np.bincount(compute.name_id, compute.took_ns, minlength=len(compute.names))
        scale = float(pace.mean()) / max(len(compute.steps), 1) if len(pace) else 0.0
        some = np.flatnonzero(took).tolist()
        by_rank.append({compute.names[one]: float(took[one]) * scale for one in some})
    stage = {
        int(index): int(stage)
        for index, stage in zip(context.graph.steps.rank, context.stage, strict=True)
    }
    uneven: dict[int, set[str]] = {}
    for one in set(stage.values()):
        members = [by_rank[index] for index in stage if stage[index] == one]
        most: dict[str, float] = defaultdict(float)
        total: dict[str, float] = defaultdict(float)
        for member in members:
            for name, took_ns in member.items():
                most[name] = max(most[name], took_ns)
                total[name] += took_ns
        uneven[one] = {
            name for name in total if most[name] * len(members) > _UNEVEN_RATIO * total[name]
        }
    if not any(uneven.values()):
        return None
    meant = []
    for index, rank in enumerate(context.split.ranks):
        events, names = rank.trace.events, uneven.get(stage.get(index, -1), set())
        is_uneven = np.array([name in names for name in events.names], dtype=np.bool_)
        rows = np.flatnonzero(rank.trace.kinds.computes)
        meant.append(rows[is_uneven[events.name_id[rows]]])
    return np.rint(context.measure_events(meant)).astype(np.int64)
