"""The terminal's answer to: does the candidate stay within its budgets?"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer.regression.check_result import Answer, Judged, Verdict
from stepsplit.dashboard.reporters.bare_table import bare_table
from stepsplit.dashboard.reporters.verdict_words import (
    MARKS,
    change,
    detectable,
    headline,
    interval,
    sides,
    value,
)

STYLE: dict[Answer, str] = {"pass": "green", "regressed": "red", "inconclusive": "yellow"}
_DIM = "bright_black"
_LOW = "low confidence: a side is of one run alone; record 3 to 5 a side"


def screen(verdict: Verdict) -> RenderableType:
    """The whole screen of one verdict, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [
        Text(headline(verdict), style=f"bold {STYLE[verdict.answer]}"),
        Text(sides(verdict), _DIM),
        *(Text(one, "yellow") for one in verdict.warnings),
        *([Text(_LOW, "yellow")] if verdict.low_confidence else []),
        Text(),
        _gated(verdict),
        *_notes(verdict),
        *_why(verdict),
        *_others(verdict),
    ]
    return Group(*parts)


def _gated(verdict: Verdict) -> Table:
    table = bare_table("  metric", "budget", "baseline", "candidate", "change", "96 % interval")
    for one in verdict.gated:
        table.add_row(
            Text(f"{MARKS[one.answer]} {one.metric}", STYLE[one.answer]), one.budget,
            value(one.metric, one.baseline), value(one.metric, one.candidate), change(one),
            interval(one),
        )  # fmt: skip
    return table


def _notes(verdict: Verdict) -> list[Text]:
    noted = (one for one in verdict.gated if one.note or one.answer != "pass")
    notes = [Text(_note(one), STYLE[one.answer]) for one in noted]
    shown = [f"{one.metric} {told}" for one in verdict.gated if (told := detectable(one))]
    told = f"these runs would show, in 4 of 5 cases: {', '.join(shown)}"
    return [*notes, *([Text(told, _DIM)] if shown else [])]


def _note(one: Judged) -> str:
    told = f"{MARKS[one.answer]} {one.metric} {one.answer}"
    return f"{told}: {one.note}" if one.note else told


def _why(verdict: Verdict) -> list[RenderableType]:
    if not verdict.causes:
        return []
    lines = [Text(f"{i}  {one.message}") for i, one in enumerate(verdict.causes, 1)]
    link = [] if verdict.compare_url is None else [Text(f"both sides: {verdict.compare_url}", _DIM)]
    return [Text(), Text("WHY", "bold"), *lines, *link]


def _others(verdict: Verdict) -> list[RenderableType]:
    if not verdict.others:
        return []
    table = bare_table("moved, without a budget", "baseline", "candidate", "change",
                       "96 % interval")  # fmt: skip
    for one in verdict.others:
        table.add_row(
            one.metric, value(one.metric, one.baseline), value(one.metric, one.candidate),
            change(one), interval(one),
        )  # fmt: skip
    return [Text(), table]
