"""The terminal's answer: what ran, where the step went, who and what held it up."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.report.medians import (
    BucketMedian,
    bucket_medians,
    full_steps,
    step_median_ns,
)
from stepsplit.analyzer.report.report import (
    CollectiveRow,
    Finding,
    Pipeline,
    Report,
    Run,
    WarningRow,
)
from stepsplit.dashboard.reporters import lines

MOST_COLLECTIVES = 6
_FEW_AXES = 2
_STYLE = {
    "compute": "green",
    "collective": "blue",
    "p2p": "cyan",
    "skew": "magenta",
    "bubble": "yellow",
    "copy": "bright_black",
    "idle": "bright_black",
}
_SHORT = {"dp_replicate": "dp repl", "dp_shard": "dp shard"}
_AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard", None)


def screen(report: Report) -> RenderableType:
    """The whole screen for one report, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [_heading(report.run), _used(report)]
    parts += _warnings(report.warnings)
    parts += [Text(), _split(report), _memo(report), *lines.coverage(report)]
    parts += lines.critical_path(report)
    if report.pipeline is not None:
        parts += [Text(), _stages(report.pipeline)]
    if report.collectives:
        parts += [Text(), _collectives(report)]
    if report.findings:
        parts += [Text(), *_causes(report.findings)]
    parts += lines.slow_steps(report)
    return Group(*parts)


def _heading(run: Run) -> Text:
    mesh = " ".join(f"{a.axis} {a.size}" for a in run.mesh) if run.mesh else "mesh unknown"
    hosts = f"{len(run.hosts)} host" + ("s" if len(run.hosts) > 1 else "")
    known = [f"run {run.name}", f"{run.world_size} x {run.device} ({hosts})", mesh]
    known += [run.backend or "", f"torch {run.torch}" if run.torch else ""]
    known += [
        f"NCCL {run.nccl}" if run.nccl else "",
        f"mesh from {run.mesh_source}" if run.mesh_source else "",
    ]
    return Text("   ".join(part for part in known if part), style="bold")


def _used(report: Report) -> Text:
    numbers = {row.step for row in report.steps}
    full = {row.step for row in report.steps if row.kind == "full"}
    left_out = ", ".join(f"#{n}" for n in sorted(numbers - full))
    steps = f"steps {len(full)} of {len(numbers)} used" + (
        f" ({left_out} left out)" if left_out else ""
    )
    ranks = f"{len(report.run.ranks)} of {report.run.world_size} ranks"
    rows = full_steps(report.steps)
    spread = ""
    if rows:
        slowest = max(
            median(r.step_ns for r in rows if r.step == n) for n in {r.step for r in rows}
        )
        spread = f"step {units.milliseconds(step_median_ns(rows))}"
        spread += f" (slowest {units.milliseconds(slowest)})"
    return Text("   ".join(part for part in (steps, ranks, spread, lines.clocks(report)) if part))


def _warnings(rows: Sequence[WarningRow]) -> list[Text]:
    """One line for each, and one for what is said of several ranks."""
    same: dict[str, list[WarningRow]] = {}
    for row in rows:
        same.setdefault(row.code if row.rank is not None else row.message, []).append(row)
    return [_warning(group[0], len(group) - 1) for group in same.values()]


def _warning(row: WarningRow, more: int) -> Text:
    of_rank = "" if row.rank is None else f" (rank {row.rank})"
    like_it = f"; the like on {more} rank{'s' if more > 1 else ''} more" if more else ""
    return Text(f"warning: {row.message}{of_rank}{like_it}", style="yellow")


def _split(report: Report) -> Table:
    axes = _axes(report)
    table = _table("", *("median", "share"), *(_axis_name(a) for a in axes), "worst rank", "")
    for row in bucket_medians(report.steps):
        of_axes = [_on_axis(report, row.bucket, axis) for axis in axes]
        worst = _worst(report, row, roomy=len(axes) <= _FEW_AXES)
        table.add_row(
            Text(row.bucket, style=_STYLE[row.bucket]),
            units.milliseconds(row.median_ns),
            units.percent(row.share),
            *of_axes,
            worst,
            Bar(1.0, 0.0, row.share, color=_STYLE[row.bucket]),
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


def _axes(report: Report) -> list[str | None]:
    """The axes on which this run communicates; none where all lie on no single axis."""
    seen = {row.axis for row in report.exposed}
    return [axis for axis in _AXES if axis in seen] if seen - {None} else []


def _axis_name(axis: str | None) -> str:
    return _SHORT.get(axis, axis) if axis else "other"


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


def _memo(report: Report) -> Text:
    rows = full_steps(report.steps)
    if not rows:
        return Text("no step in the recording")
    overlapped = median(row.overlapped_ns for row in rows)
    covered = median(row.bubble_covered_ns for row in rows)
    estimated = sum(row.estimated for row in rows)
    axes = "medians; by axis, means. " if _axes(report) else "medians. "
    memo = f"{axes}{units.milliseconds(overlapped)} of the compute hides transfers"
    memo += lines.overlap(report)
    if covered:
        memo += f", {units.milliseconds(covered)} of communication lies in holes of the schedule"
    if estimated:
        memo += f"; {estimated} of {len(rows)} splits estimated for want of counterparts"
    return Text(memo, style="bright_black")


def _stages(pipeline: Pipeline) -> Group:
    ideal = pipeline.ideal_bubble_fraction
    line = f"pipeline {pipeline.schedule}, {pipeline.microbatches} microbatches: bubble fraction "
    line += units.percent(pipeline.bubble_fraction)
    line += f", ideal {units.percent(ideal)}" if ideal is not None else ""
    table = _table("stage", *(str(stage.stage) for stage in pipeline.stages))
    table.add_row("bubble", *(units.milliseconds(stage.bubble_ns) for stage in pipeline.stages))
    table.add_row(
        "of its window", *(units.percent(stage.bubble_fraction) for stage in pipeline.stages)
    )
    return Group(Text(line), table)


def _collectives(report: Report) -> Table:
    axis = {group.id: group.axis or group.description or "unknown" for group in report.groups}
    table = _table("axis", "op", "size", "calls", "transfer", "wait", "busbw")
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


def _causes(findings: Sequence[Finding]) -> list[Text]:
    heading = Text("WHY, and what each is worth a step of the average rank", style="bold")
    return [heading] + [
        Text(f"{i} {units.milliseconds(f.gain_ns):>9}  {f.message}")
        for i, f in enumerate(findings, 1)
    ]


def _table(first: str, *others: str) -> Table:
    """A table without lines; a last column without a name takes the room that is left."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, expand="" in others
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        if name in ("", "op"):
            table.add_column(name, no_wrap=True, ratio=None if name else 1)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table
