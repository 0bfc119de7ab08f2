"""In which step the host issued each call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import Intervals, collect_intervals, find_interval
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import Bool, Int64, RankTrace


class HostSteps(Struct, frozen=True):
    """The full steps of a rank in order, each from start_ns to end_ns.

    marked: ProfilerStep marks give the host times. Otherwise the steps are inferred from repetition
    and, for a device trace, use device times: on_device.
    """

    number: tuple[int, ...]
    start_ns: Int64
    end_ns: Int64
    marked: bool
    on_device: bool

    def __len__(self) -> int:
        return len(self.number)

    def find_step(self, when: Int64) -> Int64:
        """The index of the step at each instant, -1 for none."""
        return find_interval(Intervals(self.start_ns, self.end_ns), when)


def build_host_steps(trace: RankTrace, steps: Steps) -> HostSteps:
    """The full steps of the rank (all steps if none is full) in host time."""
    counted = steps.counted
    marked = all(window.host_ns is not None for window in counted)
    if not marked or not trace.on_device:
        return _make_host_steps(counted, marked=marked, on_device=trace.on_device and not marked)
    spans = [
        replace(window, start_ns=window.host_ns[0], end_ns=window.host_ns[1])
        for window in counted
        if window.host_ns is not None and window.host_ns[1] > window.host_ns[0]
    ]
    return _make_host_steps(spans, marked=True, on_device=False)


def take_whole_trace(trace: RankTrace) -> HostSteps:
    """The whole trace as one host step."""
    first, last = int(trace.events.start_ns.min()), int(trace.events.end_ns.max())
    return _make_host_steps([StepWindow(0, "full", first, last)], marked=False, on_device=False)


def _make_host_steps(spans: Sequence[StepWindow], *, marked: bool, on_device: bool) -> HostSteps:
    edges = collect_intervals(spans)
    return HostSteps(
        number=tuple(span.step for span in spans),
        start_ns=edges.start_ns,
        end_ns=edges.end_ns,
        marked=marked,
        on_device=on_device,
    )


def compute_issued_ns(trace: RankTrace, steps: HostSteps) -> Int64:
    """The issue time of each call, on the clock of the steps; -1 if unknown."""
    starts = trace.events.start_ns[trace.calls.event]
    if steps.on_device:
        return starts
    unknown = -1 if trace.on_device else starts
    return np.where(trace.calls.issued_ns >= 0, trace.calls.issued_ns, unknown)


def find_issue_step(trace: RankTrace, steps: HostSteps, leads: Bool) -> Int64:
    """The index of the step in which each call was issued; -1 for none, and for all but the first
    row of a call with several kernels."""
    return np.where(leads, steps.find_step(compute_issued_ns(trace, steps)), -1)
