"""Model comparison of a run: buckets, calls, memory, and the waterfall of the differences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from msgspec import structs

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, StepSplit
from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.analyzer.gap.comm_gap import (
    Call,
    Key,
    LinkOfAxis,
    MeasuredComm,
    Sizes,
    build_link_lookup,
    compare_calls,
    ignore_links,
)
from stepsplit.analyzer.gap.config_from_trace import build_job_table
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.config import JobConfig, ParallelConfig
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import decode_job, decode_layout, read_tables
from stepsplit.analyzer.model.part_time import PARTS, predict_part_times
from stepsplit.analyzer.model.predict import compute_call_ns, predict, read_hardware_rates
from stepsplit.analyzer.model.prediction import Communication, Prediction, group_axis
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.ops import MESSAGES
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.report.explain import explain_idle
from stepsplit.analyzer.report.headline import compute_mean_split, compute_mean_step_ns
from stepsplit.analyzer.report.io import build_job_tables, build_prediction_row
from stepsplit.analyzer.report.report import (
    JOB_MISMATCH,
    MIN_GAIN_SHARE,
    SCHEDULE_NAMES,
    Basis,
    ComparedMemory,
    ComparedPart,
    ComparedStage,
    Finding,
    Gap,
    GapRow,
    MemoryRow,
    Report,
    WarningRow,
    describe_ideal_bubble,
    sort_findings,
)
from stepsplit.analyzer.report.step_rows import list_full_steps, select_full_steps
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.collectors.formats.run_spec import DATA_PARALLEL, RunSpec

# A report with the prediction of its run and the comparison.

AUTO = "auto"
"""Used instead of a job.toml: the config is inferred from the recording alone."""


_MAX_STEP_NS = 1 << 53
"""Parts of longer steps, which are floats, are not exact to the ns: they would not add up."""


def read_job_table(job: str | Path) -> TomlTable:
    """Read a complete or partial job.toml, or a complete config of another program, as `read_job`
    does; empty for AUTO. Raises DataError."""
    return TomlTable("run.json", "", {}) if str(job) == AUTO else read_tables((job,)).table


def compare_to_model(
    report: Report, recording: Recording, split: RunSplit, job_table: TomlTable
) -> Report:
    """Add the prediction, the comparison, the MFU and findings from the model to a report, which
    come after its own.

    Raises UsageError if the config is incomplete (lists the missing keys) or describes a different
    number of ranks or stages; DataError for an invalid job.toml.
    """
    table = build_job_table(recording.spec, split, job_table if job_table.values else None)
    notes = check_layout(decode_layout(table), recording.spec, split, table.where)
    job = decode_job(table)
    notes = (*notes, *note_inferred_keys(table, job, job_table))
    rates = read_hardware_rates(table, job.hardware)
    prediction = predict(job, rates)
    if prediction.split.step_ns > _MAX_STEP_NS:
        raise UsageError(
            f"{table.where}: its predicted step takes more than 100 days; check global_batch,"
            " seq_len and the sizes of the model"
        )
    gap = compute_gap(
        split, prediction, build_comm_cost(job, rates), report, notes, build_link_lookup(job)
    )
    gap = structs.replace(gap, parts=compare_parts(split, report, predict_part_times(job, rates)))
    step_ns = compute_mean_step_ns(report.steps)
    # Utilization of the measured step: that of the predicted one, by their ratio.
    times = prediction.split.step_ns / step_ns if step_ns else 0.0
    count = len(list_full_steps(report.steps))
    findings = sort_findings((*report.findings, *build_gap_findings(gap, report.findings, count)))
    compared = structs.replace(
        report,
        prediction=build_prediction_row(prediction),
        job=build_job_tables(table),
        gap=gap,
        findings=findings,
        mfu=None if prediction.mfu is None else prediction.mfu * times,
        hfu=None if prediction.hfu is None else prediction.hfu * times,
    )
    mismatch = describe_mismatch(compared, prediction, job_table)
    # The constants of a processor are guesses, unless they are calibrated.
    is_guess = load_device(job.hardware.family).processor and prediction.confidence != "calibrated"
    if mismatch is not None and is_guess:
        # The job may be right: the prediction is not.
        notes = (f"{mismatch.split(': ', 1)[1]}, as the speed of this processor is a guess",)
        doubted = structs.replace(gap, confidence="low", notes=(*notes, *gap.notes))
        compared = structs.replace(compared, gap=doubted)
    elif mismatch is not None:
        # A job of another recording explains nothing: no findings, and no impossible MFU.
        is_possible = compared.mfu is None or compared.mfu <= 1
        doubted = structs.replace(gap, confidence="low", notes=(mismatch, *gap.notes))
        return structs.replace(
            compared,
            gap=doubted,
            mfu=compared.mfu if is_possible else None,
            hfu=compared.hfu if is_possible else None,
            findings=report.findings,
            warnings=(*compared.warnings, WarningRow(JOB_MISMATCH, mismatch)),
        )
    if is_guess:
        # No MFU and no findings by guesses.
        return structs.replace(compared, mfu=None, hfu=None, findings=report.findings)
    return compared


_MOST_STEP_RATIO = 3.0
"""A measured step this many times the predicted one without its idle time, which the host may
cause, or the reverse, is of another job."""


def describe_mismatch(report: Report, prediction: Prediction, job_table: TomlTable) -> str | None:
    """Why the job cannot be that of the recording; None if it can.

    report is compared with the prediction of the job in job_table.
    """
    step_ns, predicted_ns = compute_mean_step_ns(report.steps), prediction.split.step_ns
    if not step_ns or not predicted_ns:
        return None
    busy_ns = step_ns - compute_mean_split(select_full_steps(report.steps)).idle_ns
    if report.mfu is not None and report.mfu > 1:
        reason = f"the MFU would be {units.format_percent(report.mfu)}"
    elif prediction.low_ns <= step_ns <= prediction.high_ns:
        # A measurement that the prediction allows for contradicts no job, however wide its band is.
        return None
    elif busy_ns > _MOST_STEP_RATIO * predicted_ns:
        reason = f"the measured step is {step_ns / predicted_ns:.1f} times the predicted one"
    elif predicted_ns > _MOST_STEP_RATIO * step_ns:
        reason = f"the predicted step is {predicted_ns / step_ns:.1f} times the measured one"
    else:
        return None
    job = f"this {Path(job_table.where).name}" if job_table.values else "the inferred job"
    return f"{job} does not describe this recording: {reason}"


def note_inferred_keys(table: TomlTable, job: JobConfig, job_table: TomlTable) -> tuple[str, ...]:
    """Why the prediction is not that of `stepsplit model` for the same complete job.toml.

    table is the job.toml completed from the recording, job its config.
    """
    try:
        if not job_table.values or decode_job(job_table) == job:
            return ()
    except StepsplitError:
        return ()
    keys = []
    for name in table.values:
        values, own = table.get_subtable(name).values, job_table.get_subtable(name).values
        for key in (key for key in values if key not in own):
            rest = {**table.values, name: {k: v for k, v in values.items() if k != key}}
            try:
                is_other = decode_job(TomlTable(table.where, "", rest)) != job
            except StepsplitError:
                is_other = True
            if is_other:
                keys.append(f"[{name}] {key}")
    if not keys:
        return ()
    return (
        f"{job_table.where} leaves out {', '.join(keys)}: here as in the recording, in `stepsplit"
        " model` the defaults",
    )


# The comparison of a run with the model: splits, calls, memory, and the waterfall.


def compute_gap(
    split: RunSplit,
    prediction: Prediction,
    cost: CommCost,
    report: Report,
    notes: Sequence[str] = (),
    links: LinkOfAxis = ignore_links,
) -> Gap:
    """Compare a run with its prediction.

    Args:
        split: the split recording.
        prediction: the prediction of its job.
        cost: the model's time for a call like a predicted one, but of another size.
        report: the report of the recording.
        notes: further caveats.
        links: the link of each axis. Default: unknown.

    Raises UsageError if the recording has no step.
    """
    steps: dict[int, list[StepSplit]] = defaultdict(list)
    for rank in split.ranks:
        steps[split.layout.find_stage(rank.trace.rank)] += rank.steps
    stages = []
    for number, rows in sorted(steps.items()):
        if rows and number < len(prediction.splits):
            # The full step of median duration; chosen from all steps if none is full.
            full = [step for step in rows if step.kind == "full"] or rows
            one = sorted(full, key=lambda step: step.split.step_ns)[(len(full) - 1) // 2]
            expected = prediction.splits[number]
            stages.append(ComparedStage(number, one.rank, one.step, one.kind, one.split, expected))
    if not stages:
        raise UsageError("cannot compare with the model: the recording has no step")
    # The stage with most work is the one that the others wait for.
    shown = max(stages, key=lambda one: one.predicted.step_ns - one.predicted.bubble_ns)
    comm = MeasuredComm.build(split, prediction)
    return Gap(
        stages=tuple(stages),
        stage=shown.stage,
        rows=build_waterfall(StageComparison(comm, prediction, cost, report, shown)),
        calls=compare_calls(comm, prediction, links) if shown.kind == "full" else (),
        memory=compare_memory(report.memory or (), split.layout, prediction),
        low_ns=prediction.low_ns,
        high_ns=prediction.high_ns,
        confidence=prediction.confidence,
        notes=(*notes, *list_caveats(split, prediction, len(stages), shown), *prediction.notes),
        bound_ns=None if prediction.bound is None else prediction.bound.ns,
        bound_resource="" if prediction.bound is None else prediction.bound.resource,
    )


# The compute of the model's parts.

OTHER_PART = "other"

_PREDICTED_PART = {"router": "experts", "loss": "head", "gradient_reduction": OTHER_PART}
"""The part of the model that has the time of a measured one of another name."""


def compare_parts(
    split: RunSplit, report: Report, predicted: Sequence[Mapping[str, int]]
) -> tuple[ComparedPart, ...]:
    """The compute of each part, mean of the recorded ranks; predicted has a stage's by part."""
    if report.part_evidence is None or report.part_evidence.evidence == "none":
        return ()
    measured, expected = Counter[str](), Counter[str]()
    has_layers = report.part_evidence.layers > 0
    for row in report.parts:
        part = _PREDICTED_PART.get(row.part, row.part)
        is_in_pass = row.layer is not None or row.phase != OTHER_PART
        if row.part == OTHER_PART and has_layers and is_in_pass:
            # Residuals and rotary embeddings, which modules have outside of their parts.
            part = "norm"
        measured[part] += row.compute_ns
    ranks = [split.layout.find_stage(rank.trace.rank) for rank in split.ranks if rank.steps]
    for stage in ranks:
        if stage < len(predicted):
            expected.update(predicted[stage])
    order = (*PARTS, OTHER_PART)
    return tuple(
        ComparedPart(part, measured[part], round(expected[part] / len(ranks)))
        for part in order
        if measured[part] or expected[part]
    )


