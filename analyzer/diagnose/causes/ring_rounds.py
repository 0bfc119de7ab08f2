"""Rings of context parallelism: what their rounds compute, dealt out evenly.

Of causal attention with its blocks in order, the last rank of the ring computes in every round and
the first one in the first round alone. Where each rank has a part of the begin of the sequence and
one of its end, all ranks compute as much, and as much in each round.
"""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.segments import WorkSegments
from stepsplit.analyzer.trace import OP_CODE, Bool, Float

_MESSAGES = [OP_CODE["send"], OP_CODE["recv"]]

_MOSTLY = 0.5
"""Work is that of a round if it is at least this share of what its segment computes."""


def find_ring_segments(context: CauseContext, segments: WorkSegments) -> Bool:
    """Whether each segment begins after a message of a ring, shape (rows, segments)."""
    kernels, matched = context.graph.kernels, context.split.matched
    of_ring = context.find_kernels(lambda axes: axes == {"cp"})
    is_message = np.zeros(len(kernels) + 1, dtype=np.bool_)  # the last one of no call
    is_message[of_ring] = np.isin(matched.op[kernels.row[of_ring]], _MESSAGES)
    ends = is_message[segments.ends_with]
    return np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)


def measure_ring_messages(context: CauseContext) -> Float:
    """For each row of the steps, how long the messages that it receives in rings move data."""
    graph, kernels = context.graph, context.graph.kernels
    of_ring = context.find_kernels(lambda axes: axes == {"cp"})
    received = of_ring[context.split.matched.op[kernels.row[of_ring]] == OP_CODE["recv"]]
    received = received[kernels.step[received] >= 0]
    moved_ns = np.maximum(graph.rest_ns[kernels.end[received]], 0)
    total = np.bincount(kernels.step[received], moved_ns, minlength=len(graph.steps.step))
    return total.astype(np.float64)


def deal_out_rounds(
    context: CauseContext, segments: WorkSegments, work_ns: Float, all_ns: Float
) -> Float:
    """The work of the segments, with that of each ring equal in all rounds.

    The last round of a ring has no message of its own: it is in one segment with the round before
    it, and with what follows the ring.

    Args:
        context: the recording.
        segments: the segments.
        work_ns: what is dealt out, shape (rows, segments).
        all_ns: all that the segments compute, of which this is a part.
    """
    begins = find_ring_segments(context, segments)
    ends = np.concatenate([begins[:, 1:], np.zeros_like(begins[:, :1])], axis=1)
    goes_on = begins & ends & (work_ns >= _MOSTLY * all_ns)
    is_first = begins.copy()
    is_first[:, 1:] &= ~goes_on[:, :-1]
    # A number for each ring of each row; 0 of segments in none.
    ring = np.where(begins, np.cumsum(is_first.ravel()).reshape(begins.shape), 0)
    count = int(ring.max(initial=0)) + 1
    is_round = goes_on & (work_ns > 0)
    rounds = np.bincount(ring.ravel(), is_round.ravel(), minlength=count)
    total = np.bincount(ring.ravel(), work_ns.ravel(), minlength=count)
    mesh = context.split.layout.mesh
    ranks = dict(zip(mesh.axes, mesh.sizes, strict=True)).get("cp", 1) if mesh else 1
    steps = np.maximum(rounds + 1, ranks)
    share = np.where(is_round, 1.0, np.where(goes_on, 0.0, (steps - rounds)[ring]))
    return np.where(ring > 0, (total / steps)[ring] * share, work_ns)
