"""Timeline: what each rank and lane did, from the whole run to one kernel."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component

from stepsplit.dashboard.pages.parts import legend, nothing, section
from stepsplit.dashboard.pages.view import View

PERFETTO = "https://ui.perfetto.dev"


def timeline_page(view: View) -> list[Component]:
    """The place that assets/timeline.js fills."""
    if view.tables is None or not len(view.tables.segments.rank):
        return [nothing("No timeline", "The tables of this run are gone: upload it once more.")]
    own: Any = {"data-run": view.run_id, "data-perfetto": PERFETTO} if view.run_id else {}
    place = html.Div(id="timeline-view", className="timeline", **own)
    note = "hatched: a rank waits; click a wait to see for whom"
    return [section("Timeline", note, legend(), place)]
