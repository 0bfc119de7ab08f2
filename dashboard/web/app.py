"""The Dash application: one layout, and a callback that renders the page of a URL."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.resources import files
from typing import Any

import orjson
from dash import Dash, Input, Output, State, callback_context, dcc, html
from dash.exceptions import PreventUpdate
from flask import Blueprint, Flask, Response, request
from plotly import graph_objects as go
from plotly.io.json import to_json_plotly

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.report import Report, Run, StepRow
from stepsplit.dashboard.figures.communication import BandwidthPoint, bandwidth
from stepsplit.dashboard.figures.run import by_rank
from stepsplit.dashboard.pages.compare import compare_page, history_page, metric_of
from stepsplit.dashboard.pages.components import (
    Address,
    AddressQuery,
    address_of,
    nothing,
    page_url,
)
from stepsplit.dashboard.pages.runs import (
    missing_page,
    run_page,
    runs_page,
    upload_zone,
    waiting_page,
)
from stepsplit.dashboard.pages.timeline import TimelineView, index_json, window_json
from stepsplit.dashboard.reporters.perfetto import perfetto_trace
from stepsplit.dashboard.store.runs import RunRow
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.html_export import still_routes
from stepsplit.dashboard.web.report_cache import Kept, Loaded, tables_of

# The Dash application: one layout, and a callback that renders the page of a URL.

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
    """Adds the pages to the server.

    Returns the hashes of the page's inline scripts for the content security policy.
    """
    loaded = Loaded(store)
    server.register_blueprint(timeline_routes(loaded))
    server.register_blueprint(still_routes(loaded))
    app = Dash(
        __name__,
        server=server,  # type: ignore[arg-type]  # dash's type hint omits Flask
        title="stepsplit",
        update_title=None,  # type: ignore[arg-type]  # the title itself would show "undefined"
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
    """Triggers the lazy setup of plotly and pyarrow so that the first page view is not slow."""
    import_module("pandas")
    run = Run("", 1, (0,), (), None, "", None, None, None, None, "0")
    step = StepRow(0, 1, "full", 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, False)
    figures = [
        by_rank(Report(run=run, steps=(step,))),
        bandwidth([BandwidthPoint("tp", "send", 1, 1.0, 1)]),
    ]
    figures.append(go.Figure([go.Heatmap(), go.Waterfall()]).add_hline(y=1))
    for figure in figures:
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
    """Opens the timeline on a click on the bar of a rank or step."""

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


# Page contents by URL, with a cache for finished runs.

_PAGES = 64


@dataclass(frozen=True, slots=True)
class Content:
    """A page's components in Dash's format. Pending pages are polled, and redrawn when their mark
    changes."""

    children: Any
    pending: bool = False
    mark: str = ""


class Contents:
    """The pages of a store. Pages of finished runs are cached in serialized form."""

    def __init__(self, store: Store, loaded: Loaded) -> None:
        self._store, self._loaded = store, loaded
        self._kept: Kept[dict[str, Any]] = Kept(_PAGES)

    def of(self, address: Address | None) -> Content:
        """The content of the page at this address."""
        if address is None:
            return Content(missing_page())
        match address.page:
            case "runs":
                rows = self._store.runs()
                pending = any(row.pending for row in rows)
                return Content(runs_page(rows, address.chosen), pending, _mark(rows))
            case "compare":
                return Content(self._compared(address.chosen))
            case "history":
                return Content(self._history(address.chosen))
        return self._run(address)

    def _run(self, address: Address) -> Content:
        run = self._store.run(address.run_id)
        if run is None:
            return Content(missing_page())
        if run.state != "done":
            return Content(waiting_page(run), run.state != "failed", _mark(run))
        try:
            return Content(self._kept.get(_key(address, run), lambda: self._made(run, address)))
        except DataError as error:
            return Content(
                html.Div([html.H1(run.name), nothing("This run cannot be read", str(error))])
            )

    def _made(self, run: RunRow, address: Address) -> dict[str, Any]:
        """The page as plain JSON values, cheap to send again."""
        page = run_page(self._loaded.view(run), address)
        made: dict[str, Any] = orjson.loads(to_json_plotly(page, engine="orjson"))
        return made

    def _compared(self, chosen: AddressQuery) -> html.Div:
        runs = [self._store.run(chosen.text(side) or "") for side in ("baseline", "candidate")]
        done = [run for run in runs if run is not None and run.state == "done"]
        if len(done) < len(runs):
            hint = "Select two finished runs in the list with the checkboxes next to their names."
            return html.Div([html.H1("Compare"), nothing("Select two runs", hint)])
        try:
            baseline, candidate = (self._loaded.view(run) for run in done)
        except DataError as error:
            return html.Div([html.H1("Compare"), nothing("A run cannot be read", str(error))])
        return html.Div([html.H1("Compare"), *compare_page(baseline, candidate)])

    def _history(self, chosen: AddressQuery) -> html.Div:
        rows = {row.id: row for row in self._store.runs()}
        tags = sorted({f"{tag.key}={tag.value}" for row in rows.values() for tag in row.tags})
        points = self._store.numbers.history(metric_of(chosen))
        wanted = chosen.text("tag")
        own = [one for one in points if not wanted or wanted in _tags(rows.get(one.run_id))]
        return html.Div([html.H1("History"), *history_page(own, tags, chosen)])


def _mark(shown: object) -> str:
    return sha256(repr(shown).encode()).hexdigest()[:16]


def _key(address: Address, run: RunRow) -> tuple[object, ...]:
    return address.page, run.id, run.name, tuple(sorted(address.chosen.values.items()))


def _tags(run: RunRow | None) -> set[str]:
    return set() if run is None else {f"{tag.key}={tag.value}" for tag in run.tags}


# JSON routes for the timeline: ranks and steps of a run, and time windows of it.

SLOTS, RANKS = 2_000, 256

_RUN = "/api/v1/runs/<run_id>"


def timeline_routes(loaded: Loaded) -> Blueprint:
    """The routes; all of them require a finished run."""
    routes = Blueprint("timeline", __name__)
    routes.add_url_rule(
        f"{_RUN}/timeline", "index", lambda run_id: _json(index_json(loaded.scene(run_id)))
    )
    routes.add_url_rule(
        f"{_RUN}/timeline/window", "window", lambda run_id: _json(_window(loaded.scene(run_id)))
    )
    routes.add_url_rule(f"{_RUN}/perfetto", "perfetto", lambda run_id: _perfetto(loaded, run_id))
    routes.register_error_handler(DataError, lambda error: (_json({"error": str(error)}), 404))
    routes.register_error_handler(ValueError, lambda error: (_json({"error": str(error)}), 400))
    return routes


def _json(body: dict[str, Any]) -> Response:
    packed = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(packed, mimetype="application/json")


def _window(scene: TimelineView) -> dict[str, Any]:
    """The window of the query: from and to in ns, slots per line, ranks and open as lists."""
    from_ns, to_ns = _number("from"), _number("to")
    if to_ns <= from_ns:
        raise ValueError("the window is empty: to must be later than from")
    slots = min(max(_number("slots"), 1), SLOTS)
    known = {one.rank for one in scene.ranks}
    ranks = [rank for rank in _numbers("ranks")[:RANKS] if rank in known]
    return window_json(scene.window(from_ns, to_ns, slots, ranks, _numbers("open")))


def _number(name: str) -> int:
    try:
        return int(float(request.args.get(name, "")))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be a number") from None


def _numbers(name: str) -> list[int]:
    parts = request.args.get(name, "").split(",")
    return [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 9]


def _perfetto(loaded: Loaded, run_id: str) -> Response:
    """A gzip-compressed trace of all ranks for ui.perfetto.dev."""
    view = loaded.finished(run_id)
    body = _packed(perfetto_trace(view.report, tables_of(view)))
    name = f"attachment; filename={run_id}.pftrace.gz"
    return Response(body, mimetype="application/gzip", headers={"Content-Disposition": name})


def _packed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(3, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for chunk in chunks:
        yield packer.compress(chunk)
    yield packer.flush()