# Findings from the comparison with the model.

_FINDING_CODES = {
    "kernels": "slower_kernels",
    "calls": "extra_calls",
    "link": "slower_calls",
    "latency": "slower_small_calls",
    "overlap": "less_overlap",
}
"""The causes of a gap that only the model reveals, with the code of their finding."""

_SAME_AS_CAUSE = {"calls": "redundant_calls", "link": "slow_link", "overlap": "no_overlap"}
"""Findings of the replay for the same problem; only one of the two is reported."""

_COUNTED_CAUSE = "calls"
"""The number of calls is exact, so that the uncertainty of the model does not matter."""


def build_gap_findings(
    gap: Gap, causes: Sequence[Finding], of_steps: int = 1
) -> tuple[Finding, ...]:
    """The significant parts of the gap beyond the uncertainty of the model, largest first, without
    those that a finding of the replay already covers. They compare one of so many steps."""
    found_codes = {one.code for one in causes}
    least_ns = max(1, MIN_GAIN_SHARE * gap.shown.measured.step_ns)
    findings = []
    for row in sorted(gap.rows, key=lambda row: -row.ns):
        if row.cause not in _FINDING_CODES or _SAME_AS_CAUSE.get(row.cause) in found_codes:
            continue
        if row.ns < least_ns:
            continue
        place = BUCKETS.index(row.bucket)
        measured_ns = gap.shown.measured.buckets_ns[place]
        predicted_ns = gap.shown.predicted.buckets_ns[place]
        uncertainty = gap.high_ns / gap.shown.predicted.step_ns - 1
        if row.cause == _COUNTED_CAUSE or row.ns > uncertainty * predicted_ns:
            findings.append(
                Finding(
                    code=_FINDING_CODES[row.cause],
                    bucket=row.bucket,
                    gain_ns=min(row.ns, measured_ns),
                    measured_ns=measured_ns,
                    predicted_ns=predicted_ns,
                    ranks=(gap.shown.rank,),
                    steps=(gap.shown.step,),
                    events=(),
                    message=row.message,
                    basis=Basis("inferred", 1, of_steps, repeats=1),
                )
            )
    return tuple(findings)


