"""The timeline in a real browser: search, groups, compact rows, a measured range, the address."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
import pytest
from support.browser_builders import running_server
from support.report_builders import analysis
from support.turns import PAGES
from support.waiting import until_on_page

from stepsplit.analyzer import BUCKETS, Analysis, examine
from stepsplit.analyzer.report.tables import Slices
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.timeline import TimelineView, WindowDetail
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.html_export import export_html

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
SAMPLES = Path(__file__).parents[2] / "sample_traces"
TIMELINE = 'document.getElementById("timeline-view").timeline'
MS = 1_000_000
OPS = (
    ("aten::mm", 0, 1 * MS, 2 * MS),
    ("gemm_bf16", 0, 20 * MS, 5 * MS),
    ("Gemm_fp8", 2, 400 * MS, 3 * MS),
    ("flash_fwd", 2, 410 * MS, 3 * MS),
)


@dataclass(frozen=True)
class Served:
    """A server, and the folder of its store."""

    url: str
    folder: Path

    def add(self, made: Analysis) -> str:
        """The address of the timeline of a run."""
        store = Store.open(f"sqlite:///{self.folder}/runs.db", self.folder / "artifacts")
        run_id = store.import_report("run", made.report, made.tables)
        store.close()
        return f"{self.url}/run/{run_id}/timeline"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("timeline")
    with running_server(folder) as url:
        yield Served(url, folder)


def with_ops() -> Analysis:
    """The run by hand with two ops on rank 0 and two on rank 2."""
    made = analysis()
    slices = {rank: _slices([one for one in OPS if one[1] == rank]) for rank in (0, 2)}
    return Analysis(made.report, msgspec.structs.replace(made.tables, slices=slices))


def _slices(ops: list[tuple[str, int, int, int]]) -> Slices:
    count = len(ops)
    return Slices(
        lane=np.zeros(count, np.int32), depth=np.zeros(count, np.uint8),
        name=np.arange(count, dtype=np.int32), bucket=np.zeros(count, np.uint8),
        owner=np.full(count, -1, np.int32),
        start_ns=np.array([one[2] for one in ops]), dur_ns=np.array([one[3] for one in ops]),
        lanes=("stream 7",), names=tuple(one[0] for one in ops),
    )  # fmt: skip


def open_timeline(browser: Any, address: str, **options: Any) -> Any:
    page = browser.new_page(**({"viewport": {"width": 1280, "height": 900}} | options))
    page.goto(address)
    page.wait_for_selector("#timeline-view[data-drawn]")
    return page


def asked(page: Any) -> dict[str, str]:
    """The choices in the page's address."""
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def rows(page: Any) -> list[str]:
    """The headings and ranks from top to bottom."""
    keys: list[str] = page.evaluate(f"() => {TIMELINE}.places().map((one) => one.key)")
    return keys


def test_a_search_finds_a_name_on_every_rank_and_goes_from_match_to_match(
    served: Served, browser: Any
) -> None:
    page = open_timeline(browser, served.add(with_ops()) + "?from=0&to=60000000&open=0")

    page.locator("#timeline-view canvas").focus()
    page.keyboard.press("/")
    page.keyboard.type("GEMM")
    count = page.locator(".tl-count")
    until_on_page(page, lambda: count.inner_text() == "2 found")
    matching = f"() => {TIMELINE}.data.names.filter((_, i) => {TIMELINE}.matching[i])"
    assert page.evaluate(matching) == ["gemm_bf16"]
    page.keyboard.press("Enter")

    until_on_page(page, lambda: count.inner_text() == "1 of 2")
    assert page.locator(".tl-status b").inner_text() == "gemm_bf16"
    page.get_by_label("next match").click()
    until_on_page(page, lambda: page.locator(".tl-status b").inner_text() == "Gemm_fp8")
    chosen = page.evaluate(f"() => {{ const t = {TIMELINE}; return [t.chosen.rank, t.from < 400e6,"
                           " t.to > 403e6, t.open.has(2)]; }")  # fmt: skip
    assert chosen == [2, True, True, True]
    until_on_page(page, lambda: asked(page).get("slice") == "2,stream 7,0,400000000")
    assert asked(page)["q"] == "GEMM"
    page.get_by_label("next match").click()
    until_on_page(page, lambda: page.locator(".tl-status b").inner_text() == "gemm_bf16")

    page.reload()
    until_on_page(page, lambda: page.locator(".tl-count").inner_text() == "2 found")


def test_the_chosen_slice_and_window_come_back_with_the_address(
    served: Served, browser: Any
) -> None:
    address = served.add(with_ops())
    page = open_timeline(
        browser, f"{address}?slice=0,stream 7,0,20000000&from=15000000&to=30000000"
    )

    until_on_page(page, lambda: page.locator(".tl-status b").inner_text() == "gemm_bf16")
    window = f"() => [{TIMELINE}.from, {TIMELINE}.to, {TIMELINE}.chosen.dur]"
    assert page.evaluate(window) == [15 * MS, 30 * MS, 5 * MS]

    page = open_timeline(browser, f"{address}?slice=0,stream 7,0,20000001")
    page.get_by_text("The slice of this address is not in the run.").wait_for()


