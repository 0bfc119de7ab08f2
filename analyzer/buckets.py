"""The split of a step: seven exclusive buckets that add up to the step, to the nanosecond."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Literal


class Bucket(IntEnum):
    """The buckets; of those that are open at one instant, the first in this order gets it.

    A member is the bucket's index in columns and tables. Its color is in bucket_styles.py.
    """

    COMPUTE = 0
    COLLECTIVE = 1
    P2P = 2
    SKEW = 3
    BUBBLE = 4
    COPY = 5
    IDLE = 6

    @property
    def label(self) -> str:
        """The name on screens, in reports and in the fields of a Split."""
        return self.name.lower()


TRANSFERS = (Bucket.COLLECTIVE, Bucket.P2P)
WAITS = (Bucket.SKEW, Bucket.BUBBLE)
"""The buckets of time spent waiting for another rank."""
COMMUNICATION = (*TRANSFERS, *WAITS)
BUCKETS = tuple(bucket.label for bucket in Bucket)
"""The labels in order."""
MEMOS = ("overlapped_ns", "bubble_covered_ns", "fused_ns", "ambiguous_ns")
"""The fields of a Split that are not part of the sum: they overlap with the buckets."""
Kind = Literal["full", "partial", "other"]


@dataclass(frozen=True, slots=True)
class Split:
    """The time of one step in ns: seven exclusive buckets, and memos that overlap with them.

    Measured and predicted steps have this type, so a comparison is a subtraction; its parts may be
    negative.

    Attributes:
        compute_ns: At least one compute kernel runs.
        collective_ns: Else: a collective transfers data (all members have arrived).
        p2p_ns: Else: a send or receive transfers data (both ends have arrived).
        skew_ns: Else: communication waits for a rank of the same pipeline stage.
        bubble_ns: Else: communication waits for a rank of another pipeline stage.
        copy_ns: Else: a memcpy or memset runs.
        idle_ns: Nothing runs: host-bound, data loading or synchronization.
        overlapped_ns: Memo: compute time that hides communication.
        bubble_covered_ns: Memo: communication inside the pipeline bubble.
        fused_ns: Memo: kernels that compute and communicate at once; part of compute_ns.
        ambiguous_ns: Memo: gaps of compute for which it is not certain, within the accuracy of the
            timestamps, whether communication or something else held them up.

    Examples:
        >>> split = Split(compute_ns=80, collective_ns=15, idle_ns=5)
        >>> split.step_ns, split.exposed_comm_ns
        (100, 15)
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
    ambiguous_ns: int = 0

    @property
    def step_ns(self) -> int:
        """The duration of the step: the sum of the buckets."""
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
        """Exposed communication: transfers, and waits for ranks of the same pipeline stage."""
        return self.collective_ns + self.p2p_ns + self.skew_ns

    def __sub__(self, other: Split) -> Split:
        return Split(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class StepSplit:
    """One step of one rank. start_ns is on the common clock of the report."""

    rank: int
    step: int
    kind: Kind
    start_ns: int
    split: Split
    estimated: bool = False
