"""One run: its numbers, where the steps went, who waited for whom."""

from __future__ import annotations

from dash import dcc, html
from dash.development.base_component import Component
from plotly.graph_objects import Figure

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables
from stepsplit.dashboard.figures.pipeline import pipeline
from stepsplit.dashboard.figures.split import by_rank, by_step
from stepsplit.dashboard.figures.timeline import ROWS, timeline
from stepsplit.dashboard.store.headline import Headline
from stepsplit.dashboard.store.store import RunRow, Store
from stepsplit.dashboard.web.address import Chosen
from stepsplit.dashboard.web.compute import compute
from stepsplit.dashboard.web.coverage import holds
from stepsplit.dashboard.web.details import blame, collectives, exposed, findings, warnings
from stepsplit.dashboard.web.idle import idle
from stepsplit.dashboard.web.numbers import cards, subtitle
from stepsplit.dashboard.web.parts import graph, section, state_pill
from stepsplit.dashboard.web.path import path
from stepsplit.dashboard.web.stragglers import overlap, stragglers


def run_page(store: Store, run: RunRow, chosen: Chosen) -> html.Div:
    """The page of a run in whatever state it is."""
    if run.state != "done" or run.headline is None:
        return html.Div([_title(run), _waiting(run)])
    try:
        report, tables = store.report(run.id), store.tables(run.id)
    except DataError as error:
        return html.Div([_title(run), html.P(str(error), className="card status failed")])
    return _report_page(run, run.headline, report, tables, chosen)


def _report_page(
    run: RunRow, numbers: Headline, report: Report, tables: Tables | None, chosen: Chosen
) -> html.Div:
    return html.Div(
        [
            _title(run, html.A("report.json", href=f"/api/v1/runs/{run.id}/report.json")),
            html.P(subtitle(report), className="subtitle"),
            cards(numbers, report),
            *findings(report),
            *warnings(report),
            _splits(report),
            *path(report),
            *_over_time(report, tables, chosen),
            html.Div([*exposed(report), *blame(report)], className="columns"),
            *idle(report),
            *stragglers(report),
            *compute(report),
            *overlap(report),
            *collectives(report),
            *holds(report),
        ]
    )


def missing_page() -> html.Div:
    """What is said of an id that no run has."""
    back = html.A("the list of runs", href="/")
    return html.Div([html.H1("No such run"), html.P(["It may be in ", back, "."])])


def step_figures(store: Store, run_id: str, step: int | None) -> tuple[Figure, Figure]:
    """The timeline and the pipeline's grid of a step; None is all steps."""
    tables = store.tables(run_id)
    if tables is None:
        return Figure(), Figure()
    return timeline(tables, step), pipeline(tables, step)


def _title(run: RunRow, *more: html.A) -> html.Div:
    return html.Div([html.H1(run.name), state_pill(run), *more], className="heading")


def _waiting(run: RunRow) -> html.P:
    told = {
        "uploading": "Its files are still on the way.",
        "queued": "Waiting for the analysis before it to end.",
        "running": "The analysis is under way; this page shows it when it is done.",
    }
    return html.P(told.get(run.state, run.error or ""), className=f"card status {run.state}")


def _splits(report: Report) -> html.Div:
    ranks = graph("by-rank", by_rank(report))
    steps = graph("by-step", by_step(report))
    return html.Div(
        [
            section("Where the step went, by rank", "each bucket's median over full steps", ranks),
            section("By step", "mean over ranks; pale steps enter no median", steps),
        ],
        className="columns",
    )


def _over_time(report: Report, tables: Tables | None, chosen: Chosen) -> list[Component]:
    if tables is None or not len(tables.segments.rank):
        return []
    step = _shown_step(report, chosen)
    band = graph("timeline", timeline(tables, step))
    grid = graph("pipeline", pipeline(tables, step))
    ranks = len(set(tables.segments.rank.tolist()))
    shown = "each rank" if ranks <= ROWS else f"{ROWS} of {ranks:,} ranks, evenly spaced,"
    top = section("Timeline", f"what {shown} did", _step_menu(report, step), band)
    note = "microbatches on each stage; the holes between them are the bubble"
    # The grid stays in the page without boxes too: the menu's callback draws into it.
    below = html.Div(section("Pipeline", note, grid), hidden=not len(tables.boxes.rank))
    return [top, below]


def _shown_step(report: Report, chosen: Chosen) -> int | None:
    """The chosen step where there is one such, else the middle full step."""
    steps = sorted({row.step for row in report.steps})
    if chosen == "all":
        return None
    if chosen in steps:
        return chosen
    full = sorted({row.step for row in report.steps if row.kind == "full"}) or steps
    return full[len(full) // 2]


def _step_menu(report: Report, step: int | None) -> html.Div:
    kinds = {row.step: row.kind for row in report.steps}
    options = [
        {"label": f"step {n}" + ("" if kind == "full" else f" ({kind})"), "value": str(n)}
        for n, kind in sorted(kinds.items())
    ]
    menu = dcc.Dropdown(
        id="step",
        options=[*options, {"label": "all steps", "value": "all"}],
        value="all" if step is None else str(step),
        clearable=False,
        searchable=len(options) > 12,
        className="step-menu",
    )
    return html.Div([menu, dcc.Store(id="chosen")], className="step-row")