def test_the_drawn_slices_are_those_of_the_run_to_the_nanosecond(
    served: Served, browser: Any
) -> None:
    made = analysis()
    segments = made.tables.segments
    own = segments.rank == 2
    start, dur = segments.start_ns[own], segments.dur_ns[own]
    first, last = 10, 25
    window = f"?from={start[first]}&to={start[last]}"
    band = f"() => {TIMELINE}.byRank.get(2)[0]"

    page = open_timeline(browser, f"{served.add(made)}{window}")
    row = page.evaluate(band)

    assert row["start"] == start[first:last].tolist()
    assert row["dur"] == dur[first:last].tolist()
    assert row["bucket"] == segments.bucket[own][first:last].tolist()

    end = int((start + dur)[-1])
    page = open_timeline(browser, f"{page.url.split('?')[0]}?from=0&to={end}&rows=compact&open=")
    row = page.evaluate(band)
    detail = WindowDetail(1, round(page.evaluate(f"() => {TIMELINE}.width()") / 2))
    view = TimelineView(made.report, made.tables)
    drawn = view.read_window(0, end, detail, (2,), ()).rows[0].drawn
    assert (drawn.row < 0).sum() > 50, "merged"
    assert row["bucket"] == drawn.bucket.tolist()
    assert row["start"] == pytest.approx(drawn.start_ns.tolist(), abs=1)
    assert row["dur"] == pytest.approx(drawn.dur_ns.tolist(), abs=1)


def test_ranks_are_grouped_folded_and_filtered(served: Served, browser: Any) -> None:
    page = open_timeline(browser, served.add(analysis()))

    page.get_by_label("group ranks by").select_option("host")
    assert rows(page) == ["group node01", "rank 0", "rank 1", "group node02", "rank 2", "rank 3"]
    page.locator("#timeline-view canvas").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert rows(page) == ["group node01", "group node02", "rank 2", "rank 3"]

    field = page.get_by_label("show only some ranks")
    field.fill("stage 0, 3")
    field.press("Enter")
    assert rows(page) == ["group node01", "group node02", "rank 3"]
    assert page.locator(".tl-status").inner_text() == "3 of 4 ranks shown"
    until_on_page(page, lambda: asked(page).get("show") == "stage 0, 3")
    assert (asked(page)["group"], asked(page)["fold"]) == ("host", "node01")

    page.reload()
    page.wait_for_selector("#timeline-view[data-drawn]")
    assert rows(page) == ["group node01", "group node02", "rank 3"]
    field.fill("node9")
    field.press("Enter")
    assert "Cannot filter" in page.locator(".tl-status").inner_text()
    assert field.get_attribute("aria-invalid") == "true"
    assert rows(page)[-1] == "rank 3"


def test_many_ranks_are_drawn_in_compact_rows(served: Served, browser: Any) -> None:
    made = analysis()
    many = msgspec.structs.replace(made.report.run, ranks=tuple(range(256)), world_size=256)
    report = msgspec.structs.replace(made.report, run=many)
    page = open_timeline(browser, served.add(Analysis(report, made.tables)))
    heights = f"() => {TIMELINE}.places().map((one) => one.height)"
    labels = f"""() => {TIMELINE}.places().filter((one) => one.labeled)
      .map((one) => {TIMELINE}.labelMiddle(one))"""

    assert sum(page.evaluate(heights)) + 34 <= page.locator(".tl-body").bounding_box()["height"]
    page.locator("#timeline-view canvas").focus()
    for _ in range(5):
        page.keyboard.press("ArrowDown")
    middles = page.evaluate(labels)
    assert len(middles) > 20
    assert all(after - before >= 13 for before, after in pairwise(middles))
    rank_5 = page.evaluate(f"() => {TIMELINE}.places()[5].labeled")
    assert rank_5, "the focused rank has a label"

    button = page.get_by_role("button", name="draw closed ranks with few pixels")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    until_on_page(page, lambda: asked(page).get("rows") == "full")
    assert set(page.evaluate(heights)) == {27}
    page.reload()
    page.wait_for_selector("#timeline-view[data-drawn]")
    assert set(page.evaluate(heights)) == {27}


def test_a_dragged_range_is_measured_for_the_focused_rank(served: Served, browser: Any) -> None:
    made = analysis()
    page = open_timeline(browser, served.add(made))
    box = page.locator("#timeline-view canvas").bounding_box()

    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 400, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 130, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")

    page.wait_for_selector(".tl-range [data-bucket]")
    from_ns, to_ns = page.evaluate(f"() => [{TIMELINE}.range.from, {TIMELINE}.range.to]")
    until_on_page(page, lambda: asked(page).get("measure") == f"{from_ns}-{to_ns}")
    rank = int(page.locator(".tl-range-rank").inner_text().split()[1])
    assert rank == 3  # under the pointer
    assert _shown_ns(page) == _split_by_hand(made, rank, from_ns, to_ns)
    page.mouse.move(box["x"] + 500, box["y"] + 60)
    until_on_page(page, lambda: page.locator(".tl-range-rank").inner_text() == "rank 0")
    assert _shown_ns(page) == _split_by_hand(made, 0, from_ns, to_ns)

    page.reload()
    page.wait_for_selector(".tl-range [data-bucket]")
    assert page.evaluate(f"() => {TIMELINE}.range") == {"from": from_ns, "to": to_ns}
    page.locator("#timeline-view canvas").focus()
    page.keyboard.press("Escape")
    assert not page.locator(".tl-range").is_visible()
    until_on_page(page, lambda: "measure" not in asked(page))


