"""The screen of compare for two runs."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.bucket_styles import TERMINAL_STYLE
from stepsplit.analyzer.regression.compare import (
    CallsChange,
    CallStats,
    ExposedChange,
    RunComparison,
    Side,
)
from stepsplit.analyzer.report.axis_names import name_axis
from stepsplit.analyzer.report.part_rows import name_part
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.tables import AXIS_SHORT, build_table

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
        return f"processes {rate} per rank, {_format_more(tokens)} ({length})"
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
        ("tokens/s per rank", "" if tokens is None else f"{tokens:,.0f}"),
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
    note = Text("counts: mean over ranks; transfer and wait: median call", DIM)
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
        Text(f"{name_part(row.part)}: {row.reason}", DIM) for row in rows[:MAX_ROWS] if row.reason
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
    axes = (name_axis(row.axis),) + ((row.candidate_axis,) if row.candidate_axis else ())
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
    return [Text(f"and {left} more {singular if left == 1 else plural}", DIM)] if left > 0 else []
