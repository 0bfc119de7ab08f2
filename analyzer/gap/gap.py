"""A measured run compared with its prediction: buckets, calls, memory, and what explains it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path

from msgspec.structs import replace

from stepsplit.analyzer.buckets import BUCKETS, StepSplit
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.gap.comm_gap import MeasuredComm, Wires, compared_calls, no_wires, wires_of
from stepsplit.analyzer.gap.config_from_trace import run_table
from stepsplit.analyzer.gap.waterfall import Price, Sides, price_of, waterfall
from stepsplit.analyzer.model.config import ParallelConfig
from stepsplit.analyzer.model.config_decode import TomlTable, read_table
from stepsplit.analyzer.model.config_file import job_in, layout_in
from stepsplit.analyzer.model.predict import predict, rates_of
from stepsplit.analyzer.model.prediction import Prediction, StageMemory
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.report.io import build_job_tables, build_prediction_row
from stepsplit.analyzer.report.report import (
    WORTH,
    ComparedMemory,
    ComparedStage,
    Finding,
    Gap,
    GapRow,
    MemoryRow,
    Report,
    step_median_ns,
)
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.collectors.run_spec import DATA_PARALLEL, RunSpec

# A report with its run's prediction, and what lies between the two.

GUESSED = "cpu"
"""A family of which the model only guesses, unless it is calibrated: no MFU and no finding rests on
that."""

AUTO = "auto"
"""In place of a RUN.toml: the recording tells all."""


def read_run(run: str | Path) -> TomlTable:
    """What a RUN.toml states, whole or a part; nothing by AUTO. Raises DataError."""
    return TomlTable("run.json", "", {}) if str(run) == AUTO else read_table(run)


def held_against(report: Report, recording: Recording, found: RunSplit, run: TomlTable) -> Report:
    """The report with prediction, gap, MFU and what only the model tells.

    Raises UsageError, which lists what neither run nor recording tells, or says that they are of
    different ranks; DataError for a run that is odd.
    """
    table = run_table(recording.spec, found, run if run.values else None)
    notes = disagreements(layout_in(table), recording.spec, found, table.where)
    job = job_in(table)
    rates = rates_of(table, job.hardware)
    prediction = predict(job, rates)
    gap = gap_of(found, prediction, price_of(job, rates), report, notes, wires_of(job))
    held = _with(report, table, prediction, gap)
    if job.hardware.family == GUESSED and prediction.confidence != "calibrated":
        return replace(held, mfu=None, hfu=None, findings=report.findings)
    return held


def _with(report: Report, table: TomlTable, prediction: Prediction, gap: Gap) -> Report:
    step_ns = step_median_ns(report.steps)
    times = prediction.split.step_ns / step_ns if step_ns else 0.0
    findings = (*report.findings, *gap_findings(gap, report.findings))
    return replace(
        report,
        prediction=build_prediction_row(prediction),
        job=build_job_tables(table),
        gap=gap,
        findings=tuple(sorted(findings, key=lambda one: -one.gain_ns)),
        mfu=None if prediction.mfu is None else prediction.mfu * times,
        hfu=None if prediction.hfu is None else prediction.hfu * times,
    )


# A run against its model: the splits, the calls, the memory, and what explains the difference.


def gap_of(
    found: RunSplit,
    prediction: Prediction,
    price: Price,
    report: Report,
    notes: Sequence[str] = (),
    wires: Wires = no_wires,
) -> Gap:
    """The run, whose report is this, held against the prediction; notes say what else to doubt,
    wires what joins the ranks.

    Raises UsageError where the recording has no step.
    """
    stages = compared_stages(found, prediction)
    if not stages:
        raise UsageError("the recording has no step to hold against a model")
    shown, seen = max(stages, key=_work_ns), MeasuredComm.of(found, prediction)
    return Gap(
        stages=stages,
        stage=shown.stage,
        rows=waterfall(Sides(seen, prediction, price, report, shown)),
        calls=compared_calls(seen, prediction, wires) if shown.kind == "full" else (),
        memory=compared_memory(report.memory or (), found.layout, prediction),
        low_ns=prediction.low_ns,
        high_ns=prediction.high_ns,
        confidence=prediction.confidence,
        notes=(*notes, *doubts(found, prediction, len(stages), shown), *prediction.notes),
    )


def _work_ns(stage: ComparedStage) -> int:
    return stage.predicted.step_ns - stage.predicted.bubble_ns


# The measured step of each stage, to hold against its prediction.


def compared_stages(found: RunSplit, prediction: Prediction) -> tuple[ComparedStage, ...]:
    """The stages of which the recording has steps, first to last."""
    steps: dict[int, list[StepSplit]] = defaultdict(list)
    for rank in found.ranks:
        steps[found.layout.stage(rank.trace.rank)] += rank.steps
    middle = {stage: _median(rows) for stage, rows in sorted(steps.items()) if rows}
    return tuple(
        ComparedStage(stage, one.rank, one.step, one.kind, one.split, prediction.splits[stage])
        for stage, one in middle.items()
        if stage < len(prediction.splits)
    )


def _median(steps: list[StepSplit]) -> StepSplit:
    """The full step of median length; of all steps where none is full."""
    full = [step for step in steps if step.kind == "full"] or steps
    return sorted(full, key=lambda step: step.split.step_ns)[(len(full) - 1) // 2]


# What of a gap is worth mending and only the model tells.

_CODES = {
    "kernels": "slower_kernels",
    "calls": "extra_calls",
    "link": "slower_calls",
    "latency": "slower_small_calls",
    "overlap": "less_overlap",
}
"""The parts of a gap that only the model tells, as findings."""

_SAID = {"calls": "needless_calls", "link": "slow_link", "overlap": "no_overlap"}
"""The causes that say the same by a replay: one line for both."""

_COUNTED = "calls"
"""How many calls there are is no matter of the model's doubt."""


