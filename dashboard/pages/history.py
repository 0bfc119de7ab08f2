"""History: a metric over all runs, with what is usual, where it changed, and a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.units import signed_percent
from stepsplit.dashboard.figures.history import FEWEST as FEWEST_USUAL
from stepsplit.dashboard.figures.history import Level, Measured, history, usual
from stepsplit.dashboard.pages.address import Chosen, page_url
from stepsplit.dashboard.pages.changes import LOOKED_AT, Change, changes
from stepsplit.dashboard.pages.parts import (
    Cell,
    choice,
    entry,
    graph,
    led,
    nothing,
    section,
    table,
)
from stepsplit.dashboard.store.numbers import Point

ROWS = 50
FEWEST = 2


@dataclass(frozen=True, slots=True)
class Metric:
    """How a stored metric is shown: its words, its unit, and what one unit is of the stored."""

    words: str
    unit: str
    one: float


METRICS: Mapping[str, Metric] = {
    "step_ns": Metric("median step", "ms", 1e6),
    "exposed_comm": Metric("exposed communication", "% of the time", 0.01),
    "skew": Metric("skew", "% of the time", 0.01),
    "bubble": Metric("bubble", "% of the time", 0.01),
    "idle": Metric("idle", "% of the time", 0.01),
    "bubble_fraction": Metric("bubble fraction of the schedule", "%", 0.01),
    "mfu": Metric("MFU", "%", 0.01),
    "peak_memory_bytes": Metric("peak memory of the fullest rank", "GiB", float(2**30)),
}


def metric_of(chosen: Chosen) -> str:
    """The metric that the address names, else the step's time."""
    name = chosen.text("metric")
    return name if name is not None and name in METRICS else "step_ns"


def history_page(points: Sequence[Point], tags: Sequence[str], chosen: Chosen) -> list[Component]:
    """points of the chosen metric, oldest first, of the runs with the chosen tag; tags are all
    that there are, as key=value."""
    name = metric_of(chosen)
    metric = METRICS[name]
    shown = [Measured(p.name, p.created_unix_ns, p.value / metric.one) for p in points]
    if len(shown) < FEWEST:
        told = "A history needs two runs at least: upload more, or choose another metric or tag."
        return [_controls(name, tags, chosen), nothing("Too few runs", told)]
    title = f"{metric.words}, {metric.unit}"
    changed = changes([one.value for one in shown])
    levels = _levels(changed, len(shown))
    figure = graph("history", history(shown, title, _number(chosen.text("budget")), levels))
    note = "diamonds lie outside of what the runs around them would have"
    if len(shown) < FEWEST_USUAL:
        note = f"what is usual is told from {FEWEST_USUAL} runs on"
    return [
        _controls(name, tags, chosen),
        section(metric.words.capitalize(), note, figure),
        _changes(points, changed, metric),
        _table(points, shown, metric, _number(chosen.text("budget"))),
    ]


def _controls(name: str, tags: Sequence[str], chosen: Chosen) -> html.Section:
    tag = chosen.text("tag")
    every = {"": "all runs", **{one: one for one in tags}}
    menus = [
        choice("metric", {key: one.words for key, one in METRICS.items()}, name, "step_ns"),
        choice("tag", every, tag if tag in every else "", ""),
        entry("budget", chosen.text("budget") or "", "budget", "none"),
    ]
    note = "of all runs that are done; a tag keeps to those that can be compared"
    return section("Which", note, html.Div(menus, className="choices"))


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _levels(changed: Sequence[Change], count: int) -> list[Level]:
    if not changed:
        return []
    first = Level(max(0, count - LOOKED_AT), changed[0].before)
    return [first, *(Level(one.at, one.after, _moved(one)) for one in changed)]


def _moved(change: Change) -> str:
    return "from zero" if change.ratio is None else signed_percent(change.ratio)


def _changes(points: Sequence[Point], changed: Sequence[Change], metric: Metric) -> html.Section:
    note = "levels of three runs or more that differ beyond chance; to look at, never for a gate"
    if not changed:
        none = f"No lasting change in {min(len(points), LOOKED_AT):,} runs."
        return section("Changes", note, html.P(none, className="told"))
    heads = ("first run of the new level", "before", "after", "change")
    rows = [_change_row(points[one.at], one, metric) for one in reversed(changed)]
    return section("Changes", note, table(heads, rows))


def _change_row(point: Point, change: Change, metric: Metric) -> list[Cell]:
    return [
        Cell(led(point.name, page_url(point.run_id))),
        Cell(_with_unit(change.before, metric), number=True),
        Cell(_with_unit(change.after, metric), number=True),
        Cell(_moved(change), number=True),
    ]


def _with_unit(value: float, metric: Metric) -> str:
    return f"{value:,.4g} {metric.unit.split()[0]}"


def _table(
    points: Sequence[Point], shown: Sequence[Measured], metric: Metric, budget: float | None
) -> html.Section:
    values = [one.value for one in shown]
    rows = [_row(points[i], values, i, metric, budget) for i in reversed(range(len(values)))]
    heads = ("run", metric.words, "usual", "difference", "remark")
    return section("Runs", "newest first", table(heads, rows[:ROWS]))


def _row(
    point: Point, values: Sequence[float], at: int, metric: Metric, budget: float | None
) -> list[Cell]:
    near, value = usual(values, at), values[at]
    change = signed_percent(value / near.middle - 1) if near and near.middle else ""
    told = ["unusual"] if near and not near.holds(value) else []
    told += ["over budget"] if budget is not None and value > budget else []
    return [
        Cell(led(point.name, page_url(point.run_id))),
        Cell(_with_unit(value, metric), number=True),
        Cell(f"{near.middle:,.4g}" if near else "", number=True),
        Cell(change, number=True),
        Cell(html.Span(", ".join(told), className="pill failed") if told else ""),
    ]
