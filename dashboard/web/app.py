"""The Dash application: one layout, and a callback that renders the page of a URL."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import orjson
from dash import Dash, Input, Output, State, callback_context, dcc, html
from dash.exceptions import DependencyException, PreventUpdate
from flask import Blueprint, Flask, Response, current_app, make_response, request
from plotly import graph_objects as go
from plotly.io.json import to_json_plotly
from werkzeug.exceptions import NotFound

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.prediction_process import NoPrediction
from stepsplit.analyzer.report.report import Report, Run
from stepsplit.analyzer.report.step_rows import StepRow
from stepsplit.dashboard.figures.communication import BandwidthPoint, draw_bandwidth
from stepsplit.dashboard.figures.run import draw_split_by_rank
from stepsplit.dashboard.figures.theme import build_bucket_css
from stepsplit.dashboard.pages.compare import (
    build_comparison_of_many,
    build_run_pickers,
    compare_page,
    select_runs,
)
from stepsplit.dashboard.pages.components import (
    Address,
    AddressQuery,
    build_empty_card,
    build_page_url,
    parse_address,
)
from stepsplit.dashboard.pages.history import build_history_page, choose_metric
from stepsplit.dashboard.pages.run_actions import RunRights
from stepsplit.dashboard.pages.runs import (
    TABLE_PAGES,
    build_missing_page,
    build_run_page,
    build_runs_page,
    build_upload_zone,
    build_waiting_page,
)
from stepsplit.dashboard.pages.timeline import (
    MAX_QUERY_LENGTH,
    TimelineView,
    WindowDetail,
    build_index_json,
    build_matches_json,
    build_range_json,
    build_window_json,
)
from stepsplit.dashboard.pages.watch import (
    SAMPLE_CHARTS,
    build_alerts_section,
    build_live_frame,
    build_watch_list,
    build_watch_page,
    compute_watch_mark,
    parse_click,
    read_watch_view,
)
from stepsplit.dashboard.reporters.perfetto import perfetto_trace
from stepsplit.dashboard.store.logins import Role, User
from stepsplit.dashboard.store.runs import RunRow
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.api import read_json
from stepsplit.dashboard.web.auth import CALLBACKS, LOGOUT_PATH, current_user
from stepsplit.dashboard.web.html_export import build_export_routes
from stepsplit.dashboard.web.report_cache import LruCache, ReportCache, require_tables
from stepsplit.dashboard.web.uploads import HttpError

# The Dash application: one layout, and a callback that renders the page of a URL.

POLL_MS = 1_000

_BARS = ("by-rank", "by-step")

_ANY_PAGE = "/<path:path>"
"""Dash's endpoint for the pages; each address gets the same document."""

