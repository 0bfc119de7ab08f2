"""A run as one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import Any

import orjson
from dash import html
from dash.development.base_component import Component
from flask import Blueprint, Response, jsonify
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from stepsplit.analyzer.errors import DataError
from stepsplit.dashboard.figures.theme import GRAPH_CONFIG, build_bucket_css
from stepsplit.dashboard.pages.communication import build_collectives_page, build_pipeline_page
from stepsplit.dashboard.pages.components import AddressQuery, ChartData, DataTable, View
from stepsplit.dashboard.pages.compute import build_memory_page
from stepsplit.dashboard.pages.overview import build_overview
from stepsplit.dashboard.pages.runs import build_compute_page
from stepsplit.dashboard.pages.timeline import build_timeline_page, export_json
from stepsplit.dashboard.web.report_cache import ReportCache

# The route of the HTML export.


def build_export_routes(cache: ReportCache) -> Blueprint:
    """GET report.html of a finished run."""
    routes = Blueprint("html_export", __name__)

    @routes.get("/api/v1/runs/<run_id>/report.html")
    def export_run(run_id: str) -> Response:
        page = export_html(cache.load_finished_run(run_id))
        name = f"attachment; filename={run_id}.html"
        headers = {"Content-Disposition": name}
        return Response(page, mimetype="text/html", headers=headers)

    @routes.errorhandler(DataError)
    def report_data_error(error: DataError) -> tuple[Response, int]:
        return jsonify(error=str(error)), 404

    return routes


# The dashboard pages of a run as one HTML file that works offline.

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

_VOID = ("br", "hr", "img", "input")

_TIMELINE_SCRIPTS = ("paint_timeline.js", "query_timeline.js", "rank_rows.js", "timeline.js")

_NAMES = {"className": "class", "colSpan": "colspan"}

_MOUNT = """
JSON.parse(document.getElementById("figures").textContent).forEach((figure, i) =>
  Plotly.newPlot("figure-" + i, figure.data, figure.layout, {responsive: true, ...CONFIG}));
""".replace("CONFIG", orjson.dumps(GRAPH_CONFIG).decode())


def export_html(view: View) -> str:
    """The self-contained HTML file; sections without data are left out."""
    view = View(view.name, view.report, view.tables)
    figures: list[Any] = []
    body = "".join(_render_html(part, figures) for part in _build_chapters(view))
    return "".join(
        [
            "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(view.name)} - "
            f"stepsplit</title><style>{_read_asset('style.css')}{build_bucket_css()}</style>",
            "<script>",
            _read_asset("theme.js"),
            "</script></head><body>",
            body,
            _build_json_script("figures", orjson.dumps(figures)),
            _build_json_script("timeline-data", _export_timeline(view)),
            "<script>",
            get_plotlyjs(),
            "</script><script>",
            _MOUNT,
            *(_read_asset(name) for name in _TIMELINE_SCRIPTS),
            "</script></body></html>\n",
        ]
    )


def _build_chapters(view: View) -> Iterator[Component]:
    theme = html.Button("light / dark", id="theme", type="button", className="theme")
    brand = html.Span("stepsplit", className="brand")
    tagline = html.Span("where every training step went", className="tagline")
    yield html.Header(html.Div([brand, tagline, theme], className="inner"), className="top")
    chapters = [
        ("", build_overview(view)),
        ("", build_timeline_page(view)),
        ("Pipeline", build_pipeline_page(view, AddressQuery()) if view.report.pipeline else []),
        ("Communication", build_collectives_page(view, AddressQuery())),
        ("Compute", build_compute_page(view)),
        ("Memory", build_memory_page(view) if view.report.memory or view.report.prediction else []),
    ]
    parts: list[Component] = [html.Div(html.H1(view.name), className="heading")]
    for title, content in chapters:
        parts += [html.H2(title, className="chapter")] if title and content else []
        parts += content
    yield html.Main(parts)


def _render_html(part: Any, figures: list[Any]) -> str:
    """A component as HTML; a figure becomes a placeholder and is appended to `figures`."""
    if part is None or isinstance(part, bool):
        return ""
    if isinstance(part, list | tuple):
        return "".join(_render_html(item, figures) for item in part)
    if not isinstance(part, Component):
        return escape(str(part))
    if isinstance(part, DataTable):
        return _render_html(part.children, figures)
    if isinstance(part, ChartData):
        return ""
    kind, props = type(part).__name__, _read_props(part)
    if kind == "Graph":
        figures.append(orjson.loads(to_json_plotly(props["figure"], engine="orjson")))
        return f'<div class="figure" id="figure-{len(figures) - 1}"></div>'
    tag = kind.lower()
    inner = "" if tag in _VOID else _render_html(props.get("children"), figures) + f"</{tag}>"
    return f"<{tag}{_format_attributes(props)}>{inner}"


def _read_props(part: Component) -> dict[str, Any]:
    props: dict[str, Any] = part.to_plotly_json()["props"]  # type: ignore[no-untyped-call]
    return props


def _format_attributes(props: dict[str, Any]) -> str:
    return "".join(
        _format_attribute(name, value) for name, value in props.items() if name != "children"
    )


def _format_attribute(name: str, value: Any) -> str:
    if value is None or value is False or value == "":
        return ""
    if name == "style":
        rules = (f"{_convert_to_kebab_case(key)}:{setting}" for key, setting in value.items())
        return f' style="{escape(";".join(rules))}"' if value else ""
    assigned = "" if value is True else f'="{escape(str(value))}"'
    return f" {_NAMES.get(name, name)}{assigned}"


def _convert_to_kebab_case(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)


def _read_asset(name: str) -> str:
    return (files("stepsplit.dashboard.web") / "assets" / name).read_text(encoding="utf-8")


def _export_timeline(view: View) -> bytes:
    if view.tables is None or not len(view.tables.segments.rank):
        return json.dumps(None).encode()
    shown = export_json(view.report, view.tables)
    return orjson.dumps(shown, option=orjson.OPT_SERIALIZE_NUMPY)


def _build_json_script(name: str, content: bytes) -> str:
    """A script element with JSON, escaped so that no text in it can close the element."""
    safe = content.decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{safe}</script>'
