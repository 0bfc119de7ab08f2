"""As if all ranks and stages were alike: the run without stragglers of any kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stepsplit.analyzer.arrays import labels_of, mean_within
from stepsplit.analyzer.compare.causes.scene import Scene
from stepsplit.analyzer.compare.replay.graph import WORK, Graph
from stepsplit.analyzer.trace import Int64

_PHASES = 3
_COMPUTE = WORK.index("compute")


def evened(scene: Scene, among: Int64) -> Graph:
    """Every row computes, forward and backward apart, what the mean of its step and among does.

    among has a number for each row: rows of one number share their work evenly.
    """
    graph, steps = scene.graph, scene.graph.steps
    nodes = np.flatnonzero(graph.step >= 0)
    cell = graph.step[nodes] * _PHASES + scene.phases()[nodes]
    own = np.bincount(cell, graph.work_ns[nodes, _COMPUTE], minlength=_PHASES * len(steps.step))
    table = own.astype(np.float64).reshape(-1, _PHASES)
    label = labels_of(steps.step, among)
    even = np.stack([mean_within(label, table[:, phase]) for phase in range(_PHASES)], axis=1)
    times = (even / np.maximum(table, 1)).ravel()[cell]
    work = graph.work_ns.copy()
    work[nodes, _COMPUTE] = np.rint(work[nodes, _COMPUTE] * times)
    return replace(graph, work_ns=work)


def usual_transfers(scene: Scene, graph: Graph) -> Graph:
    """No call moves data longer than the median of its op and size."""
    kernels, matched = graph.kernels, scene.found.matched
    kind = labels_of(matched.op[kernels.row], matched.message_bytes[kernels.row])
    took = graph.rest_ns[kernels.end]
    usual = np.array([np.median(took[kind == one]) for one in range(int(kind.max(initial=-1)) + 1)])
    rest = graph.rest_ns.copy()
    rest[kernels.end] = np.minimum(took, usual[kind].astype(np.int64)) if len(kind) else took
    return replace(graph, rest_ns=rest)
