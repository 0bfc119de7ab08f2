"""The saved artefact: everything that a terminal, a page or a gate may know of a run.

Times are ns on the clock that all ranks share, relative to run.t0_unix_ns; sizes are bytes, ratios
0..1. The fields are those of report.json, schema "stepsplit.report/1"; nothing else is shown to
people.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Struct, UnsetType

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, MEMOS, Kind, Split
from stepsplit.analyzer.split.attribute import Coverage, Overlap
from stepsplit.analyzer.split.bandwidth import CollectiveRow, StepCallsRow
from stepsplit.analyzer.split.critical_path import PathPart, PathStep
from stepsplit.analyzer.split.kernels import KernelFamily
from stepsplit.analyzer.split.lateness import Lateness, SlowKernel
from stepsplit.analyzer.split.steps import SlowStep, StepDurations
from stepsplit.analyzer.split.strategy_evidence import Strategy

if TYPE_CHECKING:
    import pandas as pd


# The rows of report.json that hold a run against its model.


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


SCHEMA = "stepsplit.report/1"

NO_MODEL = "no_model"
"""The code of the warning that says what the model would have to be told."""


class Host(Struct, frozen=True):
    """A machine and the ranks on it."""

    host: str
    ranks: tuple[int, ...]


class AxisSize(Struct, frozen=True):
    """One axis of the mesh."""

    axis: str
    size: int


class Run(Struct, frozen=True):
    """What ran; None is unknown. ranks are those whose files were there.

    strategies are what the steps show of how the job was parallel; () in reports that are older.
    """

    name: str
    world_size: int
    ranks: tuple[int, ...]
    hosts: tuple[Host, ...]
    backend: str | None
    device: str
    mesh: tuple[AxisSize, ...] | None
    mesh_source: str | None
    torch: str | None
    nccl: str | None
    t0_unix_ns: str
    profiling_slowdown: float | None = None
    strategies: tuple[Strategy, ...] = ()
    driver: str | None = None


class WarningRow(Struct, frozen=True):
    """Something that the data cannot tell, in words."""

    code: str
    message: str
    rank: int | None = None


class GroupRow(Struct, frozen=True):
    """A process group; axis is None where it lies along no single axis of the mesh."""

    id: int
    axis: str | None
    description: str
    ranks: tuple[int, ...]


class StepRow(Struct, frozen=True):
    """One step of one rank: the seven buckets add up to step_ns exactly."""

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

    def __post_init__(self) -> None:
        assert self.split.step_ns == self.step_ns, f"time is lost in {self}"

    @property
    def split(self) -> Split:
        names = (*(f"{bucket}_ns" for bucket in BUCKETS), *MEMOS)
        return Split(**{name: getattr(self, name) for name in names})


class ExposedRow(Struct, frozen=True):
    """Time lost to communication on one axis (None: no single one) in one phase of a step."""

    rank: int
    step: int
    axis: str | None
    phase: str
    collective_ns: int
    p2p_ns: int
    skew_ns: int
    bubble_ns: int


class ClockRow(Struct, frozen=True):
    """How a rank's clock maps to the report's: t_reference = t - offset_ns - drift."""

    rank: int
    host: str
    offset_ns: int
    drift_ppm: float | None
    sigma_ns: int | None
    residual_ns: int | None


class BlameRow(Struct, frozen=True):
    """Who caused waiting, over all steps; rank None is nobody in particular."""

    rank: int | None
    cause: str
    caused_skew_ns: int
    caused_bubble_ns: int
    caused_ns: int
    axis: str | None
    steps: tuple[int, ...]


class StageRow(Struct, frozen=True):
    """One pipeline stage: holes of the schedule's window, medians over the full steps."""

    stage: int
    bubble_ns: int
    bubble_fraction: float


class Pipeline(Struct, frozen=True):
    """The schedule's bubble, from the grid of forwards and backwards (not from bubble_ns)."""

    stages: tuple[StageRow, ...]
    microbatches: int
    schedule: str | None
    bubble_fraction: float
    ideal_bubble_fraction: float | None
    bubble_overhead: float


