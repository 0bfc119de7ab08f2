"""The Dash application: one layout, and a callback that renders the page of a URL."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from dash import (
    ClientsideFunction,
    Dash,
    Input,
    Output,
    State,
    callback_context,
    dcc,
    html,
    no_update,
    set_props,
)
from dash.exceptions import DependencyException, PreventUpdate
from flask import Flask, Response, current_app, make_response, request
from plotly import graph_objects as go
from plotly.io.json import to_json_plotly
from werkzeug.exceptions import NotFound

from stepsplit.analyzer.report.report import Report, Run
from stepsplit.analyzer.report.step_rows import StepRow
from stepsplit.dashboard.figures.communication import BandwidthPoint, draw_bandwidth
from stepsplit.dashboard.figures.run import draw_split_by_rank
from stepsplit.dashboard.figures.theme import build_bucket_css
from stepsplit.dashboard.pages import store_pages
from stepsplit.dashboard.pages.address import Address, build_page_url
from stepsplit.dashboard.pages.page import StorePage
from stepsplit.dashboard.pages.run_pages import find_run_page
from stepsplit.dashboard.pages.runs import build_upload_zone
from stepsplit.dashboard.pages.store_pages import find_store_page, parse_address
from stepsplit.dashboard.store.logins import Role, User
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import CALLBACKS, LOGOUT_PATH, current_user
from stepsplit.dashboard.web.http_error import HttpError
from stepsplit.dashboard.web.packed_files import ASSETS, FIRST_SCRIPT, add_assets
from stepsplit.dashboard.web.page_builder import PageBuilder
from stepsplit.dashboard.web.plotly_script import PLOTLY_PATH, add_plotly_route
from stepsplit.dashboard.web.report_cache import ReportCache
from stepsplit.dashboard.web.request_bodies import read_json
from stepsplit.dashboard.web.run_routes import build_export_routes, build_timeline_routes

POLL_MS = 1_000

_ANY_PAGE = ("/", "/<path:path>")
"""Dash's endpoints for the pages; each address gets the same document."""

_CHART_SCRIPTS = (PLOTLY_PATH, "/_dash-component-suites/dash/dcc/async-graph.js")
"""Most of what a page with charts loads; Dash asks for them when the page's content is there."""

_FETCHED = tuple(
    f"<{path}>; rel=preload; as=fetch; crossorigin=anonymous"
    for path in ("/_dash-layout", "/_dash-dependencies")
)
"""What Dash asks for once all of its scripts have run; they come meanwhile. Anonymous: with the
cookies of this site alone, as Dash asks."""

_CHARTS_HEAD = b'<head>\n<meta name="charts" content="ahead">'

_INDEX = f"""<!DOCTYPE html>
<html lang="en">
<head>
{{%metas%}}
<title>{{%title%}}</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script src="/assets/{FIRST_SCRIPT}"></script>
{{%css%}}
<style>{build_bucket_css()}</style>
</head>
<body>
{{%app_entry%}}
<footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer>
</body>
</html>
"""


def add_pages(server: Flask, store: Store) -> tuple[str, ...]:
    """Adds the pages to the server.

    Returns the hashes of the page's inline scripts for the content security policy.
    """
    cache = ReportCache(store)
    server.register_blueprint(build_timeline_routes(cache))
    server.register_blueprint(build_export_routes(cache))
    add_plotly_route(server)
    script, style = add_assets(server)
    app = Dash(
        __name__,
        server=server,  # type: ignore[arg-type]  # dash's type hint omits Flask
        title="stepsplit",
        update_title=None,  # type: ignore[arg-type]  # the title itself would show "undefined"
        assets_folder=str(ASSETS),
        # They come as one script and one style, after React.
        assets_ignore=r".*\.(js|css)",
        external_scripts=[script],
        external_stylesheets=[style],
        index_string=_INDEX,
        serve_locally=True,
        enable_mcp=False,
        suppress_callback_exceptions=True,
        add_log_handler=False,
    )
    app.layout = lambda: _build_layout(current_user())
    contents = PageBuilder(store, cache)
    _add_page_callbacks(app, contents)
    for page in store_pages.STORE_PAGES:
        if page.charts:
            _add_chart_actions(app, store, page)
    _refuse_odd_callbacks(server, app)
    # Of Dash, for the address of a script that it does not have.
    server.register_error_handler(DependencyException, lambda _: NotFound())
    _answer_pages(server, store)
    _warm()
    return tuple(app.csp_hashes())