# Whether a job.toml matches the recording, and the caveats of the comparison.


def check_layout(
    layout: ParallelConfig, spec: RunSpec | None, split: RunSplit, where: str
) -> tuple[str, ...]:
    """Caveats for a layout in the job.toml (named by `where`) that differs from the recording.

    Raises UsageError for a different number of ranks or stages, which cannot be compared.
    """
    size = split.size
    # A single trace with communication but without rank numbers may be of any world size.
    communicates = any(len(rank.trace.calls) for rank in split.ranks)
    is_open = not size.is_known or (spec is None and size.ranks == 1 and communicates)
    if layout.world_size < size.ranks or (layout.world_size != size.ranks and not is_open):
        least = "" if size.is_known else "at least "
        ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
        sizes = {axis: int(getattr(layout, axis)) for axis in ("tp", "pp", "cp", "dp")}
        axes = _format_sizes(sizes, [axis for axis in sizes if sizes[axis] > 1 or axis == "dp"])
        raise UsageError(
            f"{where} describes {ranks} ({axes}) but the recording has {least}{size.ranks};"
            " fix [parallel]"
        )
    stages = 1 + max(split.layout.stage_of.values(), default=0)
    if layout.pp != stages:
        detected = str(stages) if stages > 1 else "no pipeline"
        raise UsageError(
            f"{where} has {layout.pp} stages but the recording has {detected}; fix pp in "
            "[parallel], or record a run.json with the mesh"
        )
    mesh = split.layout.mesh
    if mesh is None:
        return ()
    data = prod(mesh.size(axis) for axis in DATA_PARALLEL)
    recorded = {"tp": mesh.size("tp"), "cp": mesh.size("cp"), "dp": data}
    configured = {axis: int(getattr(layout, axis)) for axis in recorded}
    differing = [axis for axis in recorded if recorded[axis] != configured[axis]]
    if not differing:
        return ()
    return (
        f"layout mismatch: {where} has {_format_sizes(configured, differing)}, the recording has "
        f"{_format_sizes(recorded, differing)} (from {split.layout.source})",
    )


