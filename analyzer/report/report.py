"""The report of a run: the data behind the terminal, the dashboard and the check.

Times are ns on the common clock of all ranks, relative to run.t0_unix_ns; sizes are bytes, ratios
0..1. The fields are those of report.json, schema "stepsplit.report/1".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from msgspec import UNSET, Struct, UnsetType

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import Kind, Split
from stepsplit.analyzer.parts.kernel_table import KernelRow
from stepsplit.analyzer.report.diagnosis_rows import (
    Lateness,
    PathKernel,
    PathPart,
    PathStep,
    SlowKernel,
)
from stepsplit.analyzer.report.frames import ReportFrames
from stepsplit.analyzer.report.headline import Summary, compute_mean_step_ns, summarize
from stepsplit.analyzer.report.kind_rows import StepKindRow
from stepsplit.analyzer.report.part_rows import PartEvidence, PartRow
from stepsplit.analyzer.report.rl_step import RlStep
from stepsplit.analyzer.report.step_rows import ExposedRow, StepRow
from stepsplit.analyzer.report.work_rows import StepWorkRow, WorkSummary
from stepsplit.analyzer.split.bandwidth import CollectiveRow, StepCallsRow
from stepsplit.analyzer.split.coverage import Coverage
from stepsplit.analyzer.split.kernels import KernelFamily
from stepsplit.analyzer.split.overlap import Overlap
from stepsplit.analyzer.split.step_times import SlowStep, StepDurations
from stepsplit.analyzer.split.strategy import Strategy
from stepsplit.analyzer.trace import RANKS_MISSING, WORLD_SIZE_UNKNOWN

# The rows of report.json with the model comparison.


class ComparedStage(Struct, frozen=True):
    """The median full step of a pipeline stage and its prediction.

    Attributes:
        stage: pp coordinate.
        rank: rank of the chosen step.
        step: number of the chosen step.
        kind: kind of that step; not "full" if the stage has no full step.
        measured: its measured split, in ns.
        predicted: its predicted split, in ns.
    """

    stage: int
    rank: int
    step: int
    kind: Kind
    measured: Split
    predicted: Split


class ComparedCalls(Struct, frozen=True):
    """Measured and predicted communication of one axis and op, per step of a stage's mean rank.

    Attributes:
        stage: pp coordinate.
        axis: mesh axis by the name of the prediction.
        op: operation, such as "all_reduce".
        count: measured calls per step, without scalars.
        predicted_count: predicted calls per step.
        bytes: measured message bytes per step; None if unknown.
        predicted_bytes: predicted message bytes per step.
        time_ns: measured transfer time per step, scalars included.
        predicted_time_ns: predicted transfer time per step.
        exposed_ns: exposed part of time_ns.
        predicted_exposed_ns: exposed part of predicted_time_ns.
        equal: whether counts and bytes are as predicted on all ranks and steps.
        busbw_bytes_per_s: measured bus bandwidth as in nccl-tests; None if unknown.
        predicted_busbw_bytes_per_s: predicted bus bandwidth; None if unknown.
        link_bytes_per_s: nominal peak of the slowest link between the ranks; None if unknown.
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
    """Measured and predicted memory of the fullest rank of a stage.

    Attributes:
        stage: pp coordinate.
        rank: rank with the most memory of this category.
        measured_bytes: measured bytes.
        predicted_bytes: predicted bytes.
        category: "peak", "weights", "gradients", "optimizer" or "activations".
    """

    stage: int
    rank: int
    measured_bytes: int
    predicted_bytes: int
    category: str = "peak"


class GapRow(Struct, frozen=True):
    """A part of the difference between the measured and the predicted step.

    Attributes:
        cause: "slow_rank" or "kernels" (compute); "calls" (more or larger calls), "link" (slower
            calls), "latency" (slower small calls), "overlap" (less overlapped) or "exposed" (any
            of these); "skew"; "uneven_stages" or "bubble"; "copy"; "idle".
        bucket: bucket of the step.
        axis: mesh axis; None if it does not apply.
        ns: measured - predicted, in ns of the step; negative if the run is faster.
        message: text.
    """

    cause: str
    bucket: str
    axis: str | None
    ns: int
    message: str


