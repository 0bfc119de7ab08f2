"""Forward, backward and what follows: where in a step each instant lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.split.strategy.issued import HostSteps
from stepsplit.analyzer.split.strategy.landmarks import Landmarks
from stepsplit.analyzer.trace import Bool, Int64

FORWARD, BACKWARD, AFTER = range(3)
"""The parts of a step. AFTER is behind the last backward, where optimizers work; gradients that are
summed between a backward and the next forward are summed AFTER too."""
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Passes:
    """The backward passes of a rank's steps in order of time; step indexes its full steps.

    resumes_ns is when forward work goes on after each, the largest int64 for never.
    """

    start_ns: Int64
    end_ns: Int64
    resumes_ns: Int64
    step: Int64

    def __len__(self) -> int:
        return len(self.step)

    def part_of(self, when: Int64, steps: HostSteps, ends: Bool) -> Int64:
        """FORWARD, BACKWARD or AFTER for each instant; -1 outside of steps with a backward.

        Between a backward and the next forward of a step, ends tells what belongs to the backward.
        """
        step = steps.at(when)
        known = (step >= 0) & np.isin(step, self.step)
        last = self.latest(when)
        if not len(self):
            return np.full(len(when), -1, dtype=np.int64)
        here = known & (last >= 0) & (self.step[last] == step)
        ended = here & (when >= self.end_ns[last]) & (when < self.resumes_ns[last])
        ends_step = self.resumes_ns[last] >= steps.end_ns[step]
        part = np.where(here & (when < self.end_ns[last]), BACKWARD, FORWARD)
        part = np.where(ended & (ends | ends_step), AFTER, part)
        return np.where(known, part, -1)

    def latest(self, when: Int64) -> Int64:
        """The pass that began last before each instant, -1 for none."""
        return np.searchsorted(self.start_ns, when, side="right") - 1


def passes_of(marks: Landmarks, steps: HostSteps) -> Passes:
    """The backward passes: work of autograd that no forward work interrupts."""
    engine = union(marks.engine.start_ns, marks.engine.end_ns)
    step = steps.at(engine.start_ns)
    kept = step >= 0
    engine, step = Intervals(engine.start_ns[kept], engine.end_ns[kept]), step[kept]
    work = marks.start_ns[marks.outside]
    done = np.searchsorted(work, engine.start_ns)
    new = np.ones(len(step), dtype=np.bool_)
    new[1:] = (done[1:] != done[:-1]) | (step[1:] != step[:-1])
    last = np.append(new[1:], True) if len(new) else new
    return Passes(
        start_ns=engine.start_ns[new],
        end_ns=engine.end_ns[last],
        resumes_ns=np.append(work, _NEVER)[done[new]],
        step=step[new],
    )
