"""In which phase of a step each call was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, inside, union
from stepsplit.analyzer.split.mesh.layout import DATA_AXES, Layout
from stepsplit.analyzer.split.pipeline.marks import marks_in
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Events, Int64, RankTrace


def phases_of(trace: RankTrace, windows: Sequence[StepWindow], layout: Layout) -> list[str]:
    """One of forward, backward, grad_sync, optimizer, other for each call of the rank.

    A call belongs where the host made it; a message of a pipeline by its direction.
    """
    calls, events = trace.calls, trace.events
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, events.start_ns[calls.event])
    marks = _Marks(
        optimizer=inside(_spans(events, events.named("Optimizer.step#")), when),
        backward=inside(
            _spans(events, events.named("autograd::engine") | _boxes(events, "backward")), when
        ),
        forward=inside(_spans(events, _boxes(events, "forward")), when),
        early=_before_backward(events, windows, when),
    )
    ahead = _stages_ahead(trace, layout)
    sends, receives = calls.op == OP_CODE["send"], calls.op == OP_CODE["recv"]
    found = np.select(
        [
            sends & (ahead > 0) | receives & (ahead < 0),
            sends & (ahead < 0) | receives & (ahead > 0),
            marks.optimizer,
            ~marks.forward & _syncing(trace, layout),
            marks.backward,
            marks.forward | marks.early,
        ],
        ["forward", "backward", "optimizer", "grad_sync", "backward", "forward"],
        "other",
    )
    phases: list[str] = found.tolist()
    return phases


@dataclass(frozen=True, slots=True)
class _Marks:
    """For each call, whether it was made in such a part of the step; early: before any backward."""

    optimizer: Bool
    backward: Bool
    forward: Bool
    early: Bool


def _syncing(trace: RankTrace, layout: Layout) -> Bool:
    """Which calls bring gradients together, by their group and op."""
    syncs = [_syncs_gradients(layout.axes_of(group)) for group in trace.groups]
    table = np.array([[op in of_group for op in OPS] for of_group in (*syncs, frozenset())])
    return np.asarray(table[trace.calls.group_id, trace.calls.op])


def _syncs_gradients(axes: frozenset[str]) -> frozenset[str]:
    """The ops by which a group of these axes brings gradients together.

    Data and context parallel ranks hold the same weights. On cp alone reduce_scatter belongs to
    attention.
    """
    if not axes or not axes <= DATA_AXES:
        return frozenset()
    return frozenset({"all_reduce"} if axes == {"cp"} else {"all_reduce", "reduce_scatter"})


def _stages_ahead(trace: RankTrace, layout: Layout) -> Int64:
    """By how many stages the peer of each message is later in the pipeline, 0 for no message.

    Activations go to later stages, gradients to earlier ones.
    """
    peers, place = np.unique(trace.calls.peer, return_inverse=True)
    mine = layout.stage(trace.rank)
    ahead = [layout.stage(peer) - mine if peer >= 0 else 0 for peer in peers.tolist()]
    return np.array(ahead, dtype=np.int64)[place]


def _boxes(events: Events, phase: str) -> Bool:
    """Which events mark forwards (or backwards) of microbatches; of what stage is all the same."""
    marked = (any(mark.phase == phase for mark in marks_in(name, 0)) for name in events.names)
    return events.name_mask(tuple(marked))


def _spans(events: Events, mask: Bool) -> Intervals:
    mask = mask & events.of(Category.OP, Category.ANNOTATION)
    return union(events.start_ns[mask], events.end_ns[mask])


def _before_backward(events: Events, windows: Sequence[StepWindow], when: Int64) -> Bool:
    """Which calls come before the first backward of their step."""
    backward = events.start_ns[events.named("autograd::engine")]
    early = np.zeros(len(when), dtype=np.bool_)
    for window in windows:
        first = int(np.searchsorted(backward, window.start_ns))
        limit = int(backward[first]) if first < len(backward) else window.start_ns
        early |= (when >= window.start_ns) & (when < min(limit, window.end_ns))
    return early
