"""The terminal's answer: what ran, where the step went, who and what held it up."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.report.report import (
    Finding,
    Report,
    Run,
    WarningRow,
    full_steps,
    step_median_ns,
)
from stepsplit.dashboard.reporters import lines
from stepsplit.dashboard.reporters.gap import gap_section
from stepsplit.dashboard.reporters.terminal_tables import (
    axes_of,
    collectives_table,
    split_table,
    stages_table,
)


def screen(report: Report) -> RenderableType:
    """The whole screen for one report, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [_heading(report.run), *_strategies(report.run), _used(report)]
    parts += _memory(report)
    parts += _warnings(report.warnings)
    parts += [Text(), split_table(report), _memo(report), *lines.coverage(report)]
    parts += lines.critical_path(report)
    if report.pipeline is not None:
        parts += [Text(), stages_table(report.pipeline)]
    if report.collectives:
        parts += [Text(), collectives_table(report)]
    if report.gap is not None:
        parts += [Text(), *gap_section(report.gap)]
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


def _strategies(run: Run) -> list[Text]:
    """One line of what the steps show of how the job was parallel; none where they show nothing."""
    known = ", ".join(one.in_words for one in run.strategies)
    return [Text(f"seen in the steps: {known}", style="bold")] if known else []


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
    parts = (steps, ranks, spread, lines.clocks(report), lines.profiling(report.run))
    return Text("   ".join(part for part in parts if part))


def _memory(report: Report) -> list[Text]:
    """One line of the rank that holds most; none where no rank measured."""
    told = lines.memory(report.memory or ())
    return [Text(told)] if told else []


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


def _memo(report: Report) -> Text:
    rows = full_steps(report.steps)
    if not rows:
        return Text("no step in the recording")
    overlapped = median(row.overlapped_ns for row in rows)
    covered = median(row.bubble_covered_ns for row in rows)
    estimated = sum(row.estimated for row in rows)
    axes = "medians; by axis, means. " if axes_of(report) else "medians. "
    memo = f"{axes}{units.milliseconds(overlapped)} of the compute hides transfers"
    memo += lines.overlap(report)
    if covered:
        memo += f", {units.milliseconds(covered)} of communication lies in holes of the schedule"
    if estimated:
        memo += f"; {estimated} of {len(rows)} splits estimated for want of counterparts"
    return Text(memo, style="bright_black")


def _causes(findings: Sequence[Finding]) -> list[Text]:
    words = "WHY, and by how much a step would be shorter without it"
    more = "" if len(findings) < 2 else " (each alone: they do not add up)"
    return [Text(words + more, style="bold")] + [
        Text(f"{i} {units.milliseconds(f.gain_ns):>9}  {f.message}")
        for i, f in enumerate(findings, 1)
    ]
