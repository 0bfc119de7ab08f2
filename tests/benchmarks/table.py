"""Rows -> the table, in Markdown that reads well as text too."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Row
from benchmarks.targets import targets_of

_HEAD = (
    "opened by", "seconds", "all runs", "x json.load", "x HTA", "of floor", "of first", "peak MB",
    "peak of JSON", "others' cores", "target",
)  # fmt: skip


def table_of(rows: Sequence[Row], judged: bool) -> str:
    """The rows with their targets; met or missed only where they are judged."""
    return in_markdown([_HEAD, *(_cells(row, judged) for row in rows)])


def in_markdown(cells: Sequence[Sequence[str]]) -> str:
    """The cells as a table, the first line its head."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first, *rest = [_line(line, widths) for line in cells]
    return "\n".join([first, _line(["-" * width for width in widths], widths), *rest])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _cells(row: Row, judged: bool) -> tuple[str, ...]:
    return (
        row.title,
        f"{row.least_seconds:.3f}",
        " ".join(f"{seconds:.3f}" for seconds in row.seconds),
        _figure(row.times_json, ".1f"),
        _figure(row.times_hta, ".1f"),
        _figure(row.of_floor, ".2f"),
        _figure(row.of_first, ".3f"),
        _figure(None if row.peak_bytes is None else row.peak_bytes / 1e6, ".0f"),
        _figure(row.of_json, ".2f"),
        f"{row.others_cores:.1f}",
        "; ".join(_targets(row, judged)),
    )


def _targets(row: Row, judged: bool) -> list[str]:
    targets = targets_of(row)
    if not judged:
        return list(map(str, targets))
    return [f"{target}: {'met' if target.is_met(row) else 'MISSED'}" for target in targets]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
