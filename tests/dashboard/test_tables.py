"""What a page is sent of a table, and what an exported page shows of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from dash import dcc, html
from plotly.io.json import to_json_plotly
from support.page_text import read_text
from support.report_builders import MS, analysis

from stepsplit.analyzer.bucket_styles import BUCKET_STYLES
from stepsplit.analyzer.report.report import BlameRow
from stepsplit.dashboard.figures.theme import build_bucket_css
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.tables import (
    MAX_ROWS,
    Cell,
    DataTable,
    SortHead,
    build_rate_cell,
    build_size_cell,
    build_table,
    build_time_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.web.html_export import export_html

STYLE = Path(__file__).parents[2] / "dashboard" / "web" / "assets" / "style.css"


def sent(table: DataTable) -> dict[str, Any]:
    """The table as the browser receives it."""
    message: dict[str, Any] = orjson.loads(to_json_plotly(table, engine="orjson"))
    assert (message["namespace"], message["type"]) == ("stepsplit", "DataTable")
    return message["props"]  # type: ignore[no-any-return]


def test_cells_are_sent_as_texts_with_their_unrounded_numbers() -> None:
    row = [Cell("tp"), build_time_cell(1_234_567), build_size_cell(None), build_rate_cell(None)]
    link = Cell(html.B(["see ", dcc.Link("rank 3", href="/run/1")]), columns=2)

    props = sent(build_table(("axis", "time", "size", "busbw"), [row, [Cell("x"), link, Cell()]]))

    assert props["columns"] == [
        {"head": "axis", "number": False, "unit": ""},
        {"head": "time", "number": True, "unit": "ns"},
        {"head": "size", "number": True, "unit": ""},
        {"head": "busbw", "number": True, "unit": ""},
    ]
    linked = {"tag": "link", "props": {"href": "/run/1"}, "children": "rank 3"}
    assert props["rows"] == [
        ["tp", ["1.23 ms", 1_234_567], "unknown", "unknown"],
        [
            "x",
            {
                "shown": {"tag": "b", "props": {}, "children": ["see ", linked]},
                "value": None,
                "columns": 2,
                "head": False,
            },
            "",
        ],
    ]


def test_a_column_that_the_server_sorts_says_in_which_order() -> None:
    heads = (SortHead("run ▲", "ascending"), SortHead("step"), "note")

    columns = sent(build_table(heads, [[Cell("a"), build_time_cell(MS), Cell("b")]]))["columns"]

    assert [one.get("sort") for one in columns] == ["ascending", "none", None]


def test_a_column_in_which_no_row_has_anything_is_in_the_download_only() -> None:
    rows = [[Cell("a"), Cell(), Cell()], [Cell("b"), Cell(), Cell("slow")]]

    built = build_table(("run", "check", "status"), rows)

    table = sent(built)
    assert [(one["head"], one.get("hidden", False)) for one in table["columns"]] == [
        ("run", False), ("check", True), ("status", False),
    ]  # fmt: skip
    assert table["rows"] == [["a", "", ""], ["b", "", "slow"]], "as in the download"
    assert read_text(built.children).split() == ["run", "status", "a", "b", "slow"]
    # The server sorts by this one, which a user has chosen.
    kept = sent(build_table(("run", SortHead("check"), "status"), rows))["columns"]
    assert not any(one.get("hidden") for one in kept)


def test_an_entry_beyond_the_rows_of_the_page_shows_its_column() -> None:
    """Else the column would come and go with the order of the rows."""
    rows = [[Cell(str(n)), Cell("late" if n == MAX_ROWS else "")] for n in range(MAX_ROWS + 1)]

    columns = sent(build_table(("rank", "note"), rows))["columns"]

    assert not any(one.get("hidden") for one in columns)


def test_rows_beyond_the_limit_are_counted() -> None:
    rows = [[Cell(str(i))] for i in range(MAX_ROWS + 3)]

    assert len(sent(build_table(("n",), rows))["rows"]) == MAX_ROWS
    assert format_hidden_rows(rows) == "; 3 smaller rows in report.json"
    assert format_hidden_rows(rows[:MAX_ROWS]) == ""


def test_an_exported_page_has_the_first_rows_and_counts_the_others() -> None:
    report = analysis().report
    blame = tuple(BlameRow(rank, "compute", MS, 0, MS, "tp", (1,)) for rank in range(100))
    report = msgspec.structs.replace(report, blame=blame)

    page = export_html(View("a run", report, analysis().tables))

    assert page.count('<td>compute</td><td>tp</td><td class="number">') == 40
    assert "60 more rows in the dashboard and in report.json" in page
    assert "data of this chart" not in page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_has_the_colors_of_the_figures(theme: str) -> None:
    style = build_bucket_css()
    assert "--compute:" not in STYLE.read_text()
    own, dark = style.split(':root[data-theme="dark"]', 1)
    colors = dict(re.findall(r"--(\w+): (#\w+);", own))
    if theme == "dark":
        colors |= dict(re.findall(r"--(\w+): (#\w+);", dark.split("}", 1)[0]))

    for look in BUCKET_STYLES:
        expected = look.color.light if theme == "light" else look.color.dark
        assert colors[look.bucket] == expected.lower()
