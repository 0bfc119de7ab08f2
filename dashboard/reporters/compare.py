"""Terminal screens of compare, of two runs or of several, and of what-if."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.bucket_styles import TERMINAL_STYLE
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.other_hardware import CarriedRun
from stepsplit.analyzer.diagnose.what_if import WhatIfChange, WhatIfs
from stepsplit.analyzer.regression.compare import (
    OTHER,
    CallsChange,
    CallStats,
    ExposedChange,
    RunComparison,
    Side,
)
from stepsplit.analyzer.regression.scaling import Scaling, ScalingRun
from stepsplit.analyzer.report.part_rows import name_part
from stepsplit.dashboard.reporters.console import Text
from stepsplit.dashboard.reporters.tables import AXIS_SHORT, build_table

# The screen of compare.

MIN_SHARE = 0.005
"""Share of the baseline's step; the headline omits buckets that changed less."""

_MAX_NAMED = 3

_NOTES = (
    (
        "mesh",
        "different layout: each rank does other work, which changes its buckets",
    ),
    ("microbatches", "different microbatch count: a step may do more or less work"),
)

_NO_NOISE = " (noise unknown: a single step)"


def build_comparison_screen(comparison: RunComparison) -> RenderableType:
    """Builds the screen of a comparison for a rich console of any width."""
    sides = _build_sides_table("")
    both = (_describe_side(comparison.baseline), _describe_side(comparison.candidate))
    for (name, of_one), (_, of_other) in zip(*both, strict=True):
        if of_one or of_other:
            sides.add_row(name, of_one or units.UNKNOWN, of_other or units.UNKNOWN)
    parts: list[RenderableType] = [format_headline(comparison), Text(), sides]
    if comparison.same:
        return Group(*parts)
    if comparison.settings:
        table = _build_sides_table("configuration differences")
        for row in comparison.settings:
            values = (units.UNKNOWN if v is None else v for v in (row.baseline, row.candidate))
            table.add_row(row.name, *values, style="yellow")
        # Caveats only for settings that are known on both sides.
        known = {
            one.name for one in comparison.settings if None not in (one.baseline, one.candidate)
        }
        notes = (Text(note, style="yellow") for name, note in _NOTES if name in known)
        parts += [Text(), table, *notes]
    if comparison.meshes_differ:
        note = "the meshes differ: each run has its own axes, calls are compared by op"
        parts.append(Text(note, style="yellow"))
    parts += [
        *build_findings_section(comparison),
        Text(),
        build_bucket_table(comparison),
        *build_exposed_section(comparison),
        *build_calls_section(comparison),
        *build_parts_section(comparison),
        *build_kernels_section(comparison),
    ]
    return Group(*parts)


def format_headline(comparison: RunComparison) -> Text:
    """The change of the median step, and the buckets that changed most."""
    if comparison.same:
        return Text("no differences: same settings, steps, buckets, calls and kernels", "bold")
    least_ns = MIN_SHARE * comparison.baseline.mean.step_ns
    changed = [row for row in comparison.buckets if row.changed_ns > least_ns][:_MAX_NAMED]
    named = ", ".join(
        f"{row.bucket} {units.format_signed_milliseconds(row.difference_ns)}" for row in changed
    )
    noise = ""
    if comparison.token_ratio is None and comparison.microbatch_ratio is None:
        # The noise is that of steps that do the same work.
        noise = ", within noise" if comparison.within_noise else ""
        noise = _NO_NOISE if comparison.within_noise is None else noise
    text = Text(f"candidate {_describe_difference(comparison)}", style="bold").append(
        noise, "yellow"
    )
    # The buckets are those of the mean step: it is named if it did not change as the median did.
    mean_ns, changed_ns = comparison.baseline.mean.step_ns, comparison.candidate.mean.step_ns
    more_ns = changed_ns - mean_ns
    if abs(more_ns - comparison.difference_ns) > _APART_SHARE * mean_ns:
        share = f" ({units.format_percent(abs(changed_ns / mean_ns - 1))})" if mean_ns else ""
        more = units.format_milliseconds(abs(more_ns))
        text.append(f"; its mean step is {more}{share} {'longer' if more_ns > 0 else 'shorter'}")
    return text.append(f": {named or 'no large change in any bucket'}", "not bold")


_APART_SHARE = 0.05
"""The mean step is named if its change differs from the median's by this share of the step."""


