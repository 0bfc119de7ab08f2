"""The live page of a watched run in a real browser: drawn, updated, accessible, on a phone too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser_builders import running_server
from support.turns import PAGES
from support.watch_builders import MS, STORY, batch, list_story, minutes_ago, window

from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
CHARTS = ("watch-steps", "watch-split", "watch-exposed", "watch-lateness", "watch-caused-waits")
PAGE = f"/watch/{STORY}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with _store(folder) as store:
        for one in list_story(time.time_ns()):
            store.watches.add_batch(one)
    with running_server(folder) as address:
        yield address


class _store:
    """The store in the folder, while it is needed."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")

    def __enter__(self) -> Store:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()


def _wait_for_charts(page: Any) -> None:
    for chart in CHARTS:
        page.wait_for_selector(f"#{chart} .js-plotly-plot .main-svg")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(url: str, browser: Any, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    found = []
    for path in ("/watch", PAGE):
        page.goto(url + path)
        page.wait_for_selector("#watch-live h1")
        if path == PAGE:
            _wait_for_charts(page)
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        violations = Axe().run(page).response["violations"]
        found += [one["id"] for one in violations if one["impact"] in ("serious", "critical")]
    assert (found, errors) == ([], [])


def test_a_range_is_chosen_by_its_button(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(url + PAGE)
    _wait_for_charts(page)

    page.locator(".ranges a", has_text="7 d").click()

    page.wait_for_selector('.ranges a.on:has-text("7 d")')
    assert page.url.endswith("?range=7d")
    assert page.title() == f"{STORY} - stepsplit"
    _wait_for_charts(page)


def test_a_dragged_range_is_that_of_all_charts_and_in_the_address(url: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(url + PAGE)
    _wait_for_charts(page)
    count = "() => document.querySelector('#watch-steps .js-plotly-plot').data.at(-1).x.length"
    before = page.evaluate(count)

    box = page.locator("#watch-steps .nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.6 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], middle + 9, steps=8)
    page.mouse.up()

    page.wait_for_url("**?from=*&to=*")
    _wait_for_charts(page)
    page.get_by_role("link", name="later").wait_for()
    ranges = {
        chart: page.locator(f"#{chart} .js-plotly-plot").evaluate("one => one.layout.xaxis.range")
        for chart in CHARTS
    }
    assert len({tuple(one) for one in ranges.values()}) == 1
    assert page.evaluate(count) > 0.1 * before + 5, "a finer resolution"
    assert page.locator("#choose-from").input_value() in page.url.replace("+", " ")
    # Out again, by the way back of the browser too.
    page.get_by_role("link", name="zoom out").click()
    page.wait_for_function("before => location.search !== before", arg="")
    page.locator(".ranges a", has_text="1 d").click()
    page.wait_for_url("**?range=1d")


@pytest.mark.parametrize("chart", ["watch-split", "watch-lateness"])
def test_a_click_opens_the_run_of_the_nearest_sample(
    url: str, folder: Path, browser: Any, chart: str
) -> None:
    with _store(folder) as store:
        watch = store.watches.find_watch(STORY)
        assert watch is not None
        sample = store.watches.list_samples(watch.id, 20)[-1].sample
        run_id = store.add("sample", [Tag("sample", sample.id)])
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(url + PAGE)
    _wait_for_charts(page)

    # plotly drops a click within 50 ms of the pointer's move: it still draws the label then.
    page.locator(f"#{chart} .nsewdrag.drag").first.hover()
    page.wait_for_selector(f"#{chart} .hoverlayer .hovertext")
    page.wait_for_timeout(200)
    page.mouse.down()
    page.mouse.up()

    page.wait_for_function("() => location.pathname.startsWith('/run/')")
    assert page.url.endswith(f"/run/{run_id}")
    with _store(folder) as store:
        store.delete(run_id)


def test_a_new_batch_appears_by_itself(url: str, folder: Path, browser: Any) -> None:
    with _store(folder) as store:
        store.watches.add_batch(batch(run="short", windows=(window(0, minutes_ago(3)),)))
        page = browser.new_page()
        page.goto(url + "/watch/short?range=1h")
        page.wait_for_selector("#watch-steps .main-svg")
        assert "step 20" in page.locator(".subtitle").inner_text()

        more = window(0, minutes_ago(1), 120 * MS, steps=33)
        store.watches.add_batch(batch(id="second", run="short", windows=(more,)))

    page.wait_for_selector('.subtitle:has-text("step 33")', timeout=20_000)


def test_the_page_rests_while_it_is_not_visible(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(url + PAGE)
    _wait_for_charts(page)
    # Under load, what the page loaded last comes after its charts.
    page.wait_for_load_state("networkidle")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    page.evaluate(
        """() => {
          Object.defineProperty(document, "hidden", { value: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    page.wait_for_timeout(11_000)

    assert asked == []