class ComparedPart(Struct, frozen=True):
    """The compute of a part of the model in a step, mean of the recorded ranks.

    Attributes:
        part: "embedding", "attention", "mlp", "experts" (with their router), "norm" (with residuals
            and all else between the parts of a layer), "head" (with the loss), "optimizer", or
            "other": copies of gradients, and what no evidence places.
        measured_ns: in the mean full step.
        predicted_ns: by the model; 0 for "other".
    """

    part: str
    measured_ns: int
    predicted_ns: int


class Gap(Struct, frozen=True):
    """The comparison of a run with its model.

    Attributes:
        stages: measured and predicted step of each recorded stage.
        stage: stage of `rows`: the slowest of the recorded ones by the model.
        rows: parts of the difference; they add up to measured - predicted step.
        calls: communication by stage, axis and op; empty without a full step.
        memory: memory by stage and category.
        low_ns: lower bound of the predicted step.
        high_ns: upper bound of the predicted step.
        confidence: confidence of the prediction.
        notes: caveats.
        bound_ns: least time of a step by physics alone; None if it is unknown.
        bound_resource: the resource that needs it: "compute", "memory", "links in a node" or
            "links between nodes".
        parts: compute by part of the model; empty if no part was found.
    """

    stages: tuple[ComparedStage, ...]
    stage: int
    rows: tuple[GapRow, ...]
    calls: tuple[ComparedCalls, ...]
    memory: tuple[ComparedMemory, ...]
    low_ns: int
    high_ns: int
    confidence: str
    notes: tuple[str, ...]
    bound_ns: int | None = None
    bound_resource: str = ""
    parts: tuple[ComparedPart, ...] = ()

    @property
    def shown(self) -> ComparedStage:
        """The compared stage, to which `rows` belong."""
        return next(one for one in self.stages if one.stage == self.stage)


SCHEMA = "stepsplit.report/1"

NO_MODEL = "no_model"
"""The code of the warning that lists the config keys missing for a model comparison."""

JOB_MISMATCH = "job_mismatch"
"""The code of the warning that the job.toml is of another recording; a caveat has the same text."""

INCOMPLETE = frozenset({
    "calls_missing", "calls_skipped", "collectives_not_recorded", "device_times_missing",
    "device_work_cut", "device_work_lost", "entries_damaged", "file_cut", "file_skipped",
    "file_torn", "flight_incomplete", "flight_torn", "gloo_unpaired", "groups_unknown",
    "no_device_data", "no_steps_on_rank", "trace_cut_off",
})  # fmt: skip
"""Codes of warnings that calls, their groups or their sizes are missing."""


class Host(Struct, frozen=True):
    """A host.

    Attributes:
        host: host name, "unknown" if not recorded.
        ranks: ranks on the host.
    """

    host: str
    ranks: tuple[int, ...]


class AxisSize(Struct, frozen=True):
    """One axis of the mesh.

    Attributes:
        axis: name, such as "tp".
        size: number of ranks along the axis.
    """

    axis: str
    size: int


class JobLabel(Struct, frozen=True):
    """What else the job is called, by its scheduler or in OpenTelemetry's resource.

    Attributes:
        name: such as "SLURM_JOB_ID" or "nemo.run.id".
        value: its text.
    """

    name: str
    value: str