@cache
def _warm() -> None:
    """Triggers the lazy setup of plotly and pyarrow so that the first page view is not slow."""
    import_module("pyarrow.parquet")
    run = Run("", 1, (0,), (), None, "", None, None, None, None, "0")
    step = StepRow(0, 1, "full", 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, False)
    figures = [
        draw_split_by_rank(Report(run=run, steps=(step,))),
        draw_bandwidth([BandwidthPoint("tp", "send", 1, 1.0, 1)]),
    ]
    figures.append(go.Figure([go.Heatmap()]).add_hline(y=1))
    for figure in figures:
        to_json_plotly(figure)


def _build_layout(user: User) -> html.Div:
    links = [
        dcc.Link(page.title, href=page.path)
        for page in store_pages.STORE_PAGES
        if not page.needs_admin or user.role >= Role.ADMIN
    ]
    header = [
        dcc.Link("stepsplit", href="/", className="brand"),
        html.Span("where every training step went", className="tagline"),
        html.Nav(links, className="pages"),
        html.Button("light / dark", id="theme", type="button", className="theme"),
    ]
    if user.in_session:
        title = f"logged in as {user.role.label}"
        leave = html.Button("log out", id="log-out", type="submit", className="theme", title=title)
        header.append(html.Form(leave, action=LOGOUT_PATH, method="POST", className="log-out"))
    may_upload = user.role >= Role.UPLOADER
    zone = html.Div(build_upload_zone() if may_upload else None, id="zone", hidden=True)
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=POLL_MS, disabled=True),
            dcc.Store(id="mark"),
            html.A("to the content", href="#page", className="skip"),
            html.Header(html.Div(header, className="inner"), className="top"),
            html.Main([zone, html.Div(id="page", tabIndex="-1")]),
        ]
    )


def _add_page_callbacks(app: Dash, contents: PageBuilder) -> None:
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
    ) -> tuple[Any, Any, bool, str]:
        address = _parse_address(path, search)
        changed = set(callback_context.triggered_prop_ids)
        if changed and "url.pathname" not in changed and contents.is_live(address):
            # Only this part changes: what is typed above it, and an open menu, stay.
            shown = None if "url.search" in changed else mark
            live = contents.build_live(address, current_user().role, shown)
            if live is None:
                raise PreventUpdate
            set_props("watch-live", {"children": live.children})
            set_props("watch-mark", {"data": live.fingerprint})
            return no_update, no_update, not live.pending, live.fingerprint
        user = current_user()
        content = contents.build_content(address, user.role, has_login=user.authenticated)
        if callback_context.triggered_id == "tick" and content.fingerprint == mark:
            raise PreventUpdate
        has_zone = False
        if address is not None and not address.run_id:
            has_zone = find_store_page(address).takes_uploads
        return content.children, not has_zone, not content.pending, content.fingerprint

    # A page that updates by itself is drawn again while it is open.
    @app.callback(
        Output("watch-live", "children"),
        Output("watch-mark", "data"),
        Input("watch-tick", "n_intervals"),
        State("url", "pathname"),
        State("url", "search"),
        State("watch-mark", "data"),
        prevent_initial_call=True,
    )
    def update(
        _: int | None, path: str | None, search: str | None, mark: str | None
    ) -> tuple[Any, str]:
        address = _parse_address(path, search)
        live = contents.build_live(address, current_user().role, mark)
        if live is None:
            raise PreventUpdate
        return live.children, live.fingerprint


