"""The phase of the step in which each call was issued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, is_inside, union
from stepsplit.analyzer.split.call_purposes import DDP_FORWARD, find_issue_ns
from stepsplit.analyzer.split.mesh import DATA_AXES, RankLayout
from stepsplit.analyzer.split.microbatch_marks import parse_marks
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Events, Int64, RankTrace


def infer_phases(trace: RankTrace, windows: Sequence[StepWindow], layout: RankLayout) -> list[str]:
    """The phase of each call: forward, backward, grad_sync, optimizer or other.

    A call belongs to the phase in which the host issued it; a pipeline message is classified by its
    direction.
    """
    calls, events = trace.calls, trace.events
    when = find_issue_ns(trace)
    marks = _Marks(
        optimizer=is_inside(_merge_spans(events, events.match_prefix("Optimizer.step#")), when),
        backward=is_inside(
            _merge_spans(
                events,
                events.match_prefix("autograd::engine")
                | _mask_microbatch_marks(events, "backward"),
            ),
            when,
        ),
        forward=is_inside(
            _merge_spans(
                events,
                events.match_prefix(DDP_FORWARD) | _mask_microbatch_marks(events, "forward"),
            ),
            when,
        ),
        early=_mask_before_backward(events, windows, when),
    )
    ahead = _compute_stage_distance(trace, layout)
    sends, receives = calls.op == OP_CODE["send"], calls.op == OP_CODE["recv"]
    # A device runs behind its host: there, calls before the first backward of a window may be those
    # that end the step before it.
    own_early = marks.early & (not trace.on_device)
    phase_names = np.select(
        [
            sends & (ahead > 0) | receives & (ahead < 0),
            sends & (ahead < 0) | receives & (ahead > 0),
            # An optimizer that is given a closure, as by Lightning, runs the passes itself.
            marks.optimizer & ~marks.forward & ~marks.backward,
            ~marks.forward & ~own_early & _find_gradient_syncs(trace, layout),
            marks.backward,
            marks.forward | marks.early,
        ],
        ["forward", "backward", "optimizer", "grad_sync", "backward", "forward"],
        "other",
    )
    phases: list[str] = phase_names.tolist()
    return phases


class _Marks(Struct, frozen=True):
    """For each call, whether it was issued in this part of the step; early: before the first
    backward."""

    optimizer: Bool
    backward: Bool
    forward: Bool
    early: Bool


def _find_gradient_syncs(trace: RankTrace, layout: RankLayout) -> Bool:
    """Whether each call reduces gradients, by its group and op."""
    syncs = [list_gradient_sync_ops(layout.find_axes(group)) for group in trace.groups]
    table = np.array([[op in of_group for op in OPS] for of_group in (*syncs, frozenset())])
    return np.asarray(table[trace.calls.group_id, trace.calls.op])


def list_gradient_sync_ops(axes: frozenset[str]) -> frozenset[str]:
    """The ops that reduce gradients on a group of these axes.

    Data and context parallel ranks have the same weights. On cp alone, reduce_scatter belongs to
    attention.
    """
    if not axes or not axes <= DATA_AXES:
        return frozenset()
    return frozenset({"all_reduce"} if axes == {"cp"} else {"all_reduce", "reduce_scatter"})


def _compute_stage_distance(trace: RankTrace, layout: RankLayout) -> Int64:
    """How many stages later in the pipeline the peer of each message is; 0 for collectives.

    Activations go to later stages, gradients to earlier ones.
    """
    peers, place = np.unique(trace.calls.peer, return_inverse=True)
    own_stage = layout.find_stage(trace.rank)
    ahead = [layout.find_stage(peer) - own_stage if peer >= 0 else 0 for peer in peers.tolist()]
    return np.array(ahead, dtype=np.int64)[place]


def _mask_microbatch_marks(events: Events, phase: str) -> Bool:
    """Which events mark forwards (or backwards) of microbatches, of any stage."""
    marked = (any(mark.phase == phase for mark in parse_marks(name, 0)) for name in events.names)
    return events.name_mask(tuple(marked))


def _merge_spans(events: Events, mask: Bool) -> Intervals:
    mask = mask & events.is_category(Category.OP, Category.ANNOTATION)
    return union(events.start_ns[mask], events.ends_of(mask))


def _mask_before_backward(events: Events, windows: Sequence[StepWindow], when: Int64) -> Bool:
    """Which calls were issued before the first backward of their step."""
    backward = events.start_ns[events.match_prefix("autograd::engine")]
    early = np.zeros(len(when), dtype=np.bool_)
    for window in windows:
        first = int(np.searchsorted(backward, window.start_ns))
        limit = int(backward[first]) if first < len(backward) else window.start_ns
        early |= (when >= window.start_ns) & (when < min(limit, window.end_ns))
    return early
