"""The screen of validate: error and limit of each check, and the rows with the largest errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.validation.tables import Check, ValidationRow
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.tables import build_table

EQUALITIES = "equalities"

_TOPICS = {
    "step time": ("step time",), "same steps": ("confidence",), "memory": ("memory", "activations"),
    "measured steps": ("measured step",),
}  # fmt: skip

_COLLECTIVES = "collectives"

_GROUPS = (EQUALITIES, *_TOPICS, _COLLECTIVES)

_NAMES = {
    "mean/max": ("mean", "max"), "mean/p90": ("mean", "p90"), "mean": ("mean",),
    "median": ("median",),
}  # fmt: skip


def build_validation_screen(checks: Sequence[Check], every_row: bool = False) -> RenderableType:
    """One line per check that has rows, by group, then its worst rows, or all rows including fitted
    ones."""
    parts: list[RenderableType] = []
    found = [check for check in checks if check.rows or check.left_out]
    by_group: dict[str, list[Check]] = {group: [] for group in _GROUPS}
    for check in found:
        # A check belongs to the equalities, or to the first topic with a word of its name.
        topics = (topic for topic, words in _TOPICS.items() if any(w in check.name for w in words))
        is_equality = check.measure == "equality"
        by_group[EQUALITIES if is_equality else next(topics, _COLLECTIVES)].append(check)
    for group, own in by_group.items():
        if not own:
            continue
        if group == EQUALITIES:
            table = _build_table(EQUALITIES, "rows", "equal", "verdict")
            for check in own:
                equal = sum(row.equal for row in check.reported)
                verdict = _format_verdict(check)
                table.add_row(check.name, str(len(check.reported)), str(equal), verdict)
        else:
            table = _build_limit_table(own, group)
        parts += [table, *_build_baseline_table(own), *_list_notes(own), Text()]
    for check in found:
        if check.sources:
            # The rows of other checks.
            continue
        rows = check.rows
        if not every_row:
            # The worst rows: not equal, or with an error that is worth a look.
            is_equality = check.measure == "equality"
            notable = [row for row in check.worst if is_equality or abs(row.error) >= _NOTABLE]
            rows = tuple(notable[:_SHOWN])
        if rows:
            what = "not equal" if check.measure == "equality" else "largest errors"
            heading = Text(f"{check.name}: {'all rows' if every_row else what}", style="bold")
            parts += [heading, build_row_table(rows), Text()]
    if absent := len(checks) - len(found):
        parts.append(Text(f"checks without rows in this folder: {absent}", style=DIM))
    # A check without a limit is shown for comparison and can neither be met nor missed.
    counted = [check for check in checks if check.bar and not check.skipped]
    met = sum(check.met for check in counted)
    fitted = len({row.case for check in checks for row in check.rows if row.fitted})
    words = f"{met} of {len(counted)} checks met; rows excluded because fitted: {fitted}"
    return Group(*parts, Text(words, style="bold" if met == len(counted) else "bold red"))


def _build_limit_table(checks: Sequence[Check], name: str) -> Table:
    has_bands = any(check.banded for check in checks)
    has_sources = any(check.sources for check in checks)
    table = _build_table(
        name, "rows", *["sources"] * has_sources, "result", "limit", *["in band"] * has_bands,
        "verdict",
    )  # fmt: skip
    for check in checks:
        bar = (
            (" / ".join(f"{100 * value:.1f}" for value in check.bar) + " %")
            if check.bar
            else "none"
        )
        inside = units.format_percent(check.inside / len(check.banded)) if check.banded else ""
        table.add_row(
            _trim_name(check),
            str(len(check.reported)),
            *[str(check.sources)] * has_sources,
            _format_result(check, check.result),
            bar,
            *[inside] * has_bands,
            _format_verdict(check),
        )
    return table


def _build_table(first: str, *others: str) -> Table:
    """A table whose first column wraps, so that numbers are never cut."""
    table = build_table(first, *others)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


def _trim_name(check: Check) -> str:
    """The name of a check without the words that its group heading has."""
    return re.sub(", (step time|peak memory|measured step)$", "", check.name)


def _format_result(check: Check, values: tuple[float, ...]) -> str:
    """(0.039, 0.063) -> "mean 3.9 %, p90 6.3 %"."""
    names = _NAMES[check.measure]
    return ", ".join(f"{n} {units.format_percent(v)}" for n, v in zip(names, values, strict=False))


def _format_verdict(check: Check) -> Text:
    """Met, or by how much the limit is missed."""
    if check.skipped:
        return Text("skipped", style=DIM)
    if not check.bar:
        return Text("no limit", style=DIM)
    if check.met:
        return Text("met", style="green")
    if check.measure == "equality":
        count = sum(not row.equal for row in check.reported)
        missed = f"{count} row{'s' if count > 1 else ''}"
    else:
        # By the measure that misses most.
        over = max(result - bar for result, bar in zip(check.result, check.bar, strict=True))
        missed = f"{100 * over:.1f} pt"
    return Text(f"missed by {missed}", style="red")


def _build_baseline_table(checks: Sequence[Check]) -> list[RenderableType]:
    """The error of the simplest model on the same rows, and whether it is better."""
    compared = [check for check in checks if check.baseline and not check.skipped]
    if not compared:
        return []
    table = _build_table("", "", "")
    table.show_header = table.expand = False
    for check in compared:
        better = check.baseline is not None and check.baseline[0] < check.result[0]
        label = (
            Text("better than the model", "yellow") if better else Text("worse than the model", DIM)
        )
        table.add_row(_trim_name(check), _format_result(check, check.baseline or ()), label)
    return [
        Text(
            "for comparison, one constant utilization per GPU, dtype, dense or experts, same rows:"
        ),
        table,
    ]


def _list_notes(checks: Sequence[Check]) -> list[Text]:
    """The notes of the checks, and the first row that each one excluded."""
    lines = [f"{check.name}: {check.note}" for check in checks if check.note]
    for check in checks:
        if check.left_out:
            more = f" (and {len(check.left_out) - 1} more)" if len(check.left_out) > 1 else ""
            lines.append(f"{check.name}: excluded {check.left_out[0]}{more}")
    return [Text(line, style=DIM) for line in lines]


# The table of published and predicted values.

# An error of a row below one percent is that of the digits that were published.
_SHOWN, _NOTABLE = 3, 0.01


def build_row_table(rows: Sequence[ValidationRow]) -> Table:
    """One line per row; long ids wrap."""
    several = len({row.what for row in rows}) > 1
    marks = ["fitted"] if any(row.fitted for row in rows) else []
    table = _build_table("row", "published", "predicted", "error", *marks)
    for row in rows:
        table.add_row(
            f"{row.case}, {row.what}" if several else row.case,
            _format_value(row.published, row.unit), _format_value(row.predicted, row.unit),
            f"{'+' if row.error >= 0 else ''}{units.format_percent(row.error)}",
            *[Text("yes" if row.fitted else "", style=DIM) for _ in marks],
        )  # fmt: skip
    return table


def _format_value(value: float, unit: str) -> str:
    if unit == "ns":
        return (
            units.format_milliseconds(value) if value >= 1e6 else units.format_microseconds(value)
        )
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
    return f"{shown} {unit}"
