"""What differs between two runs: a baseline, and a candidate held against it.

Every table is ordered by what changed most. Times are ns, sizes bytes, ratios 0..1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepsplit.analyzer.buckets import BUCKETS, Split

SCHEMA = "stepsplit.compare/1"
FEWEST_STEPS = 2
"""So many full steps a side are needed to say how noisy it is."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Something about how the runs were set up that is not the same; None is unknown."""

    name: str
    baseline: str | None
    candidate: str | None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs, by its full steps.

    median_ns is over ranks and steps. low_ns and high_ns are the least and the greatest of the
    steps, each by its median over the ranks. mean is over ranks and steps: its buckets add up to
    the mean step. peak_allocated_bytes are those of the fullest rank.
    """

    name: str
    steps: int
    median_ns: int
    low_ns: int
    high_ns: int
    mean: Split
    bubble_fraction: float | None
    peak_allocated_bytes: int | None
    mfu: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """The mean time of something in a step of a rank, on both sides."""

    baseline_ns: int
    candidate_ns: int

    @property
    def difference_ns(self) -> int:
        """candidate - baseline."""
        return self.candidate_ns - self.baseline_ns

    @property
    def changed_ns(self) -> int:
        """How much it changed, either way."""
        return abs(self.difference_ns)


@dataclass(frozen=True, slots=True)
class BucketChange(Change):
    """One of the seven buckets."""

    bucket: str


@dataclass(frozen=True, slots=True)
class ExposedChange(BucketChange):
    """The part of a bucket that is due to one axis; None: to no single one."""

    axis: str | None


@dataclass(frozen=True, slots=True)
class FamilyChange(Change):
    """The kernels (on a CPU ops) of one family; counts are a step and rank."""

    family: str
    baseline_count: float
    candidate_count: float


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one kind: how many a step and rank, and medians of one call; None is unknown."""

    count: float
    transfer_ns: int
    wait_ns: int
    busbw_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class CallsChange:
    """Calls of one op, dtype and size on one axis; None on the side that has no such calls."""

    axis: str
    op: str
    dtype: str | None
    message_bytes: int | None
    baseline: Calls | None
    candidate: Calls | None

    @property
    def changed_ns(self) -> float:
        """How much a step's transfers changed, and beside that its waits, by their medians.

        It only orders the rows: medians times counts are no time that a step takes.
        """
        one, other = self.baseline or _NO_CALLS, self.candidate or _NO_CALLS
        moved = other.count * other.transfer_ns - one.count * one.transfer_ns
        waited = other.count * other.wait_ns - one.count * one.wait_ns
        return abs(moved) + abs(waited)


_NO_CALLS = Calls(0.0, 0, 0, None)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A candidate against its baseline; a table is empty where a side does not know its rows."""

    baseline: Side
    candidate: Side
    settings: tuple[Setting, ...]
    exposed: tuple[ExposedChange, ...]
    collectives: tuple[CallsChange, ...]
    kernels: tuple[FamilyChange, ...]

    def __post_init__(self) -> None:
        told = sum(row.difference_ns for row in self.buckets)
        whole = self.candidate.mean.step_ns - self.baseline.mean.step_ns
        assert told == whole, f"{whole - told} ns of the difference are in no bucket"

    @property
    def buckets(self) -> tuple[BucketChange, ...]:
        """The seven buckets: their differences add up to that of the mean step."""
        both = zip(
            BUCKETS, self.baseline.mean.buckets_ns, self.candidate.mean.buckets_ns, strict=True
        )
        return tuple(
            sorted(
                (BucketChange(one, other, bucket) for bucket, one, other in both), key=most_changed
            )
        )

    @property
    def difference_ns(self) -> int:
        """The candidate's median step less the baseline's: positive where it is slower."""
        return self.candidate.median_ns - self.baseline.median_ns

    @property
    def ratio(self) -> float | None:
        """The candidate's median step by the baseline's; None where that is empty."""
        return (
            self.candidate.median_ns / self.baseline.median_ns if self.baseline.median_ns else None
        )

    @property
    def within_noise(self) -> bool | None:
        """Whether each side's median step is one that the other's steps reach too.

        No statistics. None where a side has fewer than FEWEST_STEPS steps.
        """
        one, other = self.baseline, self.candidate
        if min(one.steps, other.steps) < FEWEST_STEPS:
            return None
        return (
            one.low_ns <= other.median_ns <= one.high_ns
            and other.low_ns <= one.median_ns <= other.high_ns
        )

    @property
    def same(self) -> bool:
        """Whether nothing differs at all but the name."""
        rows = (*self.exposed, *self.kernels)
        return (
            replace(self.baseline, name="") == replace(self.candidate, name="")
            and not self.settings
            and all(row.baseline_ns == row.candidate_ns for row in rows)
            and all(row.baseline == row.candidate for row in self.collectives)
        )


def most_changed(row: Change | CallsChange) -> float:
    """The key that sorts a table by what changed most."""
    return -row.changed_ns
