"""The terminal's tables: the buckets by axis, the stages of a pipeline, the kinds of calls."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.bar import Bar
from rich.console import Group
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.report.report import (
    BucketMedian,
    CollectiveRow,
    Pipeline,
    Report,
    bucket_medians,
    full_steps,
)
from stepsplit.dashboard.reporters.bare_table import AXIS_SHORT, BUCKET_STYLE, bare_table

MOST_COLLECTIVES = 6
_FEW_AXES = 2
_AXES = ("tp", "cp", "ep", "pp", "dp_replicate", "dp_shard", None)


def split_table(report: Report) -> Table:
    """The seven buckets: median, share, by axis, and the worst rank."""
    axes = axes_of(report)
    table = bare_table("", *("median", "share"), *(_axis_name(a) for a in axes), "worst rank", "")
    for row in bucket_medians(report.steps):
        of_axes = [_on_axis(report, row.bucket, axis) for axis in axes]
        worst = _worst(report, row, roomy=len(axes) <= _FEW_AXES)
        table.add_row(
            Text(row.bucket, style=BUCKET_STYLE[row.bucket]),
            units.milliseconds(row.median_ns),
            units.percent(row.share),
            *of_axes,
            worst,
            Bar(1.0, 0.0, row.share, color=BUCKET_STYLE[row.bucket]),
        )
    return table


def _worst(report: Report, row: BucketMedian, roomy: bool) -> str:
    """The rank with most of a bucket; of idle also its cause, where there is room for it."""
    if not row.worst_ns:
        return ""
    causes = [one for one in report.idle if one.rank == row.worst_rank and one.cause != "unknown"]
    why = (
        f" ({causes[0].cause.replace('_', ' ')})"
        if row.bucket == "idle" and causes and roomy
        else ""
    )
    return f"r{row.worst_rank}{why} {units.milliseconds(row.worst_ns)}"


def axes_of(report: Report) -> list[str | None]:
    """The axes on which this run communicates; none where all lie on no single axis."""
    seen = {row.axis for row in report.exposed}
    return [axis for axis in _AXES if axis in seen] if seen - {None} else []


def _axis_name(axis: str | None) -> str:
    return AXIS_SHORT.get(axis, axis) if axis else "other"


def _on_axis(report: Report, bucket: str, axis: str | None) -> str:
    """The mean time a step of the average rank in a communication bucket on one axis."""
    if bucket not in ("collective", "p2p", "skew", "bubble"):
        return ""
    full = {(row.rank, row.step) for row in full_steps(report.steps)}
    parts = (
        int(getattr(row, f"{bucket}_ns"))
        for row in report.exposed
        if row.axis == axis and (row.rank, row.step) in full
    )
    total = sum(parts)
    return units.milliseconds(total / len(full)) if total else ""


def stages_table(pipeline: Pipeline) -> Group:
    """The schedule's bubble beside its ideal, and each stage's."""
    ideal = pipeline.ideal_bubble_fraction
    line = f"pipeline {pipeline.schedule}, {pipeline.microbatches} microbatches: bubble fraction "
    line += units.percent(pipeline.bubble_fraction)
    line += f", ideal {units.percent(ideal)}" if ideal is not None else ""
    table = bare_table("stage", *(str(stage.stage) for stage in pipeline.stages))
    table.add_row("bubble", *(units.milliseconds(stage.bubble_ns) for stage in pipeline.stages))
    table.add_row(
        "of its window", *(units.percent(stage.bubble_fraction) for stage in pipeline.stages)
    )
    return Group(Text(line), table)


def collectives_table(report: Report) -> Table:
    """The kinds of calls that moved data longest."""
    axis = {group.id: group.axis or group.description or "unknown" for group in report.groups}
    table = bare_table("axis", "op", "size", "calls", "transfer", "wait", "busbw")
    rows = _merged(report.collectives, axis)
    for row in rows[:MOST_COLLECTIVES]:
        table.add_row(*row)
    if len(rows) > MOST_COLLECTIVES:
        table.caption = f"and {len(rows) - MOST_COLLECTIVES} kinds more in report.json"
    return table


def _merged(rows: Sequence[CollectiveRow], axis: dict[int, str]) -> list[tuple[str, ...]]:
    """One line for groups of one axis that do the same, by the medians of their medians."""
    same: dict[tuple[str, str, int | None], list[CollectiveRow]] = {}
    for row in rows:
        same.setdefault((axis.get(row.group, "unknown"), row.op, row.message_bytes), []).append(row)
    return [
        (
            on, op, units.size(size) if size is not None else units.UNKNOWN,
            f"{sum(r.count for r in group):,}",
            units.milliseconds(median(r.transfer_ns_median for r in group)),
            units.milliseconds(median(r.wait_ns_median for r in group)),
            _rate([r.busbw_bytes_per_s for r in group if r.busbw_bytes_per_s is not None]),
        )
        for (on, op, size), group in same.items()
    ]  # fmt: skip


def _rate(rates: Sequence[float]) -> str:
    return units.gigabytes_per_second(median(rates)) if rates else units.UNKNOWN