class IdleRow(Struct, frozen=True):
    """Why a rank idled in its full steps, all together: the rows of a rank add up to its idle.

    cause is a word of split.idle; op None stands for the smaller ones of that cause together.
    """

    rank: int
    cause: str
    op: str | None
    idle_ns: int
    count: int


class ContentionRow(Struct, frozen=True):
    """How much longer a rank's kernels take while communication moves data beside them."""

    rank: int
    ratio: float
    kernels: int
    lost_ns: int


class MemoryRow(Struct, frozen=True):
    """What a rank's memory held at its peak."""

    rank: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    weights_bytes: int | None
    gradients_bytes: int | None
    optimizer_bytes: int | None
    activations_bytes: int | None
    transient_bytes: int | None
    other_bytes: int | None


WORTH = 0.01
"""Findings below this share of the step are not worth a line."""


class EventRef(Struct, frozen=True):
    """An event that a finding rests on."""

    rank: int
    start_ns: int
    dur_ns: int
    name: str


class Finding(Struct, frozen=True):
    """Something to fix, with what it is worth a step; measured_ns and predicted_ns where known."""

    code: str
    bucket: str
    gain_ns: int
    measured_ns: int | None
    predicted_ns: int | None
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    events: tuple[EventRef, ...]
    message: str


# The prediction that a run is compared with, in the keys of the schema stepsplit.prediction/1, and
# the job that it is of.


class PredictedMemory(Struct, frozen=True):
    """Predicted peak bytes on one rank of a stage, by category, and their sum."""

    stage: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    transient_bytes: int
    other_bytes: int
    total_bytes: int


class PredictedCalls(Struct, frozen=True):
    """One kind of communication of a stage: its calls a rank and step, and their time in all."""

    strategy: str
    op: str
    axis: str
    stage: int
    phase: str
    count: int
    message_bytes: int
    input_bytes: int
    wire_bytes: int
    time_ns: int
    time_ns_low: int
    time_ns_high: int
    exposed_ns: int


class PredictedBubble(Struct, frozen=True):
    """The bubble of the schedule: as a fraction of the pipeline's time, and of its work."""

    bubble_fraction: float
    bubble_overhead: float


class PredictedSplit(Struct, frozen=True, kw_only=True):
    """A predicted step, by bucket; stage is left out of the row of the slowest stage."""

    stage: int | UnsetType = UNSET
    compute_ns: int
    collective_ns: int
    p2p_ns: int
    skew_ns: int
    bubble_ns: int
    copy_ns: int
    idle_ns: int
    step_ns: int
    overlapped_ns: int
    bubble_covered_ns: int
    fused_ns: int


class FormulaRow(Struct, frozen=True):
    """A formula that the prediction used, and where it was published."""

    id: str
    citation: str
    text: str


class PredictionRow(Struct, frozen=True):
    """The whole prediction; report.io.prediction_of gives it as the model's own type."""

    schema: str
    parameters: int
    parameters_per_stage: tuple[int, ...]
    memory: tuple[PredictedMemory, ...]
    model_flops: int
    hardware_flops: int
    communication: tuple[PredictedCalls, ...]
    pipeline: PredictedBubble
    splits: tuple[PredictedSplit, ...]
    split: PredictedSplit
    mfu: float | None
    hfu: float | None
    tokens_per_s_per_gpu: float
    fits: bool
    formulas: tuple[FormulaRow, ...]
    confidence: str
    low_ns: int
    high_ns: int
    convention: str
    notes: tuple[str, ...]


class JobTables(Struct, frozen=True):
    """The tables of a job.toml, with the keys that it states or that were inferred;
    report.io.job_of_report gives the job that they describe."""

    model: dict[str, object]
    parallel: dict[str, object]
    training: dict[str, object]
    hardware: dict[str, object]


