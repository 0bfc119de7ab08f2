"""Pages: the list of runs, and the frame around the pages of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.pages.communication import collectives_page, pipeline_page
from stepsplit.dashboard.pages.components import (
    BUBBLE,
    COLLECTIVE,
    COMPUTE,
    RUN_PAGES,
    Address,
    AddressQuery,
    Cell,
    Content,
    View,
    aria,
    entry,
    led,
    legend,
    nothing,
    page_url,
    progress_bar,
    search_of,
    share_bar,
    state_pill,
    table,
    verdict_pill,
)
from stepsplit.dashboard.pages.compute import compute, idle, memory_page
from stepsplit.dashboard.pages.model import model_page
from stepsplit.dashboard.pages.overview import overview
from stepsplit.dashboard.pages.timeline import timeline_page
from stepsplit.dashboard.store.runs import RunRow

# The list of runs, searched and sorted by URL parameters, and the upload zone.

LISTED = 100

_ORDER = (
    "name", "added", "verdict",
    "world", "mesh", "step", "", "compute", "collective", "bubble", "mfu",
)  # fmt: skip

_OF_ALL = 3
"""Columns that are shown for runs without metrics too."""


def upload_zone() -> html.Section:
    """The zone where files are dropped; assets/upload.js handles the upload."""
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


def runs_page(runs: Sequence[RunRow], chosen: AddressQuery) -> html.Div:
    """The list of runs that match the URL, newest first by default."""
    if not runs:
        hint = "No runs yet. Drop a recording above, or create one with stepsplit demo."
        return html.Div([html.H1("Runs"), html.P(hint, className="card empty")])
    found = matching(runs, chosen.text("q"))
    ordered = in_order(found, chosen.text("sort") or NEWEST)
    rows = [_row(run) for run in ordered[:LISTED]]
    left = len(ordered) - len(rows)
    note = f"{left:,} more runs: search or sort to see them" if left else ""
    body: Component = html.Div(table(_heads(chosen), rows), className="card scroll")
    if not rows:
        body = html.P("No run matches this search.", className="card empty")
    return html.Div([_head(chosen), body, html.P(note, className="note")])


def _head(chosen: AddressQuery) -> html.Div:
    search = entry("q", chosen.text("q") or "", "search names, tags, meshes")
    compare = html.A("compare selected", href="/compare", id="compare-link", className="off")
    return html.Div([html.H1("Runs"), search, compare, legend()], className="heading")


def _heads(chosen: AddressQuery) -> list[Content]:
    """Column headers; a click sorts by the column, a second click reverses the order."""
    now = chosen.text("sort") or NEWEST
    return [
        html.Span("compare", className="unseen"),
        *(_sorter(name, now, chosen) if name else "time split" for name in _ORDER),
    ]


def _sorter(name: str, now: str, chosen: AddressQuery) -> Content:
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
    """The checkbox that selects a run for comparison; assets/choose.js handles clicks."""
    if run.headline is None or run.headline.middle is None:
        return ""
    attributes: Any = {
        "data-pick": run.id,
        "data-added": str(run.created_unix_ns),
        "aria-checked": "false",
    }
    return html.Button("", type="button", className="pick", role="checkbox",
                       **attributes, **aria(f"compare {run.name}"))  # fmt: skip


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
    """Progress of a run without metrics, or the reason why it has none."""
    parts: list[Content] = [state_pill(run), " "]
    if run.state == "running" and run.progress is not None:
        parts += [progress_bar(run.progress), " ", run.progress_note or ""]
    message = "no steps found" if run.headline is not None else run.error or ""
    return html.Div([*parts, html.Span(message, className="message")])


def _when(run: RunRow) -> str:
    moment = datetime.fromtimestamp(run.created_unix_ns // 10**9, UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC"


# Filter and order of the list of runs.

Key = Callable[[RunRow], float | str | None]

NEWEST = "-added"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list: its header and sort key; None sorts last."""

    head: str
    key: Key


def _middle(run: RunRow, *buckets: str) -> float | None:
    middle = run.headline.middle if run.headline else None
    return None if middle is None else middle.share(*buckets)


def _step_ns(run: RunRow) -> float | None:
    middle = run.headline.middle if run.headline else None
    return None if middle is None else middle.step_ns


