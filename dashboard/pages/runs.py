"""Pages: the list of runs, and the frame around the pages of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.units import format_date, format_milliseconds, format_percent
from stepsplit.dashboard.pages.communication import build_collectives_page, build_pipeline_page
from stepsplit.dashboard.pages.components import (
    BUBBLE,
    COLLECTIVE,
    COMPUTE,
    RUN_PAGES,
    Address,
    AddressQuery,
    Cell,
    Content,
    SortHead,
    View,
    build_aria_label,
    build_check_pill,
    build_empty_card,
    build_legend,
    build_link,
    build_menu,
    build_page_url,
    build_progress_bar,
    build_share_bar,
    build_share_cell,
    build_state_pill,
    build_table,
    build_text_field,
    format_query,
)
from stepsplit.dashboard.pages.compute import build_compute, build_idle, build_memory_page
from stepsplit.dashboard.pages.model import build_model_page
from stepsplit.dashboard.pages.overview import build_overview
from stepsplit.dashboard.pages.run_actions import (
    RunRights,
    build_run_actions,
    build_run_labels,
    build_tags,
)
from stepsplit.dashboard.pages.timeline import build_timeline_page
from stepsplit.dashboard.store.runs import RunRow

# The list of runs, searched and sorted by URL parameters, and the upload zone.

MAX_LISTED = 100

_COLUMN_ORDER = (
    "name", "added", "verdict",
    "world", "mesh", "step", "", "compute", "collective", "bubble", "mfu",
)  # fmt: skip

_COMMON_COLUMNS = ("name", "added", "verdict")
"""Columns that are shown for runs without metrics too."""

_HIDDEN_IF_EMPTY = ("verdict", "mesh", "mfu")


_MESH = r"\s*\w+=[0-9]+(\s*,\s*\w+=[0-9]+)*\s*"
"""Axes and sizes; the analysis refuses unknown axes."""


def build_upload_zone() -> html.Section:
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
            html.Div(
                [
                    _build_field("name", "upload-name", "of the folder or files", maxLength=200),
                    _build_field("tags", "upload-tags", "branch=main, gpus=8"),
                    _build_field("mesh", "upload-mesh", "pp=2,dp=2,tp=2", pattern=_MESH),
                ],
                className="drop-hint drop-fields",
            ),
            html.Div(id="upload-question", className="drop-question", role="group"),
            html.Div(html.Div(id="upload-bar"), id="upload-track", className="track"),
            html.Div(id="upload-status", className="drop-status", role="status"),
        ],
        id="drop-zone",
        className="card drop",
    )


def _build_field(label: str, field_id: str, example: str, **more: Any) -> html.Label:
    return html.Label([f"{label}: ", dcc.Input(id=field_id, placeholder=example, **more)])


def build_runs_page(
    runs: Sequence[RunRow], chosen: AddressQuery, *, may_upload: bool = True
) -> html.Div:
    """The list of runs that match the URL, newest first by default."""
    if not runs:
        upload = " Drop a recording above, or create one with stepsplit demo."
        hint = "No runs yet." + (upload if may_upload else "")
        return html.Div([html.H1("Runs"), html.P(hint, className="card empty")])
    matches = filter_runs(runs, chosen.find_text("q"))
    ordered = sort_runs(matches, chosen.find_text("sort") or NEWEST)
    columns = choose_columns(ordered[:MAX_LISTED])
    rows = [_build_row(run, columns) for run in ordered[:MAX_LISTED]]
    n_hidden = len(ordered) - len(rows)
    note = f"{n_hidden:,} more runs: search or sort to see them" if n_hidden else ""
    body: Component = html.Div(
        build_table(_build_table_head(chosen, columns), rows), className="card scroll"
    )
    if not rows:
        body = html.P("No run matches this search.", className="card empty")
    return html.Div([_build_heading(chosen), body, html.P(note, className="note")])


def _build_heading(chosen: AddressQuery) -> html.Div:
    search = build_text_field("q", chosen.find_text("q") or "", "search names, tags, meshes")
    compare = html.A("compare selected", href="/compare", id="compare-link", className="off")
    return html.Div([html.H1("Runs"), search, compare, build_legend()], className="heading")


def choose_columns(runs: Sequence[RunRow]) -> tuple[str, ...]:
    """The columns of the list, without those that are empty for all of the runs."""
    empty = {name for name in _HIDDEN_IF_EMPTY if all(COLUMNS[name].key(r) is None for r in runs)}
    return tuple(name for name in _COLUMN_ORDER if name not in empty)


def _build_table_head(chosen: AddressQuery, columns: Sequence[str]) -> list[Content | SortHead]:
    """Column headers; a click sorts by the column, a second click reverses the order."""
    current = chosen.find_text("sort") or NEWEST
    return [
        html.Span("compare", className="unseen"),
        *(_build_sort_link(name, current, chosen) if name else "time split" for name in columns),
    ]


def _build_sort_link(name: str, current: str, chosen: AddressQuery) -> SortHead:
    text = COLUMNS[name].head
    next_sort = f"-{name}" if current == name else name
    if current.removeprefix("-") != name and name not in ("name", "mesh"):
        next_sort = f"-{name}"
    where = "/" + format_query({"q": chosen.find_text("q"), "sort": next_sort})
    if current == name:
        return SortHead(build_link(f"{text} ▲", where), "ascending")
    if current == f"-{name}":
        return SortHead(build_link(f"{text} ▼", where), "descending")
    return SortHead(build_link(text, where))


def _build_row(run: RunRow, columns: Sequence[str]) -> list[Cell]:
    name = dcc.Link(run.name, href=build_page_url(run.id), className="run-link")
    note = [html.Div(run.note, className="run-note")] if run.note else []
    added = html.Span(format_date(run.created_unix_ns), className="when")
    cells = {
        "name": Cell(html.Div([name, *build_tags(run), *note])),
        "added": Cell(added),
        "verdict": Cell(build_check_pill(run)),
        **_build_number_cells(run),
    }
    shown = [cells[name] for name in columns if name in cells]
    if len(cells) == len(_COMMON_COLUMNS):
        shown.append(Cell(_build_state(run), columns=len(columns) - len(shown)))
    return [Cell(_build_pick_box(run)), *shown]


def _build_pick_box(run: RunRow) -> Content:
    """The checkbox that selects a run for comparison; assets/choose.js handles clicks."""
    if run.headline is None or run.headline.median_step is None:
        return ""
    attributes: Any = {
        "data-pick": run.id,
        "data-added": str(run.created_unix_ns),
        "aria-checked": "false",
    }
    return html.Button("", type="button", className="pick", role="checkbox",
                       **attributes, **build_aria_label(f"compare {run.name}"))  # fmt: skip


def _build_number_cells(run: RunRow) -> dict[str, Cell]:
    """The cells with metrics by column; none for a run without metrics."""
    numbers = run.headline
    if numbers is None or numbers.median_step is None:
        return {}
    middle = numbers.median_step
    shares = {"compute": COMPUTE, "collective": COLLECTIVE, "bubble": BUBBLE}
    return {
        "world": Cell(f"{numbers.world_size:,}", number=True),
        "mesh": Cell(numbers.mesh or "unknown"),
        "step": Cell(format_milliseconds(middle.step_ns), number=True),
        "": Cell(build_share_bar(middle.shares)),
        **{name: build_share_cell(middle.sum_share(*of)) for name, of in shares.items()},
        "mfu": Cell("" if numbers.mfu is None else format_percent(numbers.mfu), number=True),
    }


def _build_state(run: RunRow) -> html.Div:
    """Progress of a run without metrics, or the reason why it has none."""
    parts: list[Content] = [build_state_pill(run), " "]
    if run.state == "running" and run.progress is not None:
        parts += [build_progress_bar(run.progress), " ", run.progress_note or ""]
    message = "no steps found" if run.headline is not None else run.error or ""
    return html.Div([*parts, html.Span(message, className="message")])


def build_run_pickers(runs: Sequence[RunRow], chosen: AddressQuery) -> html.Div:
    """The menus that choose the two runs to compare, newest first."""
    done = [run for run in runs if run.headline is not None and run.headline.median_step]
    picked = {side: chosen.find_text(side) or "" for side in ("baseline", "candidate")}
    listed = [run for n, run in enumerate(done) if n < MAX_LISTED or run.id in picked.values()]
    names = {"": "choose a run"} | {
        run.id: f"{run.name}, {format_date(run.created_unix_ns)}" for run in listed
    }
    menus = [build_menu(side, names, run_id, "") for side, run_id in picked.items()]
    return html.Div(menus, className="pickers")


# Filter and order of the list of runs.

Key = Callable[[RunRow], float | str | None]

NEWEST = "-added"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list: its header and sort key; None sorts last."""

    head: str
    key: Key


