"""One run: its name, the way to its pages, and the page that is asked for."""

from __future__ import annotations

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.dashboard.pages.address import RUN_PAGES, Address, page_url
from stepsplit.dashboard.pages.collectives import collectives_page
from stepsplit.dashboard.pages.compute import compute
from stepsplit.dashboard.pages.idle import idle
from stepsplit.dashboard.pages.memory import memory_page
from stepsplit.dashboard.pages.model import model_page
from stepsplit.dashboard.pages.overview import overview
from stepsplit.dashboard.pages.parts import aria, nothing, progress_bar, state_pill
from stepsplit.dashboard.pages.pipeline import pipeline_page
from stepsplit.dashboard.pages.timeline import timeline_page
from stepsplit.dashboard.pages.view import View
from stepsplit.dashboard.store.store import RunRow

_WAITING = {
    "uploading": "Its files are still on the way.",
    "queued": "Waiting for the analysis before it to end.",
    "running": "The analysis is under way; this page shows it when it is done.",
}


def run_page(view: View, address: Address) -> html.Div:
    """The page of a finished run that the address names."""
    report = f"/api/v1/runs/{view.run_id}/report.json"
    more = [html.A("report.json", href=report), html.A("one page to keep", href=_still(view))]
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
    """What ranks compute, which do so slower than their peers, and why they idle."""
    shown: list[Component] = [*compute(view.report), *idle(view.report)]
    return shown or [nothing("No compute", "The recording holds no kernel and no op.")]


def waiting_page(run: RunRow) -> html.Div:
    """A run that has no report: still to come, or failed, and why."""
    head = html.Div([html.H1(run.name), state_pill(run)], className="heading")
    told = run.error if run.state == "failed" else _WAITING.get(run.state, "")
    parts: list[str | Component] = [told or ""]
    if run.state == "running" and run.progress is not None:
        parts += [html.Br(), progress_bar(run.progress), f" {run.progress_note or ''}"]
    return html.Div([head, html.P(parts, className=f"card status {run.state}")])


def missing_page(told: str = "There is no such page or run") -> html.Div:
    """What is said of an address that nothing has."""
    back = dcc.Link("the list of runs", href="/")
    return html.Div([html.H1(told), html.P(["It may be in ", back, "."])])