COLUMNS = {
    "name": Column("run", lambda run: run.name.lower()),
    "added": Column("added", lambda run: run.created_unix_ns),
    "verdict": Column("verdict", lambda run: run.verdict.answer if run.verdict else None),
    "world": Column("world", lambda run: run.headline.world_size if run.headline else None),
    "mesh": Column("mesh", lambda run: (run.headline.mesh if run.headline else None) or None),
    "step": Column("step", _step_ns),
    "compute": Column("compute", lambda run: _middle(run, *COMPUTE)),
    "collective": Column("collective", lambda run: _middle(run, *COLLECTIVE)),
    "bubble": Column("bubble", lambda run: _middle(run, *BUBBLE)),
    "mfu": Column("MFU", lambda run: run.headline.mfu if run.headline else None),
}


def matching(runs: Sequence[RunRow], asked: str | None) -> list[RunRow]:
    """Runs that contain all words of the search in name, tags, mesh, backend, state, id or
    check result."""
    words = (asked or "").lower().split()
    return [run for run in runs if all(word in _text(run) for word in words)]


def _text(run: RunRow) -> str:
    numbers = run.headline
    known = [] if numbers is None else [numbers.mesh or "", numbers.backend or ""]
    known += [run.verdict.answer] if run.verdict else []
    tags = [f"{tag.key}={tag.value}" for tag in run.tags]
    return " ".join([run.name, run.state, run.id, *known, *tags]).lower()


def in_order(runs: Sequence[RunRow], sort: str) -> list[RunRow]:
    """Runs sorted by a column, descending with a leading minus; runs without a value last."""
    column = COLUMNS.get(sort.removeprefix("-"), COLUMNS["added"])
    keyed = [(column.key(run), run) for run in runs]
    known = sorted(
        ((key, run) for key, run in keyed if key is not None),
        key=lambda pair: (pair[0], pair[1].id),
        reverse=sort.startswith("-"),
    )
    return [run for _, run in known] + [run for key, run in keyed if key is None]


# One run: its name, tabs, and the selected page.

_WAITING = {
    "uploading": "The upload is not finished.",
    "queued": "Queued for analysis.",
    "running": "The analysis is running; this page updates when it is done.",
}


def run_page(view: View, address: Address) -> html.Div:
    """The page of a finished run that the URL selects."""
    report = f"/api/v1/runs/{view.run_id}/report.json"
    more = [html.A("report.json", href=report), html.A("download as HTML", href=_still(view))]
    links = html.Span(more, className="heading-links")
    head = html.Div([html.H1(view.name), links], className="heading")
    return html.Div([head, _tabs(view.run_id, address.page), *_content(view, address)])


def _still(view: View) -> str:
    return f"/api/v1/runs/{view.run_id}/report.html"


def _tabs(run_id: str, page: str) -> html.Nav:
    links = [
        dcc.Link(
            name.capitalize(), href=page_url(run_id, name), className="on" if name == page else ""
        )
        for name in RUN_PAGES
    ]
    return html.Nav(links, className="tabs", **aria("pages of this run"))


def _content(view: View, address: Address) -> list[Component]:
    match address.page:
        case "timeline":
            return timeline_page(view)
        case "pipeline":
            return pipeline_page(view, address.chosen)
        case "collectives":
            return collectives_page(view)
        case "compute":
            return compute_page(view)
        case "memory":
            return memory_page(view)
        case "model":
            return model_page(view, address.chosen)
    return overview(view)


def compute_page(view: View) -> list[Component]:
    """The compute page: kernel families, contention, slow kernels and idle time."""
    shown: list[Component] = [*compute(view.report), *idle(view.report)]
    return shown or [nothing("No compute", "The recording has no kernels and no ops.")]


def waiting_page(run: RunRow) -> html.Div:
    """The page of a run without a report: not analyzed yet, or failed with an error."""
    head = html.Div([html.H1(run.name), state_pill(run)], className="heading")
    message = run.error if run.state == "failed" else _WAITING.get(run.state, "")
    parts: list[str | Component] = [message or ""]
    if run.state == "running" and run.progress is not None:
        parts += [html.Br(), progress_bar(run.progress), f" {run.progress_note or ''}"]
    return html.Div([head, html.P(parts, className=f"card status {run.state}")])


def missing_page(message: str = "Page or run not found") -> html.Div:
    """The page for an unknown URL."""
    back = dcc.Link("list of runs", href="/")
    return html.Div([html.H1(message), html.P(["See the ", back, "."])])