def gap_findings(gap: Gap, causes: Sequence[Finding]) -> tuple[Finding, ...]:
    """The parts that are worth a line and beyond what the model doubts of itself, largest first;
    none that a cause says already."""
    said = {one.code for one in causes}
    rows = [
        row for row in gap.rows
        if row.cause in _CODES and _SAID.get(row.cause) not in said and _worth(gap, row)
    ]  # fmt: skip
    return tuple(_finding(gap, row) for row in sorted(rows, key=lambda row: -row.ns))


def _worth(gap: Gap, row: GapRow) -> bool:
    """Whether the row is more than WORTH, and more than its bucket may be longer by the band of the
    predicted step."""
    if row.ns < max(1, WORTH * gap.shown.measured.step_ns):
        return False
    doubt = gap.high_ns / gap.shown.predicted.step_ns - 1
    return row.cause == _COUNTED or row.ns > doubt * _sides(gap, row.bucket)[1]


def _sides(gap: Gap, bucket: str) -> tuple[int, int]:
    """(measured, predicted) ns of the bucket."""
    place = BUCKETS.index(bucket)
    return gap.shown.measured.buckets_ns[place], gap.shown.predicted.buckets_ns[place]


def _finding(gap: Gap, row: GapRow) -> Finding:
    measured, predicted = _sides(gap, row.bucket)
    return Finding(
        code=_CODES[row.cause],
        bucket=row.bucket,
        gain_ns=row.ns,
        measured_ns=measured,
        predicted_ns=predicted,
        ranks=(gap.shown.rank,),
        steps=(gap.shown.step,),
        events=(),
        message=row.message,
    )


# Whether a RUN.toml is of the recording, and what of a recording the model does not mean.


def disagreements(
    layout: ParallelConfig, spec: RunSpec | None, found: RunSplit, where: str
) -> tuple[str, ...]:
    """Where the layout of the RUN.toml is another than the recording's, in a line.

    where names the RUN.toml. Raises UsageError for one of other ranks or stages: nothing of it
    could be held against the recording.
    """
    _same_ranks(layout, spec, found, where)
    _same_stages(layout, found, where)
    mesh = found.layout.mesh
    if mesh is None:
        return ()
    data = prod(mesh.size(axis) for axis in DATA_PARALLEL)
    ran = {"tp": mesh.size("tp"), "cp": mesh.size("cp"), "dp": data}
    stated = {axis: int(getattr(layout, axis)) for axis in ran}
    odd = [axis for axis in ran if ran[axis] != stated[axis]]
    if not odd:
        return ()
    return (f"{where} has {_sizes(stated, odd)}, the recording {_sizes(ran, odd)} (by "
            f"{found.layout.source}): the model is of another layout than what ran",)  # fmt: skip


