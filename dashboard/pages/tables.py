"""Tables that are sorted, filtered, paged and downloaded in the browser, and their cells."""

from __future__ import annotations

from collections.abc import Sequence, Set, Sized
from dataclasses import dataclass
from typing import Any, Literal

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.units import (
    format_gigabytes_per_second,
    format_memory_size,
    format_milliseconds,
    format_percent,
    format_signed_milliseconds,
    format_signed_percent,
    format_size,
)

# Cells, with what they show and the number by which they are sorted and downloaded.

Content = str | Component
"""What a cell or another element contains."""

Unit = Literal["", "ns", "bytes", "bytes/s", "ratio"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell; numbers are right-aligned; `columns` is the column span; a head names its row.

    value and unit: the number that the content shows, unrounded; None if it shows none.
    """

    content: Content = ""
    number: bool = False
    columns: int = 1
    value: float | None = None
    unit: Unit = ""
    head: bool = False


@dataclass(frozen=True, slots=True)
class SortHead:
    """The header of a column by which the server sorts; order is "" if it is by another."""

    content: Content
    order: Literal["ascending", "descending", ""] = ""


def build_number_cell(text: Content, value: float | None, unit: Unit = "") -> Cell:
    """A cell with a number that is formatted in its own way."""
    return Cell(text, number=True, value=value, unit=unit)


def build_time_cell(ns: float) -> Cell:
    """A cell with a time, given in ns."""
    return build_number_cell(format_milliseconds(ns), ns, "ns")


def build_time_change_cell(ns: float) -> Cell:
    """A cell with a difference of times, given in ns, with its sign."""
    return build_number_cell(format_signed_milliseconds(ns), ns, "ns")


def build_share_cell(ratio: float) -> Cell:
    """A cell with a ratio (0..1) in percent."""
    return build_number_cell(format_percent(ratio), ratio, "ratio")


def build_share_change_cell(ratio: float) -> Cell:
    """A cell with a relative change in percent, with its sign."""
    return build_number_cell(format_signed_percent(ratio), ratio, "ratio")


def build_ratio_cell(ratio: float) -> Cell:
    """A cell with a factor such as 1.20 x."""
    return build_number_cell(f"{ratio:.2f} x", ratio, "ratio")


def build_count_cell(count: int) -> Cell:
    """A cell with a count."""
    return build_number_cell(f"{count:,}", count)


def build_size_cell(bytes_: int | None) -> Cell:
    """A cell with the size of a message; None if it is unknown."""
    if bytes_ is None:
        return Cell("unknown", number=True)
    return build_number_cell(format_size(bytes_), bytes_, "bytes")


def build_memory_cell(bytes_: int) -> Cell:
    """A cell with an amount of memory."""
    return build_number_cell(format_memory_size(bytes_), bytes_, "bytes")


def build_rate_cell(bytes_per_s: float | None) -> Cell:
    """A cell with a bandwidth; None if it is unknown."""
    if bytes_per_s is None:
        return Cell("unknown", number=True)
    return build_number_cell(format_gigabytes_per_second(bytes_per_s), bytes_per_s, "bytes/s")


def build_name_cell(name: str) -> Cell:
    """A cell with a possibly long name: truncated on the page, in full in the tooltip."""
    return Cell(html.Span(name, className="name", title=name) if name else "")


# The table itself.

MAX_ROWS = 500
"""Rows of a table on a page; report.json has all of them."""

EXPORTED_ROWS = 40


class DataTable(Component):
    """A table that assets/data_table.js draws from plain JSON values.

    A component of Dash for each cell would take seconds to draw for hundreds of ranks.

    Args:
        heads: One header per column; a SortHead is sorted by the server.
        rows: The cells of each row, at most MAX_ROWS of them.
        hidden: The columns that are in the download and not on the page.
    """

    _namespace = "stepsplit"
    _type = "DataTable"
    _base_nodes = []  # noqa: RUF012 - dash reads it from the class
    _children_props = []  # noqa: RUF012

    def __init__(
        self,
        heads: Sequence[Content | SortHead],
        rows: Sequence[Sequence[Cell]],
        hidden: Set[int] = frozenset(),
    ) -> None:
        self._prop_names = ["columns", "rows"]
        self._valid_wildcard_attributes: list[str] = []
        shown_at = [at for at in range(len(heads)) if at not in hidden]
        # What is seen.
        self.heads = tuple(heads[at] for at in shown_at)
        self.cells = tuple(
            tuple(row[at] for at in shown_at) if hidden else tuple(row) for row in rows
        )
        columns: list[dict[str, Any]] = []
        for at, (one, below) in enumerate(zip(heads, _find_full_row(heads, rows), strict=True)):
            own: dict[str, Any] = {"number": below.number, "unit": below.unit}
            if at in hidden:
                own["hidden"] = True
            if isinstance(one, SortHead):
                own |= {"head": _to_node(one.content), "sort": one.order or "none"}
            else:
                own["head"] = _to_node(one)
            columns.append(own)
        described: list[list[Any]] = []
        for row in rows:
            described.append([])
            for cell in row:
                shown = _to_node(cell.content)
                # Most cells are a text, or a text and its number: as objects, a table of 500 rows
                # would be three times as large.
                if cell.columns == 1 and not cell.head and isinstance(shown, str):
                    short = shown if cell.value is None else [shown, cell.value]
                    described[-1].append(short)
                else:
                    described[-1].append({"shown": shown, "value": cell.value,
                                          "columns": cell.columns, "head": cell.head})  # fmt: skip
        super().__init__(columns=columns, rows=described)  # type: ignore[no-untyped-call]

    @property
    def children(self) -> html.Table:
        """The first rows as a table that needs no script; the page is not sent it."""
        first = _find_full_row(self.heads, self.cells)
        head = [
            html.Th(
                one.content if isinstance(one, SortHead) else one,
                className=_choose_cell_class(below),
                scope="col",
            )
            for one, below in zip(self.heads, first, strict=True)
        ]
        body = []
        for row in self.cells[:EXPORTED_ROWS]:
            cells: list[Component] = []
            for cell in row:
                span = cell.columns if cell.columns > 1 else None
                look: Any = {"className": _choose_cell_class(cell), "colSpan": span}
                # A cell that names its row is read aloud with each of the others.
                cells.append(
                    html.Th(cell.content, scope="row", **look)
                    if cell.head
                    else html.Td(cell.content, **look)
                )
            body.append(html.Tr(cells))
        left = len(self.cells) - len(body)
        if left > 0:
            words = f"{left:,} more rows in the dashboard and in report.json"
            body.append(html.Tr(html.Td(words, colSpan=len(self.heads), className="note")))
        return html.Table([html.Thead(html.Tr(head)), html.Tbody(body)])


def _find_full_row(heads: Sequence[object], rows: Sequence[Sequence[Cell]]) -> Sequence[Cell]:
    """The first row without spans, which tells how the columns are aligned."""
    return next((row for row in rows if len(row) == len(heads)), [Cell() for _ in heads])


def build_table(heads: Sequence[Content | SortHead], rows: Sequence[Sequence[Cell]]) -> DataTable:
    """A table of the first MAX_ROWS rows; each header is aligned like the cells below it.

    A column in which none of all rows has anything is in the download only, unless the server sorts
    by it: it says nothing, and takes the room of those that do.
    """
    hidden = frozenset[int]()
    if rows and all(len(row) == len(heads) for row in rows):
        hidden = frozenset(
            at
            for at, head in enumerate(heads)
            if not isinstance(head, SortHead) and all(row[at].content == "" for row in rows)
        )
    return DataTable(heads, rows[:MAX_ROWS], hidden)


def format_hidden_rows(
    rows: Sized, shown: int = MAX_ROWS, rest: str = "smaller rows in report.json"
) -> str:
    """The end of a note on a table of which only the first rows are shown."""
    left = len(rows) - shown
    return f"; {left:,} {rest}" if left > 0 else ""


def _to_node(content: Any) -> Any:
    """A component and its children as plain JSON values."""
    if isinstance(content, list | tuple):
        return [_to_node(one) for one in content]
    if not isinstance(content, Component):
        return content
    described = content.to_plotly_json()  # type: ignore[no-untyped-call]
    props = dict(described["props"])
    children = _to_node(props.pop("children", None))
    return {"tag": described["type"].lower(), "props": props, "children": children}


def _choose_cell_class(cell: Cell) -> str:
    return "number" if cell.number else ""


# The numbers of a chart as a table.


class ChartData(Component):
    """The numbers of a chart as a table, which assets/data_table.js reads from the chart when it
    is opened: for screen readers, and to download.

    Args:
        chart: The HTML id of the chart.
    """

    _namespace = "stepsplit"
    _type = "ChartData"
    _base_nodes = []  # noqa: RUF012 - dash reads it from the class
    _children_props = []  # noqa: RUF012

    def __init__(self, chart: str) -> None:
        self._prop_names = ["chart"]
        self._valid_wildcard_attributes: list[str] = []
        super().__init__(chart=chart)  # type: ignore[no-untyped-call]
