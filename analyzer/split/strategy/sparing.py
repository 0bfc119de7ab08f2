"""What a rank does to spare memory: small batches, computing again, and the host's memory."""

from __future__ import annotations

import re

import numpy as np

from stepsplit.analyzer.arrays import inside
from stepsplit.analyzer.split.strategy.passes import AFTER, BACKWARD, FORWARD
from stepsplit.analyzer.split.strategy.seen import Seen
from stepsplit.analyzer.split.strategy.strategy import Strategy
from stepsplit.analyzer.trace import Bool, Category, Events, Int64

_ONLY_FORWARD = (
    "aten::linear",
    "aten::layer_norm",
    "aten::rms_norm",
    "aten::batch_norm",
    "aten::group_norm",
    "aten::conv2d",
    "aten::scaled_dot_product_attention",
    "aten::gelu",
    "aten::silu",
    "aten::relu",
    "aten::relu_",
    "aten::softmax",
    "aten::dropout",
)
"""Ops that no backward consists of: within one they compute again what a forward threw away."""
_WITHIN = {
    "aten::linear": ("aten::mm", "aten::addmm"),
    "aten::scaled_dot_product_attention": ("aten::_scaled_dot_product",),
}
"""What does the work of an op that is made of others."""
_MOST = 0.6
"""Full recomputation repeats more of each kind; what is not in layers, as the head, it does not."""
_MANY = 4
"""So many copies of a step are of tensors, not of a loss or of a batch."""


def accumulated(seen: Seen, sums: int) -> list[Strategy]:
    """Several microbatches for one step of the optimizer, where no pipeline splits the batch.

    sums is after how many backward passes, over all steps, gradients are brought together.
    """
    spans = seen.marks.optimizer
    updates = int((seen.steps.at(spans.start_ns) >= 0).sum())
    updates = updates or (len(seen.steps) if seen.steps.marked else len(seen.passes))
    count, rest = divmod(len(seen.passes), updates)
    if count < 2 or rest or any(seen.trace.rank in line for line in seen.layout.pipelines):
        return []
    when = {updates: "gradients summed once", len(seen.passes): "gradients summed after each"}
    parts = (f"{count} microbatches", when.get(sums, ""))
    return [Strategy("gradient accumulation", detail=", ".join(part for part in parts if part))]


def recomputed(seen: Seen) -> list[Strategy]:
    """Forward ops inside of backwards: full where most of every kind are, else selective.

    What selective checkpoints keep the result of is called again, but computes nothing.
    """
    events, engine = seen.trace.events, seen.marks.engine
    ids = [i for i, name in enumerate(events.names) if name in _ONLY_FORWARD]
    rows = np.flatnonzero(np.isin(events.name_id, ids) & events.of(Category.OP))
    rows = rows[seen.steps.at(events.start_ns[rows]) >= 0]
    again = inside(engine, events.start_ns[rows])
    if not again.any():
        return []
    computes = _computes(events, rows, again)
    count = np.bincount(events.name_id[rows], again & computes, len(events.names))
    first = np.bincount(events.name_id[rows], ~again, len(events.names))
    layered = first >= 2 * max(1, len(seen.passes))
    full = layered.any() and (count[layered] >= _MOST * first[layered]).all()
    return [Strategy("recompute", detail="full" if full else "selective")]


def _computes(events: Events, rows: Int64, again: Bool) -> Bool:
    """Which of the ops do their work: those that hold as many others as their like do at first.

    Under a mode of dispatch, as selective checkpoints are, a product that is done holds another.
    """
    found = np.ones(len(rows), dtype=np.bool_)
    for name, prefixes in _WITHIN.items():
        own = events.named(name)[rows]
        within = np.array([one.startswith(prefixes) for one in events.names], dtype=np.bool_)
        starts = events.start_ns[within[events.name_id] & events.of(Category.OP)]
        low, high = np.searchsorted(starts, (events.start_ns[rows], events.end_ns[rows]))
        if (own & ~again).any():
            found &= ~own | (high - low >= np.median((high - low)[own & ~again]))
    return found


def offloaded(seen: Seen) -> list[Strategy]:
    """Activations that leave in the forward and return in the backward, or gradients that leave in
    the backward for weights that return in the forward."""
    away, back = (_copies(seen, way) for way in (r"DtoH", r"HtoD"))
    found = []
    if _often(away, FORWARD, seen) and _often(back, BACKWARD, seen):
        found.append(Strategy("offload", detail="activations"))
    returned = _often(back, FORWARD, seen) or _often(back, AFTER, seen)
    left = _often(away, BACKWARD, seen) or _often(away, AFTER, seen)
    if returned and left and _host_updates(seen):
        found.append(Strategy("offload", detail="optimizer"))
    return found


def _host_updates(seen: Seen) -> bool:
    """Whether the optimizer launches no kernel at all."""
    events, spans = seen.trace.events, seen.marks.optimizer
    kernels = np.flatnonzero(events.of(Category.KERNEL))
    launches = events.launches_of(kernels)
    return len(spans) > 0 and not inside(spans, events.start_ns[launches]).any()


def _often(parts: Int64, part: int, seen: Seen) -> bool:
    return int((parts == part).sum()) >= _MANY * max(1, len(seen.steps))


def _copies(seen: Seen, way: str) -> Int64:
    """In which part of a step each copy to or from the host was launched."""
    events = seen.trace.events
    chosen = tuple(re.search(way, name) is not None for name in events.names)
    rows = np.flatnonzero(events.of(Category.MEMCPY) & events.name_mask(chosen))
    launches = events.launches_of(rows)
    when = events.start_ns[launches[launches >= 0]]
    return seen.passes.part_of(when, seen.steps, np.zeros(len(when), dtype=np.bool_))