def _describe_difference(comparison: RunComparison) -> str:
    """How much faster the candidate is, for the same work where the work of a step differs."""
    ns, candidate = comparison.difference_ns, comparison.candidate
    length = f"its step is {units.format_milliseconds(abs(ns))} {'longer' if ns > 0 else 'shorter'}"
    if (tokens := comparison.token_ratio) is not None and candidate.tokens_per_s is not None:
        rate = units.format_tokens_per_second(candidate.tokens_per_s)
        return f"processes {rate} per GPU, {_format_more(tokens)} ({length})"
    per_microbatch, of_one = comparison.microbatch_ratio, candidate.microbatch_ns
    if per_microbatch is not None and of_one is not None:
        time = units.format_milliseconds(of_one)
        return f"takes {time} per microbatch, {_format_more(per_microbatch)} ({length})"
    if not ns:
        return "is equally fast"
    ratio = comparison.ratio
    share = "" if ratio is None else f" ({units.format_percent(abs(ratio - 1))})"
    return f"is {units.format_milliseconds(abs(ns))}{share} {'slower' if ns > 0 else 'faster'}"


def _format_more(ratio: float) -> str:
    return f"{units.format_percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"


def _describe_side(side: Side) -> tuple[tuple[str, str], ...]:
    """(name, value) rows about a run; "" is unknown."""
    fraction, peak, mfu = side.bubble_fraction, side.peak_allocated_bytes, side.mfu
    per_one, tokens = side.microbatch_ns, side.tokens_per_s
    return (
        ("run", side.name),
        ("median step", units.format_milliseconds(side.median_ns)),
        ("fastest, slowest", units.format_milliseconds_range(side.low_ns, side.high_ns)),
        ("per microbatch", "" if per_one is None else units.format_milliseconds(per_one)),
        ("tokens/s per GPU", "" if tokens is None else f"{tokens:,.0f}"),
        ("full steps", f"{side.steps:,}"),
        ("bubble fraction", "" if fraction is None else units.format_percent(fraction)),
        ("peak memory", "" if peak is None else units.format_gibibytes(peak)),
        ("MFU", "" if mfu is None else units.format_percent(mfu)),
    )


def _build_sides_table(first: str) -> Table:
    """A table with a text column per side; long text wraps."""
    table = build_table(first)
    for side in ("baseline", "candidate"):
        table.add_column(side, overflow="fold")
    return table


# The tables of compare: buckets, axes, and the calls and kernels that changed most.

MAX_ROWS = 4
"""Maximum number of rows of a table; the rest is counted."""

_DIM = "bright_black"

_MEAN = "mean step of a rank"


def build_bucket_table(comparison: RunComparison) -> Table:
    """The seven buckets; their differences add up to the difference of the mean step."""
    table = build_table(_MEAN, "baseline", "candidate", "difference", "of step")
    whole_ns = comparison.baseline.mean.step_ns
    for row in comparison.buckets:
        numbers = _format_times(row.baseline_ns, row.candidate_ns)
        table.add_row(
            Text(row.bucket, style=TERMINAL_STYLE[row.bucket]), *numbers,
            _format_share(row.difference_ns, whole_ns),
        )  # fmt: skip
    after_ns = comparison.candidate.mean.step_ns
    share = _format_share(after_ns - whole_ns, whole_ns)
    table.add_row("step", *_format_times(whole_ns, after_ns), share, style="bold")
    return table


def build_findings_section(comparison: RunComparison) -> list[RenderableType]:
    """The bottlenecks whose saving changed; empty if the steps differ by no more than noise."""
    rows = comparison.changed_findings
    if not rows:
        return []
    table = build_table("saving", "baseline", "candidate")
    table.add_column("bottlenecks (estimated saving per step)", overflow="fold")
    for row in rows[:MAX_ROWS]:
        sides = (row.baseline_ns, row.candidate_ns)
        table.add_row(
            units.format_signed_milliseconds(row.difference_ns),
            *(units.format_milliseconds(ns) if ns else "" for ns in sides),
            row.message if row.candidate_ns else f"no longer: {row.message}",
        )
    return [Text(), table, *_format_rest(len(rows), "bottleneck", "bottlenecks")]


def build_exposed_section(comparison: RunComparison) -> list[RenderableType]:
    """The communication buckets by axis; empty if there is only one axis."""
    # With one axis the table of buckets says the same.
    if not comparison.meshes_differ and len({row.axis for row in comparison.exposed}) < 2:
        return []
    table = build_table("by axis", "baseline", "candidate", "difference")
    for row in comparison.exposed[:MAX_ROWS]:
        name = Text(f"{format_axes(row)} ").append(row.bucket, TERMINAL_STYLE[row.bucket])
        table.add_row(name, *_format_times(row.baseline_ns, row.candidate_ns))
    return [
        Text(),
        table,
        *_format_rest(len(comparison.exposed), "axis and bucket", "axes and buckets"),
    ]


def build_calls_section(comparison: RunComparison) -> list[RenderableType]:
    """The kinds of calls that changed most, one line per side."""
    # A kind of call that did not change is not shown, unlike a bucket, whose rows add up.
    rows = [row for row in comparison.collectives if row.baseline != row.candidate]
    if not rows:
        return []
    table = build_table("calls per rank", "run", "per step", "transfer", "wait", "busbw")
    for row in rows[:MAX_ROWS]:
        table.add_row(f"{format_axes(row)} {row.op}", "baseline", *_format_calls(row.baseline))
        size = "size unknown"
        if row.message_bytes is not None:
            size = units.format_size(row.message_bytes)
        table.add_row(
            f"  {size} {row.dtype or ''}".rstrip(), "candidate", *_format_calls(row.candidate)
        )
    note = Text("counts: mean over ranks; transfer and wait: median call", _DIM)
    return [Text(), table, *_format_rest(len(rows), "kind of call", "kinds of calls"), note]


