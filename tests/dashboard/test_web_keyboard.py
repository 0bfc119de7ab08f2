"""What users do most, with the keyboard alone: find the straggler, delete a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.browser_builders import running_server
from support.turns import PAGES

from stepsplit.analyzer import examine
from stepsplit.dashboard.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "built_tp_pp_dp_slow_rank"
MOST_STEPS = 80
_FOCUSED = "() => document.activeElement.textContent.trim()"


@dataclass(frozen=True)
class Served:
    """A dashboard with one run, of which rank 3 is the straggler, and its store."""

    url: str
    run_id: str
    store: Store


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    run = examine([SAMPLE])
    store = Store.open(f"sqlite:///{tmp_path}/runs.db", tmp_path / "artifacts")
    run_id = store.import_report("slow-rank", run.report, run.tables)
    with running_server(tmp_path) as url:
        yield Served(url, run_id, store)
    store.close()


def press_tab_to(page, text: str) -> None:  # type: ignore[no-untyped-def]
    """Moves the focus on until it is on the element with this text."""
    for _ in range(MOST_STEPS):
        page.keyboard.press("Tab")
        if page.evaluate(_FOCUSED) == text:
            return
    raise AssertionError(f"{text} is not among the first {MOST_STEPS} elements")


def test_the_straggler_is_found_with_the_keyboard(served: Served, browser) -> None:  # type: ignore[no-untyped-def]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(served.url)
    page.wait_for_selector(".run-link")

    press_tab_to(page, "slow-rank")
    page.keyboard.press("Enter")
    page.wait_for_selector(".findings li")
    assert "rank 3 is a straggler" in page.locator(".findings li").first.inner_text()
    press_tab_to(page, "open in timeline")
    page.keyboard.press("Enter")
    page.wait_for_selector("#timeline-view[data-drawn]")
    page.locator("#timeline-view canvas").wait_for()
    for _ in range(MOST_STEPS):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    page.keyboard.press(".")

    assert "rank 3" in page.locator(".tl-status").inner_text()


def test_a_run_is_deleted_with_the_keyboard(served: Served, browser) -> None:  # type: ignore[no-untyped-def]
    page = browser.new_page()
    asked: list[str] = []

    def answer(dialog) -> None:  # type: ignore[no-untyped-def]
        asked.append(dialog.message)
        dialog.accept()

    page.on("dialog", answer)
    page.goto(f"{served.url}/run/{served.run_id}")
    page.wait_for_selector(".tabs")

    press_tab_to(page, "delete")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=No runs yet.")

    assert asked == ["Delete slow-rank with its files and its report?"]
    assert served.store.find_run(served.run_id) is None
