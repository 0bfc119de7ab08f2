"""The rows of report.json by rank and step, and which of them the results are taken over."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from msgspec import Struct

from stepsplit.analyzer.buckets import BUCKETS, MEMOS, Split


class StepRow(Struct, frozen=True):
    """The split of one step of one rank; the seven buckets add up to step_ns exactly.

    Attributes:
        rank: global rank.
        step: step number.
        kind: "full", "partial" or "other"; only full steps enter means and medians.
        start_ns: start from the report's t0.
        step_ns: duration of the step.
        compute_ns: at least one compute kernel runs.
        collective_ns: exposed collective transfers.
        p2p_ns: exposed message transfers.
        skew_ns: waits for a rank of the same pipeline stage.
        bubble_ns: waits for a rank of another pipeline stage.
        copy_ns: memory copies.
        idle_ns: idle time (host-bound, data loading, synchronization).
        overlapped_ns: communication overlapped by compute; part of compute_ns.
        bubble_covered_ns: communication inside the pipeline bubble.
        fused_ns: kernels that compute and communicate; part of compute_ns.
        estimated: whether peer ranks were missing for some calls, or calls whose range in the trace
            ends late were split by the last arrival.
        ambiguous_ns: gaps of compute for which it is not certain, within the accuracy of the
            timestamps, whether communication or something else held them up.
    """

    rank: int
    step: int
    kind: str
    start_ns: int
    step_ns: int
    compute_ns: int
    collective_ns: int
    p2p_ns: int
    skew_ns: int
    bubble_ns: int
    copy_ns: int
    idle_ns: int
    overlapped_ns: int
    bubble_covered_ns: int
    fused_ns: int
    estimated: bool
    ambiguous_ns: int = 0

    def __post_init__(self) -> None:
        assert self.split.step_ns == self.step_ns, f"time is lost in {self}"

    @property
    def split(self) -> Split:
        names = (*(f"{bucket}_ns" for bucket in BUCKETS), *MEMOS)
        return Split(**{name: getattr(self, name) for name in names})


class ExposedRow(Struct, frozen=True):
    """Exposed communication on one axis in one phase of a step, in ns.

    Attributes:
        rank: global rank.
        step: step number.
        axis: mesh axis, or the name of the group as in GroupRow; None if unknown.
        phase: phase of the step, such as "backward".
        collective_ns: exposed collective transfers.
        p2p_ns: exposed message transfers.
        skew_ns: waits for a rank of the same pipeline stage.
        bubble_ns: waits for a rank of another pipeline stage.
    """

    rank: int
    step: int
    axis: str | None
    phase: str
    collective_ns: int
    p2p_ns: int
    skew_ns: int
    bubble_ns: int


def select_full_steps(steps: Iterable[StepRow]) -> tuple[StepRow, ...]:
    """The full steps, over which means and medians are taken; all steps if none is full."""
    rows = tuple(steps)
    return tuple(row for row in rows if row.kind == "full") or rows


def list_full_steps(steps: Iterable[StepRow]) -> tuple[int, ...]:
    """The numbers of the full steps, in order; of all steps if none is full."""
    return tuple(sorted({row.step for row in select_full_steps(steps)}))


def compute_step_median_ns(steps: Iterable[StepRow]) -> int:
    """The median step in ns over ranks and full steps; 0 without steps."""
    return int(median([row.step_ns for row in select_full_steps(steps)] or [0]))
