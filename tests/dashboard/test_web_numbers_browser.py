"""Numbers that a user reads first, in a real browser: largest parts, equal work, waits, bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from support.browser_builders import ServedRuns, serving_runs
from support.samples import SAMPLES
from support.turns import PAGES

from stepsplit.analyzer import examine

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
FIRST_VIEW_BYTES, PAGE_DATA_BYTES = 1_300_000, 150_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRuns]:
    runs = {name: examine([SAMPLES / name]) for name in ("pp2_m2", "pp2_m8", "tp2_pp2")}
    made = runs["tp2_pp2"]
    runs["quiet"] = replace(made, report=replace(made.report, findings=()))
    with serving_runs(tmp_path_factory.mktemp("numbers"), runs) as both:
        yield both


def test_the_largest_parts_are_listed_where_no_fix_is_known(served: ServedRuns, browser) -> None:  # type: ignore[no-untyped-def]
    page = browser.new_page()
    page.goto(f"{served.url}/run/{served.ids['quiet']}")
    section = page.locator("section.card", has_text="Top bottlenecks")
    section.wait_for()

    parts = section.locator("li b").all_inner_texts()

    assert "No fix is known" in section.inner_text()
    assert [part.split()[0] for part in parts] == [
        "compute", "bubble", "collective", "idle", "skew",
    ]  # fmt: skip
    shares = [float(part.split()[1]) for part in parts]
    assert shares == sorted(shares, reverse=True) and min(shares) >= 5


def test_runs_with_other_microbatches_are_compared_by_microbatch(
    served: ServedRuns, browser
) -> None:  # type: ignore[no-untyped-def]
    page = browser.new_page()
    few, many = served.ids["pp2_m2"], served.ids["pp2_m8"]
    page.goto(f"{served.url}/compare?baseline={few}&candidate={many}")
    first = page.locator(".card.number").first
    first.wait_for()

    label, change, note = first.inner_text().splitlines()

    assert (label, note) == ("time per microbatch", "2 to 8 microbatches a step")
    assert change.startswith("-"), (
        "a step with four times the microbatches is less than 4 times as long"
    )


def test_waits_are_grouped_by_a_menu_and_in_the_address(served: ServedRuns, browser) -> None:  # type: ignore[no-untyped-def]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{served.url}/run/{served.ids['tp2_pp2']}/collectives")
    rows = "document.querySelector('#waits .js-plotly-plot')._fullData[0].y.join()"
    page.wait_for_selector("#waits .js-plotly-plot .hm")
    assert page.evaluate(rows) == "0,1,2,3"

    page.locator("[data-choice=group]").select_option("stage")
    page.locator("#waits .ytitle", has_text="waiting (stage)").wait_for()

    assert page.evaluate(rows) == "0,1"
    assert page.url.endswith("/collectives?group=stage")


def test_a_first_view_is_compressed_and_a_page_small(served: ServedRuns, browser) -> None:  # type: ignore[no-untyped-def]
    page = browser.new_page()
    sizes: list[int] = []
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))

    page.goto(f"{served.url}/run/{served.ids['tp2_pp2']}")
    page.wait_for_selector("#by-rank .point")
    page.wait_for_timeout(500)
    first_view = sum(sizes)
    sizes.clear()
    for name in ("Pipeline", "Collectives", "Compute", "Memory", "Model"):
        page.get_by_role("link", name=name, exact=True).click()
        page.wait_for_timeout(700)

    assert first_view < FIRST_VIEW_BYTES
    assert sizes and max(sizes) < PAGE_DATA_BYTES
