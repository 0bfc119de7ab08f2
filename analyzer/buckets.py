"""Where a step's time goes: seven buckets that add up to the step, to the nanosecond."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

BUCKETS = ("compute", "collective", "p2p", "skew", "bubble", "copy", "idle")
WAITS = ("skew", "bubble")
"""The buckets of waiting for another rank."""
MEMOS = ("overlapped_ns", "bubble_covered_ns", "fused_ns")
"""The fields of a Split that cost no time of their own."""
Kind = Literal["full", "partial", "other"]


@dataclass(frozen=True, slots=True)
class Split:
    """The time of one step in ns: seven exclusive buckets, and memos that cost no time.

    A measured and a predicted step share this type, so a comparison is a subtraction, whose parts
    may be negative.
    """

    compute_ns: int = 0
    collective_ns: int = 0
    p2p_ns: int = 0
    skew_ns: int = 0
    bubble_ns: int = 0
    copy_ns: int = 0
    idle_ns: int = 0
    overlapped_ns: int = 0
    bubble_covered_ns: int = 0
    fused_ns: int = 0

    @property
    def step_ns(self) -> int:
        """The whole step: the sum of the buckets."""
        return sum(self.buckets_ns)

    @property
    def buckets_ns(self) -> tuple[int, ...]:
        """The seven buckets, in the order of BUCKETS."""
        return (
            self.compute_ns, self.collective_ns, self.p2p_ns, self.skew_ns,
            self.bubble_ns, self.copy_ns, self.idle_ns,
        )  # fmt: skip

    @property
    def exposed_comm_ns(self) -> int:
        """Communication that held the rank up: transfers and waits for its own pipeline stage."""
        return self.collective_ns + self.p2p_ns + self.skew_ns

    def __sub__(self, other: Split) -> Split:
        return Split(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class StepSplit:
    """One step of one rank. start_ns is on the clock that all ranks of the report share."""

    rank: int
    step: int
    kind: Kind
    start_ns: int
    split: Split
    estimated: bool = False