class Run(Struct, frozen=True):
    """The recorded job; None means unknown.

    Attributes:
        name: name of the run.
        world_size: number of ranks of the job.
        ranks: recorded ranks.
        hosts: hosts with their ranks.
        backend: communication backend, such as "nccl".
        device: device name, or "gpu" or "cpu".
        mesh: mesh axes, outermost first.
        mesh_source: origin of the mesh, such as "run.json".
        torch: torch version.
        nccl: NCCL version.
        t0_unix_ns: Unix time of time 0 of the report, in ns, as text.
        profiling_slowdown: relative slowdown of profiled steps, against the steps before them
            where enough are known.
        strategies: detected parallelism; empty in older reports.
        driver: driver version.
        slowdown_after_profiling: relative slowdown of the steps after the profiled ones, against
            the steps before: on CUDA, CUPTI may stay attached. None if too few are known.
        labels: what else the job is called; absent if nothing is recorded.
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
    slowdown_after_profiling: float | None = None
    labels: tuple[JobLabel, ...] | UnsetType = UNSET


UNKNOWN_HOST = "unknown"
"""Stands for the host of ranks whose recording names none."""


def find_world_size(report: Report) -> int | None:
    """The number of ranks of the job, at least where some are certainly missing; None if whether
    others than the recorded ones exist is unknown."""
    codes = {row.code for row in report.warnings}
    is_unknown = WORLD_SIZE_UNKNOWN in codes and RANKS_MISSING not in codes
    return None if is_unknown else report.run.world_size


def format_world_size(report: Report) -> str:
    """The number of ranks of the job as far as it is known, such as "at least 16"."""
    world_size = find_world_size(report)
    if world_size is None:
        return "an unknown number of"
    is_known = all(row.code != WORLD_SIZE_UNKNOWN for row in report.warnings)
    return f"{world_size:,}" if is_known else f"at least {world_size:,}"


def count_devices(report: Report) -> int:
    """The devices of the job; the recorded ones if the number of ranks is unknown."""
    return find_world_size(report) or len(report.run.ranks)


def format_hosts(run: Run) -> str:
    """How many hosts the recorded ranks ran on, such as "2 hosts"."""
    number = sum(host.host != UNKNOWN_HOST for host in run.hosts)
    if number == 0:
        return "hosts not recorded"
    return f"{number:,} host{'' if number == 1 else 's'}"


class WarningRow(Struct, frozen=True):
    """A limitation of the data or the analysis.

    Attributes:
        code: identifier of the warning.
        message: text.
        rank: affected rank; None if all ranks are affected.
    """

    code: str
    message: str
    rank: int | None = None


class GroupRow(Struct, frozen=True):
    """A process group.

    Attributes:
        id: number of the group in the report.
        axis: mesh axis of the group; None if it is not a single axis.
        description: description of the group in the trace.
        ranks: global ranks in group order.
        name: what its communication is called wherever it is named: its axis, several as "pp x tp",
            else its description; "" if it has none, and in older reports.
    """

    id: int
    axis: str | None
    description: str
    ranks: tuple[int, ...]
    name: str = ""


class ClockRow(Struct, frozen=True):
    """The clock alignment of a rank: t_report = t - offset_ns - drift.

    Attributes:
        rank: global rank.
        host: host name.
        offset_ns: offset at the report's t0; of a rank that is not aligned with the first one,
            against the rank that its warning names.
        drift_ppm: drift in parts per million; None if not estimated.
        sigma_ns: standard error of the offset; None if unknown.
        residual_ns: residual of the fit; None if unknown.
    """

    rank: int
    host: str
    offset_ns: int
    drift_ppm: float | None
    sigma_ns: int | None
    residual_ns: int | None


class BlameRow(Struct, frozen=True):
    """Waiting caused by one rank in the full steps, in ns; in all steps if none is full.

    Attributes:
        rank: rank that caused the waits; None for the schedule, variation or unknown.
        cause: cause, such as "compute".
        caused_skew_ns: caused skew of other ranks.
        caused_bubble_ns: caused bubble of other ranks.
        caused_ns: sum of both.
        axis: mesh axis of the waits, or the name of their group as in GroupRow; None if unknown.
        steps: steps with such waits.
    """

    rank: int | None
    cause: str
    caused_skew_ns: int
    caused_bubble_ns: int
    caused_ns: int
    axis: str | None
    steps: tuple[int, ...]


SCHEDULE_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-v": "ZB-V",
    "dualpipe": "DualPipe",
    "dualpipe-v": "DualPipe-V",
}
"""Display names of schedules, if different from the identifier."""


def describe_ideal_bubble(measured: float, ideal: float) -> str:
    """What stages of equal length would leave, such as "ideal 25.0 %".

    Those of unequal length may leave less, and what is worse than the measurement is no ideal.
    """
    return f"ideal {units.format_percent(ideal)}" if ideal < measured else "not above its ideal"


class StageRow(Struct, frozen=True):
    """The bubble of one pipeline stage over the full steps.

    Attributes:
        stage: pp coordinate.
        bubble_ns: bubble per step, the mean.
        bubble_fraction: bubble / pipeline time.
    """

    stage: int
    bubble_ns: int
    bubble_fraction: float


class Pipeline(Struct, frozen=True):
    """The pipeline bubble, from the grid of forwards and backwards (not from bubble_ns).

    Attributes:
        stages: bubble by stage.
        microbatches: microbatches per step.
        schedule: name of the detected schedule; None if unknown.
        bubble_fraction: bubble / pipeline time.
        ideal_bubble_fraction: the same for equal stages, at most the measured one; None if unknown.
        bubble_overhead: bubble / useful time.
    """

    stages: tuple[StageRow, ...]
    microbatches: int
    schedule: str | None
    bubble_fraction: float
    ideal_bubble_fraction: float | None
    bubble_overhead: float


class IdleRow(Struct, frozen=True):
    """Idle time of a rank by cause over its full steps; the rows of a rank add up to its idle time.

    Attributes:
        rank: global rank.
        cause: cause, such as "launch_bound" or "data_loading".
        op: host op; None for the sum of the smaller ones.
        idle_ns: idle time over all full steps.
        count: number of gaps.
    """

    rank: int
    cause: str
    op: str | None
    idle_ns: int
    count: int


class ContentionRow(Struct, frozen=True):
    """Slowdown of a rank's kernels by concurrent communication.

    Attributes:
        rank: global rank.
        ratio: kernel time with communication / without.
        kernels: number of kernels compared.
        lost_ns: compute time lost.
    """

    rank: int
    ratio: float
    kernels: int
    lost_ns: int


class MemoryRow(Struct, frozen=True):
    """Memory of a rank at its peak, in bytes; None means not measured.

    Attributes:
        rank: global rank.
        peak_allocated_bytes: peak of allocated memory.
        peak_reserved_bytes: peak of memory reserved by the allocator.
        weights_bytes: weights.
        gradients_bytes: gradients.
        optimizer_bytes: optimizer states.
        activations_bytes: saved activations.
        transient_bytes: temporary buffers.
        other_bytes: other memory.
    """

    rank: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    weights_bytes: int | None
    gradients_bytes: int | None
    optimizer_bytes: int | None
    activations_bytes: int | None
    transient_bytes: int | None
    other_bytes: int | None


MIN_GAIN_SHARE = 0.01
"""Findings with a gain below this share of the step are not reported."""


class EventRef(Struct, frozen=True):
    """An event that supports a finding.

    Attributes:
        rank: global rank.
        start_ns: start from the report's t0.
        dur_ns: duration.
        name: name of the event.
    """

    rank: int
    start_ns: int
    dur_ns: int
    name: str


BasisKind = Literal["measured", "replayed", "inferred"]
"""How a cause is known: the recording shows what costs the time; or the order of the calls does, in
a replay; or a comparison, a formula or the layout suggest it, which have other explanations."""

Settle = Literal["shapes", "more_steps", "missing_ranks", "whole_files", "clocks"]
"""What would settle a doubt of a finding."""

SETTLES: dict[Settle, str] = {
    "shapes": "record --shapes",
    "more_steps": "more steps",
    "missing_ranks": "the missing ranks",
    "whole_files": "whole files",
    "clocks": "aligned clocks",
}
"""What to do for it."""


class Basis(Struct, frozen=True):
    """What a finding rests on.

    Attributes:
        kind: how the cause is known; the saving is that of a replay, except for a formula.
        steps: number of full steps that have it.
        of_steps: number of full steps of the recording.
        repeats: number of steps of ranks that have it.
        spread_ns: standard deviation of the saving between steps; None for less than two steps,
            or if the saving is not replayed.
        unexplained_share: share of the waiting without a recorded cause, by which a saving may be
            off, 0..1; None without waiting.
        would_settle: what would settle the doubts; empty if there are none.
    """

    kind: BasisKind
    steps: int
    of_steps: int
    repeats: int = 0
    spread_ns: int | None = None
    unexplained_share: float | None = None
    would_settle: tuple[Settle, ...] = ()

    def describe(self) -> str:
        """The basis in words, with what would settle its doubts."""
        parts = [self.kind, f"{self.steps} of {self.of_steps} steps"]
        spread = units.format_milliseconds(self.spread_ns or 0)
        if spread != units.format_milliseconds(0):
            parts.append(f"saving varies by {spread}")
        if self.unexplained_share is not None and self.unexplained_share >= _LEAST_UNEXPLAINED:
            share = units.format_percent(self.unexplained_share)
            parts.append(f"{share} of the waiting unexplained")
        needed = ", ".join(SETTLES[one] for one in self.would_settle)
        return ", ".join(parts) + (f"; to be sure: {needed}" if needed else "")


_LEAST_UNEXPLAINED = 0.05
"""Less waiting without a cause is not mentioned."""


GainKind = Literal["alone", "behind_another", "upper_limit"]
"""What a gain is: of the fix of its cause alone; of that once another finding is fixed; or more
than can be expected, as most of it usually stays. Findings come in this order."""


class Finding(Struct, frozen=True):
    """A bottleneck with the estimated saving per step.

    Attributes:
        code: identifier, such as "slow_rank".
        bucket: bucket of the lost time.
        gain_ns: estimated reduction of the mean step; gains are not additive.
        measured_ns: measured time; None if unknown.
        predicted_ns: time after a fix; None if unknown.
        ranks: ranks to blame; empty if all.
        steps: affected full steps.
        events: examples to look at.
        message: the finding in one sentence.
        basis: what it rests on; None in older reports.
        gain_kind: what the gain is; "alone" in older reports.
    """

    code: str
    bucket: str
    gain_ns: int
    measured_ns: int | None
    predicted_ns: int | None
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    events: tuple[EventRef, ...]
    message: str
    basis: Basis | None = None
    gain_kind: GainKind = "alone"


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings in the order of Report.findings."""
    kinds = get_args(GainKind)
    return tuple(sorted(findings, key=lambda one: (kinds.index(one.gain_kind), -one.gain_ns)))


