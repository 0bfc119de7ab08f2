"""The screen of compare for several runs of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.bucket_styles import TERMINAL_STYLE
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.regression.scaling import Scaling, ScalingRun
from stepsplit.dashboard.reporters.console import Text
from stepsplit.dashboard.reporters.tables import AXIS_SHORT, build_table

_WORK = {
    "tokens": "tokens/s of a rank",
    "gpu": "each rank does the same work in a step",
    "step": "all ranks together do the same work in a step",
}

_NO_WORK = (
    "efficiency unknown: the work of a step is not. Analyze each run with --job, or give "
    "--work gpu (weak scaling) or --work step (strong scaling)"
)

_MIN_COST, _MAX_COSTS = 0.005, 3


def build_scaling_screen(scaling: Scaling) -> RenderableType:
    """Builds the screen of several runs of a job: steps, buckets, and the cost of each bucket."""
    first, last = scaling.runs[0], scaling.runs[-1]
    headline = Text(
        f"{len(scaling.runs)} runs, {first.gpus:,} to {last.gpus:,} ranks", style="bold"
    )
    parts: list[RenderableType] = [headline]
    if scaling.work is None or last.efficiency is None:
        parts.append(Text(_NO_WORK, "yellow"))
    else:
        efficiency = units.format_percent(last.efficiency)
        headline.append(
            f": {last.name} has {efficiency} of the efficiency of {scaling.reference} "
            f"({_WORK[scaling.work]})",
            "not bold",
        )
    parts += [Text(), _build_scaling_table(scaling), Text()]
    # The share of each bucket in the mean step; buckets of no run are omitted.
    shown = [i for i in range(len(BUCKETS)) if any(run.step.buckets_ns[i] for run in scaling.runs)]
    table = build_table("of the mean step")
    for i in shown:
        header = Text(BUCKETS[i], style=TERMINAL_STYLE[BUCKETS[i]])
        table.add_column(header, justify="right", no_wrap=True)
    for run in scaling.runs:
        shares = (run.step.buckets_ns[i] / run.step.step_ns for i in shown)
        table.add_row(run.name, *(units.format_percent(share) for share in shares))
    parts.append(table)
    # The rank time that each run takes more for the same work, and its largest buckets.
    costs = []
    for run in (run for run in scaling.runs[1:] if run.costs):
        total = sum(cost.share for cost in run.costs)
        more = units.format_signed_percent(total)
        text = Text(f"{run.name}: {more} rank time over {scaling.reference}")
        same_sign = (cost for cost in run.costs if cost.share * total > 0)
        largest = sorted(same_sign, key=lambda cost: -abs(cost.share))[:_MAX_COSTS]
        for i, cost in enumerate(one for one in largest if abs(one.share) >= _MIN_COST):
            text.append(", " if i else ": ").append(cost.bucket, TERMINAL_STYLE[cost.bucket])
            text.append(f" {units.format_signed_percent(cost.share)}")
        costs.append(text)
    return Group(*parts, *([Text(), *costs] if costs else ()))


def _build_scaling_table(scaling: Scaling) -> Table:
    """A row for each run; columns that are unknown for all are omitted."""
    columns = {
        "run": [run.name for run in scaling.runs],
        "ranks": [f"{run.gpus:,}" for run in scaling.runs],
        "layout": [_format_mesh(run) for run in scaling.runs],
        "median step": [units.format_milliseconds(run.median_ns) for run in scaling.runs],
        "predicted": [
            _format_known(run.predicted_ns, units.format_milliseconds) for run in scaling.runs
        ],
        "tokens/s per rank": [
            _format_known(run.tokens_per_s_per_gpu, "{:,.0f}".format) for run in scaling.runs
        ],
        "efficiency": [_format_known(run.efficiency, units.format_percent) for run in scaling.runs],
        "peak memory": [
            _format_known(run.peak_allocated_bytes, units.format_gibibytes) for run in scaling.runs
        ],
    }
    # A column that no run has takes room from those that it has.
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = build_table("run")
    for name in [name for name in shown if name != "run"]:
        table.add_column(
            name, justify="left" if name == "layout" else "right", overflow="fold",
        )  # fmt: skip
    for row in zip(*shown.values(), strict=True):
        table.add_row(*(cell or units.UNKNOWN for cell in row))
    return table


ValueT = TypeVar("ValueT", int, float)


def _format_known(value: ValueT | None, form: Callable[[ValueT], str]) -> str:
    return "" if value is None else form(value)


def _format_mesh(run: ScalingRun) -> str:
    # Axes of one rank are no part of the layout that anyone compares.
    axes = [axis for axis in run.mesh or () if axis.size > 1]
    return " ".join(f"{AXIS_SHORT.get(axis.axis, axis.axis)} {axis.size}" for axis in axes)
