"""The comparison with the model on the terminal: what a step should take, and why it differs."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.bucket_styles import TERMINAL_STYLE
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.part_rows import name_part
from stepsplit.analyzer.report.report import ComparedCalls, Gap
from stepsplit.dashboard.reporters.console import Text
from stepsplit.dashboard.reporters.tables import build_table

_MIN_SHARE = 0.005
"""Parts of the difference below this share of the step are summed up."""


def build_gap_section(gap: Gap) -> list[RenderableType]:
    """The heading, the parts of the difference, speeds, calls, memory and caveats; with several
    stages also the buckets of the stage that the parts belong to."""
    shown = gap.shown
    measured, predicted = shown.measured.step_ns, shown.predicted.step_ns
    band = units.format_milliseconds_range(gap.low_ns, gap.high_ns)
    stage = f", stage {gap.stage}" if len(gap.stages) > 1 or gap.stage else ""
    bound = ""
    if gap.bound_ns is not None:
        bound = f"bound {units.format_milliseconds(gap.bound_ns)} ({gap.bound_resource}), "
    heading = (
        f"MODEL COMPARISON{stage}   median step, step {shown.step} of rank {shown.rank}: "
        f"measured {units.format_milliseconds(measured)}, "
        f"predicted {units.format_milliseconds(predicted)} ({band}), {bound}"
        f"difference {units.format_signed_percent(measured / predicted - 1)}   "
        f"confidence {gap.confidence}"
    )
    parts: list[RenderableType] = [Text(heading, style="bold")]
    if len(gap.stages) > 1:
        table = build_table("", "measured", "model", "diff")
        buckets = zip(BUCKETS, shown.predicted.buckets_ns, shown.measured.buckets_ns, strict=True)
        for bucket, expected, took in buckets:
            if expected or took:
                table.add_row(
                    Text(bucket, style=TERMINAL_STYLE[bucket]),
                    units.format_milliseconds(took),
                    units.format_milliseconds(expected),
                    units.format_signed_milliseconds(took - expected),
                )
        parts.append(table)
    # The parts of the difference, largest first; the small ones in one line, so that they add up.
    least = _MIN_SHARE * measured
    large = sorted((row for row in gap.rows if abs(row.ns) >= least), key=lambda row: -abs(row.ns))
    differences = [(row.ns, row.message) for row in large]
    if small := sum(row.ns for row in gap.rows if abs(row.ns) < least):
        differences.append((small, "smaller differences together"))
    if differences:
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", no_wrap=True)
        for ns, message in differences:
            table.add_row(units.format_signed_milliseconds(ns), message)
        parts += [Text("difference by cause", style="bold"), table]
    if gap.parts:
        # Which parts of the compute a calibration is to fit; means of the ranks.
        table = build_table("compute of a rank", "measured", "model", "diff")
        for part in gap.parts:
            table.add_row(
                name_part(part.part), units.format_milliseconds(part.measured_ns),
                units.format_milliseconds(part.predicted_ns),
                units.format_signed_milliseconds(part.measured_ns - part.predicted_ns),
            )  # fmt: skip
        parts.append(table)
    parts += _compare_speeds(gap)
    # Calls that differ are the first thing to look for: their times then differ for that reason
    # alone.
    if differing := [calls for calls in gap.calls if not calls.equal]:
        parts.append(Text("calls that differ: " + "; ".join(map(_compare_call, differing))))
    elif gap.calls:
        parts.append(Text("calls: counts and bytes as predicted"))
    for category in dict.fromkeys(row.category for row in gap.memory):
        # The peak is compared with the GiB of the device, the others with sizes of messages.
        peak = category == "peak"
        size = units.format_gibibytes if peak else units.format_size
        own = [
            f"stage {row.stage} {size(row.measured_bytes)} (model {size(row.predicted_bytes)})"
            for row in gap.memory
            if row.category == category
        ]
        parts.append(Text(f"{'peak memory' if peak else category}: {', '.join(own)}"))
    return parts + [Text(f"caveat: {note}", style="yellow") for note in gap.notes]


def _compare_call(calls: ComparedCalls) -> str:
    size = "" if calls.bytes is None or calls.predicted_bytes is None else (
        f" ({units.format_size(calls.bytes)}, predicted {units.format_size(calls.predicted_bytes)})"
    )  # fmt: skip
    where = f"stage {calls.stage} {calls.op} on {calls.axis}"
    return f"{where} {calls.count}, predicted {calls.predicted_count}{size}"


def _compare_speeds(gap: Gap) -> list[RenderableType]:
    """Transfer time and bandwidth of the stage's calls: measured, model, share of the link."""
    rows = [calls for calls in gap.calls if calls.stage == gap.stage and calls.busbw_bytes_per_s]
    if not rows:
        return []
    table = build_table("axis", "op", "per step", "model", "busbw", "model", "of link peak")
    for calls in rows:
        busbw, peak = calls.busbw_bytes_per_s, calls.link_bytes_per_s
        # Only with both: the peak of a link is not known for all hardware. On a CPU, messages
        # through shared memory are faster than the link of the job, of which they are no share.
        of_peak = ""
        if busbw is not None and peak:
            of_peak = units.format_percent(busbw / peak) if busbw <= peak else "above it"
        table.add_row(
            calls.axis, calls.op, units.format_milliseconds(calls.time_ns),
            units.format_milliseconds(calls.predicted_time_ns),
            _format_bandwidth(busbw),
            _format_bandwidth(calls.predicted_busbw_bytes_per_s), of_peak,
        )  # fmt: skip
    return [table]


def _format_bandwidth(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else units.format_gigabytes_per_second(bytes_per_s)