# The prediction of the run, with the keys of the schema stepsplit.prediction/1, and its job config.


class PredictedMemory(Struct, frozen=True):
    """Predicted peak bytes on one rank of a stage, by category, and their sum.

    Attributes:
        stage: pp coordinate.
        weights_bytes: weights.
        gradients_bytes: gradients.
        optimizer_bytes: optimizer states.
        activations_bytes: saved activations.
        transient_bytes: temporary buffers.
        other_bytes: other memory.
        total_bytes: their sum.
    """

    stage: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    transient_bytes: int
    other_bytes: int
    total_bytes: int


class PredictedCalls(Struct, frozen=True):
    """One kind of communication of a stage: calls per rank and step, and their total time.

    Attributes:
        strategy: why it is sent, such as "sp".
        op: operation, such as "all_gather".
        axis: mesh axis of its groups.
        stage: pp coordinate.
        phase: phase of the step, such as "forward".
        count: calls per rank and step.
        message_bytes: bytes of a call, as nccl-tests count them.
        input_bytes: bytes that a rank puts into a call.
        wire_bytes: bytes that a rank sends in a call.
        time_ns: time of all calls of a step.
        time_ns_low: lower end of its band.
        time_ns_high: upper end of its band.
        exposed_ns: the part of time_ns that compute does not overlap.
    """

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
    """The predicted pipeline bubble.

    Attributes:
        bubble_fraction: bubble / pipeline time.
        bubble_overhead: bubble / useful time.
    """

    bubble_fraction: float
    bubble_overhead: float


