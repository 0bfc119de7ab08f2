"""The terminal's tables of two runs: buckets, axes, calls and kernels that changed most."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.regression.compare import Calls, CallsChange, RunComparison
from stepsplit.dashboard.reporters.bare_table import AXIS_SHORT, BUCKET_STYLE, bare_table

MOST = 4
"""Rows of a table that are shown; the rest is counted."""
_DIM = "bright_black"
_MEAN = "mean of a rank's step"


def bucket_table(found: RunComparison) -> Table:
    """The seven buckets, whose differences add up to that of the mean step."""
    table = bare_table(_MEAN, "baseline", "candidate", "difference", "of the step")
    whole_ns = found.baseline.mean.step_ns
    for row in found.buckets:
        numbers = _numbers(row.baseline_ns, row.candidate_ns)
        table.add_row(
            Text(row.bucket, style=BUCKET_STYLE[row.bucket]), *numbers,
            _share(row.difference_ns, whole_ns),
        )  # fmt: skip
    after_ns = found.candidate.mean.step_ns
    share = _share(after_ns - whole_ns, whole_ns)
    table.add_row("the step", *_numbers(whole_ns, after_ns), share, style="bold")
    return table


def exposed_section(found: RunComparison) -> list[RenderableType]:
    """The buckets of communication by axis; nothing where a single axis has all of them."""
    if len({row.axis for row in found.exposed}) < 2:
        return []
    table = bare_table("of which on", "baseline", "candidate", "difference")
    for row in found.exposed[:MOST]:
        name = Text(f"{_axis(row.axis or 'other')} ").append(row.bucket, BUCKET_STYLE[row.bucket])
        table.add_row(name, *_numbers(row.baseline_ns, row.candidate_ns))
    return [Text(), table, *_more(len(found.exposed), "axis and bucket", "axes and buckets")]


def calls_section(found: RunComparison) -> list[RenderableType]:
    """The kinds of calls that changed most, a line a side."""
    rows = [row for row in found.collectives if row.baseline != row.candidate]
    if not rows:
        return []
    table = bare_table("calls of a rank", "run", "a step", "transfer", "wait", "busbw")
    for row in rows[:MOST]:
        table.add_row(f"{_axis(row.axis)} {row.op}", "baseline", *_cells(row.baseline))
        table.add_row(_size(row), "candidate", *_cells(row.candidate))
    note = Text("counts are means over ranks; transfer and wait are those of the median call", _DIM)
    return [Text(), table, *_more(len(rows), "kind of call", "kinds of calls"), note]


def kernels_section(found: RunComparison) -> list[RenderableType]:
    """The families of kernels whose time changed most."""
    rows = [row for row in found.kernels if row.baseline_ns != row.candidate_ns]
    if not rows:
        return []
    table = bare_table("kernels of a rank", "baseline", "candidate", "difference", "a step")
    for row in rows[:MOST]:
        number = f"{_count(row.baseline_count)} -> {_count(row.candidate_count)}"
        table.add_row(row.family, *_numbers(row.baseline_ns, row.candidate_ns), number)
    return [Text(), table, *_more(len(rows), "family", "families")]


def _numbers(baseline_ns: int, candidate_ns: int) -> tuple[str, str, str]:
    change_ns = candidate_ns - baseline_ns
    return (
        units.milliseconds(baseline_ns),
        units.milliseconds(candidate_ns),
        units.signed_milliseconds(change_ns) if change_ns else "",
    )


def _share(part_ns: int, whole_ns: int) -> str:
    return units.signed_percent(part_ns / whole_ns) if part_ns and whole_ns else ""


def _axis(name: str) -> str:
    return AXIS_SHORT.get(name, name)


def _size(row: CallsChange) -> str:
    size = "size unknown" if row.message_bytes is None else units.size(row.message_bytes)
    return f"  {size} {row.dtype or ''}".rstrip()


def _cells(calls: Calls | None) -> tuple[str, ...]:
    if calls is None:
        return ("none",)
    rate = calls.busbw_bytes_per_s
    return (
        _count(calls.count),
        units.milliseconds(calls.transfer_ns),
        units.milliseconds(calls.wait_ns),
        units.UNKNOWN if rate is None else units.gigabytes_per_second(rate),
    )


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def _more(rows: int, one: str, several: str) -> list[Text]:
    left = rows - MOST
    return [Text(f"and {left} {one if left == 1 else several} more", _DIM)] if left > 0 else []
