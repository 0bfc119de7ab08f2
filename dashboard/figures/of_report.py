"""The figures of a run's pages, each by one call on its report or analysis.

What needs the tables takes an `Analysis`, as `stepsplit.analyzer.examine` returns it; all others
take a `Report` too. A figure is plotly's, and may be changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.arrays import select_rows
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.diagnose.what_if import build_ideal_grid
from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.analyzer.gap.comm_gap import model_busbw
from stepsplit.analyzer.model.prediction import Prediction, StageMemory
from stepsplit.analyzer.regression.compare import RunComparison
from stepsplit.analyzer.report.axis_names import name_groups
from stepsplit.analyzer.report.headline import compute_mean_split
from stepsplit.analyzer.report.io import extract_job, extract_prediction
from stepsplit.analyzer.report.report import Gap, MemoryRow, Pipeline, Report
from stepsplit.analyzer.report.step_rows import list_full_steps, select_full_steps
from stepsplit.analyzer.report.tables import Boxes, Tables
from stepsplit.analyzer.report.waits import sum_waits_by_root
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.analyzer.units import format_size
from stepsplit.dashboard.figures import communication, run
from stepsplit.dashboard.figures.communication import BandwidthPoint, Curve, MedianCall, RankGroup
from stepsplit.dashboard.figures.rank_groups import RankGrouping, list_report_groupings
from stepsplit.dashboard.figures.run import CATEGORIES, MemoryBar

Result = Report | Analysis


def _get_report(result: Result) -> Report:
    return result.report if isinstance(result, Analysis) else result


def _get_tables(result: Result, what: str) -> Tables:
    if not isinstance(result, Analysis):
        raise UsageError(f"{what} needs the tables of a run; pass the result of examine([PATH])")
    return result.tables


# The step.


def plot_split_by_rank(result: Result) -> go.Figure:
    """The mean step of each rank as a stacked bar of the seven buckets, in ms."""
    return run.draw_split_by_rank(_get_report(result))


def plot_split_by_step(result: Result, rank: int | None = None) -> go.Figure:
    """Each step as a stacked bar, in ms: of one rank, or by default the mean over ranks."""
    return run.draw_split_by_step(_get_report(result), rank)


def plot_busy_ranks(result: Result) -> go.Figure:
    """By how much longer each rank is busy than the median of its stage, by host, in ms."""
    report = _get_report(result)
    groupings = list_report_groupings(report)
    stages = {one.by: one.groups for one in groupings}.get("stage")
    ranks = list_busy_ranks(report, stages or (RankGroup("", report.run.ranks),))
    columns = list_rank_columns(report, groupings)
    return run.draw_busy_grid(columns, "rank", {one.rank: one.excess_ns for one in ranks})


def plot_critical_path(result: Result) -> go.Figure:
    """The critical path of the average step by bucket and axis, in ms."""
    return run.draw_critical_path(_get_report(result))


# Communication.


def plot_bandwidth(result: Result) -> go.Figure:
    """Bus bandwidth over message size, with the model's curves if the report has a job."""
    points, curves = collect_bandwidth(_get_report(result))
    return communication.draw_bandwidth(points, curves)


def plot_wait_against_transfer(result: Result) -> go.Figure:
    """The kinds of calls that take longest: wait and transfer of the median call, in ms."""
    calls = [call for call, _ in list_median_calls(_get_report(result))]
    return communication.draw_wait_against_transfer(calls)


def plot_waits(analysis: Analysis) -> go.Figure:
    """How long each rank (row) waits for each other (column) at the end of the chain, in ms."""
    waits, report = _get_tables(analysis, "plot_waits").waits, analysis.report
    steps = list_full_steps(report.steps)
    own = select_rows(waits, np.isin(waits.step, steps))
    sums = sum_waits_by_root(own, max(report.run.ranks, default=-1) + 1)
    groups = tuple(RankGroup(f"rank {rank}", (rank,)) for rank in report.run.ranks)
    return communication.draw_waits_matrix(sums, groups, len(steps) or 1)


# The pipeline.


