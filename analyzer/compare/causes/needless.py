"""Weights and activations that are gathered though the layout does not need it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.compare.causes.scene import Scene
from stepsplit.analyzer.compare.replay.edits import left_out
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.strategy_evidence import accumulated_microbatches
from stepsplit.analyzer.trace import OP_CODE, Bool, Int64

_PRECISIONS = (0.25, 0.5, 1.0, 2.0)
_PADDING = 1e-3
"""What weights may take of the bytes of their gradients, and how exactly they do."""


def needless_calls(scene: Scene) -> list[Finding]:
    """A finding for each axis on which more is gathered than its reductions tell that it needs, as
    if those gathers were not there."""
    found: dict[str, list[Int64]] = defaultdict(list)
    for number, group in enumerate(scene.found.matched.groups):
        axes = scene.found.layout.axes_of(group)
        kernels = _Gathers.of(scene, number).needless(axes)
        if len(kernels):
            found[" x ".join(sorted(axes))].append(kernels)
    return [_finding(scene, axis, np.concatenate(parts)) for axis, parts in found.items()]


class _Gathers:
    """What a group gathers and reduces of tensors in all steps: kernels of all its ranks, in order
    of start, with op and message_bytes; one marks those of its first rank."""

    def __init__(self, scene: Scene, kernels: Int64) -> None:
        table, matched = scene.graph.kernels, scene.found.matched
        self._scene, self._kernels = scene, kernels
        row = table.row[kernels]
        self._op, self._bytes, self._call = (
            matched.op[row],
            matched.message_bytes[row],
            matched.shared[row],
        )
        self._one = table.rank[kernels] == (table.rank[kernels[0]] if len(kernels) else -1)
        self._step = scene.graph.steps.step[table.step[kernels]]

    @classmethod
    def of(cls, scene: Scene, group: int) -> _Gathers:
        row = scene.graph.kernels.row
        matched = scene.found.matched
        large = matched.message_bytes[row] > SCALAR_BYTES
        return cls(scene, np.flatnonzero((matched.group[row] == group) & large))

    def needless(self, axes: frozenset[str]) -> Int64:
        """The kernels of the gathers that nothing needs, on all ranks."""
        gathers = self._of("all_gather")
        if not axes or not gathers.any():
            return self._kernels[:0]
        if self._of("reduce_scatter").any():
            return self._kernels[self._beyond_scattered(gathers)]
        if axes == {"tp"}:
            return self._kernels[self._beyond_logits(gathers)]
        if axes <= DATA_AXES and self._of("all_reduce").any():
            return self._kernels[self._before_sums(gathers)]
        return self._kernels[:0]

    def _of(self, op: str) -> Bool:
        return np.asarray(self._op == OP_CODE[op])

    def _beyond_scattered(self, gathers: Bool) -> Bool:
        """More than two for each reduce_scatter: of sizes that nothing scatters, else those that
        hold ranks up most. Who accumulates gradients gathers more often than he scatters."""
        scatters = self._of("reduce_scatter") & self._one
        excess = int((gathers & self._one).sum()) - 2 * int(scatters.sum())
        accumulates = accumulated_microbatches(self._scene.found.strategies) is not None
        if accumulates or excess < len(np.unique(self._step)):
            return np.zeros_like(gathers)
        odd = gathers & ~self._fits(np.unique(self._bytes[scatters]))
        if 0 < int((odd & self._one).sum()) <= excess + int(scatters.sum()):
            return odd
        return self._most_exposed(gathers, excess)

    def _fits(self, scattered: Int64) -> Bool:
        """Which calls are of the weights whose gradients are scattered, padding aside."""
        weights = np.multiply.outer(scattered, _PRECISIONS).ravel()
        apart = np.abs(self._bytes[:, np.newaxis] / weights - 1)
        return np.asarray((apart < _PADDING).any(axis=1))

    def _beyond_logits(self, gathers: Bool) -> Bool:
        """Of a size that occurs more often than microbatches, each of which may gather logits."""
        schedule = self._scene.found.schedule
        allowed = (schedule.microbatches if schedule else 1) * len(np.unique(self._step))
        sizes, count = np.unique(self._bytes[gathers & self._one], return_counts=True)
        return gathers & np.isin(self._bytes, sizes[count > allowed])

    def _before_sums(self, gathers: Bool) -> Bool:
        """Before the last sum of gradients of their step: behind it ZeRO-1 hands weights on."""
        found = np.zeros_like(gathers)
        for step in np.unique(self._step).tolist():
            mine = np.flatnonzero(self._one & (self._step == step))
            sums = np.flatnonzero(self._of("all_reduce")[mine])
            early = mine[: sums[-1]] if len(sums) else mine[:0]
            found |= gathers & np.isin(self._call, self._call[early])
        return found

    def _most_exposed(self, gathers: Bool, excess: int) -> Bool:
        names, place = np.unique(self._call[gathers], return_inverse=True)
        held = np.bincount(place, self._scene.exposed_ns()[self._kernels[gathers]])
        chosen = names[np.argsort(-held, kind="stable")[:excess]]
        return gathers & np.isin(self._call, chosen) & (self._call >= 0)


def _finding(scene: Scene, axis: str, kernels: Int64) -> Finding:
    table, matched = scene.graph.kernels, scene.found.matched
    steps = max(1, len(np.unique(table.step[kernels])))
    size = int(matched.message_bytes[table.row[kernels]].sum()) // steps
    rows = np.isin(scene.graph.steps.rank, table.rank[kernels])
    return Finding(
        code="needless_calls",
        bucket="collective",
        gain_ns=scene.gain_ns(left_out(scene.graph, kernels)),
        measured_ns=int(scene.exposed_ns()[kernels].sum()) // steps,
        predicted_ns=0,
        ranks=(),
        steps=scene.steps_of(rows),
        events=scene.calls(kernels),
        message=(
            f"{len(kernels) / steps:.0f} all_gathers a step on {axis} ({units.size(size)} a rank) "
            "bring nothing that the layout needs"
        ),
    )
