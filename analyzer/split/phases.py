"""In which phase of a step each call was made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepsplit.analyzer.split.intervals import Intervals, union
from stepsplit.analyzer.split.layout import Layout
from stepsplit.analyzer.split.pipeline import BOX, PHASE_OF_LETTER
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import OPS, Bool, Category, Events, Int64, RankTrace


def phases_of(
    trace: RankTrace, windows: Sequence[StepWindow], axis_of: Sequence[str | None], layout: Layout
) -> list[str]:
    """One of forward, backward, grad_sync, optimizer, other for each call of the rank.

    axis_of gives the axis of each of the trace's groups. A call belongs where the host made it.
    """
    calls, events = trace.calls, trace.events
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, events.start_ns[calls.event])
    optimizer = _inside(_spans(events, events.named("Optimizer.step#")), when)
    backward = _inside(
        _spans(events, events.named("autograd::engine") | _boxes(events, "backward")), when
    )
    forward = _inside(_spans(events, _boxes(events, "forward")), when)
    early = _before_backward(events, windows, when)
    found = []
    for i in range(len(calls)):
        op, group_id = OPS[calls.op[i]], int(calls.group_id[i])
        axis = axis_of[group_id] if group_id >= 0 else None
        if op in ("send", "recv", "send_recv"):
            found.append(_direction(op, trace.rank, int(calls.peer[i]), layout))
        elif optimizer[i]:
            found.append("optimizer")
        elif (
            (axis or "").startswith("dp")
            and op in ("all_reduce", "reduce_scatter")
            and not forward[i]
        ):
            found.append("grad_sync")
        elif backward[i]:
            found.append("backward")
        else:
            found.append("forward" if forward[i] or early[i] else "other")
    return found


def _direction(op: str, rank: int, peer: int, layout: Layout) -> str:
    """Activations go to later stages, gradients to earlier ones."""
    ahead = layout.stage(peer) - layout.stage(rank) if peer >= 0 else 0
    if not ahead:
        return "other"
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
