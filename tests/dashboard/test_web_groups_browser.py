"""In a browser: runs of several jobs are grouped, selected and compared, with the keyboard too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.browser_builders import running_server
from support.job_builders import key_of, store_runs
from support.report_builders import analysis
from support.turns import PAGES

from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]

PACES = {
    "gpt": [1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 1.2, 1.21, 1.19, 1.22, 1.2, 1.21],
    "tiny": [1.0, 1.01] * 4,
    "m2": [1.0] * 3,
    "m8": [1.0] * 2,
}


@dataclass(frozen=True)
class Shared:
    """A server with runs of four jobs, and their ids by job."""

    url: str
    ids: dict[str, list[str]]

    @property
    def four(self) -> str:
        """A run of each job."""
        return ",".join(own[0] for own in self.ids.values())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("groups")
    with running_server(folder) as url:
        store = Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")
        ids = store_runs(store, PACES)
        store.close()
        yield Shared(url, ids)


def open_page(browser: Any, url: str, **options: Any) -> Any:
    page = browser.new_page(**options)
    page.goto(url)
    page.wait_for_selector("h1")
    return page


def press_until(page: Any, key: str, selector: str) -> None:
    """Presses the key until the focus is on such an element."""
    for _ in range(200):
        page.keyboard.press(key)
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return
    raise AssertionError(f"{key} does not reach {selector}")


def test_runs_are_selected_and_compared_with_the_keyboard(shared: Shared, browser: Any) -> None:
    page = open_page(browser, f"{shared.url}/?group=job")
    page.wait_for_selector(".pick")
    for _ in range(3):
        press_until(page, "Tab", ".pick")
        page.keyboard.press("Space")
    page.get_by_text("compare 3 selected").wait_for()
    press_until(page, "Shift+Tab", "#compare-link")
    page.keyboard.press("Enter")

    a, b, c = reversed(shared.ids["gpt"][-3:])
    page.wait_for_url(f"**/compare?runs={c},{b},{a}")
    page.locator(".matrix table").first.wait_for()
    page.wait_for_function("document.title === 'Compare - stepsplit'")
    heads = page.locator(".matrix").first.locator("thead th").all_inner_texts()
    assert [head.split()[:2] for head in heads[1:]] == [
        ["1", "gpt-09"], ["2", "gpt-10"], ["3", "gpt-11"],
    ]  # fmt: skip

    press_until(page, "Tab", ".pickers li:nth-child(2) .button")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/compare?runs={b},{c},{a}")
    page.locator(".pickers li:nth-child(1)", has_text="gpt-10").wait_for()
    press_until(page, "Tab", ".pickers li:nth-child(3) .button:last-child")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/compare?baseline={b}&candidate={c}")
    page.get_by_text("Difference by bucket").wait_for()


def test_selected_runs_stay_selected_while_the_list_is_searched(
    shared: Shared, browser: Any
) -> None:
    page = open_page(browser, shared.url)
    page.locator("#choose-q").fill("gpt-03")
    page.wait_for_url("**/?q=gpt-03")
    page.get_by_role("checkbox", name="select gpt-03").click()
    page.get_by_text("select another run to compare").wait_for()
    page.locator("#choose-q").fill("tiny-02")
    page.wait_for_url("**/?q=tiny-02")
    box = page.get_by_role("checkbox", name="select tiny-02")
    box.wait_for()
    assert box.get_attribute("aria-checked") == "false"
    box.click()

    page.get_by_text("compare selected").click()

    older, newer = shared.ids["tiny"][2], shared.ids["gpt"][3]
    page.wait_for_url(f"**/compare?baseline={older}&candidate={newer}")


def test_the_selection_is_limited_and_cleared(shared: Shared, browser: Any) -> None:
    page = open_page(browser, shared.url)
    page.wait_for_selector(".pick")
    boxes = page.locator("[data-pick]")
    for at in range(13):
        boxes.nth(at).click()
    page.get_by_text("at most 12 are compared").wait_for()
    assert not page.locator("#compare-link").is_visible()
    boxes.nth(0).click()
    page.get_by_text("compare 12 selected").wait_for()
    page.get_by_text("clear selection").click()
    assert page.locator('.pick[aria-checked="true"]').count() == 0
    assert not page.locator("#compare-link, #clear-picks").filter(visible=True).count()


def test_a_run_is_found_and_added(shared: Shared, browser: Any) -> None:
    a, b = shared.ids["gpt"][:2]
    page = open_page(browser, f"{shared.url}/compare?baseline={a}&candidate={b}")
    page.get_by_text("add a run").click()
    page.locator("#choose-find").fill("m2-00")
    page.wait_for_url("**&find=m2-00")
    page.get_by_role("link", name="add m2-00").click()
    page.wait_for_url(lambda url: url.endswith(f"={a},{b},{shared.ids['m2'][0]}"))
    page.locator(".matrix table").first.wait_for()
    page.reload()
    page.locator("#splits .bars .point").nth(2).wait_for(state="attached")


def test_selected_runs_are_tagged_and_deleted_together(tmp_path: Path, browser: Any) -> None:
    made = analysis()
    with running_server(tmp_path) as url:
        store = Store.open(f"sqlite:///{tmp_path}/runs.db", tmp_path / "artifacts")
        kept = [Tag("branch", "main"), Tag("old", "1")]
        names = ("first", "second", "third")
        ids = [store.import_report(name, made.report, made.tables, kept) for name in names]

        def read_tags() -> dict[str, list[str]]:
            return {run.name: [f"{tag.key}={tag.value}" for tag in run.tags]
                    for run in store.list_runs()}  # fmt: skip

        page = open_page(browser, f"{url}/?q=first")
        page.get_by_role("checkbox", name="select first").click()
        # The selection is kept in another search, and after a look at a run.
        page.goto(f"{url}/run/{ids[0]}")
        page.goto(f"{url}/?q=second")
        page.get_by_role("checkbox", name="select second").click()
        page.get_by_text("2 runs selected, 1 not in this list").wait_for()
        page.get_by_role("button", name="tag", exact=True).click()
        page.locator("#tag-lines").fill("release=2.1\nold")
        page.locator("#tag-save").click()
        page.get_by_role("link", name="release=2.1").wait_for()
        assert read_tags() == {
            "first": ["branch=main", "release=2.1"], "second": ["branch=main", "release=2.1"],
            "third": ["branch=main", "old=1"],
        }  # fmt: skip

        page.goto(f"{url}/?tag=release=2.1")
        page.locator("#pick-all").wait_for()
        page.once("dialog", lambda dialog: dialog.accept())
        page.locator("#delete-picks").click()
        page.get_by_text("No run matches").wait_for()
        assert list(read_tags()) == ["third"]

        page.goto(url)
        page.get_by_role("checkbox", name="select third").wait_for()
        assert not page.locator("#picks").is_visible()
        # The list shows what was added meanwhile, without a reload.
        page.evaluate("dash_clientside.set_props('watch-tick', { interval: 200 })")
        store.import_report("fourth", made.report, made.tables)
        page.get_by_role("link", name="fourth").wait_for()
        store.close()


def test_columns_are_chosen_by_the_keyboard(shared: Shared, browser: Any) -> None:
    page = open_page(browser, shared.url)
    page.wait_for_selector("[data-pick]")
    press_until(page, "Tab", ".menu summary")
    page.keyboard.press("Enter")
    page.get_by_role("checkbox", name="first finding").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/?columns=*finding")
    page.locator("th", has_text="first finding").wait_for()
    # The menu stays open for the next one, where the keyboard is.
    page.keyboard.press("Enter")
    page.wait_for_url(f"{shared.url}/")
    page.keyboard.press("Escape")
    assert page.locator("details.menu[open]").count() == 0


def test_a_choice_before_the_server_has_answered_keeps_the_one_before(
    shared: Shared, browser: Any
) -> None:
    page = open_page(browser, f"{shared.url}/?tag=branch%3Dmain")
    page.locator(".tag.on").wait_for()
    page.route("**/_dash-update-component", _answer_late)

    # A filter, two columns and the order, and the order again.
    page.locator(".tag.on").click()
    page.locator(".menu summary").click()
    for head in ("first finding", "idle"):
        page.get_by_role("checkbox", name=head, exact=True).click()
        assert page.get_by_role("checkbox", name=head, exact=True).get_attribute(
            "aria-checked"
        ) == ("true")
    # The open menu may cover the heads.
    page.locator(".menu summary").click()
    page.locator("thead a", has_text="step").click()
    page.locator("thead a", has_text="step").click()

    query = parse_qs(urlsplit(page.url).query)
    assert query["sort"] == ["step"] and "tag" not in query
    assert {"finding", "idle", "step"} <= set(query["columns"][0].split(","))
    page.locator("th[aria-sort=ascending]", has_text="step").wait_for()
    assert page.locator("th", has_text="first finding").count() == 1

    # What is typed meanwhile stays in the field, and the focus too.
    field = page.locator("#choose-q")
    field.press_sequentially("gpt-1", delay=450)
    page.wait_for_url("**q=gpt-1*")
    page.get_by_text("2 of 25 runs").wait_for()
    assert field.input_value() == "gpt-1"
    assert page.evaluate("document.activeElement.id") == "choose-q"
    assert "sort=step" in page.url and "idle" in page.url

    # The way back leads through each of them.
    page.unroute("**/_dash-update-component")
    page.locator("h1").click()
    page.go_back()
    page.wait_for_function("() => document.getElementById('choose-q').value === 'gpt-'")


def _answer_late(route: Any) -> None:
    time.sleep(1)
    route.continue_()


def test_the_history_of_a_job_is_chosen(shared: Shared, browser: Any) -> None:
    page = open_page(browser, f"{shared.url}/history")
    page.wait_for_selector("#history .scatterlayer .trace")
    assert page.locator("#history .legendtext").count() == 4
    page.locator("[data-choice=job]").select_option(key_of("gpt"))
    page.wait_for_url(f"**/history?job={key_of('gpt')}")
    page.get_by_text("typical range").wait_for()
    page.get_by_role("link", name="gpt-06").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_axe_finds_nothing(shared: Shared, browser: Any, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    paths = {
        "/?group=job": ".group", "/": ".pick", "/compare": ".finder .button",
        "/?columns=added,finding,idle&sort=-step": ".pick", f"/?job={key_of('tiny')}": ".pick",
        f"/compare?runs={shared.four}": "#splits .point", "/history": "#history .trace",
        f"/history?job={key_of('gpt')}": "#history .trace",
    }  # fmt: skip
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    found = {}
    for path, drawn in paths.items():
        page.goto(shared.url + path)
        page.locator(drawn).first.wait_for(state="attached")
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        found[path] = [one["id"] for one in Axe().run(page).response["violations"]]
    assert not any(found.values()), found
