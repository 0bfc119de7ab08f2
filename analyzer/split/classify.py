"""Classification of events: compute, copies, fused kernels, pipeline annotations."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, distinct, empty, union
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.trace import Bool, Category, Events, RankTrace

# Which events are work of the rank: computing, copying, or both at once with communication.

_COMMUNICATES = ("c10d::", "_c10d_functional::", "c10d_functional::")

_WRAPS = ("autograd::engine", "torch::autograd::", "PythonSubclass")


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank worked on, each a sorted disjoint set; fused is a part of compute."""

    compute: Intervals
    copy: Intervals
    fused: Intervals


def work_of(trace: RankTrace, rules: Rules = BUILT_IN) -> Work:
    """The rank's work: kernels and copies of a device, else the ops of its training threads."""
    events, compute = trace.events, computing(trace, rules)
    if not trace.on_device:
        return Work(_covered(events, compute), empty(), empty())
    fused = _fused(events, rules)
    copy = _covered(events, copying(trace))
    return Work(_covered(events, compute), copy, _covered(events, fused))


def computing(trace: RankTrace, rules: Rules = BUILT_IN) -> Bool:
    """Which events are compute: kernels that do not only communicate, else ops of a CPU run."""
    if not trace.on_device:
        return computing_ops(trace.events)
    only_communicates = _communicating(trace) & ~_fused(trace.events, rules)
    return trace.events.of(Category.KERNEL) & ~only_communicates


def copying(trace: RankTrace) -> Bool:
    """Which events are copies of a device that carry out no call; none on a CPU run."""
    return trace.events.of(Category.MEMCPY, Category.MEMSET) & ~_communicating(trace)


def _communicating(trace: RankTrace) -> Bool:
    """Which events carry out a call."""
    found = np.zeros(len(trace.events), dtype=np.bool_)
    found[trace.calls.event] = True
    return found


def computing_ops(events: Events) -> Bool:
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


def _covered(events: Events, mask: Bool) -> Intervals:
    return union(events.start_ns[mask], events.end_ns[mask])


def _starts(events: Events, prefixes: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(name.startswith(prefixes) for name in events.names)


def _fused(events: Events, rules: Rules) -> Bool:
    """Which kernels compute and communicate at once; other names are many, and are not asked."""
    kernels = events.of(Category.KERNEL)
    chosen = np.zeros(len(events.names), dtype=np.bool_)
    for number in distinct(events.name_id[kernels]).tolist():
        chosen[number] = rules.kind_of(events.names[number]) == "fused"
    return kernels & chosen[events.name_id]


# The names by which annotations mark the work of a pipeline.

_ONE = re.compile(
    r"(?:stepsplit::(?=[FBW] )|PP:(?P<pp>\d{1,9})(?=[FBIW]\d))(?P<letter>[FBIW])"
    r"(?: stage=(?P<stage>\d{1,9}) mb=(?P<mb>\d{1,9})|(?P<pp_mb>\d{1,9}))$"
)

PHASE_OF_LETTER = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}

_AT_ONCE = re.compile(r"PP:\((?P<actions>[\dFBIW;]+)\)OVERLAP_F_B$")

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")

_OF_GPIPE = re.compile(r"(?P<phase>Forward|Backward) (?P<mb>\d{1,9})$")

MARKERS = (("stepsplit::",), ("PP:",), ("Forward ", "Backward "))
"""How the names of each kind of mark begin; the first kind that a trace holds counts alone."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A stage's work on a microbatch, as a name tells it."""

    stage: int
    microbatch: int
    phase: str


def marks_in(name: str, stage: int | None = None) -> tuple[Mark, ...]:
    """What the name marks, several actions at once included; nothing for any other name.

    torch's GPipe names no stage: stage, the rank's pp coordinate, does, or they mark nothing.
    """
    if (one := _ONE.match(name)) is not None:
        phase = PHASE_OF_LETTER[one["letter"]]
        return (Mark(int(one["stage"] or one["pp"]), int(one["mb"] or one["pp_mb"]), phase),)
    if (several := _AT_ONCE.match(name)) is not None:
        return tuple(
            Mark(int(at), int(microbatch), PHASE_OF_LETTER[letter])
            for at, letter, microbatch in _ACTION.findall(several["actions"])
        )
    if stage is not None and (named := _OF_GPIPE.match(name)) is not None:
        return (Mark(stage, int(named["mb"]), named["phase"].lower()),)
    return ()