def _compute_share(run: RunRow, *buckets: str) -> float | None:
    middle = run.headline.median_step if run.headline else None
    return None if middle is None else middle.sum_share(*buckets)


def _read_step_ns(run: RunRow) -> float | None:
    middle = run.headline.median_step if run.headline else None
    return None if middle is None else middle.step_ns


COLUMNS = {
    "name": Column("run", lambda run: run.name.lower()),
    "added": Column("added", lambda run: run.created_unix_ns),
    "verdict": Column("check", lambda run: run.verdict.answer if run.verdict else None),
    "world": Column("world", lambda run: run.headline.world_size if run.headline else None),
    "mesh": Column("mesh", lambda run: (run.headline.mesh if run.headline else None) or None),
    "step": Column("step", _read_step_ns),
    "compute": Column("compute", lambda run: _compute_share(run, *COMPUTE)),
    "collective": Column("collective", lambda run: _compute_share(run, *COLLECTIVE)),
    "bubble": Column("bubble", lambda run: _compute_share(run, *BUBBLE)),
    "mfu": Column("MFU", lambda run: run.headline.mfu if run.headline else None),
}


def filter_runs(runs: Sequence[RunRow], asked: str | None) -> list[RunRow]:
    """Runs that contain all words of the search in name, tags, mesh, backend, state, id or
    check result."""
    words = (asked or "").lower().split()
    return [run for run in runs if all(word in _collect_search_text(run) for word in words)]


