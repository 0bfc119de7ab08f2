"""A run as one self-contained HTML page, which needs neither a server nor a database."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import orjson
from dash import html
from dash.development.base_component import Component
from plotly.io.json import to_json_plotly

from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.dashboard.figures.theme import GRAPH_CONFIG, build_bucket_css
from stepsplit.dashboard.pages import run_pages
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.roles import build_roles_content
from stepsplit.dashboard.pages.tables import ChartData, DataTable
from stepsplit.dashboard.pages.timeline import export_json
from stepsplit.dashboard.web.plotly_script import read_plotly_script

# The dashboard pages of a run as one HTML file that works offline.

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

_NUMPY = orjson.OPT_SERIALIZE_NUMPY

_VOID = ("br", "hr", "img", "input")

_TIMELINE_SCRIPTS = (
    "paint_timeline.js", "query_timeline.js", "range_table.js", "rank_rows.js",
    "second_timeline.js", "timeline.js",
)  # fmt: skip

_CAPITAL = re.compile("[A-Z]")

_NAMES = {"className": "class", "colSpan": "colspan"}

_MOUNT = """
JSON.parse(document.getElementById("figures").textContent).forEach((figure, i) =>
  Plotly.newPlot("figure-" + i, figure.data, figure.layout, {responsive: true, ...CONFIG}));
""".replace("CONFIG", orjson.dumps(GRAPH_CONFIG).decode())


def export_html(view: View, notes: Sequence[str] = ()) -> str:
    """The self-contained HTML file; sections without data are left out.

    notes: on ranges of the timeline, as in its address.
    """
    view = View(view.name, view.report, view.tables, is_role=view.is_role)
    tables, shown = view.tables, None
    if tables is not None and len(tables.segments.rank):
        shown = export_json(view.report, tables, notes)
    parts: list[Component] = []
    for page in run_pages.RUN_PAGES:
        if page.chapter is not None and page.has_data(view.report):
            content = page.build(view, AddressQuery())
            is_titled = page.chapter and content
            parts += [html.H2(page.chapter, className="chapter")] if is_titled else []
            parts += content
    return _render_page(view.name, parts, shown)


def export_roles_html(name: str, job: RoleJob) -> str:
    """The page of a job of several roles as such a file; a role of it has a file of its own."""
    return _render_page(name, build_roles_content(job), None)


def _render_page(name: str, content: Sequence[Component], shown: dict[str, Any] | None) -> str:
    """The file with this content, and the JSON of its timeline."""
    theme = html.Button("light / dark", id="theme", type="button", className="theme")
    brand = html.Span("stepsplit", className="brand")
    tagline = html.Span("where every training step went", className="tagline")
    head = html.Header(html.Div([brand, tagline, theme], className="inner"), className="top")
    title = html.Div(html.H1(name), className="heading")
    figures: list[Any] = []
    body = _render_html([head, html.Main([title, *content])], figures)
    return "".join(
        [
            "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(name)} - "
            f"stepsplit</title><style>{_read_asset('style.css')}{build_bucket_css()}</style>",
            "<script>",
            _read_asset("theme.js"),
            "</script></head><body>",
            body,
            _build_json_script("figures", orjson.dumps(figures)),
            _build_json_script("timeline-data", orjson.dumps(shown, option=_NUMPY)),
            "<script>",
            read_plotly_script(),
            "</script><script>",
            _MOUNT,
            *(_read_asset(name) for name in _TIMELINE_SCRIPTS),
            "</script></body></html>\n",
        ]
    )


def _render_html(part: Any, figures: list[Any]) -> str:
    """A component as HTML; a figure becomes a placeholder and is appended to `figures`."""
    if part is None or isinstance(part, bool):
        return ""
    if isinstance(part, list | tuple):
        return "".join(_render_html(item, figures) for item in part)
    if not isinstance(part, Component):
        return escape(str(part))
    if isinstance(part, DataTable):
        return _render_html(html.Div(part.children, className="scroll"), figures)
    if isinstance(part, ChartData):
        return ""
    kind = type(part).__name__
    props: dict[str, Any] = part.to_plotly_json()["props"]  # type: ignore[no-untyped-call]
    if kind == "Graph":
        figures.append(orjson.loads(to_json_plotly(props["figure"], engine="orjson")))
        return f'<div class="figure" id="figure-{len(figures) - 1}"></div>'
    tag = kind.lower()
    inner = "" if tag in _VOID else _render_html(props.get("children"), figures) + f"</{tag}>"
    attributes = "".join(
        _format_attribute(name, value) for name, value in props.items() if name != "children"
    )
    return f"<{tag}{attributes}>{inner}"


def _format_attribute(name: str, value: Any) -> str:
    if value is None or value is False or value == "":
        return ""
    if name == "style":
        # As Dash's names: borderTopColor is border-top-color.
        names = {key: _CAPITAL.sub(lambda found: f"-{found[0].lower()}", key) for key in value}
        rules = (f"{names[key]}:{setting}" for key, setting in value.items())
        return f' style="{escape(";".join(rules))}"' if value else ""
    assigned = "" if value is True else f'="{escape(str(value))}"'
    return f" {_NAMES.get(name, name)}{assigned}"


def _read_asset(name: str) -> str:
    return (files("stepsplit.dashboard.web") / "assets" / name).read_text(encoding="utf-8")


def _build_json_script(name: str, content: bytes) -> str:
    """A script element with JSON, escaped so that no text in it can close the element."""
    safe = content.decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{safe}</script>'
