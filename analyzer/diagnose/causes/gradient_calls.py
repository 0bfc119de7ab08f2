"""The calls of data parallelism in a recording: which reduce gradients or gather weights, and which
run in the forward."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, find_interval, intersect, is_inside
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext
from stepsplit.analyzer.split.call_purposes import (
    DDP_FORWARD,
    SHARDS,
    find_backward_spans,
    find_first_backward_ns,
    find_issue_ns,
    find_spans,
)
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import OP_CODE, Bool, Int64
from stepsplit.collectors.formats.rank_record import MemoryState

REDUCTION_OPS = ("all_reduce", "reduce_scatter")

_SAME_BYTES = 0.01
"""Gradients and what is reduced in the backward are the same within this fraction: buckets are
padded, and the optimizer may know weights without a gradient."""


def find_ops(context: ReplayContext, ops: Iterable[str]) -> Bool:
    """Which collectives and messages are one of these ops."""
    codes = [OP_CODE[op] for op in ops]
    return np.isin(context.split.matched.op[context.graph.kernels.row], codes)


def find_on_data_axes(context: ReplayContext) -> Bool:
    """Which collectives and messages are of groups along data axes alone."""
    found = np.zeros(len(context.graph.kernels), dtype=np.bool_)
    found[context.find_kernels(lambda axes: bool(axes) and axes <= DATA_AXES)] = True
    return found


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
    sums, data = find_ops(context, REDUCTION_OPS), find_on_data_axes(context)
    ops = sums | find_ops(context, ("all_gather",))
    return ops & data & ~(find_forward_kernels(context) & sums)


class ExtraSums(Struct, frozen=True):
    """The all_reduces after the backward that gradients do not need.

    Attributes:
        found: Which of the collectives that ranks waited for are.
        gradient_bytes: The gradients of a rank and step.
    """

    found: Bool
    gradient_bytes: float


def find_sums_after_backward(context: ReplayContext) -> ExtraSums:
    """Find the all_reduces on data axes, issued after the backward and outside of the optimizer,
    that cannot reduce gradients.

    Such a call may reduce gradients, without DDP or in a last bucket. It does not if it alone, or
    all of them though a backward has reduced as much, have more bytes than all gradients; nor if
    the backward has reduced exactly the gradients.
    """
    table = context.graph.kernels
    data = find_on_data_axes(context)
    size = context.split.matched.message_bytes[table.row].astype(np.float64)
    sums, all_reduces = find_ops(context, REDUCTION_OPS), find_ops(context, ("all_reduce",))
    counted = np.append(context.counted, False)[table.step] & data & (size > SCALAR_BYTES)
    found, most = np.zeros(len(table), dtype=np.bool_), 0.0
    for index, rank in enumerate(context.split.ranks):
        mine = table.list_rows(index)
        steps = max(1, int((context.counted & (context.graph.steps.rank == index)).sum()))
        in_backward, after = classify_issue(rank)
        call = table.call[mine]
        reduced = size[mine[counted[mine] & sums[mine] & in_backward[call]]].sum() / steps
        later = counted[mine] & all_reduces[mine] & after[call]
        if not later.any():
            continue
        weights = _count_known_gradients(context, index, mine[later])
        gradients = max(reduced, weights)
        if not gradients:
            continue
        total = size[mine[later]].sum() / steps
        # Gradients may be dropped once they are reduced, such as those of frozen layers: then fewer
        # are left than there are weights.
        whole = {weights} | {
            float(memory.weights_bytes)
            for memory in _list_memories(context, index)
            if memory.weights_bytes and (memory.gradients_bytes or 0) < memory.weights_bytes
        }
        is_done = any(abs(reduced - one) <= _SAME_BYTES * one for one in whole if one)
        too_many = reduced > 0.9 * gradients and total > (1 + _SAME_BYTES) * gradients
        extra = all_reduces[mine] & data[mine] & after[call] & (size[mine] > SCALAR_BYTES)
        if not too_many and not (is_done and total > 2 * _SAME_BYTES * weights):
            extra &= size[mine] > (1 + _SAME_BYTES) * gradients
        found[mine] = extra
        most = max(most, gradients)
    shared = context.split.matched.shared[table.row]
    return ExtraSums(found | ((shared >= 0) & np.isin(shared, shared[found])), most)


def find_sums_before_updates(context: ReplayContext) -> Bool:
    """Which all_reduces on data axes an optimizer issues before it has computed anything, if they
    have as many bytes as all gradients, which the backward has reduced: these once more.

    An optimizer that shares its updates, such as a Muon that divides the weights among the ranks,
    computes them first.
    """
    table = context.graph.kernels
    size = context.split.matched.message_bytes[table.row].astype(np.float64)
    of_data = find_on_data_axes(context) & (size > SCALAR_BYTES)
    sums, all_reduces = find_ops(context, REDUCTION_OPS), find_ops(context, ("all_reduce",))
    counted = np.append(context.counted, False)[table.step]
    found = np.zeros(len(table), dtype=np.bool_)
    for index, rank in enumerate(context.split.ranks):
        mine = table.list_rows(index)
        mine = mine[of_data[mine]]
        again = mine[all_reduces[mine]]
        again = again[_is_before_updates(rank)[table.call[again]]] if len(again) else again
        if not len(again):
            continue
        in_backward, _ = classify_issue(rank)
        passed = mine[sums[mine] & in_backward[table.call[mine]]]
        first, second = (size[some[counted[some]]].sum() for some in (passed, again))
        steps = max(1, int((context.counted & (context.graph.steps.rank == index)).sum()))
        # Reduced by hand, half of the gradients look like the other half.
        least = steps * (1 - _SAME_BYTES) * _count_known_gradients(context, index, again)
        found[again] = least > 0 and min(first, second) >= least
    shared = context.split.matched.shared[table.row]
    return found | ((shared >= 0) & np.isin(shared, shared[found]))


def _is_before_updates(rank: RankSplit) -> Bool:
    """For each call, whether it was issued in an optimizer, which runs no pass, whose first call
    comes before all of its compute."""
    events, when = rank.trace.events, find_issue_ns(rank.trace)
    updates = _find_updates(rank, find_backward_spans(rank.trace))
    if not len(updates):
        return np.zeros(len(when), dtype=np.bool_)
    computes = np.flatnonzero(rank.trace.kinds.computes)
    on_device = rank.trace.on_device
    at = events.find_launch_ns(computes) if on_device else events.start_ns[computes]
    place = find_interval(updates, when)
    inside = place >= 0
    first_ns = np.full(len(updates), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, place[inside], when[inside])
    at = np.sort(at)
    is_first = np.searchsorted(at, first_ns) == np.searchsorted(at, updates.start_ns)
    return np.asarray(inside & np.append(is_first, False)[place])


def find_sums_of_earlier_passes(context: ReplayContext, passes: int) -> Bool:
    """Which all_reduces on data axes are of all but the last of so many accumulated microbatches:
    those in the backwards of a step, if they are the same after each. Every pass must sum."""
    table = context.graph.kernels
    size = context.split.matched.message_bytes[table.row]
    sums = find_ops(context, ("all_reduce",)) & find_on_data_axes(context) & (size > SCALAR_BYTES)
    found = np.zeros(len(table), dtype=np.bool_)
    for index, rank in enumerate(context.split.ranks):
        mine = table.list_rows(index)
        in_backward, _ = classify_issue(rank)
        mine = mine[sums[mine] & in_backward[table.call[mine]]]
        mine = mine[np.argsort(find_issue_ns(rank.trace)[table.call[mine]], kind="stable")]
        for step in np.unique(table.step[mine]).tolist():
            own = mine[table.step[mine] == step]
            each, rest = divmod(len(own), passes)
            if each and not rest and (size[own] == np.tile(size[own[:each]], passes)).all():
                found[own[:-each]] = True
    shared = context.split.matched.shared[table.row]
    return found | ((shared >= 0) & np.isin(shared, shared[found]))


def _list_memories(context: ReplayContext, index: int) -> list[MemoryState]:
    return [one.memory for one in context.list_records(index) if one.memory is not None]


def _count_known_gradients(context: ReplayContext, index: int, kernels: Int64) -> float:
    """The bytes of the gradients of a rank, whose collectives these are; 0 without its record."""
    matched = context.split.matched
    groups = np.unique(matched.group[context.graph.kernels.row[kernels]]).tolist()
    members = max(len(matched.groups[one].ranks) for one in groups)
    memories = _list_memories(context, index)
    return float(max((_count_gradient_bytes(one, members) for one in memories), default=0))


def _count_gradient_bytes(memory: MemoryState, members: int) -> int:
    """The gradients of a rank; 0 if unknown. Where its optimizer has the part of one of so many
    members, as with ZeRO-1 and 2, those of all parts: as many bytes as weights, or twice that."""
    own, weights = memory.gradients_bytes or 0, memory.weights_bytes or 0
    whole = own * members
    apart = min(abs(whole - weights), abs(whole - 2 * weights))
    return whole if own < weights and apart < _SAME_BYTES * weights else own or weights


def classify_issue(rank: RankSplit) -> tuple[Bool, Bool]:
    """For each call of a rank: whether it was issued in a backward, or by FSDP; whether after the
    first backward of its step, and neither in a backward, a forward, nor the optimizer."""
    events, when = rank.trace.events, find_issue_ns(rank.trace)
    passes = find_backward_spans(rank.trace)
    updates = _find_updates(rank, passes)
    is_other = is_inside(find_spans(events, DDP_FORWARD), when) | is_inside(updates, when)
    backward = is_inside(passes, when) | is_inside(find_spans(events, *SHARDS), when)
    first_ns = find_first_backward_ns(rank.trace, when)
    return backward, ~backward & ~is_other & (first_ns >= 0) & (when >= first_ns)


def _find_updates(rank: RankSplit, passes: Intervals) -> Intervals:
    """When the host ran optimizers; one that is given a closure, and runs the passes itself, is
    left out. passes: the backwards."""
    optimizer = find_spans(rank.trace.events, "Optimizer.step#")
    alone = np.ones(len(optimizer), dtype=np.bool_)
    alone[intersect(optimizer, passes).left] = False
    return Intervals(optimizer.start_ns[alone], optimizer.end_ns[alone])
