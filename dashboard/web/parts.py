"""The pieces that pages are put together from: tables, cards, figures, bars of shares."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass

from dash import dcc, html
from dash.development.base_component import Component
from plotly.graph_objects import Figure

from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.figures.palette import LOOKS, Look
from stepsplit.dashboard.store.store import RunRow

Content = str | Component


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table; numbers stand right; a wide one takes the place of several columns."""

    content: Content = ""
    number: bool = False
    columns: int = 1


def time_cell(ns: float) -> Cell:
    """A time, in ms."""
    return Cell(milliseconds(ns), number=True)


def share_cell(ratio: float) -> Cell:
    """A ratio, in percent."""
    return Cell(percent(ratio), number=True)


def count_cell(count: int) -> Cell:
    """How many."""
    return Cell(f"{count:,}", number=True)


def name_cell(name: str) -> Cell:
    """A name from a file, which may be very long: cut on the page, whole under the pointer."""
    return Cell(html.Span(name, className="name", title=name))


def worst_cell(rank: int, ns: float) -> Cell:
    """The rank that has most of something, and how much."""
    return Cell(html.Span(f"rank {rank}, {milliseconds(ns)}", className="whole"))


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> html.Table:
    """A plain table; the head of a column stands as the first full row's cell does."""
    full = next((row for row in rows if len(row) == len(heads)), [Cell() for _ in heads])
    head = [html.Th(h, className=_align(cell)) for h, cell in zip(heads, full, strict=True)]
    body = [html.Tr([_td(cell) for cell in row]) for row in rows]
    return html.Table([html.Thead(html.Tr(head)), html.Tbody(body)])


def _td(cell: Cell) -> html.Td:
    return html.Td(cell.content, className=_align(cell), colSpan=cell.columns)


def card(label: str, value: str, note: str = "", accent: str | None = None) -> html.Div:
    """One number with its name above and a remark below; accent is the bucket's color."""
    mark = {"borderTopColor": accent} if accent else {}
    parts = [
        html.Div(label, className="label"),
        html.Div(value, className="value"),
        html.Div(note, className="note"),
    ]
    return html.Div(parts, className="card number", style=mark)


def section(title: str, note: str, *content: Component) -> html.Section:
    """A titled card."""
    head = [html.H2(title), html.Span(note, className="note")]
    return html.Section([html.Div(head, className="section-head"), *content], className="card")


def on_demand(summary: str, *content: Component) -> html.Details:
    """What is shown to those who ask for it."""
    return html.Details([html.Summary(summary), *content], className="more")


def left_out(rows: Sized, shown: int) -> str:
    """The end of a note on a table that shows only so many of the rows."""
    left = len(rows) - shown
    return f"; {left:,} smaller are in report.json" if left > 0 else ""


def graph(name: str, figure: Figure) -> dcc.Graph:
    """A figure on the page; name is its id."""
    return dcc.Graph(
        id=name,
        figure=figure,
        config={"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
    )


def share_bar(shares: Sequence[float]) -> html.Div:
    """The seven buckets' shares of all time, in a line."""
    pieces = [
        html.Span(
            className=_swatch(look),
            style={"width": f"{100 * share:.2f}%", "backgroundColor": look.color},
            title=f"{look.bucket} {percent(share)}",
        )
        for look, share in zip(LOOKS, shares, strict=True)
        if share > 0
    ]
    return html.Div(pieces, className="share")


def legend() -> html.Div:
    """What the colors mean."""
    keys = [
        html.Span([html.I(className=_swatch(k), style={"backgroundColor": k.color}), k.bucket])
        for k in LOOKS
    ]
    return html.Div(keys, className="legend")


def state_pill(run: RunRow) -> html.Span:
    """Where the run stands, in one word."""
    return html.Span(run.state, className=f"pill {run.state}")


def _swatch(look: Look) -> str:
    return "hatched" if look.hatched else ""


def _align(cell: Cell) -> str:
    return "number" if cell.number else ""
