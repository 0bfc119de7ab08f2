"""The terminal's table of checks: what the model is held to, how far off it is, and where most."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.validation.tables import Check
from stepsplit.dashboard.reporters.bare_table import bare_table
from stepsplit.dashboard.reporters.validation_rows import far_off, row_table

EQUALITIES = "equalities"
_TOPICS = {"step time": ("step time",), "memory": ("memory", "activations")}
_COLLECTIVES = "collectives"
_GROUPS = (EQUALITIES, "memory", "step time", _COLLECTIVES)
_NAMES = {
    "mean/max": ("mean", "max"), "mean/p90": ("mean", "p90"), "mean": ("mean",),
    "median": ("median",),
}  # fmt: skip


def screen(checks: Sequence[Check], every_row: bool = False) -> RenderableType:
    """One line a check, by group, then its worst rows, or every row with those fitted on."""
    parts: list[RenderableType] = []
    for group in _GROUPS:
        parts += _group([check for check in checks if _group_of(check) == group], group)
    for check in checks:
        rows = check.rows if every_row else far_off(check)
        if rows:
            parts += [Text(_heading(check, every_row), style="bold"), row_table(rows), Text()]
    return Group(*parts, _total(checks))


def _group_of(check: Check) -> str:
    """An equality, or what the check's name speaks of."""
    if check.measure == "equality":
        return EQUALITIES
    topics = (topic for topic, words in _TOPICS.items() if any(w in check.name for w in words))
    return next(topics, _COLLECTIVES)


def _group(checks: Sequence[Check], name: str) -> list[RenderableType]:
    if not checks:
        return []
    table = _equalities(checks) if name == EQUALITIES else _within_bars(checks, name)
    return [table, *_baselines(checks), *_notes(checks), Text()]


def _equalities(checks: Sequence[Check]) -> Table:
    table = _table(EQUALITIES, "rows", "equal", "verdict")
    for check in checks:
        rows = check.reported
        equal = sum(row.equal for row in rows)
        table.add_row(check.name, str(len(rows)), str(equal), _verdict(check))
    return table


def _within_bars(checks: Sequence[Check], name: str) -> Table:
    table = _table(name, "rows", "result", "bar", "verdict")
    for check in checks:
        bar = _numbers(check.bar) if check.bar else "none"
        table.add_row(_short(check), str(len(check.reported)), _result(check, check.result), bar,
                      _verdict(check))  # fmt: skip
    return table


def _table(first: str, *others: str) -> Table:
    """Numbers are never cut; a long name goes on in the next line."""
    table = bare_table(first, *others)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


def _short(check: Check) -> str:
    """The check's name without what the group's heading says already."""
    return check.name.replace(", step time", "").replace(", peak memory", "")


def _result(check: Check, values: tuple[float, ...]) -> str:
    """(0.039, 0.063) -> "mean 3.9 %, p90 6.3 %"."""
    names = _NAMES[check.measure]
    return ", ".join(f"{n} {units.percent(v)}" for n, v in zip(names, values, strict=False))


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


def _missed_by(check: Check) -> str:
    if check.measure == "equality":
        count = sum(not row.equal for row in check.reported)
        return f"{count} row{'s' if count > 1 else ''}"
    over = max(result - bar for result, bar in zip(check.result, check.bar, strict=True))
    return f"{100 * over:.1f} pt"


def _baselines(checks: Sequence[Check]) -> list[RenderableType]:
    """What the simplest model reaches on the same rows, and where it is the better one."""
    compared = [check for check in checks if check.baseline and not check.skipped]
    if not compared:
        return []
    table = _table("", "", "")
    table.show_header = table.expand = False
    for check in compared:
        better = check.baseline is not None and check.baseline[0] < check.result[0]
        said = (
            Text("better than the model", "yellow")
            if better
            else Text("worse than the model", "bright_black")
        )
        table.add_row(_short(check), _result(check, check.baseline or ()), said)
    return [Text("beside it, one constant utilization for each GPU and dtype, same rows:"), table]


def _notes(checks: Sequence[Check]) -> list[Text]:
    """What is to be known of a check, and the first row that it left out."""
    lines = [f"{check.name}: {check.note}" for check in checks if check.note]
    for check in checks:
        if check.left_out:
            more = f" (and {len(check.left_out) - 1} more)" if len(check.left_out) > 1 else ""
            lines.append(f"{check.name}: left out {check.left_out[0]}{more}")
    return [Text(line, style="bright_black") for line in lines]


def _total(checks: Sequence[Check]) -> Text:
    held = [check for check in checks if check.bar and not check.skipped]
    met = sum(check.met for check in held)
    fitted = len({row.case for check in checks for row in check.rows if row.fitted})
    words = f"{met} of {len(held)} checks met; rows fitted on, which do not count: {fitted}"
    return Text(words, style="bold" if met == len(held) else "bold red")


def _heading(check: Check, every_row: bool) -> str:
    if every_row:
        return f"{check.name}: all rows"
    return f"{check.name}: {'not equal' if check.measure == 'equality' else 'farthest off'}"