def list_caveats(
    split: RunSplit, prediction: Prediction, stages: int, shown: ComparedStage
) -> list[str]:
    """The caveats of the comparison: incomplete steps, missing stages and missing ranks."""
    caveats = []
    if shown.kind != "full":
        caveats.append(f"stage {shown.stage} has no full step: using step {shown.step} of rank "
                    f"{shown.rank} ({shown.kind})")  # fmt: skip
    if stages < len(prediction.splits):
        caveats.append(f"only {stages} of {len(prediction.splits)} stages are in the recording")
    estimated = [step.estimated for rank in split.ranks for step in rank.steps]
    if any(estimated):
        caveats.append(
            f"waits of {sum(estimated)} of {len(estimated)} steps are estimates "
            "(ranks or ends of calls missing)"
        )
    return caveats


def _format_sizes(sizes: dict[str, int], axes: list[str]) -> str:
    return " ".join(f"{axis} {sizes[axis]}" for axis in axes)


# Memory by category, measured and predicted.


def compare_memory(
    rows: Sequence[MemoryRow], layout: RankLayout, prediction: Prediction
) -> tuple[ComparedMemory, ...]:
    """The peak and each category of every stage on its fullest rank, where it was measured."""
    fullest: dict[tuple[int, str], ComparedMemory] = {}
    for row in rows:
        stage = layout.find_stage(row.rank)
        if stage >= len(prediction.memory):
            continue
        expected = prediction.memory[stage]
        for category, measured_bytes, predicted_bytes in (
            ("peak", row.peak_allocated_bytes, expected.total_bytes),
            # Collectors measure the weights that are trained; others show in the peak alone.
            ("weights", row.weights_bytes, expected.weights_bytes - expected.frozen_bytes),
            # All gradients, though not all of them may exist at the peak.
            (
                "gradients",
                row.gradients_bytes,
                expected.gradients_bytes + expected.missing_gradients_bytes,
            ),
            ("optimizer", row.optimizer_bytes, expected.optimizer_bytes),
            ("activations", row.activations_bytes, expected.activations_bytes),
        ):
            if measured_bytes is None:
                continue
            known = fullest.get((stage, category))
            if known is None or measured_bytes > known.measured_bytes:
                fullest[stage, category] = ComparedMemory(
                    stage, row.rank, measured_bytes, predicted_bytes, category
                )
    return tuple(sorted(fullest.values(), key=lambda one: one.stage))


