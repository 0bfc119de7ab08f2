"""In which phase of a step each call was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.intervals import Intervals, union
from stepsplit.analyzer.split.layout import Layout
from stepsplit.analyzer.split.pipeline import BOX, PHASE_OF_LETTER
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import OPS, Bool, Category, Events, Int64, RankTrace


def phases_of(trace: RankTrace, windows: Sequence[StepWindow], layout: Layout) -> list[str]:
    """One of forward, backward, grad_sync, optimizer, other for each call of the rank.

    A call belongs where the host made it; a message of a pipeline by its direction.
    """
    calls, events = trace.calls, trace.events
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, events.start_ns[calls.event])
    marks = _Marks(
        optimizer=_inside(_spans(events, events.named("Optimizer.step#")), when),
        backward=_inside(
            _spans(events, events.named("autograd::engine") | _boxes(events, "backward")), when
        ),
        forward=_inside(_spans(events, _boxes(events, "forward")), when),
        early=_before_backward(events, windows, when),
    )
    syncs = [_syncs_gradients(layout.axes_of(group)) for group in trace.groups]
    return [
        _direction(trace, i, layout) or _phase(trace, i, marks, syncs) for i in range(len(calls))
    ]


@dataclass(frozen=True, slots=True)
class _Marks:
    """For each call, whether it was made in such a part of the step; early: before any backward."""

    optimizer: Bool
    backward: Bool
    forward: Bool
    early: Bool


def _phase(trace: RankTrace, row: int, marks: _Marks, syncs: Sequence[frozenset[str]]) -> str:
    group_id = int(trace.calls.group_id[row])
    if marks.optimizer[row]:
        return "optimizer"
    if not marks.forward[row] and group_id >= 0 and OPS[trace.calls.op[row]] in syncs[group_id]:
        return "grad_sync"
    if marks.backward[row]:
        return "backward"
    return "forward" if marks.forward[row] or marks.early[row] else "other"


def _syncs_gradients(axes: frozenset[str]) -> frozenset[str]:
    """The ops by which a group of these axes brings gradients together.

    Data and context parallel ranks hold the same weights. On cp alone reduce_scatter belongs to
    attention.
    """
    if not axes or not axes <= {"dp_replicate", "dp_shard", "cp"}:
        return frozenset()
    return frozenset({"all_reduce"} if axes == {"cp"} else {"all_reduce", "reduce_scatter"})


def _direction(trace: RankTrace, row: int, layout: Layout) -> str | None:
    """Activations go to later stages, gradients to earlier; None for no message of a pipeline."""
    op, peer = OPS[trace.calls.op[row]], int(trace.calls.peer[row])
    ahead = layout.stage(peer) - layout.stage(trace.rank) if peer >= 0 else 0
    if op not in ("send", "recv") or not ahead:
        return None
    return "forward" if (ahead > 0) == (op == "send") else "backward"


def _boxes(events: Events, phase: str) -> Bool:
    matches = (BOX.match(name) for name in events.names)
    return events.name_mask(
        tuple(m is not None and PHASE_OF_LETTER[m["letter"]] == phase for m in matches)
    )


def _spans(events: Events, mask: Bool) -> Intervals:
    mask = mask & events.of(Category.OP, Category.ANNOTATION)
    return union(events.start_ns[mask], events.end_ns[mask])


def _inside(spans: Intervals, when: Int64) -> Bool:
    last = np.searchsorted(spans.start_ns, when, side="right") - 1
    inside = last >= 0
    inside[inside] = when[inside] < spans.end_ns[last[inside]]
    return np.asarray(inside)


def _before_backward(events: Events, windows: Sequence[StepWindow], when: Int64) -> Bool:
    """Which calls come before the first backward of their step."""
    backward = events.start_ns[events.named("autograd::engine")]
    early = np.zeros(len(when), dtype=np.bool_)
    for window in windows:
        first = int(np.searchsorted(backward, window.start_ns))
        limit = int(backward[first]) if first < len(backward) else window.start_ns
        early |= (when >= window.start_ns) & (when < min(limit, window.end_ns))
    return early
