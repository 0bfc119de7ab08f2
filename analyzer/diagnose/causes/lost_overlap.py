"""Lost overlap: exposed gradient reduction that could overlap with the backward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.backward_passes import BackwardPasses
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.gradient_calls import (
    REDUCTION_OPS,
    find_sums_after_backward,
)
from stepsplit.analyzer.diagnose.graph.replay import HoistedCalls, ReplayContext, hoist_collectives
from stepsplit.analyzer.split.call_purposes import find_issue_ns
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.phases import list_gradient_sync_ops
from stepsplit.analyzer.split.strategy import count_accumulated_microbatches
from stepsplit.analyzer.trace import OP_CODE

_OVERLAPPED_SHARE = 0.1
"""Gradient reduction counts as overlapped if at least this fraction is hidden by compute."""

_LEFT_SHARE = 0.1
"""A reduction is launched in time if at least this share of the backward is launched after it."""


def find_lost_overlap(context: CauseContext) -> Iterator[Remedy]:
    """Find exposed gradient reduction.

    The replay starts each bucket as soon as its gradients are ready, in the recorded order. None
    where compute hides enough of it, or most of it is launched during the backward already: then
    the link is the limit.
    """
    overlaps = [
        row
        for row in context.split.detail.overlaps
        if row.axis in DATA_AXES and row.op in list_gradient_sync_ops(frozenset({row.axis}))
    ]
    moved_ns = sum(row.moved_ns for row in overlaps)
    hidden_ns = sum(row.hidden_ns for row in overlaps)
    if not moved_ns or hidden_ns / moved_ns >= _OVERLAPPED_SHARE:
        return
    moves = list_hoistable_calls(context)
    if not moves:
        return
    kernels = np.concatenate([move.kernels for move in moves])
    rows = np.isin(context.graph.steps.rank, context.graph.kernels.rank[kernels])
    spent = int(context.sum_exposed_ns()[kernels].sum()) // max(1, int(rows.sum()))
    # Reductions may be launched in time, and one queue to the GPU holds them up.
    doubt = "; CUDA_DEVICE_MAX_CONNECTIONS is 1, which may hold it up: try it unset"
    gains = context.compute_step_gains(hoist_collectives(context.graph, moves))
    # Behind what their stream still does for other calls they start hardly earlier.
    is_most = 2 * gains.mean_ns >= spent
    part = "most" if is_most else units.format_milliseconds(max(gains.mean_ns, 0))
    yield replay_remedy(
        context,
        lambda graph: hoist_collectives(graph, moves),
        bucket="collective",
        measured_ns=spent,
        predicted_ns=None,
        rows=rows,
        message=(
            f"exposed gradient reduction: {units.format_milliseconds(spent)} per step; reducing "
            f"bucket by bucket during the backward would overlap {part} of it with compute"
            f"{doubt if _has_one_queue(context) else ''}"
        ),
        events=context.list_longest_calls(kernels),
        gains=gains,
    )


def _has_one_queue(context: ReplayContext) -> bool:
    is_one = {record.max_connections for record in context.records} == {1}
    return is_one and context.split.ranks[0].trace.on_device


def list_hoistable_calls(context: ReplayContext) -> list[HoistedCalls]:
    """The exposed gradient reductions, and when the gradients of each bucket were ready: an item
    for each rank and step that could start some earlier.

    None of a rank in a pipeline whose backwards are not known: gradients are complete in the last
    of them.
    """
    table, found = context.graph.kernels, []
    extra = find_sums_after_backward(context).found
    # Backward passes per step without a pipeline; gradients are complete after the last.
    passes = count_accumulated_microbatches(context.split.strategies) or 0
    for index, rank in enumerate(context.split.ranks):
        if context.split.layout.pipelines and not any(grid.slots for grid in rank.grids):
            continue
        calls = rank.trace.calls
        phases = np.array(rank.phase, dtype=np.str_)
        syncs = rank.attribution.exposed.call[phases == "grad_sync"]
        sums = np.isin(calls.op, [OP_CODE[op] for op in REDUCTION_OPS])
        mine = table.list_rows(index)
        mine = mine[~extra[mine]]
        call = table.call[mine]
        chosen = np.isin(call, syncs) & sums[call] & (calls.message_bytes[call] > SCALAR_BYTES)
        mine = mine[chosen]
        if not len(mine):
            continue
        backwards = BackwardPasses.find(rank, passes)
        first_step = int(np.flatnonzero(context.graph.steps.rank == index)[0])
        for step in np.unique(table.step[mine]).tolist():
            here, window = mine[table.step[mine] == step], step - first_step
            own = table.call[here]
            size = calls.message_bytes[own].astype(np.float64)
            # In time: the host launches most bytes while much of the last backward is still to be
            # launched.
            left = backwards.measure_left(window, find_issue_ns(rank.trace)[own])
            is_in_time = 2 * size[left >= _LEFT_SHARE].sum() > size.sum()
            is_exposed = bool((table.resume[here] >= 0).any())
            if not is_exposed or (is_in_time and not _has_one_queue(context)):
                continue
            starts = rank.clock.map_to_common_ns(rank.trace.events.start_ns[calls.event[own]])
            begin, end = backwards.find_before(window, int(starts.min()))
            # The backward makes gradients in proportion to time.
            made = np.rint((end - begin) * np.cumsum(size) / size.sum()).astype(np.int64)
            found.append(HoistedCalls(here, begin + made))
    return found


LOST_OVERLAP = CauseEntry(
    "no_overlap", find_lost_overlap, basis="replayed", explained_by="small_collectives"
)
