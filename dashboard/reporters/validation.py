"""The terminal's table of checks: what the model is held to, how far off it is, and where most."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.model.validate.tables import Check, Row
from stepsplit.dashboard.reporters.bare_table import bare_table

_NAMES = {
    "equality": "equal", "mean/max": "mean / max", "mean/p90": "mean / p90", "mean": "mean",
    "median": "median",
}  # fmt: skip
_SHOWN, _NOTABLE = 3, 0.01


def screen(checks: Sequence[Check], every_row: bool = False) -> RenderableType:
    """One line a check, then its worst rows, or every row with those that were fitted on."""
    parts: list[RenderableType] = [_checks(checks), Text(), *_notes(checks), _total(checks)]
    for check in checks:
        rows = check.rows if every_row else _far_off(check)
        if rows:
            parts += [Text(), Text(_heading(check, every_row), style="bold"), _rows(rows)]
    return Group(*parts)


def _checks(checks: Sequence[Check]) -> Table:
    table = bare_table("check", "rows", "measure", "bar", "result", "baseline", "verdict")
    for check in checks:
        table.add_row(
            check.name, str(len(check.reported)), _NAMES[check.measure], _bar(check),
            _result(check), _baseline(check), _verdict(check),
        )  # fmt: skip
    return table


def _bar(check: Check) -> str:
    if not check.bar:
        return "none"
    return "all" if check.measure == "equality" else _numbers(check.bar)


def _result(check: Check) -> str:
    if check.skipped:
        return ""
    if check.measure == "equality":
        return str(sum(row.equal for row in check.reported))
    return _numbers(check.result)


def _baseline(check: Check) -> str:
    return _numbers(check.baseline) if check.baseline else ""


def _numbers(values: tuple[float, ...]) -> str:
    """(0.02, 0.035) -> "2.0 / 3.5 %"."""
    return " / ".join(f"{100 * value:.1f}" for value in values) + " %"


def _verdict(check: Check) -> Text:
    """Met, or missed by how much."""
    if check.skipped:
        return Text("skipped", style="bright_black")
    if not check.bar:
        return Text("shown only", style="bright_black")
    if check.met:
        return Text("met", style="green")
    return Text(f"missed by {_missed_by(check)}", style="red")


def _notes(checks: Sequence[Check]) -> list[Text]:
    """What is to be known of a check, and the first row that it left out."""
    lines = [f"{check.name}: {check.note}" for check in checks if check.note]
    for check in checks:
        if check.left_out:
            more = f" (and {len(check.left_out) - 1} more)" if len(check.left_out) > 1 else ""
            lines.append(f"{check.name}: left out {check.left_out[0]}{more}")
    return [Text(line) for line in lines]


def _missed_by(check: Check) -> str:
    if check.measure == "equality":
        count = sum(not row.equal for row in check.reported)
        return f"{count} row{'s' if count > 1 else ''}"
    over = max(result - bar for result, bar in zip(check.result, check.bar, strict=True))
    return f"{100 * over:.1f} pt"


def _total(checks: Sequence[Check]) -> Text:
    held = [check for check in checks if check.bar and not check.skipped]
    met = sum(check.met for check in held)
    fitted = len({row.case for check in checks for row in check.rows if row.fitted})
    words = f"{met} of {len(held)} checks met; rows fitted on, which do not count: {fitted}"
    return Text(words, style="bold" if met == len(held) else "bold red")


def _far_off(check: Check) -> Sequence[Row]:
    """What is worth a line: rows that are not equal, or off by NOTABLE."""
    rows = check.worst
    if check.measure != "equality":
        rows = tuple(row for row in rows if abs(row.error) >= _NOTABLE)
    return rows[:_SHOWN]


def _heading(check: Check, every_row: bool) -> str:
    if every_row:
        return f"{check.name}: all rows"
    return f"{check.name}: {'not equal' if check.measure == 'equality' else 'farthest off'}"


def _rows(rows: Sequence[Row]) -> Table:
    table = bare_table("case", "what", "published", "predicted", "error", "")
    for row in rows:
        table.add_row(
            row.case, row.what, _value(row.published, row.unit), _value(row.predicted, row.unit),
            _percent(row.error), Text("fitted on" if row.fitted else "", style="bright_black"),
        )  # fmt: skip
    return table


def _value(value: float, unit: str) -> str:
    if unit == "ns":
        return units.milliseconds(value)
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
    return f"{shown} {unit}"


def _percent(error: float) -> str:
    return f"{'+' if error >= 0 else ''}{units.percent(error)}"
