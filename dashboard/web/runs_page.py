"""The list of runs, and the place to drop a new one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from dash import html

from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.store.store import RunRow
from stepsplit.dashboard.web.numbers import BUBBLE, COLLECTIVE, COMPUTE
from stepsplit.dashboard.web.parts import Cell, legend, share_bar, state_pill, table

LISTED = 200
SHARES = ("compute", "collective", "bubble")
_HEADS = ("run", "added", "state", "world", "mesh", "step", "where it went", *SHARES)


def upload_zone() -> html.Section:
    """Where files are dropped; assets/upload.js gives it life."""
    return html.Section(
        [
            html.Div("Drop a recording here", className="drop-title"),
            html.Div(
                "the folder of a run, or its rank trace files",
                className="drop-hint",
            ),
            html.Div(
                [
                    html.Button("Choose files", id="choose-files", type="button"),
                    html.Button("Choose a folder", id="choose-folder", type="button"),
                ],
                className="drop-buttons",
            ),
            html.Div(html.Div(id="upload-bar"), id="upload-track", className="track"),
            html.Div(id="upload-status", className="drop-status", role="status"),
        ],
        id="drop-zone",
        className="card drop",
    )


def runs_page(runs: Sequence[RunRow]) -> html.Div:
    """All runs, newest first."""
    if not runs:
        hint = "No runs yet. Drop a recording above, or see one made with stepsplit demo."
        return html.Div([html.H1("Runs"), html.P(hint, className="card empty")])
    rows = [_row(run) for run in runs[:LISTED]]
    head = html.Div([html.H1("Runs"), legend()], className="heading")
    body = html.Div(table(_HEADS, rows), className="card scroll")
    left = len(runs) - len(rows)
    note = html.P(f"{left:,} older runs are not shown", className="note", hidden=not left)
    return html.Div([head, body, note])


def _row(run: RunRow) -> list[Cell]:
    name = html.A(run.name, href=f"/run/{run.id}", className="run-link")
    added = html.Span(_when(run), className="when")
    return [Cell(name), Cell(added), Cell(state_pill(run)), *_numbers(run)]


def _numbers(run: RunRow) -> list[Cell]:
    numbers = run.headline
    if numbers is None or numbers.middle is None:
        told = "no steps" if numbers is not None else run.error or ""
        return [Cell(html.Span(told, className="told"), columns=len(_HEADS) - 3)]
    middle = numbers.middle
    shares = (middle.share(*COMPUTE), middle.share(*COLLECTIVE), middle.share(*BUBBLE))
    return [
        Cell(f"{numbers.world_size:,}", number=True),
        Cell(numbers.mesh or "unknown"),
        Cell(milliseconds(middle.step_ns), number=True),
        Cell(share_bar(middle.shares)),
        *(Cell(percent(share), number=True) for share in shares),
    ]


def _when(run: RunRow) -> str:
    moment = datetime.fromtimestamp(run.created_unix_ns // 10**9, UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC"
