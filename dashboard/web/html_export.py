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
from stepsplit.dashboard.pages.communication import collectives_page, pipeline_page
from stepsplit.dashboard.pages.components import AddressQuery, View
from stepsplit.dashboard.pages.compute import memory_page
from stepsplit.dashboard.pages.overview import overview
from stepsplit.dashboard.pages.runs import compute_page
from stepsplit.dashboard.pages.timeline import still_json, timeline_page
from stepsplit.dashboard.web.report_cache import Loaded

# The route of the HTML export.


def still_routes(loaded: Loaded) -> Blueprint:
    """GET report.html of a finished run."""
    routes = Blueprint("html_export", __name__)

    @routes.get("/api/v1/runs/<run_id>/report.html")
    def still(run_id: str) -> Response:
        page = still_page(loaded.finished(run_id))
        name = f"attachment; filename={run_id}.html"
        headers = {"Content-Disposition": name}
        return Response(page, mimetype="text/html", headers=headers)

    @routes.errorhandler(DataError)
    def unreadable(error: DataError) -> tuple[Response, int]:
        return jsonify(error=str(error)), 404

    return routes


# The dashboard pages of a run as one HTML file that works offline.

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

_VOID = ("br", "hr", "img", "input")

_NAMES = {"className": "class", "colSpan": "colspan"}

_MOUNT = """
JSON.parse(document.getElementById("figures").textContent).forEach((figure, i) =>
  Plotly.newPlot("figure-" + i, figure.data, figure.layout, 
    {responsive: true, displaylogo: false}));
"""


def still_page(view: View) -> str:
    """The self-contained HTML file; sections without data are left out."""
    view = View(view.name, view.report, view.tables)
    figures: list[Any] = []
    body = "".join(_html(part, figures) for part in _parts(view))
    return "".join(
        [
            "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(view.name)} - stepsplit</title><style>{_asset('style.css')}</style>",
            "<script>", _asset("theme.js"), "</script></head><body>", body,
            _data("figures", orjson.dumps(figures)),
            _data("timeline-data", _timeline(view)),
            "<script>", get_plotlyjs(), "</script><script>", _MOUNT,
            _asset("paint_timeline.js"), _asset("timeline.js"),
            "</script></body></html>\n",
        ]
    )  # fmt: skip


def _parts(view: View) -> Iterator[Component]:
    theme = html.Button("light / dark", id="theme", type="button", className="theme")
    brand = html.Span("stepsplit", className="brand")
    tagline = html.Span("where every training step went", className="tagline")
    yield html.Header(html.Div([brand, tagline, theme], className="inner"), className="top")
    chapters = [
        ("", overview(view)),
        ("", timeline_page(view)),
        ("Pipeline", pipeline_page(view, AddressQuery()) if view.report.pipeline else []),
        ("Communication", collectives_page(view)),
        ("Compute", compute_page(view)),
        ("Memory", memory_page(view) if view.report.memory or view.report.prediction else []),
    ]
    parts: list[Component] = [html.Div(html.H1(view.name), className="heading")]
    for title, own in chapters:
        parts += [html.H2(title, className="chapter")] if title and own else []
        parts += own
    yield html.Main(parts)


def _html(part: Any, figures: list[Any]) -> str:
    """A component as HTML; a figure becomes a placeholder and is appended to `figures`."""
    if part is None or isinstance(part, bool):
        return ""
    if isinstance(part, list | tuple):
        return "".join(_html(item, figures) for item in part)
    if not isinstance(part, Component):
        return escape(str(part))
    kind, props = type(part).__name__, _props(part)
    if kind == "Graph":
        figures.append(orjson.loads(to_json_plotly(props["figure"], engine="orjson")))
        return f'<div class="figure" id="figure-{len(figures) - 1}"></div>'
    tag = kind.lower()
    inside = "" if tag in _VOID else _html(props.get("children"), figures) + f"</{tag}>"
    return f"<{tag}{_attributes(props)}>{inside}"


def _props(part: Component) -> dict[str, Any]:
    props: dict[str, Any] = part.to_plotly_json()["props"]  # type: ignore[no-untyped-call]
    return props


def _attributes(props: dict[str, Any]) -> str:
    return "".join(_attribute(name, value) for name, value in props.items() if name != "children")


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False or value == "":
        return ""
    if name == "style":
        rules = (f"{_dashed(key)}:{setting}" for key, setting in value.items())
        return f' style="{escape(";".join(rules))}"' if value else ""
    assigned = "" if value is True else f'="{escape(str(value))}"'
    return f" {_NAMES.get(name, name)}{assigned}"


def _dashed(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)


def _asset(name: str) -> str:
    return (files("stepsplit.dashboard.web") / "assets" / name).read_text(encoding="utf-8")


def _timeline(view: View) -> bytes:
    if view.tables is None or not len(view.tables.segments.rank):
        return json.dumps(None).encode()
    shown = still_json(view.report, view.tables)
    return orjson.dumps(shown, option=orjson.OPT_SERIALIZE_NUMPY)


def _data(name: str, content: bytes) -> str:
    """A script element with JSON, escaped so that no text in it can close the element."""
    safe = content.decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{safe}</script>'