def plot_pipeline(analysis: Analysis, step: int | None = None) -> go.Figure:
    """Microbatches of each stage in one step (by default the middle one) above the schedule's
    ideal. Raises UsageError without a pipeline."""
    boxes = _get_tables(analysis, "plot_pipeline").boxes
    steps = list_drawn_steps(analysis.report, boxes)
    if analysis.report.pipeline is None or not steps:
        raise UsageError("no microbatches were recognized in this recording")
    chosen = steps[len(steps) // 2] if step is None else step
    if chosen not in steps:
        raise UsageError(f"no microbatches in step {chosen}; there are {steps}")
    grid = choose_grid(analysis.report, boxes, chosen)
    return run.draw_pipeline(grid.measured, grid.ideal)


def plot_stage_bubbles(result: Result) -> go.Figure:
    """The bubble fraction of each stage and the schedule's ideal. Raises UsageError without a
    pipeline."""
    pipeline = _get_report(result).pipeline
    if pipeline is None:
        raise UsageError("the report has no pipeline")
    return run.draw_stage_bubbles(pipeline)


# Memory and the model.


def plot_memory(result: Result) -> go.Figure:
    """Peak memory by category, measured by rank and predicted by stage. Raises UsageError without
    either."""
    found = collect_memory(_get_report(result))
    if not found.bars:
        raise UsageError("the report has neither measured nor predicted memory")
    return run.draw_memory(found.bars, found.limit_bytes)


def plot_predicted_and_measured(result: Result) -> go.Figure:
    """The predicted and the measured step. Raises UsageError without a model comparison."""
    return run.draw_predicted_and_measured(_get_gap(result))


def plot_waterfall(result: Result) -> go.Figure:
    """From the predicted to the measured step, part by part. Raises UsageError without a model
    comparison."""
    return run.draw_waterfall(_get_gap(result))


def _get_gap(result: Result) -> Gap:
    gap = _get_report(result).gap
    if gap is None:
        raise UsageError('no model comparison; use analyze(PATH, job="auto") or a job.toml')
    return gap


# Two runs.


def plot_difference(comparison: RunComparison) -> go.Figure:
    """From the baseline's to the candidate's mean step, bucket by bucket, in ms."""
    return run.draw_difference(comparison)


# What the figures and the pages draw.


@dataclass(frozen=True, slots=True)
class BusyRank:
    """The mean step of a rank, and by how much longer it is busy per step than the
    median rank of its stage: all time but skew and bubble, in which it waits."""

    rank: int
    split: Split
    excess_ns: float

    @property
    def busy_ns(self) -> int:
        return self.split.step_ns - self.split.skew_ns - self.split.bubble_ns


def list_busy_ranks(report: Report, stages: Sequence[RankGroup]) -> tuple[BusyRank, ...]:
    """The ranks of these stages, the longest busy first."""
    steps = dict(run.group_steps(select_full_steps(report.steps), "rank"))
    ranks: list[BusyRank] = []
    for stage in stages:
        own = [BusyRank(n, compute_mean_split(steps[n]), 0) for n in stage.ranks if n in steps]
        usual_ns = median(one.busy_ns for one in own) if own else 0
        ranks += [replace(one, excess_ns=one.busy_ns - usual_ns) for one in own]
    return tuple(sorted(ranks, key=lambda one: -one.excess_ns))


def list_rank_columns(report: Report, groupings: Sequence[RankGrouping]) -> tuple[RankGroup, ...]:
    """The ranks by host, or 32 in a column if hosts are not known."""
    by_host = {one.by: one.groups for one in groupings}.get("host")
    ranks = report.run.ranks
    parts = [ranks[at : at + 32] for at in range(0, len(ranks), 32)]
    cut = [RankGroup(f"ranks {part[0]} to {part[-1]}", tuple(part)) for part in parts]
    return tuple(sorted(by_host or cut, key=lambda one: one.ranks[0]))


KINDS, WIDER = 10, 8
"""Kinds of calls to draw; factor by which the model's curve extends the measured sizes."""


def estimate_total_ns(row: CollectiveRow) -> int:
    """Estimated total time of the row's calls in ns: count times the median call."""
    return row.count * (row.transfer_ns_median + row.wait_ns_median)


def list_median_calls(report: Report) -> list[tuple[MedianCall, CollectiveRow]]:
    """The kinds of calls with the largest total time, each by the median call of its slowest
    group, and that group's row."""
    names = name_groups(report)
    kinds: dict[str, CollectiveRow] = {}
    # Ascending: of the groups of a kind the slowest is kept.
    for row in sorted(report.collectives, key=estimate_total_ns):
        size = "size unknown" if row.message_bytes is None else format_size(row.message_bytes)
        kinds[f"{row.op} on {names[row.group]}, {size}"] = row
    largest = sorted(kinds.items(), key=lambda item: -estimate_total_ns(item[1]))[:KINDS]
    return [
        (MedianCall(words, row.transfer_ns_median, row.wait_ns_median), row)
        for words, row in largest
    ]


def collect_bandwidth(report: Report) -> tuple[list[BandwidthPoint], list[Curve]]:
    """The measured bandwidths by size, and the model's curves around them."""
    names = name_groups(report)
    points = [
        BandwidthPoint(
            names[row.group], row.op, row.message_bytes, row.busbw_bytes_per_s,
            row.count,
        )
        for row in report.collectives if row.message_bytes and row.busbw_bytes_per_s
    ]  # fmt: skip
    if not points:
        return [], []
    kinds = sorted({(one.axis, one.op) for one in points})
    sizes = [one.message_bytes for one in points]
    low, high = min(sizes) // WIDER, max(sizes) * WIDER
    lines = [model_busbw(report, axis, op, low, high) for axis, op in kinds]
    curves = [
        Curve(axis, op, line.message_bytes, line.busbw_bytes_per_s, line.link_bytes_per_s)
        for (axis, op), line in zip(kinds, lines, strict=True) if line is not None
    ]  # fmt: skip
    return points, curves


@dataclass(frozen=True, slots=True)
class PipelineGrid:
    """The microbatches of a step: as measured, and as the schedule would at best. The ideal is None
    if it would not be faster: microbatches of unequal length may fit better than equal ones."""

    measured: Boxes
    measured_ns: int
    ideal: Boxes | None
    ideal_ns: int | None


def list_drawn_steps(report: Report, boxes: Boxes) -> list[int]:
    """The full steps with microbatches; all steps with them if none is full."""
    drawn: set[int] = set(np.unique(boxes.step).tolist())
    full = {row.step for row in report.steps if row.kind == "full"} & drawn
    return sorted(full or drawn)


def choose_grid(report: Report, boxes: Boxes, step: int) -> PipelineGrid:
    """The grid of a step, of a report with a pipeline."""
    pipeline = report.pipeline
    measured = run.select_pipeline(boxes, step)
    ideal = _build_ideal(measured, pipeline) if pipeline is not None else None
    measured_ns = _compute_window_ns(measured)
    ideal_ns = None if ideal is None else _compute_window_ns(ideal)
    is_ideal = ideal_ns is not None and ideal_ns <= measured_ns
    return PipelineGrid(measured, measured_ns, ideal if is_ideal else None, ideal_ns)


def _build_ideal(measured: Boxes, pipeline: Pipeline) -> Boxes | None:
    return build_ideal_grid(measured, pipeline.schedule, pipeline.microbatches)


def _compute_window_ns(boxes: Boxes) -> int:
    return int((boxes.start_ns + boxes.dur_ns).max() - boxes.start_ns.min())


MAX_MEMORY_RANKS = 64


@dataclass(frozen=True, slots=True)
class MemoryBars:
    """Bars of memory, the device's limit if it is known, and how many of the last are predicted."""

    bars: list[MemoryBar]
    limit_bytes: int | None
    n_predicted: int


def collect_memory(report: Report) -> MemoryBars:
    """The measured memory of the first ranks, then the predicted of each stage."""
    predicted: list[MemoryBar] = []
    limit = None
    # A report whose job cannot be read still has its measured memory.
    with suppress(StepsplitError):
        prediction, job = extract_prediction(report), extract_job(report)
        limit = None if job is None else job.hardware.memory_bytes
        predicted = [] if prediction is None else build_predicted_bars(prediction)
    bars = []
    for row in [one for one in report.memory or () if one.peak_allocated_bytes][:MAX_MEMORY_RANKS]:
        parts = _list_memory_parts(row)
        rest = (row.peak_allocated_bytes or 0) - sum(count for _, count in parts)
        bars.append(MemoryBar(f"rank {row.rank}", parts, max(rest, 0), row.rank))
    return MemoryBars([*bars, *predicted], limit, len(predicted))


def build_predicted_bars(prediction: Prediction, label: str = "model") -> list[MemoryBar]:
    """One bar per stage, by category."""
    return [
        MemoryBar(f"{label}, stage {one.stage}", _list_memory_parts(one))
        for one in prediction.memory
    ]


def _list_memory_parts(row: MemoryRow | StageMemory) -> tuple[tuple[str, int], ...]:
    sizes = ((category, getattr(row, f"{category}_bytes")) for category in CATEGORIES)
    return tuple((category, count) for category, count in sizes if count)
