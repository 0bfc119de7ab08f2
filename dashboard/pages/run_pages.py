"""The pages of a run: their list, and the frame around them with name, tabs and buttons."""

from __future__ import annotations

from dataclasses import replace

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.dashboard.pages import communication, compute, model, overview, structure, timeline
from stepsplit.dashboard.pages.address import Address, build_page_url
from stepsplit.dashboard.pages.components import (
    View,
    build_aria_label,
    build_progress_bar,
    build_state_pill,
)
from stepsplit.dashboard.pages.page import RunPage
from stepsplit.dashboard.pages.run_actions import RunRights, build_run_actions, build_run_labels
from stepsplit.dashboard.store.run_row import RunRow

RUN_PAGES: tuple[RunPage, ...] = (
    overview.PAGE,
    timeline.PAGE,
    communication.PIPELINE_PAGE,
    communication.COLLECTIVES_PAGE,
    compute.COMPUTE_PAGE,
    structure.PAGE,
    compute.MEMORY_PAGE,
    model.PAGE,
)
"""In the order of the tabs, and of the chapters of the HTML export."""


def find_run_page(key: str) -> RunPage:
    """The page of this key."""
    return next(page for page in RUN_PAGES if page.key == key)


_ALL = RunRights()

_WAITING = {
    "uploading": "The upload is not finished.",
    "queued": "Queued for analysis.",
    "running": "The analysis is running; this page updates when it is done.",
}


def build_run_page(view: View, address: Address, run: RunRow, rights: RunRights = _ALL) -> html.Div:
    """The page of a finished run that the URL selects."""
    data = f"/api/v1/runs/{view.run_id}/report"
    view = replace(view, offers_job=rights.edit and run.can_be_analyzed_again)
    whole = []
    if run.is_role:
        whole = [dcc.Link("all roles", href=build_page_url(run.id.partition(".")[0]))]
    links = html.Span(
        [
            *whole,
            html.A("report.json", href=f"{data}.json"),
            html.A("download as HTML", href=f"{data}.html"),
            *build_run_actions(run, rights),
        ],
        className="heading-links",
    )
    tabs = [
        dcc.Link(
            page.key.capitalize(),
            href=build_page_url(view.run_id, page.key if at else ""),
            className="on" if page.key == address.page else "",
        )
        for at, page in enumerate(RUN_PAGES)
    ]
    return html.Div(
        [
            html.Div([html.H1(view.name), links], className="heading"),
            *build_run_labels(run, rights),
            html.Nav(tabs, className="tabs", **build_aria_label("pages of this run")),
            *find_run_page(address.page).build(view, address.chosen),
        ]
    )


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