def _shown_ns(page: Any) -> dict[str, int]:
    shown = page.locator(".tl-range [data-bucket]").evaluate_all(
        "all => all.map(one => [one.dataset.bucket, Number(one.dataset.ns)])"
    )
    return dict(shown)


def _split_by_hand(made: Analysis, rank: int, from_ns: int, to_ns: int) -> dict[str, int]:
    segments, sums = made.tables.segments, dict.fromkeys(BUCKETS, 0)
    columns = (segments.rank, segments.bucket, segments.start_ns, segments.dur_ns)
    for own, bucket, start, dur in zip(*(column.tolist() for column in columns), strict=True):
        if own == rank:
            sums[BUCKETS[bucket]] += max(0, min(start + dur, to_ns) - max(start, from_ns))
    assert sum(sums.values()) == to_ns - from_ns
    return sums


def test_a_range_is_measured_by_keyboard(served: Served, browser: Any) -> None:
    made = analysis()
    page = open_timeline(browser, served.add(made))
    page.locator("#timeline-view canvas").focus()

    page.keyboard.press(".")
    page.keyboard.press("[")
    begin = page.evaluate(f"() => {TIMELINE}.chosen.start")
    for key in (".", ".", "]"):
        page.keyboard.press(key)

    page.wait_for_selector(".tl-range [data-bucket]")
    end = page.evaluate(f"() => {TIMELINE}.chosen.start + {TIMELINE}.chosen.dur")
    assert page.evaluate(f"() => [{TIMELINE}.range.from, {TIMELINE}.range.to]") == [begin, end]
    assert _shown_ns(page) == _split_by_hand(made, 0, begin, end)


def test_a_tip_names_the_kernel_that_takes_most_of_a_band(served: Served, browser: Any) -> None:
    page = open_timeline(browser, served.add(with_ops()) + "?from=0&to=60000000&open=3")
    box = page.locator("#timeline-view canvas").bounding_box()
    x = box["x"] + page.evaluate(f"() => {TIMELINE}.x(2e6)")
    tip = page.locator(".tl-tip b")

    page.mouse.move(x, box["y"] + 45)
    until_on_page(page, lambda: tip.inner_text() == "mostly aten::mm")
    page.mouse.move(x, box["y"] + 72)

    assert tip.inner_text() == "compute"  # no kernels of rank 1 are known


def test_the_controls_are_reached_by_keyboard_and_pass_axe(served: Served, browser: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    made = analysis()
    for scheme, width in (("light", 390), ("dark", 1440)):
        page = open_timeline(
            browser, served.add(made) + "?group=host&q=x&measure=1000000-9000000",
            color_scheme=scheme, viewport={"width": width, "height": 900},
        )  # fmt: skip
        page.wait_for_selector(".tl-range [data-bucket]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        serious = [one["id"] for one in Axe().run(page).response["violations"]
                   if one["impact"] in ("serious", "critical")]  # fmt: skip
        assert serious == []
        page.get_by_label("step", exact=True).focus()
        reached = []
        for _ in range(11):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
        assert [label.split(",")[0] for label in reached[2:]] == [
            "download trace", "search a kernel or op", "group ranks by", "show only some ranks",
            "draw closed ranks with few pixels", "keep the chosen rank above the others",
            "second timeline", "Timeline. Arrow left and right move",
            "zoom to the range",
        ]  # fmt: skip


def test_the_exported_page_searches_groups_and_measures_without_a_server(
    browser: Any, tmp_path: Path
) -> None:
    run = examine([SAMPLES / "tp2_pp2"])
    file = tmp_path / "kept.html"
    file.write_text(export_html(View("kept", run.report, run.tables)))
    page = open_timeline(browser, file.as_uri())

    names = page.evaluate(f"() => {TIMELINE}.data.names")
    page.get_by_label("search a kernel or op").fill("mm")
    until_on_page(page, lambda: "found" in page.locator(".tl-count").inner_text())
    page.get_by_label("next match").click()
    until_on_page(page, lambda: page.locator(".tl-status b").count() == 1)
    assert "mm" in page.locator(".tl-status b").inner_text()
    assert page.locator(".tl-status b").inner_text() in names

    page.get_by_label("group ranks by").select_option("stage")
    assert rows(page)[0] == "group stage 0"
    page.locator("#timeline-view canvas").focus()
    page.keyboard.press("[")
    page.keyboard.press("0")
    page.keyboard.press(".")
    page.keyboard.press("]")
    page.wait_for_selector(".tl-range [data-bucket]")
