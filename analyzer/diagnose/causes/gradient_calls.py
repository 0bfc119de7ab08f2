"""The calls of data parallelism in a recording: which reduce gradients or gather weights, and which
run in the forward."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stepsplit.analyzer.diagnose.graph.replay import ReplayContext
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.trace import OP_CODE, Bool

REDUCTION_OPS = ("all_reduce", "reduce_scatter")


def find_ops(context: ReplayContext, ops: Iterable[str]) -> Bool:
    """Which collectives and messages are one of these ops."""
    codes = [OP_CODE[op] for op in ops]
    return np.isin(context.split.matched.op[context.graph.kernels.row], codes)


def find_forward_kernels(context: ReplayContext) -> Bool:
    """Which collectives a rank waited for that its host issued in a forward."""
    kernels = context.graph.kernels
    found = np.zeros(len(kernels), dtype=np.bool_)
    for index, rank in enumerate(context.split.ranks):
        forward = np.array([phase == "forward" for phase in rank.phase], dtype=np.bool_)
        mine = kernels.list_rows(index)
        found[mine] = np.isin(kernels.call[mine], rank.attribution.exposed.call[forward])
    shared = context.split.matched.shared[kernels.row]
    return found | ((shared >= 0) & np.isin(shared, shared[found]))


def find_sync_kernels(context: ReplayContext) -> Bool:
    """Which collectives reduce gradients or gather weights on a data axis."""
    sums = find_ops(context, REDUCTION_OPS)
    data = np.zeros(len(sums), dtype=np.bool_)
    data[context.find_kernels(lambda axes: bool(axes) and axes <= DATA_AXES)] = True
    ops = sums | find_ops(context, ("all_gather",))
    return ops & data & ~(find_forward_kernels(context) & sums)