def doubts(found: RunSplit, prediction: Prediction, stages: int, shown: ComparedStage) -> list[str]:
    """What the recording cannot tell of the shown step and of as many stages as it has."""
    said = []
    if shown.kind != "full":
        said.append(f"stage {shown.stage} has no full step: step {shown.step} of rank "
                    f"{shown.rank}, which is {shown.kind}, stands in for one")  # fmt: skip
    if stages < len(prediction.splits):
        said.append(f"{stages} of {len(prediction.splits)} stages are in the recording")
    estimated = [step.estimated for rank in found.ranks for step in rank.steps]
    if any(estimated):
        said.append(f"{sum(estimated)} of {len(estimated)} splits are estimated for want of ranks: "
                    "what their calls moved and waited is told by calls like them")  # fmt: skip
    return said


def _same_ranks(layout: ParallelConfig, spec: RunSpec | None, found: RunSplit, where: str) -> None:
    """A trace alone that communicates and names no ranks may be of any number of them."""
    ran = spec.world_size if spec else max(rank.trace.world_size for rank in found.ranks)
    stated = layout.world_size
    communicates = any(len(rank.trace.calls) for rank in found.ranks)
    if stated == ran or (spec is None and ran == 1 and communicates):
        return
    raise UsageError(f"{where} is of {_ranks(stated)} ({_axes(layout)}), the recording of {ran}: "
                     "mend [parallel]")  # fmt: skip


def _same_stages(layout: ParallelConfig, found: RunSplit, where: str) -> None:
    ran = 1 + max(found.layout.stage_of.values(), default=0)
    if layout.pp != ran:
        told = f"shows {ran}" if ran > 1 else "shows no pipeline"
        raise UsageError(f"{where} has {layout.pp} stages, the recording {told}: mend pp in "
                         "[parallel], or record a run.json that states the mesh")  # fmt: skip


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _axes(layout: ParallelConfig) -> str:
    sizes = {axis: int(getattr(layout, axis)) for axis in ("tp", "pp", "cp", "dp")}
    return _sizes(sizes, [axis for axis in sizes if sizes[axis] > 1 or axis == "dp"])


def _sizes(sizes: dict[str, int], axes: list[str]) -> str:
    return " ".join(f"{axis} {sizes[axis]}" for axis in axes)


# Memory by category, measured and predicted.

_CATEGORIES = ("weights", "gradients", "optimizer", "activations")


def compared_memory(
    rows: Sequence[MemoryRow], layout: RankLayout, prediction: Prediction
) -> tuple[ComparedMemory, ...]:
    """Of each stage its peak and each category, on the rank that held most of it; none of what no
    rank measured."""
    fullest: dict[tuple[int, str], ComparedMemory] = {}
    for row in rows:
        stage = layout.stage(row.rank)
        if stage < len(prediction.memory):
            for one in _of_rank(row, stage, prediction.memory[stage]):
                known = fullest.get((stage, one.category))
                if known is None or one.measured_bytes > known.measured_bytes:
                    fullest[stage, one.category] = one
    return tuple(sorted(fullest.values(), key=lambda one: one.stage))


def _of_rank(row: MemoryRow, stage: int, expected: StageMemory) -> list[ComparedMemory]:
    sides = [("peak", row.peak_allocated_bytes, expected.total_bytes)]
    sides += [
        (name, getattr(row, f"{name}_bytes"), getattr(expected, f"{name}_bytes"))
        for name in _CATEGORIES
    ]
    return [
        ComparedMemory(stage, row.rank, held, predicted, name)
        for name, held, predicted in sides
        if held is not None
    ]
