"""Two timelines, statistics of a range, pinned ranks and notes in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.browser_builders import ServedRuns, serving_runs
from support.turns import PAGES

from stepsplit.analyzer import examine
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.web.html_export import export_html

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
SAMPLES = Path(__file__).parents[2] / "sample_traces"
TIMELINE = 'document.getElementById("timeline-view").timeline'
WITHIN = "() => {const s = TIMELINE.shownStep(); TIMELINE.setRange(s.from + 1e6, s.from + 9e6)}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRuns]:
    names = ("h100_pp2", "h100_fsdp2", "built_tp_pp_dp_slow_rank")
    made = {name: examine([SAMPLES / name]) for name in names}
    with serving_runs(tmp_path_factory.mktemp("second"), made) as runs:
        yield runs


def open_both(browser: Any, served: ServedRuns, more: str = "", **options: Any) -> Any:
    page = browser.new_page(**({"viewport": {"width": 1440, "height": 900}} | options))
    first, second = (served.ids[name] for name in ("h100_pp2", "h100_fsdp2"))
    page.goto(f"{served.url}/run/{first}/timeline?with={second}{more}")
    page.wait_for_selector(".tl-second[data-drawn]")
    return page


def begins(page: Any) -> list[float]:
    """How far both windows begin after the begin of their steps."""
    words = "TIMELINE.from - TIMELINE.shownStep().from"
    both = (words, words.replace("TIMELINE", "TIMELINE.second"))
    code = f"() => [{', '.join(both)}]".replace("TIMELINE", TIMELINE)
    found: list[float] = page.evaluate(code)
    return found


def ask(page: Any) -> dict[str, list[str]]:
    page.wait_for_timeout(400)
    return parse_qs(urlsplit(page.url).query)


def cells(page: Any, number: int) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    rows = page.locator(".tl-table").nth(number).locator("tbody tr")
    texts = [rows.nth(at).locator("td").all_inner_texts() for at in range(rows.count())]
    return {row[0]: row[1:] for row in texts}


def test_two_runs_are_aligned_by_step_and_move_together(served: ServedRuns, browser: Any) -> None:
    page = open_both(browser, served)
    assert begins(page)[0] == pytest.approx(begins(page)[1])
    before = begins(page)
    box = page.locator(".tl-second canvas").bounding_box()
    page.mouse.move(box["x"] + 700, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 60, steps=4)
    page.mouse.up()
    after = begins(page)
    assert after[0] == pytest.approx(after[1]) and after[0] > before[0]

    steps = page.locator(".tl-second").get_by_label("step", exact=True)
    numbers = steps.locator("option").all_inner_texts()
    steps.select_option(label=numbers[-1])
    number = numbers[-1].split()[1]
    assert ask(page)["with_step"] == [number]
    page.reload()
    page.wait_for_selector(".tl-second[data-drawn]")
    assert page.evaluate(f"() => {TIMELINE}.second.shownStep().step") == int(number)
    page.locator(".tl-second").get_by_text("close").click()
    assert "with" not in ask(page) and page.locator(".tl-second").count() == 0


def test_a_range_of_both_has_a_table_by_bucket_and_kernel(served: ServedRuns, browser: Any) -> None:
    page = open_both(browser, served, "&stats=1")
    page.evaluate(WITHIN.replace("TIMELINE", TIMELINE))
    page.wait_for_selector(".tl-table >> nth=1")

    by_bucket = cells(page, 0)
    sums = [sum(float(row[at].split()[0]) for row in by_bucket.values()) for at in (1, 3)]
    assert sums == [pytest.approx(100, abs=0.4)] * 2, "the shares of each side"
    assert by_bucket["bubble"][2].startswith("0") and by_bucket["bubble"][-1].startswith(
        "\N{MINUS SIGN}"
    )
    kernels = cells(page, 1)
    assert any("AllGather" in name and not row[0] for name, row in kernels.items())
    assert len(ask(page)["with_measure"][0].split("-")) == 2


def test_a_pinned_rank_stays_above_the_others(served: ServedRuns, browser: Any) -> None:
    page = open_both(browser, served)
    page.get_by_label("close the second timeline").click()
    canvas = page.locator("#timeline-view canvas")
    canvas.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    keys = f"() => {TIMELINE}.places().map((one) => one.key)"
    assert page.evaluate(keys) == ["rank 1", "rank 0"] and ask(page)["pin"] == ["1"]
    hit = f"() => {{const t = {TIMELINE}; t.paint(); return t.hit(10, 40).rank}}"
    page.evaluate(f"() => {{{TIMELINE}.body.scrollTop = 30}}")
    assert page.evaluate(hit) == 1
    page.keyboard.press("k")
    assert page.evaluate(keys) == ["rank 0", "rank 1"]


def test_notes_are_in_the_address_and_the_export(
    served: ServedRuns, browser: Any, tmp_path: Path
) -> None:
    page = open_both(browser, served)
    page.get_by_label("close the second timeline").click()
    page.evaluate(WITHIN.replace("TIMELINE", TIMELINE))
    page.wait_for_selector("#timeline-view > .tl-range [data-bucket]")
    page.get_by_label("write a note on this range").click()
    page.keyboard.type("waits </script><b>here</b>")
    page.keyboard.press("Enter")
    assert ask(page)["note"][0].endswith(":waits </script><b>here</b>")

    page.reload()
    page.wait_for_selector(".tl-note")
    with page.expect_download() as download:
        page.get_by_text("export with these notes").click()
    file = tmp_path / "kept.html"
    download.value.save_as(file)
    page.goto(file.as_uri())
    page.wait_for_selector("#timeline-view[data-drawn]")
    (note,) = page.locator(".tl-note button").all()
    assert note.inner_text() == "1 waits </script><b>here</b>"
    note.click()
    page.get_by_text("table of 2 ranks").click()
    assert page.locator(".tl-table").count() == 2


def test_the_rows_and_folded_groups_of_the_second_timeline_stay(
    served: ServedRuns, browser: Any
) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    second = served.ids["built_tp_pp_dp_slow_rank"]
    page.goto(f"{served.url}/run/{served.ids['h100_pp2']}/timeline?with={second}")
    page.wait_for_selector(".tl-second[data-drawn]")
    below = page.locator(".tl-second")
    (by,) = below.get_by_label("group ranks by").locator("option").all_inner_texts()[1:2]
    below.get_by_label("group ranks by").select_option(label=by)
    name = page.evaluate(f"() => {TIMELINE}.second.groups()[0].name")
    page.evaluate(f"(name) => {TIMELINE}.second.toggleGroup(name)", name)
    below.get_by_label("draw closed ranks with few pixels").click()
    asked = ask(page)
    assert (asked["with_fold"], asked["with_rows"]) == ([name], ["compact"])
    assert "rows" not in asked and "fold" not in asked
    page.reload()
    page.wait_for_selector(".tl-second[data-drawn]")
    shown = f"() => [[...{TIMELINE}.second.folded], {TIMELINE}.second.isCompact()]"
    assert page.evaluate(shown) == [[name], True]
    assert page.evaluate(f"() => {TIMELINE}.isCompact()") is False


def test_a_note_on_another_step_is_said_in_the_export(
    served: ServedRuns, browser: Any, tmp_path: Path
) -> None:
    run = examine([SAMPLES / "h100_pp2"])
    first, second = (next(one for one in run.report.steps if one.step == n) for n in (3, 5))
    notes = [f"{one.start_ns + 10}-{one.start_ns + 99}:<i>{one.step}" for one in (first, second)]
    file = tmp_path / "run.html"
    file.write_text(export_html(View("run", run.report, run.tables), [*notes, "odd"]), "utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    page.wait_for_selector("#timeline-view[data-drawn]")
    texts = page.locator(".tl-note").all_inner_texts()
    assert texts[0] == "step 3: <i>3 (this file has only step 5)" and "1 <i>5" in texts[1]
    assert len(texts) == 2 and page.locator(".tl-note button").count() == 1


def test_odd_choices_of_an_address_leave_the_first_timeline(
    served: ServedRuns, browser: Any
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    address = f"{served.url}/run/{served.ids['h100_pp2']}/timeline?pin=9,x,1&stats=1&note=5-1:x"
    for odd in ("../../x", "ffffffffffff", "%00", "a" * 500):
        page.goto(f"{address}&with={odd}&with_step=-3&with_measure=9-1&with_open=77&note=no")
        page.wait_for_selector("#timeline-view[data-drawn]")
    page.goto(f"{address}&with=ffffffffffff")
    page.wait_for_selector("#timeline-view[data-drawn]")
    page.wait_for_function("document.querySelector('.tl-second .tl-status').textContent")
    assert "Cannot load the timeline" in page.locator(".tl-second .tl-status").inner_text()
    page.get_by_label("later").click()
    second = served.ids["h100_fsdp2"]
    page.goto(f"{address}&with={second}&with_step=nan&measure=54897904-61428165")
    page.wait_for_selector(".tl-second .tl-range [data-bucket]")
    assert errors == []


def test_the_tables_follow_the_filter_and_the_pins(served: ServedRuns, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{served.url}/run/{served.ids['h100_pp2']}/timeline?stats=1&pin=99,1,1&show=0")
    page.wait_for_selector("#timeline-view[data-drawn]")
    assert page.evaluate(f"() => {TIMELINE}.shownRanks()") == [1, 0], "no rank 99"
    page.evaluate(WITHIN.replace("TIMELINE", TIMELINE))
    page.wait_for_selector(".tl-table >> nth=1")
    both = cells(page, 1)
    page.evaluate(f"() => {{{TIMELINE}.focus = 'rank 1'; {TIMELINE}.togglePin()}}")
    page.get_by_text("mean of 1 rank", exact=False).wait_for()
    page.wait_for_selector(".tl-table >> nth=1")
    alone = cells(page, 1)
    assert {row[-1].split(", ")[1] for row in alone.values()} == {"rank 0"} and alone != both


def test_names_with_line_breaks_and_names_beyond_the_first(
    served: ServedRuns, browser: Any
) -> None:
    page = open_both(browser, served, "&stats=1")
    page.evaluate(WITHIN.replace("TIMELINE", TIMELINE))
    page.wait_for_selector(".tl-table >> nth=1")
    page.evaluate(
        """() => {
          const t = TIMELINE;
          const row = (name, ms) => ({ calls: 1, name, bucket: 0, total_ns: ms * 2e6 });
          t.nameTimes = { count: 2, names: [row("a\\nb", 9), row("c", 1)] };
          t.second.nameTimes = { count: 300, names: [row("c", 5), row("d", 4)] };
          t.showTable();
        }""".replace("TIMELINE", TIMELINE)
    )
    rows = cells(page, 1)
    found = {" ".join(name.split()[:-2]): row[-1] for name, row in rows.items()}
    assert found == {"a b": "", "c": "+4.000 ms", "d": "+4.000 ms"}


def test_the_second_timeline_keeps_its_part_of_the_address(
    served: ServedRuns, browser: Any
) -> None:
    page = open_both(browser, served)
    page.evaluate(f"() => {{const t = {TIMELINE}.second; t.toggleAll(); t.focus = 'rank 1'}}")
    if page.evaluate(f"() => {TIMELINE}.second.open.size"):
        page.evaluate(f"() => {TIMELINE}.second.toggleAll()")
    page.evaluate(f"() => {TIMELINE}.second.togglePin()")
    assert ask(page)["with_pin"] == ["1"] and "with_open=" in page.url

    # It never comes while its index is held back.
    second = served.ids["h100_fsdp2"]
    page.route(f"**/api/v1/runs/{second}/timeline", lambda route: None)
    page.goto(page.url + "&with_show=1&with_measure=5-9")
    page.wait_for_selector("#timeline-view[data-drawn]")
    page.get_by_label("later").click()
    asked = ask(page)
    assert (asked["with_show"], asked["with_measure"], asked["with_pin"]) == (["1"], ["5-9"], ["1"])

    page.unroute_all(behavior="ignoreErrors")
    page.goto(page.url)
    page.wait_for_selector(".tl-second[data-drawn]")
    shown = f"() => [{TIMELINE}.second.open.size, {TIMELINE}.second.pins]"
    assert page.evaluate(shown) == [0, [1]]


def test_an_exported_page_measures_the_ranks_of_its_filter(
    served: ServedRuns, browser: Any, tmp_path: Path
) -> None:
    file = tmp_path / "run.html"
    run = examine([SAMPLES / "h100_pp2"])
    file.write_text(export_html(View("run", run.report, run.tables)), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    page.wait_for_selector("#timeline-view[data-drawn]")
    page.evaluate(f"() => {{{TIMELINE}.stats = true; {TIMELINE}.setFilter('1')}}")
    page.evaluate(WITHIN.replace("TIMELINE", TIMELINE))
    assert "mean of 1 rank" in page.locator(".tl-caption").first.inner_text()
    page.evaluate(
        f"() => {{const t = {TIMELINE}; t.data.rows = t.data.rows.filter((one) => one.lane === "
        "'buckets'); t.setFilter(''); t.setRange(t.range.from, t.range.to + 1)}"
    )
    page.wait_for_selector(".tl-tables .message")
    assert page.locator(".tl-tables .message").inner_text().startswith("This file has no names")
    assert "mean of 2 ranks" in page.locator(".tl-caption").first.inner_text()


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1440)])
def test_both_pass_axe(served: ServedRuns, browser: Any, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    more = "&stats=1&measure=54897904-61428165&note=54897904-61428165:here&pin=1"
    size = {"width": width, "height": 900}
    page = open_both(browser, served, more, color_scheme=scheme, viewport=size)
    page.wait_for_selector(".tl-table >> nth=1")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
