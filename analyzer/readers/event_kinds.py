"""The kind of each event of a trace (compute, communication, copy), decided once, by the rules."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.arrays import distinct
from stepsplit.analyzer.readers.kernel_rules import OTHER, Rules
from stepsplit.analyzer.trace import (
    Bool,
    Calls,
    Category,
    EventKind,
    EventKinds,
    Events,
    Int32,
    Int64,
)

# Rules and the events of a trace -> their kinds.


class EventClassifier:
    """Decides the kinds of events by rules, which are asked once about each name of a recording."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._is_fused, self._family = dict[str, bool](), dict[str, str]()

    def classify(self, events: Events, calls: Calls) -> EventKinds:
        """The kind of each event; calls are those that events of the trace carry out.

        Of a device: kernels that do not only communicate compute, and copies that carry out no call
        copy. Of a CPU run: ops of training threads that only compute.
        """
        kind = np.zeros(len(events), dtype=np.uint8)
        kernels = events.of(Category.KERNEL)
        kind[kernels] = EventKind.COMPUTE
        kind[events.of(Category.MEMCPY, Category.MEMSET)] = EventKind.COPY
        kind[calls.event] = EventKind.COMMUNICATION
        if events.on_device:
            kind[kernels & self._fused(events, kernels)] = EventKind.FUSED
        else:
            kind[_computing_ops(events)] = EventKind.COMPUTE
        computes = (kind == EventKind.COMPUTE) | (kind == EventKind.FUSED)
        family, families = self._families(events, distinct(events.name_id[computes]))
        return EventKinds(kind, family, families)

    def _fused(self, events: Events, kernels: Bool) -> Bool:
        """Which events have the name of a fused kernel; other names are many, and are not asked."""
        chosen = np.zeros(len(events.names), dtype=np.bool_)
        for number in distinct(events.name_id[kernels]).tolist():
            name = events.names[number]
            if name not in self._is_fused:
                self._is_fused[name] = self._rules.kind_of(name) == "fused"
            chosen[number] = self._is_fused[name]
        return chosen[events.name_id]

    def _families(self, events: Events, computing: Int64) -> tuple[Int32, tuple[str, ...]]:
        """For each name its place among the families; computing are the names that matter."""
        families = {OTHER: 0}
        family = np.zeros(len(events.names), dtype=np.int32)
        for number in computing.tolist():
            name = events.names[number]
            if name not in self._family:
                self._family[name] = self._rules.family_of(name)
            family[number] = families.setdefault(self._family[name], len(families))
        return family, tuple(families)


# Which ops of a CPU run compute.

_COMMUNICATES = ("c10d::", "_c10d_functional::", "c10d_functional::")

_WRAPS = ("autograd::engine", "torch::autograd::", "PythonSubclass")


def _computing_ops(events: Events) -> Bool:
    """Which ops of a CPU run are compute: those of training threads that only compute.

    An op that wraps others may span anything, and one around a collective contains its wait.
    """
    ops = events.of(Category.OP)
    communicates = ops & events.name_mask(_starts(events, _COMMUNICATES))
    computes = ops & ~communicates & ~events.name_mask(_starts(events, _WRAPS))
    training = _training_lanes(events)
    computes &= training[events.lane]
    for lane in np.flatnonzero(training).tolist():
        here = events.lane == lane
        rows = np.flatnonzero(computes & here)
        calls = events.start_ns[communicates & here]
        first = np.searchsorted(calls, events.start_ns[rows], side="left")
        after = np.searchsorted(calls, events.end_ns[rows], side="left")
        computes[rows[after > first]] = False
    return computes


def _training_lanes(events: Events) -> Bool:
    """A thread that steps the profiler or runs autograd trains; others load data or move bytes."""
    steps = events.named("ProfilerStep#")
    marks = steps | events.named("autograd::engine")
    if not steps.any():
        marks = ~(events.named("gloo:") & ~_messages(events))
        moves_bytes = np.bincount(events.lane[~marks], minlength=len(events.lanes)) > 0
        return np.asarray(~moves_bytes)
    return np.asarray(np.bincount(events.lane[marks], minlength=len(events.lanes)) > 0)


def _messages(events: Events) -> Bool:
    return events.named("gloo:send") | events.named("gloo:recv")


def _starts(events: Events, prefixes: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(name.startswith(prefixes) for name in events.names)
