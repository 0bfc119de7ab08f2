"""Uneven kernels: those that some ranks of a stage run for longer than others, and how much compute
each node of the graph has in them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.replay import WeightedSpans, measure_spans
from stepsplit.analyzer.split.kernels import collect_compute
from stepsplit.analyzer.trace import Float, Int64

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
    by_rank = _sum_by_name(context)
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
    spans = []
    for index, rank in enumerate(context.split.ranks):
        events = rank.trace.events
        names = uneven.get(stage.get(index, -1), set())
        meant = np.array([name in names for name in events.names], dtype=np.bool_)
        rows = np.flatnonzero(rank.trace.kinds.computes)
        rows = rows[meant[events.name_id[rows]]]
        to_common = rank.clock.map_to_common_ns
        spans.append(
            WeightedSpans.cover(to_common(events.start_ns[rows]), to_common(events.ends_of(rows)))
        )
    return np.rint(measure_spans(context.graph, spans)).astype(np.int64)


def _sum_by_name(context: CauseContext) -> list[dict[str, float]]:
    """The time of each kernel a step on each rank, at the speed of the peers, in ns."""
    of_row, counted = context.graph.steps.rank, context.counted
    found = []
    for index, rank in enumerate(context.split.ranks):
        mine = counted & (of_row == index)
        pace: Float = context.peer_speed[mine]
        compute = collect_compute(rank.trace, rank.windows)
        took_ns = np.bincount(compute.name_id, compute.took_ns, minlength=len(compute.names))
        scale = float(pace.mean()) / max(len(compute.steps), 1) if len(pace) else 0.0
        some = np.flatnonzero(took_ns)
        found.append({compute.names[one]: float(took_ns[one]) * scale for one in some.tolist()})
    return found
