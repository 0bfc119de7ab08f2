"""The Dash application: one layout, and a callback that turns an address into a page."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from dash import Dash, Input, Output, State, callback_context, dcc, html
from dash.exceptions import PreventUpdate
from flask import Flask
from plotly import graph_objects as go
from plotly.io.json import to_json_plotly

from stepsplit.analyzer.report.report import Report, Run, StepRow
from stepsplit.dashboard.figures.bandwidth import Point, bandwidth
from stepsplit.dashboard.figures.split import by_rank
from stepsplit.dashboard.pages.address import address_of, page_url
from stepsplit.dashboard.pages.runs import upload_zone
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.content import Contents
from stepsplit.dashboard.web.loaded import Loaded
from stepsplit.dashboard.web.still_api import still_routes
from stepsplit.dashboard.web.timeline_api import timeline_routes

POLL_MS = 1_000
_BARS = ("by-rank", "by-step")
_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script src="/assets/theme.js"></script>
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>
"""


def add_pages(server: Flask, store: Store) -> tuple[str, ...]:
    """Adds the pages on the store to the server. The hashes of the page's inline scripts, for its
    content security policy."""
    loaded = Loaded(store)
    server.register_blueprint(timeline_routes(loaded))
    server.register_blueprint(still_routes(loaded))
    app = Dash(
        __name__,
        server=server,  # type: ignore[arg-type]  # dash's hint forgets what its manual says
        title="stepsplit",
        update_title=None,  # type: ignore[arg-type]  # the same as title makes it "undefined"
        assets_folder=str(files("stepsplit.dashboard.web") / "assets"),
        assets_ignore=r"theme\.js",
        index_string=_INDEX,
        serve_locally=True,
        enable_mcp=False,
        suppress_callback_exceptions=True,
        add_log_handler=False,
    )
    app.layout = _layout
    _route(app, Contents(store, loaded))
    _lead_to_timeline(app)
    _warm()
    return tuple(app.csp_hashes())


@cache
def _warm() -> None:
    """Plotly builds its classes, and pyarrow loads pandas, when they are first used: not while the
    first viewer waits."""
    import_module("pandas")
    run = Run("", 1, (0,), (), None, "", None, None, None, None, "0")
    step = StepRow(0, 1, "full", 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, False)
    drawn = [by_rank(Report(run=run, steps=(step,))), bandwidth([Point("tp", "send", 1, 1.0, 1)])]
    drawn.append(go.Figure([go.Heatmap(), go.Waterfall()]).add_hline(y=1))
    for figure in drawn:
        to_json_plotly(figure)


def _layout() -> html.Div:
    links = [("Runs", "/"), ("Compare", "/compare"), ("History", "/history")]
    nav = html.Nav([dcc.Link(text, href=href) for text, href in links], className="pages")
    brand = dcc.Link("stepsplit", href="/", className="brand")
    tagline = html.Span("where every training step went", className="tagline")
    theme = html.Button("light / dark", id="theme", type="button", className="theme")
    head = html.Div([brand, tagline, nav, theme], className="inner")
    zone = html.Div(upload_zone(), id="zone", hidden=True)
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=POLL_MS, disabled=True),
            dcc.Store(id="mark"),
            html.Header(head, className="top"),
            html.Main([zone, html.Div(id="page")]),
        ]
    )


def _route(app: Dash, contents: Contents) -> None:
    @app.callback(
        Output("page", "children"),
        Output("zone", "hidden"),
        Output("tick", "disabled"),
        Output("mark", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("tick", "n_intervals"),
        State("mark", "data"),
    )
    def show(
        path: str | None, search: str | None, _: int | None, mark: str | None
    ) -> tuple[Any, bool, bool, str]:
        address = address_of(path, search)
        content = contents.of(address)
        if callback_context.triggered_id == "tick" and content.mark == mark:
            raise PreventUpdate
        at_home = address is not None and address.page == "runs"
        return content.children, not at_home, not content.pending, content.mark


def _lead_to_timeline(app: Dash) -> None:
    """A click on a rank's or step's bar."""

    @app.callback(
        Output("url", "href"),
        *(Input(bars, "clickData", allow_optional=True) for bars in _BARS),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    def lead(rank: Any, step: Any, path: str | None) -> str:
        address = address_of(path, "")
        of_rank = callback_context.triggered_id == _BARS[0]
        which, clicked = ("rank", rank) if of_rank else ("step", step)
        if address is None or not clicked:
            raise PreventUpdate
        number = str(clicked["points"][0]["x"]).split()[0]
        return page_url(address.run_id, "timeline", **{which: number})