# The waterfall from the predicted to the measured step; its parts add up to the difference.


@dataclass(frozen=True, slots=True)
class StageComparison:
    """One stage, measured and predicted, with the inputs that explain the difference."""

    comm: MeasuredComm
    prediction: Prediction
    cost: CommCost
    report: Report
    stage: ComparedStage

    def compute_gap_ns(self, bucket: str) -> int:
        """Measured - predicted time of one bucket, in ns."""
        difference = self.stage.measured - self.stage.predicted
        return difference.buckets_ns[BUCKETS.index(bucket)]

    def choose_text(self, bucket: str, more: str, less: str) -> str:
        """`more` if the bucket is larger than predicted, else `less`."""
        return more if self.compute_gap_ns(bucket) > 0 else less


def build_waterfall(sides: StageComparison) -> tuple[GapRow, ...]:
    """The non-zero parts of the difference in the order of the buckets."""
    stage, report = sides.stage, sides.report
    # Compute: a rank that is slower than its peers, and the rest, kernels or their number.
    compute_ns = sides.compute_gap_ns("compute")
    lost_ns = sum(one.lost_ns for one in report.slow_kernels if one.rank == stage.rank)
    slow_ns = min(lost_ns, max(0, compute_ns))
    kernels = sides.choose_text(
        "compute",
        "compute takes more time than predicted (slower or more kernels)",
        "compute takes less time than predicted (faster or fewer kernels)",
    )
    # The bubble: pipeline imbalance, and the rest. The predicted bubble does not include the wait
    # for a stage with more compute than the compared one.
    bubble_ns = sides.compute_gap_ns("bubble")
    imbalance = next(
        (
            one
            for one in report.findings
            if one.code == "uneven_stages" and stage.rank not in one.ranks
        ),
        None,
    )
    uneven_ns = 0 if imbalance is None else min(imbalance.gain_ns, max(0, bubble_ns))
    uneven = imbalance.message if imbalance else ""
    waiting = (
        sides.choose_text("bubble", "more", "less") + " waiting for other stages than predicted"
    )
    if grid := report.pipeline:
        waiting += f"; measured bubble {units.format_percent(grid.bubble_fraction)}"
        ideal = grid.ideal_bubble_fraction
        if ideal is not None:
            name = SCHEDULE_NAMES.get(grid.schedule or "", grid.schedule)
            waiting += f", {describe_ideal_bubble(grid.bubble_fraction, ideal)} ({name})"
        waiting += f", predicted {units.format_percent(sides.prediction.bubble_fraction)}"
    copies = "memory copies that the model does not include"
    if stage.predicted.copy_ns:
        copies = (
            f"memory copies take {sides.choose_text('copy', 'more', 'less')} time than predicted"
        )
    # Idle time with its largest cause in this step, skew with the rank that caused most of it.
    rank, split = sides.comm.find_rank(stage), sides.comm.split
    window = rank.numbers.index(stage.step)
    causes = split.detail.idle[split.ranks.index(rank)]
    cause = explain_idle(one for one in causes if one.window == window)
    idle = f"{sides.choose_text('idle', 'more', 'less')} idle time than predicted"
    idle += f"; {cause}" if cause else ""
    blamed: dict[tuple[int, str], int] = defaultdict(int)
    for row in report.blame:
        if row.rank is not None and row.caused_skew_ns:
            blamed[row.rank, row.cause] += row.caused_skew_ns
    skew = sides.choose_text("skew", "more", "less") + " waiting within the stage than predicted"
    if blamed:
        by_rank, by_cause = max(blamed, key=lambda key: blamed[key])
        skew += f", mostly for rank {by_rank} ({by_cause})"
    rows = [
        GapRow(
            "slow_rank", "compute", None, slow_ns, f"rank {stage.rank} is slower than its peers"
        ),
        GapRow("kernels", "compute", None, compute_ns - slow_ns, kernels),
        *explain_calls(sides.comm, sides.prediction, sides.cost, stage),
        GapRow("skew", "skew", None, sides.compute_gap_ns("skew"), skew),
        GapRow("uneven_stages", "bubble", "pp", uneven_ns, uneven),
        GapRow("bubble", "bubble", "pp", bubble_ns - uneven_ns, waiting),
        GapRow("copy", "copy", None, sides.compute_gap_ns("copy"), copies),
        GapRow("idle", "idle", None, sides.compute_gap_ns("idle"), idle),
    ]
    for bucket in BUCKETS:
        explained, gap = (
            sum(row.ns for row in rows if row.bucket == bucket),
            sides.compute_gap_ns(bucket),
        )
        assert explained == gap, f"the waterfall explains {explained} ns of {gap} ns in {bucket}"
    return tuple(row for row in rows if row.ns)


