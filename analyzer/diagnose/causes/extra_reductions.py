"""Extra reductions: data parallelism reduces only gradients, and a pipeline sends messages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.gradient_calls import (
    REDUCTION_OPS,
    find_forward_kernels,
    find_ops,
    find_sums_after_backward,
    find_sums_before_updates,
    find_sums_of_earlier_passes,
)
from stepsplit.analyzer.diagnose.causes.removed_calls import remove_calls_remedy
from stepsplit.analyzer.split.mesh import DATA_AXES, format_axes
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.strategy import (
    count_accumulated_microbatches,
    sums_after_each_microbatch,
)
from stepsplit.analyzer.trace import Int64


def find_extra_reductions(context: CauseContext) -> Iterator[Remedy]:
    """Find the axes with exposed reductions that their parallelism does not need.

    These are reductions of data parallel ranks in the forward, their all-reduces after the
    backward that cannot be of gradients, those that an optimizer issues of gradients which the
    backward has reduced, those of gradients after each accumulated microbatch, and all-reduces of
    tensors across pipeline stages, which only tied embeddings need.
    """
    table, matched = context.graph.kernels, context.split.matched
    row = table.row
    forward_sums = find_forward_kernels(context) & find_ops(context, REDUCTION_OPS)
    tensors = find_ops(context, ("all_reduce",)) & (matched.message_bytes[row] > SCALAR_BYTES)
    for axes in dict.fromkeys(map(context.split.layout.find_axes, matched.groups)):
        axis = format_axes(axes)
        if axes == {"pp"}:
            extra, why = tensors, "across pipeline stages, which only tied embeddings need"
        elif axes and axes <= DATA_AXES and axes != {"cp"}:
            why = (
                f"on {axis} in the forward, where data parallelism needs none (a loss over all"
                " ranks or a synchronized normalization does)"
            )
            extra = forward_sums
        else:
            continue
        on_axes = context.find_kernels(axes.__eq__)
        kernels = on_axes[extra[on_axes]]
        if not len(kernels):
            continue
        yield _remove(context, kernels, f"extra reductions {why}")
    after = find_sums_after_backward(context)
    again = (
        "before it computes anything: as many bytes as all gradients, which the backward reduces"
    )
    for found, where, than in (
        (
            after.found,
            "after the backward",
            f", while all gradients are {units.format_size(after.gradient_bytes)}",
        ),
        (find_sums_before_updates(context), "in the optimizer", f", {again}"),
    ):
        kernels = np.flatnonzero(found)
        if len(kernels):
            groups = np.unique(matched.group[row[kernels]]).tolist()
            reduced = {
                one
                for group in groups
                for one in context.split.layout.find_axes(matched.groups[group])
            }
            what = f"extra reductions on {format_axes(reduced)} {where}"
            yield _remove(context, kernels, what, than)
    # ZeRO-2 shards the gradients of each microbatch, to save memory.
    strategies = context.split.strategies
    microbatches = count_accumulated_microbatches(strategies)
    is_ddp = "ddp" in {one.name for one in strategies}
    if microbatches is None or not is_ddp or not sums_after_each_microbatch(strategies):
        return
    kernels = np.flatnonzero(find_sums_of_earlier_passes(context, microbatches))
    if len(kernels):
        yield _remove(
            context,
            kernels,
            f"extra reductions of gradients after each of {microbatches} microbatches, where those"
            " after the last are enough (DDP's no_sync)",
        )


def _remove(context: CauseContext, kernels: Int64, what: str, than: str = "") -> Remedy:
    table = context.graph.kernels
    steps = max(1, len(np.unique(table.step[kernels])))
    size = int(np.median(context.split.matched.message_bytes[table.row[kernels]]))
    each = f" of {units.format_size(size)}" if size >= 0 else ""
    message = f"{what}: {len(kernels) / steps:.0f} per step{each}{than}"
    return remove_calls_remedy(context, kernels, steps, message)


EXTRA_REDUCTIONS = CauseEntry("extra_reductions", find_extra_reductions, basis="inferred")
