"""What a user reads on a page: its texts in order, and the words of cards, tables and charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

from dash import dcc
from dash.development.base_component import Component
from plotly.graph_objects import Figure

from stepsplit.dashboard.pages.tables import DataTable

_SPOKEN = ("title", "aria-label", "placeholder")
"""Properties of a component that are shown or read aloud."""

_STYLE = ("template", "hovertemplate", "color", "colorscale", "family", "dtype", "bdata", "symbol",
          "colorway")  # fmt: skip


def find(part: Any, kind: type) -> Iterator[Any]:
    """The components of this kind, in order."""
    if isinstance(part, list | tuple):
        for one in part:
            yield from find(one, kind)
    elif isinstance(part, Component):
        if isinstance(part, kind):
            yield part
        yield from find(getattr(part, "children", None), kind)


def read_text(part: Any) -> str:
    """The words of a part without those of its charts, with single spaces."""
    return " ".join(" ".join(_list_texts(part)).split())


def read_chart_text(figure: Figure) -> str:
    """The words of a chart: axes, labels and tooltips."""
    return " ".join(_list_strings(figure.to_plotly_json()))


def read_page(page: Any) -> str:
    """All words of a page, with those of its charts."""
    charts = (read_chart_text(one.figure) for one in find(page, dcc.Graph))
    return " ".join([read_text(page), *charts])


def read_cards(page: Any) -> dict[str, tuple[str, str]]:
    """Value and note of each card by its label."""
    cards = {}
    for one in find(page, Component):
        if getattr(one, "className", None) == "card number":
            label, value, note = map(read_text, one.children)
            cards[label] = (value, note)
    return cards


def read_tables(page: Any) -> list[list[dict[str, str]]]:
    """The rows of each table, what is seen below each header."""

    def read(content: Any) -> str:
        return " ".join(" ".join(_list_texts(content, ())).split())

    return [
        [
            dict(zip(heads, (read(cell.content) for cell in row), strict=True))
            for row in table.cells
            if len(row) == len(heads)
        ]
        for table in find(page, DataTable)
        for heads in [[read_text(getattr(one, "content", one)) for one in table.heads]]
    ]


def read_export(page: str) -> str:
    """The words of an exported page, with single spaces."""
    reader = _ExportReader()
    reader.feed(page)
    return " ".join(" ".join(reader.texts).split())


class _ExportReader(HTMLParser):
    """Collects the texts outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.skips = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skips = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.skips = False

    def handle_data(self, data: str) -> None:
        if not self.skips:
            self.texts.append(data)


def _list_texts(part: Any, spoken: Sequence[str] = _SPOKEN) -> Iterator[str]:
    if isinstance(part, list | tuple):
        for one in part:
            yield from _list_texts(one, spoken)
    elif isinstance(part, DataTable):
        for head in part.heads:
            yield from _list_texts(getattr(head, "content", head))
        for row in part.cells:
            for cell in row:
                yield from _list_texts(cell.content)
    elif isinstance(part, Component):
        for name in spoken:
            if getattr(part, name, None):
                yield str(getattr(part, name))
        yield from _list_texts(getattr(part, "children", None), spoken)
    elif part is not None:
        yield str(part)


def _list_strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, one in value.items():
            if name not in _STYLE:
                yield from _list_strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _list_strings(one)
    elif isinstance(value, str):
        yield value
