"""The terminal's table of single published numbers beside the model's."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.validation.tables import Check, Row
from stepsplit.dashboard.reporters.bare_table import bare_table

_SHOWN, _NOTABLE = 3, 0.01


def far_off(check: Check) -> Sequence[Row]:
    """What is worth a line: rows that are not equal, or off by more than a percent."""
    rows = check.worst
    if check.measure != "equality":
        rows = tuple(row for row in rows if abs(row.error) >= _NOTABLE)
    return rows[:_SHOWN]


def row_table(rows: Sequence[Row]) -> Table:
    """One line a row; an id that is too long for the terminal goes on in the next line."""
    several = len({row.what for row in rows}) > 1
    marks = ["fitted on"] if any(row.fitted for row in rows) else []
    table = bare_table("row", "published", "predicted", "error", *marks)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for row in rows:
        table.add_row(
            f"{row.case}, {row.what}" if several else row.case,
            _value(row.published, row.unit), _value(row.predicted, row.unit),
            f"{'+' if row.error >= 0 else ''}{units.percent(row.error)}",
            *[Text("yes" if row.fitted else "", style="bright_black") for _ in marks],
        )  # fmt: skip
    return table


def _value(value: float, unit: str) -> str:
    if unit == "ns":
        return units.milliseconds(value) if value >= 1e6 else units.microseconds(value)
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
    return f"{shown} {unit}"
