"""The rows of report.json that hold a run against its model."""

from __future__ import annotations

from msgspec import Struct

from stepsplit.analyzer.buckets import Kind, Split


class ComparedStage(Struct, frozen=True):
    """A stage's median full step, which is that of a rank in a step, beside its prediction; its
    kind is another where the stage has no full step."""

    stage: int
    rank: int
    step: int
    kind: Kind
    measured: Split
    predicted: Split


class ComparedCalls(Struct, frozen=True):
    """One axis and op of a stage's mean rank in a step.

    Counts and bytes are of tensors, bytes None where unknown; time_ns is how long data moved in a
    step, scalars too, exposed_ns how much of that held the rank up. equal: counts and bytes are as
    predicted on all ranks and steps. busbw is the measured and the predicted one, by nccl-tests,
    link the peak of the slowest link between the ranks; None where unknown.
    """

    stage: int
    axis: str
    op: str
    count: int
    predicted_count: int
    bytes: int | None
    predicted_bytes: int | None
    time_ns: int
    predicted_time_ns: int
    exposed_ns: int
    predicted_exposed_ns: int
    equal: bool
    busbw_bytes_per_s: float | None = None
    predicted_busbw_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


class ComparedMemory(Struct, frozen=True):
    """What a stage's fullest rank held beside its prediction: at its peak, or of one category."""

    stage: int
    rank: int
    measured_bytes: int
    predicted_bytes: int
    category: str = "peak"


class GapRow(Struct, frozen=True):
    """A part of measured - predicted, in ns of the step: negative where the run is faster.

    cause: slow_rank, kernels (compute); calls (more of them, or larger), link (slower ones),
    latency (slower ones, too small for the link to matter), overlap (less of them hidden), exposed
    (any of these); skew; uneven_stages, bubble; copy; idle.
    """

    cause: str
    bucket: str
    axis: str | None
    ns: int
    message: str


class Gap(Struct, frozen=True):
    """A run held against its model. rows are of the stage that the model takes for the slowest, of
    those in the recording: they add up to its measured less its predicted step. notes say what
    to doubt of either side; calls are none where no step is full."""

    stages: tuple[ComparedStage, ...]
    stage: int
    rows: tuple[GapRow, ...]
    calls: tuple[ComparedCalls, ...]
    memory: tuple[ComparedMemory, ...]
    low_ns: int
    high_ns: int
    confidence: str
    notes: tuple[str, ...]

    @property
    def shown(self) -> ComparedStage:
        """The stage of the rows."""
        return next(one for one in self.stages if one.stage == self.stage)
