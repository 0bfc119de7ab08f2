"""The screen of what-if: the measured step, its estimates, and the run on other hardware."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.other_hardware import CarriedRun
from stepsplit.analyzer.diagnose.what_if import WhatIfChange, WhatIfs
from stepsplit.dashboard.reporters.console import Text
from stepsplit.dashboard.reporters.tables import build_table

_DESCRIPTIONS = {
    "even": "equal compute on all ranks, no slow calls",
    "even-ranks": "equal compute on all ranks of a stage",
    "even-stages": "equal compute on all ranks and stages",
    "no-slow-ranks": "no rank is slower than its peers in the same kernels",
    "no-idle": "no GPU idle time",
    "overlap": "gradient reduction overlaps the backward pass",
}


def build_what_if_screen(result: WhatIfs) -> RenderableType:
    """Builds the screen of what-if: the measured step, and its estimate with each change."""
    parts: list[RenderableType] = []
    if result.carried is not None:
        parts += _build_carried(result.carried, result.step_ns)
    if result.changes or not parts:
        mean = units.format_milliseconds(result.step_ns)
        table = build_table("change", "step", "difference")
        table.add_column("", overflow="fold")
        for row in result.changes:
            # A gain is positive where the step gets shorter.
            gain = -row.gain_ns / result.step_ns if result.step_ns else 0.0
            table.add_row(
                str(row.change),
                units.format_milliseconds(row.step_ns),
                units.format_signed_percent(gain),
                _describe_change(row.change),
            )
        heading = Text(f"mean step {mean}; estimates with one change each:", style="bold")
        parts += [heading, table]
    slowdown = f"slowdown by stragglers and load imbalance: {result.slowdown:.3f}x"
    return Group(*parts, Text(slowdown))


def _build_carried(run: CarriedRun, recorded_ns: int) -> Iterator[RenderableType]:
    """The step on other hardware: its band, its parts, and what changes by how much."""
    format_ms = units.format_milliseconds
    difference = units.format_signed_percent(run.step_ns / recorded_ns - 1 if recorded_ns else 0.0)
    yield Text(f"carried from {run.source} to {run.target}", style="bold")
    yield Text(
        f"mean step {format_ms(recorded_ns)} -> {format_ms(run.step_ns)} ({difference}; band "
        f"{format_ms(run.low_ns)} to {format_ms(run.high_ns)})"
    )
    yield Text(
        f"compute {format_ms(run.compute_ns)}, exposed communication and waits "
        f"{format_ms(run.communication_ns)}, copies {format_ms(run.copy_ns)}, idle "
        f"{format_ms(run.idle_ns)}; the host alone needs {format_ms(run.host_ns)}"
    )
    table = build_table("per step and rank", "count", "recorded", "there", "by shape")
    for kernels in run.kernels:
        table.add_row(
            f"{kernels.kind} kernels", f"{kernels.count:,}", format_ms(kernels.recorded_ns),
            format_ms(kernels.carried_ns), units.format_percent(kernels.by_shape),
        )  # fmt: skip
    for calls in run.calls:
        table.add_row(
            f"transfers, {calls.axis or 'axis unknown'}", f"{calls.count:,}",
            format_ms(calls.recorded_ns), format_ms(calls.carried_ns), "",
        )  # fmt: skip
    yield table
    yield from (Text(f"limit: {text}") for text in run.limits)


def _describe_change(change: WhatIfChange) -> str:
    match change.kind:
        case "link":
            links = "all links" if change.axis == "all" else f"{change.axis} links"
            return f"{links} are {change.times:g}x as fast"
        case "microbatches":
            return f"{change.count} microbatches of the same size, scaled to the same work"
        case "schedule":
            return f"pipeline schedule {change.name}"
        case "replicas":
            return f"{change.count}x the data-parallel ranks, on equally fast links"
        case "buckets":
            buckets = "bucket" if change.count == 1 else "buckets"
            return f"gradients of a step reduced in {change.count} {buckets} per group"
    return _DESCRIPTIONS[change.kind]