class PredictedSplit(Struct, frozen=True, kw_only=True):
    """A predicted step by bucket, in ns.

    Attributes:
        stage: pp coordinate; omitted in the row of the slowest stage.
        compute_ns: compute kernels.
        collective_ns: exposed collective transfers.
        p2p_ns: exposed message transfers.
        skew_ns: waits for a rank of the same pipeline stage.
        bubble_ns: waits for a rank of another pipeline stage.
        copy_ns: memory copies.
        idle_ns: idle time.
        step_ns: the sum of the seven buckets.
        overlapped_ns: communication overlapped by compute; part of compute_ns.
        bubble_covered_ns: communication inside the pipeline bubble.
        fused_ns: kernels that compute and communicate; part of compute_ns.
    """

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
    """A formula used by the prediction, and its publication.

    Attributes:
        id: identifier, such as "parameters.total".
        citation: where it is published.
        text: the formula.
    """

    id: str
    citation: str
    text: str


class PredictionRow(Struct, frozen=True):
    """The complete prediction as stored in report.json. Bytes and splits are per rank, FLOPs of the
    whole job.

    Attributes:
        schema: version of the JSON, "stepsplit.prediction/1".
        parameters: parameters of the model.
        parameters_per_stage: parameters on one rank of each pipeline stage.
        memory: peak memory of one rank of each stage.
        model_flops: FLOPs of a step without recomputation.
        hardware_flops: FLOPs of a step with recomputation.
        communication: communication of each stage.
        pipeline: pipeline bubble.
        splits: the split of each stage.
        split: the split of the slowest stage.
        mfu: model FLOPs utilization, 0..1; None if the peak at the dtype is unknown.
        hfu: hardware FLOPs utilization, likewise.
        tokens_per_s_per_gpu: throughput of one GPU.
        fits: whether every stage fits in the device memory.
        formulas: the formulas used.
        confidence: "calibrated", "high", "medium" or "low".
        low_ns: lower end of the step time's error band.
        high_ns: upper end of the step time's error band.
        convention: how model FLOPs are counted.
        notes: the reasons for a medium or low confidence.
    """

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
    """The tables of a job.toml, with configured and inferred keys.

    Attributes:
        model: the model.
        parallel: the parallel layout.
        training: batch, dtype, optimizer, framework.
        hardware: devices and links.
    """

    model: dict[str, object]
    parallel: dict[str, object]
    training: dict[str, object]
    hardware: dict[str, object]


