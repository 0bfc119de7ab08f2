"""The work of the recorded steps, as the job counts it: tokens, samples, FLOPs."""

from __future__ import annotations

import math
from typing import Any

from stepsplit.collectors.formats.rank_record import RecordedWork, StepWork
from stepsplit.collectors.guard import warn

Count = Any
"""A whole number, or a tensor of one element: a count on the device is read when the recording
ends, as reading it in the step would wait for the device."""

# What int64 does not hold, in the tables of the analyzer.
_MAX_COUNT = 1 << 63


class WorkCounter:
    """Collects the work of steps; no method raises or waits for a device."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._counts: dict[int, dict[str, Count]] = {}
        self._origin = ""

    def add(self, step: int, origin: str, counts: dict[str, Count]) -> None:
        """Notes the counts of a step by their names: tokens, samples, flops; None for unknown."""
        known = {name: count for name, count in counts.items() if count is not None}
        for name, count in known.items():
            # The job may count on in the same tensor.
            if hasattr(count, "detach"):
                known[name] = count.detach().clone()
        if known:
            self._origin = self._origin or origin
            self._counts[step] = known

    def collect(self, first: int, last: int, steps_before: int) -> RecordedWork | None:
        """The work of the steps from first to last, None without any; counts that are no whole
        number from 0 on are left out with one warning."""
        steps, invalid = [], ""
        for step in sorted(each for each in self._counts if first <= each <= last):
            read: dict[str, int] = {}
            for name, count in self._counts[step].items():
                number = _read_count(count)
                if number is None:
                    invalid = invalid or f"{name} of step {steps_before + step}"
                else:
                    read[name] = number
            if read:
                steps.append(StepWork(steps_before + step, **read))
        if invalid:
            warn(
                f"rank {self._rank}: {invalid} is not a number from 0 on; such counts are left out"
            )
        return RecordedWork(self._origin, tuple(steps)) if steps else None


def _read_count(count: Count) -> int | None:
    try:
        number = float(count)
        whole = round(number) if math.isfinite(number) else -1
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    # Of a whole number all digits count, of a measured one (FLOPs as 1.2e15) the whole part.
    exact = count if isinstance(count, int) and not isinstance(count, bool) else whole
    return exact if 0 <= exact < _MAX_COUNT and not isinstance(count, bool | str | bytes) else None
