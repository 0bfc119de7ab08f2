"""The pieces that pages are put together from: tables, cards, figures, bars of shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component
from plotly.graph_objects import Figure

from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.figures.palette import LOOKS, Look
from stepsplit.dashboard.store.store import RunRow

Content = str | Component
COLOR = {look.bucket: look.color for look in LOOKS} | {"idle": "var(--idle)"}


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


def table(heads: Sequence[Content], rows: Sequence[Sequence[Cell]]) -> html.Table:
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


def nothing(title: str, told: str) -> html.Section:
    """In place of what a recording does not hold: what is missing, and what to do."""
    return html.Section([html.H2(title), html.P(told)], className="card empty")


def choice(name: str, options: Mapping[str, str], value: str, usual: str) -> html.Label:
    """A menu whose value is that name's in the address, unless it is the usual one; options are
    words by value. assets/choose.js gives it life."""
    every = [html.Option(words, value=key, selected=key == value) for key, words in options.items()]
    menu = html.Select(every, **_chosen(name, usual))
    return html.Label([html.Span(name.replace("_", " "), className="menu-label"), menu])


def entry(name: str, value: str, words: str, hint: str = "") -> html.Label:
    """A field whose text is that name's in the address; the words are read out, and seen as a
    hint where there is none."""
    shown = "menu-label" if hint else "unseen"
    field = dcc.Input(id=f"choose-{name}", value=value, placeholder=hint or words, type="text")
    return html.Label([html.Span(words, className=shown), html.Span(field, **_chosen(name, ""))])


def _chosen(name: str, usual: str) -> Any:
    return {"data-choice": name, "data-usual": usual}


def aria(label: str) -> Any:
    """What a screen reader calls the element."""
    return {"aria-label": label}


def progress_bar(share: float) -> html.Progress:
    """How far something is, 0..1."""
    return html.Progress(value=f"{100 * share:.0f}", max="100", **aria("progress"))


def led(text: str, where: str | None) -> Content:
    """Text that leads to another page of this dashboard, where there is one."""
    return text if where is None else dcc.Link(text, href=where)


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
            style={"width": f"{100 * share:.2f}%", "backgroundColor": COLOR[look.bucket]},
            title=f"{look.bucket} {percent(share)}",
        )
        for look, share in zip(LOOKS, shares, strict=True)
        if share > 0
    ]
    return html.Div(pieces, className="share")


def legend() -> html.Div:
    """What the colors mean."""
    keys = [
        html.Span(
            [html.I(className=_swatch(k), style={"backgroundColor": COLOR[k.bucket]}), k.bucket]
        )
        for k in LOOKS
    ]
    return html.Div(keys, className="legend")


def state_pill(run: RunRow) -> html.Span:
    """Where the run stands, in one word."""
    return html.Span(run.state, className=f"pill {run.state}")


_LOOKS = {"pass": "done", "regressed": "failed", "inconclusive": "running"}


def verdict_pill(run: RunRow) -> Content:
    """What a gate said of the run, in one word, its headline under the pointer; nothing where no
    gate did."""
    if run.verdict is None:
        return ""
    look = _LOOKS.get(run.verdict.answer, "")
    return html.Span(run.verdict.answer, className=f"pill {look}", title=run.verdict.words)


def _swatch(look: Look) -> str:
    return "hatched" if look.hatched else ""


def _align(cell: Cell) -> str:
    return "number" if cell.number else ""