class Report(ReportFrames, frozen=True, kw_only=True):
    """The analysis of one run.

    Times are ns from `run.t0_unix_ns` on the common clock of all ranks. Optional parts are None or
    empty if the recording has no such data.

    Attributes:
        schema: version of the JSON, "stepsplit.report/1".
        run: the recorded job.
        warnings: limitations of data and analysis.
        groups: process groups.
        summary: the mean step, part by part; None without steps and in older reports.
        steps: split of each step of each rank.
        step_kinds: kinds of the complete steps, the headline first; empty if all are of one.
        exposed: exposed communication by axis and phase.
        clocks: clock alignment of the ranks.
        collectives: collectives by group, op and size.
        step_calls: calls per step.
        blame: ranks that cause waits.
        pipeline: pipeline bubble.
        idle: idle time by cause.
        kernels: compute by kernel family.
        kernel_table: the kernels with the most time, longest first; all are in tables/.
        parts: the mean step by part of the model; empty in older reports.
        part_evidence: how the parts were found; None without parts.
        slow_kernels: kernels slower than on peer ranks.
        contention: slowdown of compute by communication.
        overlap: overlapped communication.
        lateness: late arrivals by rank.
        critical_path: parts of the critical path.
        path_steps: critical path of each step.
        path_kernels: the kernels with the most time on the critical paths.
        step_times: distribution of step durations.
        slow_steps: outlier steps.
        coverage: coverage of the steps by known events.
        memory: memory by rank.
        prediction: prediction of the model.
        job: job config of the prediction.
        gap: comparison with the model.
        findings: bottlenecks, largest gain first; after them what gains only once another one is
            fixed, and last, on a CPU, the time between ops.
        mfu: model FLOPs utilization, 0..1.
        hfu: hardware FLOPs utilization, 0..1.
        work: the counted work by which times are compared; left out if the job counted none, or not
            the same on all ranks.
        step_work: what each rank processed in each step; left out if the job counted nothing.
        rl_step: an RL step by phase; left out if no rank marks one that only RL has.

    Examples:
        >>> from stepsplit.analyzer import analyze
        >>> report = analyze("runs/exp1")  # doctest: +SKIP
        >>> [finding.message for finding in report.findings]  # doctest: +SKIP
        ['rank 3 is a straggler: its GEMMs are 1.40x slower than on its peers at equal grids']
    """

    schema: str = SCHEMA
    run: Run
    warnings: tuple[WarningRow, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    summary: Summary | None = None
    steps: tuple[StepRow, ...] = ()
    step_kinds: tuple[StepKindRow, ...] = ()
    exposed: tuple[ExposedRow, ...] = ()
    clocks: tuple[ClockRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    step_calls: tuple[StepCallsRow, ...] = ()
    blame: tuple[BlameRow, ...] = ()
    pipeline: Pipeline | None = None
    idle: tuple[IdleRow, ...] = ()
    kernels: tuple[KernelFamily, ...] = ()
    kernel_table: tuple[KernelRow, ...] = ()
    parts: tuple[PartRow, ...] = ()
    part_evidence: PartEvidence | None = None
    slow_kernels: tuple[SlowKernel, ...] = ()
    contention: tuple[ContentionRow, ...] = ()
    overlap: tuple[Overlap, ...] = ()
    lateness: tuple[Lateness, ...] = ()
    critical_path: tuple[PathPart, ...] = ()
    path_steps: tuple[PathStep, ...] = ()
    path_kernels: tuple[PathKernel, ...] = ()
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
    work: WorkSummary | UnsetType = UNSET
    step_work: tuple[StepWorkRow, ...] | UnsetType = UNSET
    rl_step: RlStep | UnsetType = UNSET

    def _repr_html_(self) -> str:

        # How a notebook shows it: the split as a bar, the first findings, and the table.
        from stepsplit.analyzer.report.notebook import build_html

        run = self.run
        ranks = f"{len(run.ranks):,} of {format_world_size(self)} ranks"
        summary = self.summary or summarize(self.steps, self.exposed)
        found = [(one.gain_ns, one.message) for one in self.findings]
        return build_html((run.name, ranks, run.device), summary, found)


# Speed and calls of a run.


def compute_token_rate(report: Report) -> float | None:
    """Measured tokens/s of one GPU; None without a job, which gives the tokens of a step."""
    step_ns, predicted = compute_mean_step_ns(report.steps), report.prediction
    if predicted is None or not step_ns:
        return None
    return predicted.tokens_per_s_per_gpu * predicted.split.step_ns / step_ns


def count_calls_per_step(report: Report) -> dict[CollectiveRow, float]:
    """Calls of each kind per full step and member, of messages per step; 0 if in no full step."""
    members = {group.id: len({*group.ranks} & {*report.run.ranks}) for group in report.groups}
    counted = {(row.group, row.op, row.dtype, row.message_bytes): row for row in report.step_calls}
    counts = {}
    for row in report.collectives:
        found = counted.get((row.group, row.op, row.dtype, row.message_bytes))
        shared = 1 if row.op in _MESSAGES else max(1, members.get(row.group, 1))
        counts[row] = 0.0 if found is None else found.calls / shared
    return counts


_MESSAGES = ("send", "recv")
