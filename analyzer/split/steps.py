"""Where each step of a rank begins and ends."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from stepsplit.analyzer.arrays import most_of
from stepsplit.analyzer.buckets import Kind
from stepsplit.analyzer.split.repeats import repeats_of
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    Bool,
    Category,
    Events,
    Int64,
    Note,
    RankTrace,
)

_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One step: its number, and its window on the rank's own clock in ns."""

    step: int
    kind: Kind
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Steps:
    """The rank's windows in order; they touch and never overlap. notes say what was assumed."""

    windows: tuple[StepWindow, ...]
    notes: tuple[Note, ...]

    @property
    def counted(self) -> tuple[StepWindow, ...]:
        """The full steps, over which sums and medians are taken; all of them where none is full."""
        return tuple(w for w in self.windows if w.kind == "full") or self.windows


@dataclass(frozen=True, slots=True)
class _HostStep:
    step: int
    start_ns: int
    end_ns: int


def steps_of(trace: RankTrace) -> Steps:
    """The windows of the rank's steps: as marked, else from what repeats, else the whole trace."""
    marked = _marked(trace.events)
    repeats = repeats_of(trace) if not marked else None
    if repeats is not None:
        marked = _repeated(trace.events, repeats.ends_ns)
    if not marked:
        return _whole(trace)
    windows = _on_device(trace, marked) if trace.on_device else _on_host(marked)
    kinds = _kinds(trace, marked)
    windows = [
        w if w.kind == "partial" else replace(w, kind=k)
        for w, k in zip(windows, kinds, strict=True)
    ]
    inferred = () if repeats is None else (_inferred(repeats.told_by, trace.rank),)
    if repeats is not None:
        windows = [_cut_off(w, marked) for w in windows]
    kept = tuple(w for w in windows if w.end_ns > w.start_ns)
    notes = tuple(
        Note("empty_step", f"step {w.step} has no time of its own and is left out", trace.rank)
        for w in windows
        if w.end_ns <= w.start_ns
    )
    return Steps(kept, (*inferred, *notes))


def _inferred(told_by: str, rank: int) -> Note:
    text = f"no ProfilerStep in the trace: steps are taken from {told_by}"
    return Note("steps_inferred", text, rank)


def _repeated(events: Events, ends_ns: Int64) -> list[_HostStep]:
    """The steps between these ends, and at either edge what the recording cut off of another."""
    first, last = int(events.start_ns.min()), int(events.end_ns.max())
    edges = [first, *(end for end in ends_ns.tolist() if first < end < last), last]
    return [_HostStep(i, start, end) for i, (start, end) in enumerate(pairwise(edges))]


def _cut_off(window: StepWindow, marked: Sequence[_HostStep]) -> StepWindow:
    """The first and the last step of those that repeat may begin before or end after the trace."""
    outer = window.step in (marked[0].step, marked[-1].step)
    return replace(window, kind="partial") if outer else window


def _marked(events: Events) -> list[_HostStep]:
    mask = events.of(Category.ANNOTATION, Category.OP) & events.named("ProfilerStep#")
    found = {}
    for row in np.flatnonzero(mask).tolist():
        if (match := _STEP.match(events.names[events.name_id[row]])) is not None:
            start = int(events.start_ns[row])
            found[int(match[1])] = _HostStep(int(match[1]), start, start + int(events.dur_ns[row]))
    return sorted(found.values(), key=lambda step: step.start_ns)


def _whole(trace: RankTrace) -> Steps:
    events = trace.events
    rows = events.of(*DEVICE_CATEGORIES) if trace.on_device else events.of(Category.OP)
    rows = rows if rows.any() else np.ones(len(events), dtype=np.bool_)
    window = StepWindow(0, "full", int(events.start_ns[rows].min()), int(events.end_ns[rows].max()))
    note = Note(
        "no_steps", "no ProfilerStep in the trace: all of it is taken as one step", trace.rank
    )
    return Steps((window,) if window.end_ns > window.start_ns else (), (note,))


def _on_host(marked: Sequence[_HostStep]) -> list[StepWindow]:
    """Each from the end of the step before to its own, also where the marks overlap."""
    edges = [marked[0].start_ns, *accumulate((step.end_ns for step in marked), max)]
    return [
        StepWindow(step.step, "full", start, end)
        for step, (start, end) in zip(marked, pairwise(edges), strict=True)
    ]


def _on_device(trace: RankTrace, marked: Sequence[_HostStep]) -> list[StepWindow]:
    """A step ends with the last kernel that it launched on the main compute stream."""
    events = trace.events
    device = np.flatnonzero(events.of(*DEVICE_CATEGORIES))
    launched = events.launch_ns()
    launched = np.where(launched < 0, events.start_ns, launched)[device]
    ends = events.end_ns[device]
    main = on_main_stream(trace, device)
    step_of = np.searchsorted([step.start_ns for step in marked], launched, side="right") - 1
    earlier = ends[step_of < 0]
    host_start = marked[0].start_ns
    start = int(earlier.max()) if len(earlier) else host_start
    limit = np.array([step.end_ns for step in marked], dtype=np.int64)
    own = np.where(main & (launched < limit[step_of]), step_of, -1)
    latest = most_of(own, ends, len(marked)).tolist()
    windows: list[StepWindow] = []
    for i, (step, last) in enumerate(zip(marked, latest, strict=True)):
        end = max(start, last)
        kind: Kind = "partial" if i == 0 and start > host_start else "full"
        windows.append(StepWindow(step.step, kind, start, end))
        start = end
    return windows


def on_main_stream(trace: RankTrace, device: Int64) -> Bool:
    """Which of these events of the device, given as rows, are kernels on the stream that computes
    most; all of them where no kernel computes."""
    events = trace.events
    computes = events.of(Category.KERNEL)
    computes[trace.calls.event] = False
    busy = np.bincount(
        events.lane[computes], weights=events.dur_ns[computes], minlength=len(events.lanes)
    )
    if not busy.max(initial=0.0):
        return np.ones(len(device), dtype=np.bool_)
    kernel = events.category[device] == Category.KERNEL
    return np.asarray(kernel & (events.lane[device] == int(busy.argmax())))


def _kinds(trace: RankTrace, marked: Sequence[_HostStep]) -> list[Kind]:
    """full for the steps that communicate as most do, other for the rest.

    A call belongs to the step in which the host made it: on the device the edges shift.
    """
    calls = trace.calls
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, trace.events.start_ns[calls.event])
    starts = [step.start_ns for step in marked]
    step_of = np.searchsorted(starts, when, side="right") - 1
    signatures = _signatures(trace, step_of, when, len(marked))
    usual, count = Counter(signatures).most_common(1)[0]
    alike = 2 * count <= len(marked)
    return ["full" if alike or signature == usual else "other" for signature in signatures]


def _signatures(trace: RankTrace, step_of: Int64, when: Int64, count: int) -> list[bytes]:
    """Each step's calls as groups and ops, each group's in the order in which they were made."""
    calls = trace.calls
    rows = np.lexsort((when, calls.group_id, step_of))
    pairs = np.stack((calls.group_id[rows], calls.op[rows].astype(np.int32)), axis=1)
    edges = np.searchsorted(step_of[rows], np.arange(count + 1)).tolist()
    return [pairs[low:high].tobytes() for low, high in pairwise(edges)]
