"""The Dash application: one layout, one callback that turns an address into a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate
from flask import Flask
from plotly.graph_objects import Figure

from stepsplit.analyzer.analysis import examine
from stepsplit.dashboard.store.ingest import Analyze, Worker
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.address import run_id_of, search_of, step_of
from stepsplit.dashboard.web.api import FILE_LIMIT_BYTES, Api, blueprint
from stepsplit.dashboard.web.run_page import missing_page, run_page, step_figures
from stepsplit.dashboard.web.runs_page import runs_page, upload_zone
from stepsplit.dashboard.web.security import protect

POLL_MS = 1_000
_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>
"""


def create_app(
    store: Store, *, analyze: Analyze = examine, file_limit_bytes: int = FILE_LIMIT_BYTES
) -> Dash:
    """The dashboard on the store. Analyses that an earlier server left are taken up again."""
    server = Flask(__name__)
    server.url_map.merge_slashes = False
    worker = Worker(store, analyze)
    server.register_blueprint(blueprint(Api(store, worker, file_limit_bytes)))
    app = Dash(
        __name__,
        server=server,  # type: ignore[arg-type]  # dash's hint forgets what its manual says
        title="stepsplit",
        update_title=None,  # type: ignore[arg-type]  # the same as title makes it "undefined"
        assets_folder=str(Path(__file__).parent / "assets"),
        index_string=_INDEX,
        serve_locally=True,
        enable_mcp=False,
        suppress_callback_exceptions=True,
        add_log_handler=False,
    )
    app.layout = _layout
    _route(app, store)
    _choose_step(app, store)
    protect(server, app.csp_hashes())
    worker.resume()
    return app


def _layout() -> html.Div:
    brand = html.A("stepsplit", href="/", className="brand")
    tagline = html.Span("where every training step went", className="tagline")
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=POLL_MS, disabled=True),
            html.Header(html.Div([brand, tagline], className="inner"), className="top"),
            html.Main([html.Div(upload_zone(), id="zone", hidden=True), html.Div(id="page")]),
        ]
    )


def _route(app: Dash, store: Store) -> None:
    @app.callback(
        Output("page", "children"),
        Output("zone", "hidden"),
        Output("tick", "disabled"),
        Input("url", "pathname"),
        Input("tick", "n_intervals"),
        State("url", "search"),
    )
    def show(path: str, _: int | None, search: str | None) -> tuple[Any, bool, bool]:
        run_id = run_id_of(path or "/")
        if run_id is None:
            rows = store.runs()
            return runs_page(rows), path not in ("/", None), not any(row.pending for row in rows)
        row = store.run(run_id)
        if row is None:
            return missing_page(), True, True
        return run_page(store, row, step_of(search)), True, not row.pending


def _choose_step(app: Dash, store: Store) -> None:
    @app.callback(
        Output("timeline", "figure"),
        Output("pipeline", "figure"),
        Output("chosen", "data"),
        Input("step", "value"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    def choose(value: str, path: str) -> tuple[Figure, Figure, str]:
        step = None if value == "all" else int(value)
        timeline, pipeline = step_figures(store, str(run_id_of(path)), step)
        return timeline, pipeline, search_of(step)

    # Apart from the figures: with the address among its outputs, dash would run the callback
    # above when the page opens, and draw everything twice.
    @app.callback(Output("url", "search"), Input("chosen", "data"), prevent_initial_call=True)
    def remember(search: str | None) -> str:
        if search is None:
            raise PreventUpdate
        return search
