"""The terminal's answer to: what should this step have cost, and why did it not?"""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import ComparedCalls, Gap
from stepsplit.dashboard.reporters.bare_table import BUCKET_STYLE, bare_table

_LEAST = 0.005
"""Parts of the gap below this share of the step are summed up."""


def gap_section(gap: Gap) -> list[RenderableType]:
    """The heading, the buckets of the stage that the model takes for the slowest side by side, the
    parts of the gap, calls and memory."""
    parts: list[RenderableType] = [_heading(gap), _buckets(gap), *_explained(gap)]
    parts += [*_speeds(gap), *_calls(gap), *_memory(gap)]
    return parts + [Text(f"doubt: {note}", style="yellow") for note in gap.notes]


def _heading(gap: Gap) -> Text:
    shown = gap.shown
    measured, predicted = shown.measured.step_ns, shown.predicted.step_ns
    band = units.milliseconds_between(gap.low_ns, gap.high_ns)
    stage = f", stage {gap.stage}" if len(gap.stages) > 1 or gap.stage else ""
    return Text(
        f"AGAINST THE MODEL{stage}   measured {units.milliseconds(measured)}, "
        f"{units.signed_percent(measured / predicted - 1)} of {units.milliseconds(predicted)} "
        f"predicted ({band})   confidence {gap.confidence}",
        style="bold",
    )


def _buckets(gap: Gap) -> Table:
    """The buckets that either side has."""
    table = bare_table("", "predicted", "measured", "difference")
    shown = gap.shown
    for bucket, expected, took in zip(
        BUCKETS, shown.predicted.buckets_ns, shown.measured.buckets_ns, strict=True
    ):
        if expected or took:
            name = Text(bucket, style=BUCKET_STYLE[bucket])
            sides = units.milliseconds(expected), units.milliseconds(took)
            table.add_row(name, *sides, units.signed_milliseconds(took - expected))
    return table


def _explained(gap: Gap) -> list[RenderableType]:
    """The parts of the gap, largest first; the small ones in one line."""
    least = _LEAST * gap.shown.measured.step_ns
    large = sorted((row for row in gap.rows if abs(row.ns) >= least), key=lambda row: -abs(row.ns))
    small = sum(row.ns for row in gap.rows if abs(row.ns) < least)
    parts = [(row.ns, row.message) for row in large]
    if small:
        parts.append((small, "smaller parts together"))
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    for ns, message in parts:
        table.add_row(units.signed_milliseconds(ns), message)
    return [Text("the difference is", style="bold"), table] if parts else []


def _calls(gap: Gap) -> list[Text]:
    odd = [one for one in gap.calls if not one.equal]
    if odd:
        return [Text("calls that differ: " + "; ".join(map(_call, odd)))]
    return [Text("calls: as many and as large as predicted, to the byte")] if gap.calls else []


def _call(one: ComparedCalls) -> str:
    size = "" if one.bytes is None or one.predicted_bytes is None else (
        f" ({units.size(one.bytes)} of {units.size(one.predicted_bytes)})"
    )  # fmt: skip
    where = f"stage {one.stage} {one.op} on {one.axis}"
    return f"{where} {one.count} of {one.predicted_count} predicted{size}"


def _speeds(gap: Gap) -> list[RenderableType]:
    """How fast the shown stage's calls moved data, beside the model and the link's peak."""
    rows = [one for one in gap.calls if one.stage == gap.stage and one.busbw_bytes_per_s]
    if not rows:
        return []
    table = bare_table("axis", "op", "a step", "predicted", "busbw", "predicted", "of the link")
    for one in rows:
        table.add_row(
            one.axis, one.op, units.milliseconds(one.time_ns),
            units.milliseconds(one.predicted_time_ns), _rate(one.busbw_bytes_per_s),
            _rate(one.predicted_busbw_bytes_per_s), _share(one),
        )  # fmt: skip
    return [table]


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else units.gigabytes_per_second(bytes_per_s)


def _share(one: ComparedCalls) -> str:
    if one.busbw_bytes_per_s is None or not one.link_bytes_per_s:
        return ""
    return units.percent(one.busbw_bytes_per_s / one.link_bytes_per_s)


def _memory(gap: Gap) -> list[Text]:
    """A line for the peak, and one for each category that some rank measured."""
    categories = dict.fromkeys(one.category for one in gap.memory)
    return [Text(_held(gap, category)) for category in categories]


def _held(gap: Gap, category: str) -> str:
    size = units.gibibytes if category == "peak" else units.size
    parts = [
        f"stage {one.stage} {size(one.measured_bytes)} of {size(one.predicted_bytes)} predicted"
        for one in gap.memory
        if one.category == category
    ]
    return f"{'peak memory' if category == 'peak' else category}: {', '.join(parts)}"