# Differences between measured and predicted exposed communication, per axis.


def explain_calls(
    comm: MeasuredComm, prediction: Prediction, cost: CommCost, stage: ComparedStage
) -> list[GapRow]:
    """Split the difference on each axis into extra calls, slower calls and less overlap.

    The parts of a bucket add up to measured - predicted. A step that is not full has incomplete
    calls: each axis is one part.
    """
    measured, expected = comm.sum_exposed_ns(stage), _sum_predicted_exposed(prediction, stage)
    kinds = compare_call_times(comm, prediction, cost, stage) if stage.kind == "full" else None
    rows: list[GapRow] = []
    for bucket, axis in sorted({*measured, *expected}):
        gap_ns = measured.get((bucket, axis), 0) - expected.get((bucket, axis), 0)
        if kinds is None:
            words = "more" if gap_ns > 0 else "less"
            message = f"{words} exposed communication on {axis} than predicted"
            rows.append(GapRow("exposed", bucket, axis, gap_ns, message))
            continue
        own = [one for one in kinds if (_choose_bucket(one.op), one.axis) == (bucket, axis)]
        # The extra time of the calls explains at most all of the gap; the rest of it is a
        # difference in overlap with compute.
        longer_ns = sum(one.extra_ns + one.slower_ns for one in own)
        share = min(1.0, max(0.0, gap_ns / longer_ns)) if longer_ns else 0.0
        parts = []
        for one in own:
            slower = "latency" if one.small else "link"
            parts.append(("calls", one.extra_ns * share, one.extra_words))
            parts.append((slower, one.slower_ns * share, one.slower_words))
        left_ns = gap_ns - longer_ns * share
        words = "less" if left_ns > 0 else "more"
        message = f"{words} of the communication on {axis} is overlapped than predicted"
        parts.append(("overlap", left_ns, message))
        # Rounded to whole ns without changing their sum.
        sum_ns, rounded = 0.0, 0
        for cause, part_ns, message in parts:
            sum_ns += part_ns
            rows.append(GapRow(cause, bucket, axis, round(sum_ns) - rounded, message))
            rounded = round(sum_ns)
    return rows


def _sum_predicted_exposed(prediction: Prediction, stage: ComparedStage) -> dict[Key, int]:
    """Predicted exposed time by bucket and axis; rounding errors go to the largest axis."""
    sums: dict[Key, int] = defaultdict(int)
    for one in prediction.communication:
        if one.message.stage == stage.stage and one.exposed_ns:
            sums[_choose_bucket(one.message.op), one.message.axis] += one.exposed_ns
    for bucket, whole in (
        ("collective", stage.predicted.collective_ns),
        ("p2p", stage.predicted.p2p_ns),
    ):
        own = {key: ns for key, ns in sums.items() if key[0] == bucket}
        if whole != sum(own.values()):
            sums[max(own, key=lambda key: own[key], default=(bucket, "other"))] += whole - sum(
                own.values()
            )
    return dict(sums)


def _choose_bucket(op: str) -> str:
    return "p2p" if op in MESSAGES else "collective"


# Measured and predicted time of the calls of one axis and op in a step.

