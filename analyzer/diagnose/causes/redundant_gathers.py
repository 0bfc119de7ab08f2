"""Redundant all-gathers: of weights and activations that the layout does not need gathered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_rows
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.removed_calls import remove_calls_remedy
from stepsplit.analyzer.split.mesh import DATA_AXES, format_axes
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.strategy import count_accumulated_microbatches
from stepsplit.analyzer.trace import OP_CODE, Bool, Int64

_PRECISIONS = (0.25, 0.5, 1.0, 2.0)
"""Possible ratios of weight bytes to gradient bytes."""

_PADDING = 1e-3
"""The tolerance for padding."""


def find_redundant_gathers(context: CauseContext) -> Iterator[Remedy]:
    """Find the axes with more all-gathers than their reductions require."""
    gathers: dict[str, list[Int64]] = defaultdict(list)
    table, matched = context.graph.kernels, context.split.matched
    row = table.row
    tensors = np.flatnonzero(
        (matched.group[row] >= 0) & (matched.message_bytes[row] > SCALAR_BYTES)
    )
    order, first = group_rows(matched.group[row[tensors]])
    for kernels in np.split(tensors[order], first[1:]) if len(tensors) else []:
        axes = context.split.layout.find_axes(matched.groups[matched.group[row[kernels[0]]]])
        redundant = _Gathers(context, kernels).find_redundant(axes)
        if len(redundant):
            gathers[format_axes(axes)].append(redundant)
    for axis, parts in gathers.items():
        chosen = np.concatenate(parts)
        steps = max(1, len(np.unique(table.step[chosen])))
        size = int(matched.message_bytes[row[chosen]].sum()) // steps
        message = (
            f"redundant all-gathers on {axis}: {len(chosen) / steps:.0f} per step "
            f"({units.format_size(size)} per rank) that the layout does not require"
        )
        yield remove_calls_remedy(context, chosen, steps, message)


class _Gathers:
    """The tensor all-gathers and reductions of a group in all steps.

    Holds the kernels of all its ranks in order of start, with op and message_bytes; `_of_first`
    marks those of the first rank.
    """

    def __init__(self, context: CauseContext, kernels: Int64) -> None:
        table, matched = context.graph.kernels, context.split.matched
        self._context, self._kernels = context, kernels
        row = table.row[kernels]
        self._op, self._bytes, self._call = (
            matched.op[row],
            matched.message_bytes[row],
            matched.shared[row],
        )
        self._of_first = table.rank[kernels] == table.rank[kernels[0]]
        self._step = context.graph.steps.step[table.step[kernels]]

    def find_redundant(self, axes: frozenset[str]) -> Int64:
        """The kernels of redundant all-gathers on all ranks."""
        gathers = self._match_op("all_gather")
        if not axes or not gathers.any():
            return self._kernels[:0]
        if self._match_op("reduce_scatter").any():
            return self._kernels[self._find_beyond_scatters(gathers)]
        if axes == {"tp"}:
            # All-gathers of a size that occurs more often than once per microbatch (the logits).
            schedule, strategies = self._context.split.schedule, self._context.split.strategies
            accumulated = count_accumulated_microbatches(strategies)
            microbatches = schedule.microbatches if schedule else accumulated or 1
            allowed = microbatches * len(np.unique(self._step))
            sizes, count = np.unique(self._bytes[gathers & self._of_first], return_counts=True)
            return self._kernels[gathers & np.isin(self._bytes, sizes[count > allowed])]
        if axes <= DATA_AXES and self._match_op("all_reduce").any():
            # All-gathers before the last gradient reduction of their step; ZeRO-1 gathers after
            # it.
            redundant = np.zeros_like(gathers)
            for step in np.unique(self._step).tolist():
                mine = np.flatnonzero(self._of_first & (self._step == step))
                sums = np.flatnonzero(self._match_op("all_reduce")[mine])
                early = mine[: sums[-1]] if len(sums) else mine[:0]
                redundant |= gathers & np.isin(self._call, self._call[early])
            return self._kernels[redundant]
        return self._kernels[:0]

    def _gathers_for_microbatches(self, gathers: Bool, scatters: Bool) -> bool:
        """Whether the gathers look like those of several microbatches whose gradients are reduced
        with the last one: whole microbatches of gathers before the first reduce_scatter.

        A microbatch gathers each unit once or twice; the last one of the forward may stay.
        """
        steps = len(np.unique(self._step))
        total, layers = int(gathers.sum()), int(scatters.sum()) // max(steps, 1)
        for of_microbatch in (2 * layers, 2 * layers - 1, layers):
            microbatches, rest = divmod(total, max(steps * of_microbatch, 1))
            if rest or microbatches < 2:
                continue
            early = 0
            for step in np.unique(self._step).tolist():
                mine = np.flatnonzero((gathers | scatters) & (self._step == step))
                early += int(np.argmax(scatters[mine]))
            if early >= steps * (microbatches - 1) * of_microbatch:
                return True
        return False

    def _match_op(self, op: str) -> Bool:
        return np.asarray(self._op == OP_CODE[op])

    def _find_beyond_scatters(self, gathers: Bool) -> Bool:
        """All-gathers beyond two per reduce_scatter.

        Chosen are sizes without a matching reduce_scatter, else the most exposed calls. With
        gradient accumulation there are more all-gathers than reduce-scatters: none is redundant.
        """
        scatters = self._match_op("reduce_scatter") & self._of_first
        excess = int((gathers & self._of_first).sum()) - 2 * int(scatters.sum())
        accumulates = count_accumulated_microbatches(self._context.split.strategies) is not None
        accumulates |= self._gathers_for_microbatches(gathers & self._of_first, scatters)
        if accumulates or excess < len(np.unique(self._step)):
            return np.zeros_like(gathers)
        # Which calls match the size of weights whose gradients are scattered, except padding.
        scattered = np.unique(self._bytes[scatters])
        weights = np.multiply.outer(scattered, _PRECISIONS).ravel()
        apart = np.abs(self._bytes[:, np.newaxis] / weights - 1)
        odd: Bool = gathers & ~np.asarray((apart < _PADDING).any(axis=1))
        if 0 < int((odd & self._of_first).sum()) <= excess + int(scatters.sum()):
            return odd
        names, place = np.unique(self._call[gathers], return_inverse=True)
        exposed_ns = np.bincount(place, self._context.sum_exposed_ns()[self._kernels[gathers]])
        chosen = names[np.argsort(-exposed_ns, kind="stable")[:excess]]
        return gathers & np.isin(self._call, chosen) & (self._call >= 0)


REDUNDANT_GATHERS = CauseEntry("redundant_calls", find_redundant_gathers, basis="inferred")
