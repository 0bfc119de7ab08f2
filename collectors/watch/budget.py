"""What samples cost, and when the next one is due."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from stepsplit.collectors.formats.watch_notes import WINDOW_STEPS, SampleReport
from stepsplit.collectors.watch.plan import WatchPlan

MAX_FAULTS = 3
"""Samples in a row that failed, after which there are no more."""


def compute_cost_ns(before_ns: Sequence[int], under_ns: Sequence[int], own_ns: int) -> int:
    """The training time that a sample cost: its steps above the median of those before.

    own_ns: the time measured in the profiler's start, stop and export, which is the least.
    """
    if not before_ns:
        return own_ns
    return max(own_ns, sum(under_ns) - round(len(under_ns) * median(before_ns)))


RISE_STEPS, LEAST_RISE_STEPS = 200, 20

LEAST_RISE, LEAST_RISE_MADS = 0.05, 4.0

_SETTLING_STEPS = 5


class FirstSampleRise:
    """Whether the steps of a process stay slower after its first sample.

    On CUDA, CUPTI stays attached after its first use, and steps may take 10 to 20 % longer from
    then on (pytorch/pytorch#144455), which no duty cycle bounds.
    """

    def __init__(self) -> None:
        self._before_ns: deque[int] = deque(maxlen=RISE_STEPS)
        self._after_ns: list[int] = []
        self._skipped = 0
        self._is_sampled = self._is_judged = False

    def begin_sample(self) -> None:
        """The next steps are those after the first sample."""
        if not self._is_sampled:
            self._is_sampled, self._skipped = True, 0

    def add(self, took_ns: int) -> None:
        """Adds an unprofiled step."""
        # The first steps of a process allocate and compile, and those after a sample catch up.
        if self._skipped < _SETTLING_STEPS:
            self._skipped += 1
        elif not self._is_sampled:
            self._before_ns.append(took_ns)
        elif len(self._after_ns) < RISE_STEPS:
            self._after_ns.append(took_ns)

    def describe(self) -> str:
        """One sentence of a rise; "" without one, and as long as too few steps are known. Once."""
        # As many after as before, so that both sides are as certain.
        after_ns = self._after_ns[: len(self._before_ns)]
        is_early = len(after_ns) < max(len(self._before_ns), LEAST_RISE_STEPS)
        if self._is_judged or is_early:
            return ""
        self._is_judged = True
        before_ns = find_lasting_rise(list(self._before_ns), after_ns)
        if before_ns is None:
            return ""
        return (
            f"steps take {median(after_ns) / 1e6:.3g} ms since the first sample, "
            f"{before_ns / 1e6:.3g} ms before; the profiler may have stayed attached, which "
            "TEARDOWN_CUPTI=1 prevents for CUDA 12.6 and later, without CUDA graphs"
        )


def find_lasting_rise(before_ns: Sequence[int], after_ns: Sequence[int]) -> float | None:
    """The median before a rise that lasts; None if there is none.

    The median of each quarter of the n steps after is above that before by more than 5 % and more
    than four MAD of the medians of five steps, both times sqrt(200 / n).
    """
    usual = median(before_ns)
    # Of medians of five, since single steps vary by more than levels do.
    medians = [median(before_ns[i : i + 5]) for i in range(0, len(before_ns) - 4, 5)]
    usual_of_five = median(medians)
    mad = median(abs(each - usual_of_five) for each in medians)
    # A median of fewer steps is less certain, by the square root of their number.
    widening = math.sqrt(RISE_STEPS / len(after_ns))
    limit = usual + max(LEAST_RISE * usual, LEAST_RISE_MADS * mad) * widening
    quarter = len(after_ns) // 4
    # In each quarter: an evaluation or a checkpoint after the sample is slow in one of them only.
    quarters = [after_ns[i * quarter : (i + 1) * quarter] for i in range(4)]
    return usual if all(median(each) > limit for each in quarters) else None


class BudgetController:
    """Decides on rank 0 when the next sample is due, and whether there is one.

    A sample is followed by at least its cost divided by the budget, so that the sum of all costs
    stays within the budget.
    """

    def __init__(self, plan: WatchPlan) -> None:
        self._plan = plan
        self._begin_ns = time.monotonic_ns()
        self._faults = 0
        self._cost_ns = self._last_cost_ns = 0
        self.samples = 0

    def add(self, own: SampleReport, others: Sequence[SampleReport]) -> str:
        """Adds a sample by the reports of its ranks. Returns why it was the last one, or ""."""
        reports = [own, *others]
        self.samples += 1
        # The ranks wait for each other, so the slowest one's cost is the job's.
        self._last_cost_ns = max(each.cost_ns for each in reports)
        self._cost_ns += self._last_cost_ns
        faults = [each for each in reports if each.is_fault]
        self._faults = self._faults + 1 if faults else 0
        if self._faults >= MAX_FAULTS:
            return f"{MAX_FAULTS} samples in a row failed: {faults[0].no_data}"
        return ""

    def compute_interval(self, step_ns: float) -> int:
        """The steps from the last sample to the next, given the time of an unprofiled step."""
        plan = self._plan
        wanted = plan.every_steps or math.ceil((plan.every_s or 0.0) * 1e9 / max(step_ns, 1))
        within_budget = math.ceil(self._last_cost_ns / plan.budget / max(step_ns, 1))
        # The steps before a sample and after the one before it must not be the same ones.
        least = plan.warmup + plan.steps + 1 + 2 * WINDOW_STEPS
        return max(wanted, within_budget, least)

    def measure_overhead(self) -> float | None:
        """The part of the time since the start that samples have cost; None before the first."""
        elapsed_ns = time.monotonic_ns() - self._begin_ns
        return self._cost_ns / max(elapsed_ns, 1) if self.samples else None
