"""Tables and the data of charts in a real browser: sorted, filtered, paged, downloaded."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.browser_builders import running_server
from support.report_builders import MS, analysis
from support.turns import PAGES

from stepsplit.analyzer.report.diagnosis_rows import PathKernel, SlowKernel
from stepsplit.analyzer.report.report import BlameRow, Report
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.dashboard.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
N_RANKS = 30
FORMULA = '=HYPERLINK("http://host/","a, b")'
_TABLE = "//section[.//h2[text()='{}']]//div[contains(@class,'data-table')]"


def report_with_long_tables() -> Report:
    """Rank n caused n ms of waiting per step on an unknown axis, largest first as in reports, and a
    kernel with a name that a spreadsheet would run."""
    report = analysis().report
    n_windows = len(select_full_steps(report.steps))
    blame = tuple(
        BlameRow(rank, "compute", rank * MS * n_windows, 0, rank * MS * n_windows + 1, None, (1,))
        for rank in reversed(range(N_RANKS))
    )
    slow = SlowKernel(rank=1, kernel=FORMULA, family="gemm", count=3, ratio=1.25, lost_ns=1_234_567)
    on_path = PathKernel(1, "gemm_kernel", 7, "compute", 2 * MS, 4, 5 * MS, MS)
    return msgspec.structs.replace(
        report, blame=blame, slow_kernels=(slow,), path_kernels=(on_path,)
    )


@pytest.fixture(scope="module")
def run_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tables")
    store = Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")
    run_id = store.import_report("long", report_with_long_tables(), analysis().tables, ())
    store.close()
    with running_server(folder) as url:
        yield f"{url}/run/{run_id}"


def open_table(browser, address: str, title: str, width: int = 1280):  # type: ignore[no-untyped-def]
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(address)
    table = page.locator(_TABLE.format(title)).first
    table.wait_for()
    return page, table


def ranks(table) -> list[int]:  # type: ignore[no-untyped-def]
    cells = table.locator("tbody tr td:first-child").all_text_contents()
    return [int(cell.removeprefix("rank ")) for cell in cells]


def test_a_header_sorts_by_key_and_by_mouse_and_restores_the_order(run_url: str, browser) -> None:  # type: ignore[no-untyped-def]
    _, table = open_table(browser, f"{run_url}/collectives", "Blame")
    head = table.get_by_role("columnheader", name="skew")
    largest = list(range(N_RANKS - 1, N_RANKS - 13, -1))
    assert ranks(table) == largest

    seen = []
    for _ in range(3):
        head.get_by_role("button").focus()
        table.page.keyboard.press("Enter")
        seen.append((head.get_attribute("aria-sort"), ranks(table)))

    assert seen == [
        ("descending", largest),
        ("ascending", list(range(12))),
        ("none", largest),
    ]


def test_ranks_are_sorted_as_numbers(run_url: str, browser) -> None:  # type: ignore[no-untyped-def]
    _, table = open_table(browser, f"{run_url}/collectives", "Blame")

    table.get_by_role("button", name="rank").click()

    assert ranks(table) == list(range(12))


def test_rows_are_filtered_and_paged(run_url: str, browser) -> None:  # type: ignore[no-untyped-def]
    _, table = open_table(browser, f"{run_url}/collectives", "Blame")
    assert "rows 1 to 12 of 30" in table.inner_text()

    table.get_by_role("button", name="next").click()
    table.get_by_role("button", name="next").click()
    assert ranks(table) == [5, 4, 3, 2, 1, 0]
    assert table.get_by_role("button", name="next").is_disabled()

    table.get_by_role("searchbox").fill("7.00 ms")
    assert ranks(table) == [7]
    assert "1 of 30 rows" in table.inner_text()

    table.get_by_role("searchbox").fill("")
    table.get_by_role("button", name="all").click()
    assert len(ranks(table)) == N_RANKS


def test_a_download_has_all_rows_with_unrounded_numbers(  # type: ignore[no-untyped-def]
    run_url: str, browser, tmp_path: Path
) -> None:
    page, table = open_table(browser, f"{run_url}/collectives", "Blame")
    shown = [head.split()[0] for head in table.locator("thead th").all_inner_texts()]
    assert shown == ["rank", "cause", "skew", "bubble", "caused"], "no row has an axis"

    with page.expect_download() as download:
        table.get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "long_blame.csv"
    download.value.save_as(tmp_path / "blame.csv")

    head, *rows = csv.reader((tmp_path / "blame.csv").read_text().splitlines())
    assert head == ["rank", "cause", "axis", "skew (ns)", "bubble (ns)", "caused per step (ns)"]
    blame = report_with_long_tables().blame
    n_windows = len(select_full_steps(analysis().report.steps))
    assert [(int(row[0].removeprefix("rank ")), float(row[5])) for row in rows] == [
        (one.rank, pytest.approx(one.caused_ns / n_windows, rel=1e-15)) for one in blame
    ]


def test_a_name_from_a_file_is_no_formula_in_a_download(  # type: ignore[no-untyped-def]
    run_url: str, browser, tmp_path: Path
) -> None:
    page, table = open_table(browser, f"{run_url}/compute", "Slow kernels")
    with page.expect_download() as download:
        table.get_by_role("button", name="CSV").click()
    download.value.save_as(tmp_path / "slow.csv")

    _, row = csv.reader((tmp_path / "slow.csv").read_text().splitlines())

    assert row == ["rank 1", f"'{FORMULA}", "gemm", "3", "1.25", "1234567"]


def test_on_a_phone_a_wide_table_scrolls_and_its_heading_and_pager_stay(  # type: ignore[no-untyped-def]
    run_url: str, browser
) -> None:
    page, table = open_table(browser, f"{run_url}/collectives", "Blame", width=375)
    section = page.locator("section.card", has=page.locator("h2", has_text="Blame"))
    widths = "part => [part.scrollWidth, part.clientWidth]"

    frame = table.locator(".scroll")
    content, room = frame.evaluate(widths)
    assert content > room, "the table is wider than the screen"
    frame.evaluate("part => { part.scrollLeft = part.scrollWidth; }")
    last = table.locator("thead th").last.bounding_box()
    assert last["x"] + last["width"] <= 375, "the last column is reached"

    for part in (section, page.locator("html")):
        content, room = part.evaluate(widths)
        assert content <= room, "nothing but the table goes on beyond the screen"
    for part in (section.locator("h2"), table.get_by_role("searchbox"), table.get_by_text("CSV")):
        box = part.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 375
    page.locator(".data-table .scroll[tabindex='0']").first.wait_for()


def test_another_page_begins_with_its_own_order(run_url: str, browser) -> None:  # type: ignore[no-untyped-def]
    page, table = open_table(browser, f"{run_url}/collectives", "Blame")
    table.get_by_role("button", name="skew").click()
    table.get_by_role("button", name="skew").click()
    assert ranks(table)[0] == 0

    page.get_by_role("link", name="Overview").click()
    page.wait_for_selector("#by-rank .point")
    page.get_by_role("link", name="Collectives").click()
    table.wait_for()

    assert ranks(table)[0] == N_RANKS - 1


def test_a_link_in_a_table_opens_its_page(run_url: str, browser) -> None:  # type: ignore[no-untyped-def]
    page, _ = open_table(browser, run_url, "Critical path")

    page.get_by_role("link", name="longest").first.click()

    page.wait_for_selector("#timeline-view[data-drawn]")
    assert "/timeline?" in page.url


def test_a_chart_has_its_numbers_as_a_table(run_url: str, browser) -> None:  # type: ignore[no-untyped-def]
    page, _ = open_table(browser, run_url, "Critical path")
    page.wait_for_selector("#by-rank .point")
    shown = page.locator("//div[div[@id='by-rank']]/details")

    shown.locator("summary").focus()
    page.keyboard.press("Enter")

    table = shown.locator("table")
    table.wait_for()
    traces = page.evaluate(
        "document.querySelector('#by-rank .js-plotly-plot')._fullData"
        ".map(one => [one.name, Array.from(one.y)])"
    )
    heads = table.locator("th").all_text_contents()
    assert [head.split(",")[0] for head in heads[1:]] == [name for name, _ in traces]
    rows = [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()]
    n_ranks = len(analysis().report.run.ranks)
    assert len(rows) == n_ranks
    shown_values = [[float(cell.replace(",", "")) for cell in row[1:]] for row in rows]
    for i, (_, values) in enumerate(traces):
        assert [row[i] for row in shown_values] == pytest.approx(values, rel=1e-3, abs=1e-3)
