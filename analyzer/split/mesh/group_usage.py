"""How each group is used in a step: which collectives, and whether before the first backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import inside, union
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Events, Group, Int64, RankTrace

SCALAR_BYTES = 1024
"""A collective of at most so many bytes brings together a loss, a norm or a flag, no tensor."""
MANY = 4
"""So many all_reduces before the first backward of a step: two of each of two layers."""
_GATHERS = "FSDP::all_gather"
Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Usage:
    """Mean calls a step and rank, shape (ops,): before the first backward of a step and after.

    sizes: how many different sizes the all_to_alls of the group have. sharded: FSDP marks the
    group's gathers as its own.
    """

    early: Counts
    late: Counts
    sizes: int
    sharded: bool

    def axis(self) -> str | None:
        """The axis of a group so used; None where groups of several axes may be used so.

        Layers of tp sum, or gather and scatter, activations in both passes. Sharded weights are
        gathered in both passes and scattered in the backward alone. Replicated weights have no
        collective before. Experts receive ever other numbers of tokens, where all_to_alls of
        attention heads are alike.
        """
        if self.sharded:
            return "dp_shard"
        if self._often("all_to_all", early=0, late=0):
            return "ep" if self.sizes > MANY else None
        if self._often("all_reduce", early=MANY, late=MANY):
            return "tp"
        if self._often("reduce_scatter", early=MANY, late=MANY):
            return "tp" if self.early[OP_CODE["all_gather"]] >= MANY else None
        if self.early[[OP_CODE["all_reduce"], OP_CODE["reduce_scatter"]]].any():
            return None
        gathers, scatters = OP_CODE["all_gather"], OP_CODE["reduce_scatter"]
        both_late = bool(self.late[gathers] and self.late[scatters])
        if self.early[gathers]:
            return "dp_shard" if both_late else None
        return "dp_replicate" if self.late[OP_CODE["all_reduce"]] or both_late else None

    def _often(self, op: str, *, early: float, late: float) -> bool:
        """Whether the op is called at all, and at least so often in either part of a step."""
        code = OP_CODE[op]
        called = bool(self.early[code] or self.late[code])
        return called and bool(self.early[code] >= early and self.late[code] >= late)

    @property
    def sums_gradients(self) -> bool:
        """Whether tensors are reduced after the first backward has begun."""
        return bool(self.late[[OP_CODE["all_reduce"], OP_CODE["reduce_scatter"]]].any())


def usages(traces: Sequence[RankTrace]) -> dict[Group, Usage]:
    """How groups are used, where traces tell which calls come before the first backward."""
    counts: dict[Group, list[Counts]] = defaultdict(list)
    sizes: dict[Group, set[int]] = defaultdict(set)
    sharded: dict[Group, bool] = {}
    for trace in traces:
        parts, marked = _parts(trace), _marked_gathers(trace)
        for group_id in np.unique(trace.calls.group_id[parts >= 0]).tolist():
            rows = (parts >= 0) & (trace.calls.group_id == group_id)
            if group_id >= 0:
                group = trace.groups[group_id]
                counts[group].append(_counts(trace, rows, parts))
                gathers = marked[rows & (trace.calls.op == OP_CODE["all_gather"])]
                sharded[group] = sharded.get(group, True) and bool(len(gathers) and gathers.all())
                exchanged = rows & (trace.calls.op == OP_CODE["all_to_all"])
                sizes[group] |= set(trace.calls.message_bytes[exchanged].tolist())
    means = {group: np.mean(found, axis=0) for group, found in counts.items()}
    return {g: Usage(m[0], m[1], len(sizes[g]), sharded[g]) for g, m in means.items()}


def _marked_gathers(trace: RankTrace) -> Bool:
    """Which calls the host made within an all_gather of FSDP2."""
    events, calls = trace.events, trace.calls
    marks = events.named(_GATHERS) & events.of(Category.OP, Category.ANNOTATION)
    spans = union(events.start_ns[marks], events.end_ns[marks])
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, events.start_ns[calls.event])
    return inside(spans, when)


def _counts(trace: RankTrace, rows: Bool, parts: Int64) -> Counts:
    """Calls a step, shape (2, ops), of early and late parts."""
    place = parts[rows] * len(OPS) + trace.calls.op[rows]
    steps = max(1, len(_step_starts(trace.events)))
    return np.bincount(place, minlength=2 * len(OPS)).reshape(2, len(OPS)) / steps


def _parts(trace: RankTrace) -> Int64:
    """0 for calls before the first backward of their step, 1 for later ones, -1 for those that do
    not count: messages, scalars, calls of unknown time or outside of steps with a backward."""
    calls, events = trace.calls, trace.events
    starts = events.start_ns[calls.event]
    known = calls.issued_ns >= 0
    when = np.where(known, calls.issued_ns, starts)
    tensors = (calls.message_bytes < 0) | (calls.message_bytes > SCALAR_BYTES)
    counts = tensors & ~calls.is_message & (known | (not trace.on_device))
    backward = _first_backward_ns(events, when)
    return np.where(counts & (backward >= 0), (when >= backward).astype(np.int64), -1)


def _first_backward_ns(events: Events, when: Int64) -> Int64:
    """When the step of each instant has its first backward; -1 where there is none."""
    marks = events.named("autograd::engine") & events.of(Category.OP, Category.ANNOTATION)
    backward = events.start_ns[marks]
    steps = _step_starts(events)
    steps = steps if len(steps) else events.start_ns[:1]
    if not len(backward) or not len(steps):
        return np.full(len(when), -1, dtype=np.int64)
    ends = np.append(steps[1:], np.iinfo(np.int64).max)
    first = np.searchsorted(backward, steps)
    start = backward[np.minimum(first, len(backward) - 1)]
    of_step = np.where((first < len(backward)) & (start < ends), start, -1)
    step = np.searchsorted(steps, when, side="right") - 1
    return np.where(step >= 0, of_step[np.maximum(step, 0)], -1)


def _step_starts(events: Events) -> Int64:
    mask = events.named("ProfilerStep#") & events.of(Category.OP, Category.ANNOTATION)
    return events.start_ns[mask]