class Report(Struct, frozen=True, kw_only=True):
    """One analyzed run; prediction and job are of the model that it was compared with."""

    schema: str = SCHEMA
    run: Run
    warnings: tuple[WarningRow, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    exposed: tuple[ExposedRow, ...] = ()
    clocks: tuple[ClockRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    step_calls: tuple[StepCallsRow, ...] = ()
    blame: tuple[BlameRow, ...] = ()
    pipeline: Pipeline | None = None
    idle: tuple[IdleRow, ...] = ()
    kernels: tuple[KernelFamily, ...] = ()
    slow_kernels: tuple[SlowKernel, ...] = ()
    contention: tuple[ContentionRow, ...] = ()
    overlap: tuple[Overlap, ...] = ()
    lateness: tuple[Lateness, ...] = ()
    critical_path: tuple[PathPart, ...] = ()
    path_steps: tuple[PathStep, ...] = ()
    step_times: tuple[StepDurations, ...] = ()
    slow_steps: tuple[SlowStep, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    memory: tuple[MemoryRow, ...] | None = None
    prediction: PredictionRow | None = None
    job: JobTables | None = None
    gap: Gap | None = None
    findings: tuple[Finding, ...] = ()
    mfu: float | None = None
    hfu: float | None = None

    def _repr_html_(self) -> str:

        return str(medians(self).to_html())


# The report's rows as pandas frames, for notebooks: the only place with pandas.


def steps(report: Report) -> pd.DataFrame:
    """One row a rank and step, columns as in report.json."""
    import pandas as pd

    return pd.DataFrame([msgspec.structs.asdict(row) for row in report.steps])


def exposed(report: Report) -> pd.DataFrame:
    """Time lost to communication, one row a rank, step, axis and phase."""
    import pandas as pd

    return pd.DataFrame([msgspec.structs.asdict(row) for row in report.exposed])


def medians(report: Report) -> pd.DataFrame:
    """The split of the run for people: one row a bucket, units written."""
    import pandas as pd

    rows = [
        (m.bucket, units.milliseconds(m.median_ns), units.percent(m.share),
         f"{m.worst_rank} ({units.milliseconds(m.worst_ns)})")
        for m in bucket_medians(report.steps)
    ]  # fmt: skip
    columns = ["bucket", "median of full steps", "share", "worst rank"]
    return pd.DataFrame(rows, columns=columns).set_index("bucket")


# The middle of a run: medians over its full steps.


@dataclass(frozen=True, slots=True)
class BucketMedian:
    """One bucket over the full steps: its median in ns, its share of all time, and its worst rank.

    worst_ns is the worst rank's own median.
    """

    bucket: str
    median_ns: int
    share: float
    worst_rank: int
    worst_ns: int


def full_steps(steps: Iterable[StepRow]) -> tuple[StepRow, ...]:
    """The steps that medians are taken over; all of them where none is full."""
    rows = tuple(steps)
    return tuple(row for row in rows if row.kind == "full") or rows


def step_median_ns(steps: Iterable[StepRow]) -> int:
    """The median step in ns, over ranks and full steps; 0 where there is none."""
    return int(median([row.step_ns for row in full_steps(steps)] or [0]))


def bucket_medians(steps: Iterable[StepRow]) -> tuple[BucketMedian, ...]:
    """One row a bucket, in the order of BUCKETS. Shares are of the sums, so they add up to one."""
    rows = full_steps(steps)
    total = sum(row.step_ns for row in rows) or 1
    return tuple(_bucket(bucket, rows, total) for bucket in BUCKETS) if rows else ()


def _bucket(bucket: str, rows: Sequence[StepRow], total: int) -> BucketMedian:
    value = {id(row): getattr(row, f"{bucket}_ns") for row in rows}
    ranks = sorted({row.rank for row in rows})
    of_rank = {rank: int(median(value[id(r)] for r in rows if r.rank == rank)) for rank in ranks}
    worst = max(ranks, key=lambda rank: of_rank[rank])
    return BucketMedian(
        bucket, int(median(value.values())), sum(value.values()) / total, worst, of_rank[worst]
    )