def _add_chart_actions(app: Dash, store: Store, page: StorePage) -> None:
    """Opens a run on a click on a chart of the page, and shows a range of time that is dragged."""
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("watch", "zoom"),
        Output("url", "search", allow_duplicate=True),
        *(Input(chart, "relayoutData", allow_optional=True) for chart in page.charts),
        prevent_initial_call=True,
    )

    @app.callback(
        Output("url", "pathname", allow_duplicate=True),
        *(Input(chart, "clickData", allow_optional=True) for chart in page.charts),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    def open_run(*values: Any) -> str:
        clicked = dict(zip(page.charts, values, strict=False))
        address = _parse_address(values[-1], "")
        chart = callback_context.triggered_id
        if address is None or address.page != page.key or not clicked.get(chart):
            raise PreventUpdate
        try:
            run_id = page.find_run(store, address.item, clicked[chart])
        except ValueError:
            raise HttpError(400, "the click is on no point of a chart") from None
        if run_id is None:
            raise PreventUpdate
        return build_page_url(run_id)


def _parse_address(path: object, search: object) -> Address | None:
    """The address that the browser sends. Raises HttpError if it is not text."""
    if not isinstance(path, str | None) or not isinstance(search, str | None):
        raise HttpError(400, "the address must be text")
    return parse_address(path, search)


def _answer_pages(server: Flask, store: Store) -> None:
    """Pages, runs and watched runs that do not exist have the status 404; those that do name what
    the browser needs next."""
    build_document = server.view_functions[_ANY_PAGE[0]]

    def answer_page(path: str = "") -> Response:
        response = make_response(build_document())
        address = parse_address(f"/{path}", request.query_string.decode("ascii", "replace"))
        if address is None:
            exists = False
        elif address.run_id:
            run = store.find_run_or_role(address.run_id)
            exists = run is not None
            # A failed or waiting run and a hang have no charts, and a script that comes ahead and
            # is not run is a warning of the browser.
            has_charts = bool(run and run.has_report and find_run_page(address.page).loads_charts)
        else:
            page = find_store_page(address)
            exists = page.has_item(store, address.item)
            has_charts = page.loads_charts and bool(address.chosen.values or address.item)
        if address is None or not exists:
            response.status_code = 404
            return response
        ahead = list(_FETCHED)
        if has_charts:
            if address.run_id:
                # For assets/charts.js, which has them run.
                response.set_data(response.get_data().replace(b"<head>", _CHARTS_HEAD, 1))
            # They come while the page's content is made, not after it.
            ahead += [f"<{script}>; rel=preload; as=script" for script in _CHART_SCRIPTS]
        response.headers["Link"] = ", ".join(ahead)
        return response

    server.view_functions |= dict.fromkeys(_ANY_PAGE, answer_page)


# Dash answers a callback request that it did not send itself with an internal error.


def _refuse_odd_callbacks(server: Flask, app: Dash) -> None:
    """Refuses callback requests that do not name a callback of this app with its inputs."""
    answer = server.view_functions[CALLBACKS]

    def check_and_answer() -> Any:
        body = read_json()
        if not isinstance(body, dict) or not _is_callback(app, body):
            raise HttpError(400, "this is not a request of the dashboard's pages")
        return current_app.ensure_sync(answer)()

    server.view_functions[CALLBACKS] = check_and_answer


def _is_callback(app: Dash, body: dict[str, Any]) -> bool:
    output, changed = body.get("output"), body.get("changedPropIds", [])
    if not isinstance(output, str) or not isinstance(changed, list):
        return False
    known = app.callback_map.get(output)
    if known is None:
        return False
    inputs = [_name_property(one) for one in known["inputs"]]
    outputs = body.get("outputs")
    named = [_name_property(one) for one in (outputs if isinstance(outputs, list) else [outputs])]
    return (
        named == output.strip(".").split("...")
        and set(map(str, changed)) <= set(inputs)
        and _list_properties(body.get("inputs")) == inputs
        and _list_properties(body.get("state", [])) == [_name_property(s) for s in known["state"]]
    )


def _list_properties(sent: object) -> list[str | None] | None:
    return [_name_property(one) for one in sent] if isinstance(sent, list) else None


def _name_property(sent: object) -> str | None:
    """The component and property, such as url.search; None for anything else."""
    return f"{sent.get('id')}.{sent.get('property')}" if isinstance(sent, dict) else None