_INDEX = f"""<!DOCTYPE html>
<html lang="en">
<head>
{{%metas%}}
<title>{{%title%}}</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script src="/assets/theme.js"></script>
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
    app.layout = lambda: _build_layout(current_user())
    contents = PageBuilder(store, cache)
    _add_page_callback(app, contents)
    _add_watch_callback(app, contents)
    _add_timeline_link(app)
    _add_sample_link(app, contents)
    _refuse_odd_callbacks(server, app)
    # Of Dash, for the address of a script that it does not have.
    server.register_error_handler(DependencyException, lambda _: NotFound())
    _mark_missing_pages(server, store)
    _keep_assets(server)
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
    figures.append(go.Figure([go.Heatmap(), go.Waterfall()]).add_hline(y=1))
    for figure in figures:
        to_json_plotly(figure)


def _build_layout(user: User) -> html.Div:
    links = [("Runs", "/"), ("Compare", "/compare"), ("History", "/history"), ("Watch", "/watch")]
    nav = html.Nav([dcc.Link(text, href=href) for text, href in links], className="pages")
    brand = dcc.Link("stepsplit", href="/", className="brand")
    tagline = html.Span("where every training step went", className="tagline")
    theme = html.Button("light / dark", id="theme", type="button", className="theme")
    log_out = [_build_log_out(user)] if user.in_session else []
    header = html.Div([brand, tagline, nav, theme, *log_out], className="inner")
    may_upload = user.role >= Role.UPLOADER
    zone = html.Div(build_upload_zone() if may_upload else None, id="zone", hidden=True)
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=POLL_MS, disabled=True),
            dcc.Store(id="mark"),
            html.A("to the content", href="#page", className="skip"),
            html.Header(header, className="top"),
            html.Main([zone, html.Div(id="page", tabIndex="-1")]),
        ]
    )


def _build_log_out(user: User) -> html.Form:
    """The button that ends the session."""
    title = f"logged in as {user.role.label}"
    button = html.Button("log out", id="log-out", type="submit", className="theme", title=title)
    return html.Form(button, action=LOGOUT_PATH, method="POST", className="log-out")


def _add_page_callback(app: Dash, contents: PageBuilder) -> None:
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
        address = parse_address(_require_text(path), _require_text(search))
        content = contents.build_content(address, current_user().role)
        if callback_context.triggered_id == "tick" and content.fingerprint == mark:
            raise PreventUpdate
        at_home = address is not None and address.page == "runs"
        return content.children, not at_home, not content.pending, content.fingerprint


def _add_watch_callback(app: Dash, contents: PageBuilder) -> None:
    """Draws a page of watched runs again while it is open."""

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
        address = parse_address(_require_text(path), _require_text(search))
        if address is None or address.page != "watch":
            raise PreventUpdate
        live = contents.build_watch(address, current_user().role, mark)
        if live is None:
            raise PreventUpdate
        return live.children, live.fingerprint


def _add_timeline_link(app: Dash) -> None:
    """Opens the timeline on a click on the bar of a rank or step."""

    @app.callback(
        # Not href: that changes the address alone.
        Output("url", "pathname"),
        Output("url", "search"),
        *(Input(bars, "clickData", allow_optional=True) for bars in _BARS),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    def open_timeline(rank: Any, step: Any, path: str | None) -> tuple[str, str]:
        address = parse_address(_require_text(path), "")
        of_rank = callback_context.triggered_id == _BARS[0]
        which, clicked = ("rank", rank) if of_rank else ("step", step)
        if address is None or not clicked:
            raise PreventUpdate
        try:
            number = str(clicked["points"][0]["x"]).split()[0]
        except (LookupError, TypeError):
            raise HttpError(400, "the click is on no bar") from None
        url = urlsplit(build_page_url(address.run_id, "timeline", **{which: number}))
        return url.path, f"?{url.query}"


def _add_sample_link(app: Dash, contents: PageBuilder) -> None:
    """Opens the run of the nearest sample on a click on a chart of a watched run."""

    @app.callback(
        Output("url", "pathname", allow_duplicate=True),
        *(Input(chart, "clickData", allow_optional=True) for chart in SAMPLE_CHARTS),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    def open_sample(*values: Any) -> str:
        clicked = dict(zip(SAMPLE_CHARTS, values, strict=False))
        address = parse_address(_require_text(values[-1]), "")
        chart = callback_context.triggered_id
        if address is None or address.page != "watch" or not clicked.get(chart):
            raise PreventUpdate
        try:
            run_id = contents.find_run_of_sample(address.watched, parse_click(clicked[chart]))
        except ValueError:
            raise HttpError(400, "the click is on no point of a chart") from None
        if run_id is None:
            raise PreventUpdate
        return build_page_url(run_id)


def _keep_assets(server: Flask) -> None:
    """Browsers keep the scripts and styles whose address names their version."""

    @server.after_request
    def keep(response: Response) -> Response:
        is_versioned = request.path.startswith("/assets/") and "m" in request.args
        if is_versioned and response.status_code == 200:
            response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def _mark_missing_pages(server: Flask, store: Store) -> None:
    """Pages and runs that do not exist have the status 404."""
    page = server.view_functions[_ANY_PAGE]

    def answer_page(path: str) -> Response:
        response = make_response(page(path))
        address = parse_address(f"/{path}", "")
        if address is None or not _has_page(store, address):
            response.status_code = 404
        return response

    server.view_functions[_ANY_PAGE] = answer_page


def _has_page(store: Store, address: Address) -> bool:
    """Whether the run or watched run of the address exists, if it names one."""
    if address.watched:
        return store.watches.find_watch(address.watched) is not None
    return not address.run_id or store.find_run(address.run_id) is not None


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


def _require_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise HttpError(400, "the address must be text")


# Page contents by URL, with a cache for finished runs.

_CACHED_PAGES = 64

_SHOWN_ALERTS = 20

_ODD_DATA = (
    "Its data is of a kind that this page does not expect; the server's log names the error. Please"
    " report it with the recording."
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageContent:
    """A page's components in Dash's format. Pending pages are polled, and redrawn when their mark
    changes."""

    children: Any
    pending: bool = False
    fingerprint: str = ""


class PageBuilder:
    """The pages of a store. Pages of finished runs are cached in serialized form."""

    def __init__(self, store: Store, loaded: ReportCache) -> None:
        self._store, self._loaded = store, loaded
        self._kept: LruCache[dict[str, Any]] = LruCache(_CACHED_PAGES)

    def find_run_of_sample(self, watched: str, unix_ns: int) -> str | None:
        """The stored run of the nearest sample of a watched run; None without one."""
        run = self._store.watches.find_watch(watched)
        return None if run is None else self._store.watches.find_run_of_sample(run.id, unix_ns)

    def build_content(self, address: Address | None, role: Role = Role.VIEWER) -> PageContent:
        """The content of the page at this address, with the buttons that the role may use."""
        if address is None:
            return PageContent(build_missing_page())
        match address.page:
            case "runs":
                rows = self._store.list_runs()
                pending = any(row.pending for row in rows)
                return PageContent(
                    build_runs_page(rows, address.chosen, may_upload=role >= Role.UPLOADER),
                    pending,
                    _compute_fingerprint(rows),
                )
            case "compare":
                return PageContent(self._build_comparison(address.chosen))
            case "history":
                return PageContent(self._build_history(address.chosen))
            case "watch":
                live = self.build_watch(address, role)
                if live is None:
                    return PageContent(build_missing_page())
                return PageContent(build_live_frame(live.children, live.fingerprint))
        return self._build_run(
            address, RunRights(edit=role >= Role.UPLOADER, delete=role >= Role.ADMIN)
        )

    def build_watch(
        self, address: Address, role: Role, mark: str | None = None
    ) -> PageContent | None:
        """The list of watched runs, or the page of one of them with the buttons that the role may
        use; None if it does not exist, or if the mark shows that it is still the same."""
        watches, now_ns = self._store.watches, time.time_ns()
        found = watches.find_watch(address.watched) if address.watched else None
        if address.watched and found is None:
            return None
        runs = watches.list_watches() if found is None else (found,)
        newest = compute_watch_mark(runs, address.chosen, now_ns)
        if newest == mark:
            return None
        if found is None:
            open_alerts = self._store.alerts.count_open()
            return PageContent(build_watch_list(runs, now_ns, open_alerts), fingerprint=newest)
        view = read_watch_view(watches, found, address.chosen, now_ns)
        opened = self._store.alerts.list_alerts(found.name, _SHOWN_ALERTS, is_open=True)
        alerts = build_alerts_section(opened, now_ns, may_act=role >= Role.UPLOADER)
        return PageContent(build_watch_page(view, address.chosen, alerts), fingerprint=newest)

    def _build_run(self, address: Address, rights: RunRights) -> PageContent:
        run = self._store.find_run(address.run_id)
        if run is None:
            return PageContent(build_missing_page())
        if run.state != "done":
            return PageContent(
                build_waiting_page(run, rights),
                run.state != "failed",
                _compute_fingerprint(run),
            )
        key = (*_build_cache_key(address, run), rights)
        try:
            rendered = self._kept.find(key)
            if rendered is None and address.page == "model":
                # Rendered outside of the cache, where requests for the same page would wait for
                # each other with a thread each: too many predictions at once are refused.
                rendered = self._render_run(run, address, rights)
            return PageContent(
                self._kept.get(key, lambda: rendered or self._render_run(run, address, rights))
            )
        except NoPrediction as error:
            # Not cached; a busy server is asked again by the page's next tick.
            problem = _build_problem(run.name, "No prediction", str(error))
            return PageContent(problem, error.is_busy, _compute_fingerprint(str(error)))
        except DataError as error:
            return PageContent(_build_problem(run.name, "This run cannot be read", str(error)))
        except Exception:  # noqa: BLE001 - a bug met by odd data; other pages may still work
            _LOG.exception("page %s of run %s failed", address.page, run.id)
            return PageContent(_build_problem(run.name, "This page cannot be shown", _ODD_DATA))

    def _render_run(self, run: RunRow, address: Address, rights: RunRights) -> dict[str, Any]:
        """The page as plain JSON values, cheap to send again."""
        loaded = self._loaded
        load = loaded.load_view if address.page in TABLE_PAGES else loaded.load_report_view
        page = build_run_page(load(run), address, run, rights)
        rendered: dict[str, Any] = orjson.loads(to_json_plotly(page, engine="orjson"))
        return rendered

    def _build_comparison(self, chosen: AddressQuery) -> html.Div:
        rows = self._store.list_runs()
        selection = select_runs(rows, chosen)
        head = [html.H1("Compare"), build_run_pickers(rows, selection, chosen)]
        if len(selection.runs) < 2:
            hint = "Choose two or more finished runs, or mark them in the list of runs."
            return html.Div([*head, build_empty_card("Select runs", hint)])
        try:
            views = [self._loaded.load_report_view(run) for run in selection.runs]
            if len(views) == 2:
                return html.Div([*head, *compare_page(*views)])
            work = chosen.find_text("work") or ""
            return html.Div([*head, *build_comparison_of_many(views, work)])
        except DataError as error:
            return _build_problem("Compare", "A run cannot be read", str(error))
        except Exception:  # noqa: BLE001 - as above
            _LOG.exception("the comparison of runs %s failed", [run.id for run in selection.runs])
            return _build_problem("Compare", "These runs cannot be compared", _ODD_DATA)

    def _build_history(self, chosen: AddressQuery) -> html.Div:
        rows = {row.id: row for row in self._store.list_runs()}
        tags = sorted({f"{tag.key}={tag.value}" for row in rows.values() for tag in row.tags})
        points = self._store.numbers.read_history(choose_metric(chosen))
        wanted = chosen.find_text("tag")
        own = [one for one in points if not wanted or wanted in _list_tags(rows.get(one.run_id))]
        return html.Div([html.H1("History"), *build_history_page(own, tags, chosen)])


def _build_problem(title: str, problem: str, detail: str) -> html.Div:
    return html.Div([html.H1(title), build_empty_card(problem, detail)])


def _compute_fingerprint(shown: object) -> str:
    return sha256(repr(shown).encode()).hexdigest()[:16]


def _build_cache_key(address: Address, run: RunRow) -> tuple[object, ...]:
    return address.page, run, tuple(sorted(address.chosen.values.items()))


def _list_tags(run: RunRow | None) -> set[str]:
    return set() if run is None else {f"{tag.key}={tag.value}" for tag in run.tags}


# JSON routes for the timeline: ranks and steps of a run, its time windows, and questions about it.

SLOTS, RANKS = 2_000, 512

BAND_SLOTS = 2
"""Slots of the shortest slice of a band that is sent by itself: narrower ones have no label."""

MAX_MATCHES = 200
"""Matches of a search in one response."""

_MAX_NUMBER = 1 << 61
"""Largest time in ns, so that the length of a window fits into 64 bits."""

_RUN = "/api/v1/runs/<run_id>"


def build_timeline_routes(cache: ReportCache) -> Blueprint:
    """The routes; all of them require a finished run."""
    routes = Blueprint("timeline", __name__)
    answers: dict[str, Callable[[TimelineView], dict[str, Any]]] = {
        "": build_index_json,
        "/window": _read_window,
        "/search": _search,
        "/measure": _measure,
        "/slice": _read_slice,
        "/name": _read_name,
    }
    for path, answer in answers.items():
        routes.add_url_rule(
            f"{_RUN}/timeline{path}",
            path.strip("/") or "index",
            lambda run_id, answer=answer: _build_json_response(answer(cache.load_timeline(run_id))),
        )
    routes.add_url_rule(
        f"{_RUN}/perfetto", "perfetto", lambda run_id: _send_perfetto(cache, run_id)
    )
    routes.register_error_handler(
        DataError, lambda error: (_build_json_response({"error": str(error)}), 404)
    )
    routes.register_error_handler(
        ValueError, lambda error: (_build_json_response({"error": str(error)}), 400)
    )
    return routes


def _build_json_response(body: dict[str, Any]) -> Response:
    packed = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(packed, mimetype="application/json")


def _read_window(scene: TimelineView) -> dict[str, Any]:
    """The window of the query: from and to in ns, slots per row, ranks and open as lists; compact
    is the number of slots of closed ranks, q the text searched for."""
    from_ns, to_ns = _parse_range()
    detail = WindowDetail(
        slots=_clamp(_parse_number("slots"), SLOTS),
        compact_slots=_clamp(_parse_number("compact"), SLOTS) if _has("compact") else None,
        query=_parse_query() if _has("q") else "",
        band_slots=BAND_SLOTS,
    )
    ranks, opened = _parse_ranks(scene), _parse_numbers("open")
    return build_window_json(scene.read_window(from_ns, to_ns, detail, ranks, opened))


def _search(scene: TimelineView) -> dict[str, Any]:
    """The matches of q between from and to (default: the whole run) on ranks (default: all).

    The response starts with the match number `at`, by default with the first match that starts at
    `near` or later; limit is the number of matches in it.
    """
    ranks = _parse_ranks(scene) if _has("ranks") else None
    from_ns, to_ns = _parse_range() if _has("from") or _has("to") else (-_MAX_NUMBER, _MAX_NUMBER)
    found = scene.search(_parse_query()).narrow(ranks, from_ns, to_ns)
    if _has("at"):
        first = max(_parse_number("at"), 0)
    else:
        first = found.count_before(_parse_number("near") if _has("near") else from_ns)
    limit = _clamp(_parse_number("limit"), MAX_MATCHES) if _has("limit") else MAX_MATCHES
    return build_matches_json(found, scene.read_slices, first, limit)


def _measure(scene: TimelineView) -> dict[str, Any]:
    """The time of each bucket between from and to on each of the ranks."""
    from_ns, to_ns = _parse_range()
    splits = scene.measure(_parse_ranks(scene), from_ns, to_ns)
    return build_range_json(from_ns, to_ns, splits)


def _read_slice(scene: TimelineView) -> dict[str, Any]:
    """The slice of a rank that starts at `start` on a lane and depth; null if there is none."""
    (rank,) = _parse_ranks(scene, "rank")[:1] or [-1]
    lane, depth = request.args.get("lane", ""), _parse_number("depth")
    return {"slice": scene.find_slice(rank, lane, depth, _parse_number("start"))}


def _read_name(scene: TimelineView) -> dict[str, Any]:
    """The name that takes most of a bucket's time between from and to; null if unknown."""
    (rank,) = _parse_ranks(scene, "rank")[:1] or [-1]
    return {"name": scene.find_name(rank, _parse_number("bucket"), *_parse_range())}