_LATENCY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The calls of one axis and op of one rank in one step.

    predicted_ns is the model's time for the predicted calls, expected_ns its time for the measured
    calls, measured_ns the measured transfer time. small: expected_ns is mostly latency.
    """

    axis: str
    op: str
    measured: Sizes
    predicted: Sizes
    predicted_ns: float
    expected_ns: float
    measured_ns: float
    small: bool

    @property
    def extra_ns(self) -> float:
        """The predicted cost of more or larger calls."""
        return self.expected_ns - self.predicted_ns

    @property
    def slower_ns(self) -> float:
        """How much longer the calls take than predicted for calls of their sizes."""
        return self.measured_ns - self.expected_ns

    @property
    def extra_words(self) -> str:
        return (
            f"{self.op} on {self.axis}: {_format_amount(self.measured)}, predicted "
            f"{_format_amount(self.predicted)}"
        )

    @property
    def slower_words(self) -> str:
        times = self.measured_ns / self.expected_ns if self.expected_ns else 1.0
        text = f"{self.op} on {self.axis} takes {times:.2f}x the predicted time"
        return f"{text} (small calls, latency-bound)" if self.small else text


def compare_call_times(
    comm: MeasuredComm, prediction: Prediction, cost: CommCost, stage: ComparedStage
) -> list[CallTimes]:
    """A row for each measured or predicted axis and op of the stage's step."""
    rank, sizes = comm.find_rank(stage), comm.count_sizes(stage)
    window = rank.windows.windows[rank.numbers.index(stage.step)]
    moved = comm.sum_moved_ns(rank, [window])
    expected: dict[Call, list[Communication]] = defaultdict(list)
    for one in prediction.communication:
        if one.message.stage == stage.stage:
            expected[one.message.axis, one.message.op].append(one)
    rows = []
    for kind in sorted({*sizes, *moved, *expected}):
        measured, predicted = sizes.get(kind, {}), expected.get(kind, [])
        moved_ns = float(moved.get(kind, (0, 0))[0])
        predicted_ns = sum(each.time.ns for each in predicted)
        expected_ns, least_ns = moved_ns, 0.0
        if predicted:
            expected_ns = _estimate_ns(measured, predicted, cost)
            least_ns = _estimate_ns({1: sum(measured.values())}, predicted, cost)
            if not predicted_ns:
                # Free in the model, such as the receiving side of a ring.
                moved_ns = 0.0
        predicted_sizes: dict[int, int] = defaultdict(int)
        for each in predicted:
            predicted_sizes[each.message.message_bytes] += each.message.count
        rows.append(
            CallTimes(
                axis=kind[0],
                op=kind[1],
                measured=measured,
                predicted=predicted_sizes,
                predicted_ns=predicted_ns,
                expected_ns=expected_ns,
                measured_ns=moved_ns,
                small=least_ns > _LATENCY_SHARE * expected_ns,
            )
        )
    return rows


def _estimate_ns(measured: Sizes, predicted: Sequence[Communication], cost: CommCost) -> float:
    """The model's time for the calls, from the predicted call nearest in size; from the mean call
    if the size is unknown."""
    count = sum(one.message.count for one in predicted)
    mean_ns = sum(one.time.ns for one in predicted) / count
    total_ns = 0.0
    for size, calls in measured.items():
        each_ns = mean_ns
        if size >= 0:
            nearest = min(predicted, key=lambda one: abs(one.message.message_bytes - size))
            each_ns = cost(nearest, size)
        total_ns += calls * each_ns
    return total_ns


def _format_amount(sizes: Sizes) -> str:
    """Such as "4 calls (12.7 MB)"; without bytes if unknown."""
    count = sum(sizes.values())
    text = "1 call" if count == 1 else f"{count} calls"
    if not count or any(size < 0 for size in sizes):
        return text
    return f"{text} ({units.format_size(sum(size * calls for size, calls in sizes.items()))})"


# The model's time for a call like a predicted one, but of another size.

CommCost = Callable[[Communication, int], float]
"""(predicted communication, bytes of one call) -> time of such a call in ns."""


def build_comm_cost(job: JobConfig, rates: Rates) -> CommCost:
    """The cost function of the job's calls; it reproduces the prediction for predicted sizes."""

    def estimate_ns(like: Communication, message_bytes: int) -> float:
        message = like.message
        each_ns = like.time.ns / message.count
        if message_bytes == message.message_bytes:
            return each_ns
        own = replace(message, axis=group_axis(message.axis))
        there_ns = compute_call_ns(job, own, rates).ns
        here_ns = compute_call_ns(job, replace(own, message_bytes=message_bytes), rates).ns
        times = here_ns / there_ns if there_ns else message_bytes / message.message_bytes
        return each_ns * times

    return estimate_ns