def build_kernels_section(comparison: RunComparison) -> list[RenderableType]:
    """The kernel families whose time changed most."""
    rows = [row for row in comparison.kernels if row.baseline_ns != row.candidate_ns]
    if not rows:
        return []
    table = build_table("kernels per rank", "baseline", "candidate", "difference", "per step")
    for row in rows[:MAX_ROWS]:
        number = f"{_format_count(row.baseline_count)} -> {_format_count(row.candidate_count)}"
        table.add_row(row.family, *_format_times(row.baseline_ns, row.candidate_ns), number)
    return [Text(), table, *_format_rest(len(rows), "family", "families")]


def build_parts_section(comparison: RunComparison) -> list[RenderableType]:
    """The parts of the model whose time changed most."""
    rows = [row for row in comparison.parts if row.baseline_ns != row.candidate_ns]
    if not rows:
        return []
    table = build_table("parts of the model", "baseline", "candidate", "difference")
    for row in rows[:MAX_ROWS]:
        table.add_row(name_part(row.part), *_format_times(row.baseline_ns, row.candidate_ns))
    reasons = [
        Text(f"{name_part(row.part)}: {row.reason}", _DIM) for row in rows[:MAX_ROWS] if row.reason
    ]
    return [Text(), table, *reasons, *_format_rest(len(rows), "part", "parts")]


def _format_times(baseline_ns: int, candidate_ns: int) -> tuple[str, str, str]:
    change_ns = candidate_ns - baseline_ns
    return (
        units.format_milliseconds(baseline_ns),
        units.format_milliseconds(candidate_ns),
        units.format_signed_milliseconds(change_ns) if change_ns else "",
    )


def _format_share(part_ns: int, whole_ns: int) -> str:
    return units.format_signed_percent(part_ns / whole_ns) if part_ns and whole_ns else ""


def format_axes(row: ExposedChange | CallsChange) -> str:
    """The axis of a row; if the meshes differ, those of the baseline and of the candidate."""
    axes = (row.axis or OTHER,) + ((row.candidate_axis,) if row.candidate_axis else ())
    short = (" + ".join(AXIS_SHORT.get(one, one) for one in side.split(" + ")) for side in axes)
    return " -> ".join(short)


def _format_calls(calls: CallStats | None) -> tuple[str, ...]:
    if calls is None:
        return ("none",)
    rate = calls.busbw_bytes_per_s
    return (
        _format_count(calls.count),
        units.format_milliseconds(calls.transfer_ns),
        units.format_milliseconds(calls.wait_ns),
        units.UNKNOWN if rate is None else units.format_gigabytes_per_second(rate),
    )


def _format_count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def _format_rest(rows: int, singular: str, plural: str) -> list[Text]:
    left = rows - MAX_ROWS
    return [Text(f"and {left} more {singular if left == 1 else plural}", _DIM)] if left > 0 else []


# The screen of compare for several runs.

_WORK = {
    "tokens": "tokens/s of a GPU",
    "gpu": "each GPU does the same work in a step",
    "step": "all GPUs together do the same work in a step",
}

_NO_WORK = (
    "efficiency unknown: the work of a step is not. Analyze each run with --job, or give "
    "--work gpu (weak scaling) or --work step (strong scaling)"
)

_MIN_COST, _MAX_COSTS = 0.005, 3


def build_scaling_screen(scaling: Scaling) -> RenderableType:
    """Builds the screen of several runs of a job: steps, buckets, and the cost of each bucket."""
    first, last = scaling.runs[0], scaling.runs[-1]
    headline = Text(f"{len(scaling.runs)} runs, {first.gpus:,} to {last.gpus:,} GPUs", style="bold")
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
    # The GPU time that each run takes more for the same work, and its largest buckets.
    costs = []
    for run in (run for run in scaling.runs[1:] if run.costs):
        total = sum(cost.share for cost in run.costs)
        more = units.format_signed_percent(total)
        text = Text(f"{run.name}: {more} GPU time over {scaling.reference}")
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
        "GPUs": [f"{run.gpus:,}" for run in scaling.runs],
        "layout": [_format_mesh(run) for run in scaling.runs],
        "median step": [units.format_milliseconds(run.median_ns) for run in scaling.runs],
        "predicted": [
            _format_known(run.predicted_ns, units.format_milliseconds) for run in scaling.runs
        ],
        "tokens/s per GPU": [
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


# The screen of what-if.

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