def _has(name: str) -> bool:
    return name in request.args


def _clamp(number: int, most: int) -> int:
    return min(max(number, 1), most)


def _parse_range() -> tuple[int, int]:
    from_ns, to_ns = _parse_number("from"), _parse_number("to")
    if to_ns <= from_ns:
        raise ValueError("the window is empty: to must be later than from")
    return from_ns, to_ns


def _parse_query() -> str:
    text = request.args.get("q", "").strip()
    if not text or len(text) > MAX_QUERY_LENGTH:
        raise ValueError(f"q must have 1 to {MAX_QUERY_LENGTH} characters")
    return text


def _parse_ranks(scene: TimelineView, name: str = "ranks") -> list[int]:
    """The ranks of the list that the run has."""
    known = {one.rank for one in scene.ranks}
    return [rank for rank in _parse_numbers(name)[:RANKS] if rank in known]


def _parse_number(name: str) -> int:
    try:
        number = int(float(request.args.get(name, "")))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be a number") from None
    if abs(number) > _MAX_NUMBER:
        raise ValueError(f"{name} must be at most {_MAX_NUMBER}")
    return number


def _parse_numbers(name: str) -> list[int]:
    parts = request.args.get(name, "").split(",")
    return [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 9]


def _send_perfetto(cache: ReportCache, run_id: str) -> Response:
    """A gzip-compressed trace of all ranks for ui.perfetto.dev."""
    view = cache.load_finished_run(run_id)
    body = _compress_chunks(perfetto_trace(view.report, require_tables(view)))
    name = f"attachment; filename={run_id}.pftrace.gz"
    return Response(body, mimetype="application/gzip", headers={"Content-Disposition": name})


def _compress_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(3, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for chunk in chunks:
        yield packer.compress(chunk)
    yield packer.flush()
