"""Gradients that are summed while nothing computes, though they could be during the backward."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.compare.causes.backwards import Backwards
from stepsplit.analyzer.compare.causes.scene import Scene
from stepsplit.analyzer.compare.replay.earlier import Earlier, earlier
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.split.strategy_evidence import accumulated_microbatches
from stepsplit.analyzer.trace import OP_CODE, Int64

_SUMS = ("all_reduce", "reduce_scatter")
_HIDDEN = 0.1
"""Where compute hides as much of the sums as this, they overlap already."""


def lost_overlap(scene: Scene) -> list[Finding]:
    """As if each bucket of gradients were summed as soon as the backward has made it, in the order
    in which they are summed now, and only what follows waited."""
    if _hidden_share(scene) >= _HIDDEN:
        return []
    moves = moves_of(scene)
    if not moves:
        return []
    kernels = np.concatenate([move.kernels for move in moves])
    rows = np.isin(scene.graph.steps.rank, scene.graph.kernels.rank[kernels])
    spent = int(scene.exposed_ns()[kernels].sum()) // max(1, int(rows.sum()))
    return [
        Finding(
            code="no_overlap",
            bucket="collective",
            gain_ns=scene.gain_ns(earlier(scene.graph, moves)),
            measured_ns=spent,
            predicted_ns=None,
            ranks=(),
            steps=scene.steps_of(rows),
            events=scene.calls(kernels),
            message=(
                f"gradients are summed while nothing computes, for {units.milliseconds(spent)} a "
                "step; bucket by bucket during the backward, most of that would be hidden"
            ),
        )
    ]


def moves_of(scene: Scene) -> list[Earlier]:
    """The sums of gradients that held ranks up, and when each bucket of them was there."""
    return [move for index in range(len(scene.found.ranks)) for move in _moves(scene, index)]


def _hidden_share(scene: Scene) -> float:
    overlaps = scene.found.detail.overlaps
    rows = [row for row in overlaps if row.op in _SUMS and row.axis in DATA_AXES]
    moved = sum(row.moved_ns for row in rows)
    return sum(row.hidden_ns for row in rows) / moved if moved else 1.0


def _moves(scene: Scene, index: int) -> list[Earlier]:
    """What one rank would sum earlier, step by step."""
    rank, kernels = scene.found.ranks[index], scene.graph.kernels
    exposed = rank.attribution.exposed
    syncs = {
        call for call, phase in zip(exposed.call.tolist(), rank.phase, strict=True)
        if phase == "grad_sync"
    }  # fmt: skip
    sums = np.isin(rank.trace.calls.op, [OP_CODE[op] for op in _SUMS])
    large = rank.trace.calls.message_bytes > SCALAR_BYTES
    mine = np.flatnonzero(kernels.rank == index)
    call = kernels.call[mine]
    mine = mine[np.isin(call, list(syncs)) & sums[call] & large[call]]
    if not len(mine):
        return []
    backwards = Backwards.of(rank, _passes(scene))
    first = int(np.flatnonzero(scene.graph.steps.rank == index)[0])
    steps = np.unique(kernels.step[mine]).tolist()
    of_step = [(step - first, mine[kernels.step[mine] == step]) for step in steps]
    return [
        _of_step(rank, backwards, window, here, kernels.call)
        for window, here in of_step
        if (kernels.resume[here] >= 0).any()
    ]


def _passes(scene: Scene) -> int:
    """How many backwards a step has outside of a pipeline: gradients are whole with the last."""
    return accumulated_microbatches(scene.found.strategies) or 1


def _of_step(
    rank: RankSplit, backwards: Backwards, window: int, mine: Int64, call: Int64
) -> Earlier:
    calls = rank.trace.calls
    starts = rank.clock.common_ns(rank.trace.events.start_ns[calls.event[call[mine]]])
    begin, end = backwards.before(window, int(starts.min()))
    size = calls.message_bytes[call[mine]].astype(np.float64)
    ready = begin + np.rint((end - begin) * np.cumsum(size) / size.sum()).astype(np.int64)
    return Earlier(mine, ready)