def _collect_search_text(run: RunRow) -> str:
    numbers = run.headline
    known = [] if numbers is None else [numbers.mesh or "", numbers.backend or ""]
    known += [run.verdict.answer] if run.verdict else []
    tags = [f"{tag.key}={tag.value}" for tag in run.tags]
    return " ".join([run.name, run.state, run.id, *known, *tags]).lower()


def sort_runs(runs: Sequence[RunRow], sort: str) -> list[RunRow]:
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

_ALL = RunRights()

_WAITING = {
    "uploading": "The upload is not finished.",
    "queued": "Queued for analysis.",
    "running": "The analysis is running; this page updates when it is done.",
}


def build_run_page(view: View, address: Address, run: RunRow, rights: RunRights = _ALL) -> html.Div:
    """The page of a finished run that the URL selects."""
    report = f"/api/v1/runs/{view.run_id}/report.json"
    view = replace(view, offers_job=rights.edit and run.can_be_analyzed_again)
    more = [
        html.A("report.json", href=report),
        html.A("download as HTML", href=_build_export_url(view)),
        *build_run_actions(run, rights),
    ]
    links = html.Span(more, className="heading-links")
    head = html.Div([html.H1(view.name), links], className="heading")
    tabs = _build_tabs(view.run_id, address.page)
    return html.Div([head, *build_run_labels(run, rights), tabs, *_build_content(view, address)])


def _build_export_url(view: View) -> str:
    return f"/api/v1/runs/{view.run_id}/report.html"


def _build_tabs(run_id: str, page: str) -> html.Nav:
    links = [
        dcc.Link(
            name.capitalize(),
            href=build_page_url(run_id, name),
            className="on" if name == page else "",
        )
        for name in RUN_PAGES
    ]
    return html.Nav(links, className="tabs", **build_aria_label("pages of this run"))


def _build_content(view: View, address: Address) -> list[Component]:
    match address.page:
        case "timeline":
            return build_timeline_page(view)
        case "pipeline":
            return build_pipeline_page(view, address.chosen)
        case "collectives":
            return build_collectives_page(view)
        case "compute":
            return build_compute_page(view)
        case "memory":
            return build_memory_page(view)
        case "model":
            return build_model_page(view, address.chosen)
    return build_overview(view)


def build_compute_page(view: View) -> list[Component]:
    """The compute page: kernel families, contention, slow kernels and idle time."""
    shown: list[Component] = [*build_compute(view.report), *build_idle(view.report)]
    return shown or [build_empty_card("No compute", "The recording has no kernels and no ops.")]


def build_waiting_page(run: RunRow, rights: RunRights = _ALL) -> html.Div:
    """The page of a run without a report: not analyzed yet, or failed with an error."""
    links = html.Span(build_run_actions(run, rights), className="heading-links")
    head = html.Div([html.H1(run.name), build_state_pill(run), links], className="heading")
    message = run.error if run.state == "failed" else _WAITING.get(run.state, "")
    parts: list[str | Component] = [message or ""]
    if run.state == "running" and run.progress is not None:
        parts += [html.Br(), build_progress_bar(run.progress), f" {run.progress_note or ''}"]
    status = html.P(parts, className=f"card status {run.state}")
    return html.Div([head, *build_run_labels(run, rights), status])


def build_missing_page(message: str = "Page or run not found") -> html.Div:
    """The page for an unknown URL."""
    back = dcc.Link("list of runs", href="/")
    return html.Div([html.H1(message), html.P(["See the ", back, "."])])
