"""The list of runs, searched and sorted by its address, and the place to drop a new one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.pages.address import Chosen, page_url, search_of
from stepsplit.dashboard.pages.numbers import BUBBLE, COLLECTIVE, COMPUTE
from stepsplit.dashboard.pages.parts import (
    Cell,
    Content,
    aria,
    entry,
    led,
    legend,
    progress_bar,
    share_bar,
    state_pill,
    table,
    verdict_pill,
)
from stepsplit.dashboard.pages.runs_order import COLUMNS, NEWEST, in_order, matching
from stepsplit.dashboard.store.store import RunRow

LISTED = 100


_ORDER = (
    "name", "added", "verdict",
    "world", "mesh", "step", "", "compute", "collective", "bubble", "mfu",
)  # fmt: skip
_OF_ALL = 3
"""Columns that a run without numbers has as well."""


def upload_zone() -> html.Section:
    """Where files are dropped; assets/upload.js gives it life."""
    return html.Section(
        [
            html.H2("Drop a recording here", className="drop-title"),
            html.Div(
                "the folder of a run, its rank trace files, or an archive of them",
                className="drop-hint",
            ),
            html.Div(
                [
                    html.Button("Choose files", id="choose-files", type="button"),
                    html.Button("Choose a folder", id="choose-folder", type="button"),
                ],
                className="drop-buttons",
            ),
            html.Div(html.Div(id="upload-bar"), id="upload-track", className="track"),
            html.Div(id="upload-status", className="drop-status", role="status"),
        ],
        id="drop-zone",
        className="card drop",
    )


def runs_page(runs: Sequence[RunRow], chosen: Chosen) -> html.Div:
    """The runs that the address asks for, newest first unless it says otherwise."""
    if not runs:
        hint = "No runs yet. Drop a recording above, or see one made with stepsplit demo."
        return html.Div([html.H1("Runs"), html.P(hint, className="card empty")])
    found = matching(runs, chosen.text("q"))
    ordered = in_order(found, chosen.text("sort") or NEWEST)
    rows = [_row(run) for run in ordered[:LISTED]]
    left = len(ordered) - len(rows)
    told = f"{left:,} more: search or sort to see them" if left else ""
    body: Component = html.Div(table(_heads(chosen), rows), className="card scroll")
    if not rows:
        body = html.P("No run has all of these words.", className="card empty")
    return html.Div([_head(chosen), body, html.P(told, className="note")])


def _head(chosen: Chosen) -> html.Div:
    search = entry("q", chosen.text("q") or "", "search names, tags, meshes")
    compare = html.A("compare the two", href="/compare", id="compare-link", className="off")
    return html.Div([html.H1("Runs"), search, compare, legend()], className="heading")


def _heads(chosen: Chosen) -> list[Content]:
    """Each head sorts by its column; a second time, the other way."""
    now = chosen.text("sort") or NEWEST
    return [
        html.Span("compare", className="unseen"),
        *(_sorter(name, now, chosen) if name else "where it went" for name in _ORDER),
    ]


def _sorter(name: str, now: str, chosen: Chosen) -> Content:
    mark = {name: " ▲", f"-{name}": " ▼"}.get(now, "")
    then = f"-{name}" if now == name else name
    if now.removeprefix("-") != name and name not in ("name", "mesh"):
        then = f"-{name}"
    where = "/" + search_of({"q": chosen.text("q"), "sort": then})
    return led(COLUMNS[name].head + mark, where)


def _row(run: RunRow) -> list[Cell]:
    tags = [html.Span(f"{tag.key}={tag.value}", className="tag") for tag in run.tags]
    name = dcc.Link(run.name, href=page_url(run.id), className="run-link")
    added = html.Span(_when(run), className="when")
    known = [Cell(html.Div([name, *tags])), Cell(added), Cell(verdict_pill(run))]
    return [Cell(_pick(run)), *known, *_numbers(run)]


def _pick(run: RunRow) -> Content:
    """The box that chooses a run to be compared; assets/choose.js gives it life."""
    if run.headline is None or run.headline.middle is None:
        return ""
    told: Any = {
        "data-pick": run.id,
        "data-added": str(run.created_unix_ns),
        "aria-checked": "false",
    }
    return html.Button("", type="button", className="pick", role="checkbox",
                       **told, **aria(f"compare {run.name}"))  # fmt: skip


def _numbers(run: RunRow) -> list[Cell]:
    numbers = run.headline
    if numbers is None or numbers.middle is None:
        return [Cell(_standing(run), columns=len(_ORDER) - _OF_ALL)]
    middle = numbers.middle
    shares = (middle.share(*COMPUTE), middle.share(*COLLECTIVE), middle.share(*BUBBLE))
    return [
        Cell(f"{numbers.world_size:,}", number=True),
        Cell(numbers.mesh or "unknown"),
        Cell(milliseconds(middle.step_ns), number=True),
        Cell(share_bar(middle.shares)),
        *(Cell(percent(share), number=True) for share in shares),
        Cell("" if numbers.mfu is None else percent(numbers.mfu), number=True),
    ]


def _standing(run: RunRow) -> html.Div:
    """How far a run is that has no numbers, or why it has none."""
    parts: list[Content] = [state_pill(run), " "]
    if run.state == "running" and run.progress is not None:
        parts += [progress_bar(run.progress), " ", run.progress_note or ""]
    told = "no steps were found" if run.headline is not None else run.error or ""
    return html.Div([*parts, html.Span(told, className="told")])


def _when(run: RunRow) -> str:
    moment = datetime.fromtimestamp(run.created_unix_ns // 10**9, UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC"
