"""The rows of report.json on the work that the job counted itself: tokens, samples, FLOPs."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from stepsplit.analyzer import units

WorkUnit = Literal["tokens", "samples", "flops"]


class StepWorkRow(Struct, frozen=True):
    """What a rank processed in a step, as the job counted it; None means unknown.

    Attributes:
        rank: global rank.
        step: number of the step.
        tokens: tokens.
        samples: samples.
        flops: FLOPs of the rank.
    """

    rank: int
    step: int
    tokens: int | None
    samples: int | None
    flops: int | None


class WorkSummary(Struct, frozen=True):
    """The counted work of the full steps by which their times are compared.

    Attributes:
        unit: what is counted: "flops", else "tokens", else "samples", the first that all recorded
            ranks counted in all full steps.
        origin: who counted: "run.step" for the script, or the name of a framework.
        mean: work of the mean rank in the mean step.
        most_ratio: of each step the work of the rank with the most over that of the mean rank of
            its stage, the mean over the steps; 1 for even work.
        ns_per_unit: mean step over mean work, in ns: what a unit of a rank's work takes.
        power: the compute grows as the work to this power, by the steps of each rank compared with
            its others; None where the work is even or hardly varies.
        power_low: lower end of what the steps allow for it; 0 means that work has no influence.
        power_high: upper end; 2 is attention alone.
    """

    unit: WorkUnit
    origin: str
    mean: float
    most_ratio: float
    ns_per_unit: float
    power: float | None
    power_low: float
    power_high: float

    def describe(self) -> str:
        """The work in one line."""
        noun = WORK_NOUNS[self.unit]
        mean = f"{units.format_count(self.mean)} {noun} a rank and step (counted by {self.origin})"
        rate = f"{units.format_microseconds(self.ns_per_unit)} each"
        if self.unit == "flops":
            mean = f"{units.format_flops(self.mean)} a rank and step (counted by {self.origin})"
            rate = (
                f"{units.format_flops(1e9 / self.ns_per_unit)}/s a rank" if self.ns_per_unit else ""
            )
        parts = [mean, rate]
        if self.most_ratio > 1:
            more = units.format_percent(self.most_ratio - 1)
            parts.append(f"the rank with the most has {more} more than the mean")
        if self.power is not None:
            parts.append(f"compute grows as {noun} to the power {self.power:.2f}")
        return f"work: {'; '.join(part for part in parts if part)}"


WORK_NOUNS: dict[WorkUnit, str] = {"tokens": "tokens", "samples": "samples", "flops": "FLOPs"}
"""The units as people read them."""
