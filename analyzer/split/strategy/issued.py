"""In which step the host issued each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import Bool, Category, Events, Int64, RankTrace

_MARK = "ProfilerStep#"


@dataclass(frozen=True, slots=True)
class HostSteps:
    """The full steps of a rank in order of time, each from start_ns to end_ns.

    marked: ProfilerStep says when the host began and ended them. Else they are taken from what
    repeats, and of a device the times are its own: on_device.
    """

    number: tuple[int, ...]
    start_ns: Int64
    end_ns: Int64
    marked: bool
    on_device: bool

    def __len__(self) -> int:
        return len(self.number)

    def at(self, when: Int64) -> Int64:
        """The index of the step at each instant, -1 where there is none."""
        step = np.searchsorted(self.start_ns, when, side="right") - 1
        within = step >= 0
        within[within] = when[within] < self.end_ns[step[within]]
        return np.where(within, step, -1)


def host_steps(trace: RankTrace, steps: Steps) -> HostSteps:
    """The full steps of the rank (all of them where none is full) as its host went through them."""
    marks = _marks(trace.events)
    counted = [w for w in steps.counted if not marks or w.step in marks]
    spans = [marks[w.step] if marks and trace.on_device else w for w in counted]
    return _of(spans, marked=bool(marks), on_device=trace.on_device and not marks)


def whole_trace(trace: RankTrace) -> HostSteps:
    """All that the host did, taken as one step."""
    first, last = int(trace.events.start_ns.min()), int(trace.events.end_ns.max())
    return _of([StepWindow(0, "full", first, last)], marked=False, on_device=False)


def _of(spans: Sequence[StepWindow], *, marked: bool, on_device: bool) -> HostSteps:
    return HostSteps(
        number=tuple(span.step for span in spans),
        start_ns=np.array([span.start_ns for span in spans], dtype=np.int64),
        end_ns=np.array([span.end_ns for span in spans], dtype=np.int64),
        marked=marked,
        on_device=on_device,
    )


def issued_ns(trace: RankTrace, steps: HostSteps) -> Int64:
    """When each call was made, on the clock of the steps; -1 where nothing tells."""
    starts = trace.events.start_ns[trace.calls.event]
    if steps.on_device:
        return starts
    unknown = -1 if trace.on_device else starts
    return np.where(trace.calls.issued_ns >= 0, trace.calls.issued_ns, unknown)


def issued_in(trace: RankTrace, steps: HostSteps, leads: Bool) -> Int64:
    """The index of the step in which each call was made; -1 for none, and for all rows but the
    first of a call of several kernels."""
    return np.where(leads, steps.at(issued_ns(trace, steps)), -1)


def _marks(events: Events) -> dict[int, StepWindow]:
    """The marked steps by number: each from the end of the one before, the first from its start."""
    rows = np.flatnonzero(events.named(_MARK) & events.of(Category.ANNOTATION, Category.OP))
    found: dict[int, StepWindow] = {}
    begin = int(events.start_ns[rows[0]]) if len(rows) else 0
    for row in rows.tolist():
        number, end = events.name_of(row).removeprefix(_MARK), int(events.end_ns[row])
        if number.isdecimal() and end > begin:
            found[int(number)] = StepWindow(int(number), "full", begin, end)
            begin = end
    return found
