"""From a batch to the webhook to the alert on the page of a real dashboard in a real browser."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.alert_receiver import SECRET, Receiver, running_receiver
from support.dashboard_processes import Dashboard, open_store, running_dashboard
from support.turns import PAGES
from support.waiting import until
from support.watch_builders import (
    CHANGE_CAUSE,
    CHANGE_TEXT,
    MS,
    STORY,
    batch,
    build_story_change,
    event,
    list_story,
    minutes_ago,
    window,
)

from stepsplit.analyzer.watch.records import WatchBatch, encode_batch

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
PAGE = f"/watch/{STORY}".replace(" ", "%20")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alerts")


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with running_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def dashboard(folder: Path, receiver: Receiver) -> Iterator[Dashboard]:
    with open_store(folder) as store:
        for one in list_story(time.time_ns()):
            store.watches.add_batch(one)
    os.environ["STEPSPLIT_ALERT_SECRET"] = SECRET
    public = ("--public-url", "https://stepsplit.example")
    try:
        with running_dashboard(
            folder, "--workers", "0", "--alert-url", receiver.url, *public
        ) as running:
            yield running
    finally:
        del os.environ["STEPSPLIT_ALERT_SECRET"]


def _send(dashboard: Dashboard, one: WatchBatch) -> bool:
    request = urllib.request.Request(
        f"{dashboard.url}/api/v1/watch", encode_batch(one), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return bool(json.load(answer)["accepted"])


def test_from_a_batch_to_the_webhook_to_the_page(
    dashboard: Dashboard, receiver: Receiver, folder: Path, browser: Any
) -> None:
    one = build_story_change("changed")
    assert [_send(dashboard, one) for _ in range(2)] == [True, False]

    until(lambda: receiver.messages)
    (message,) = receiver.messages
    assert (message["run"], message["metric"], message["rank"]) == (STORY, "step_time", 5)
    assert (message["before"], message["after"], message["text"]) == (0.412, 0.494, CHANGE_TEXT)
    assert message["link"] == f"https://stepsplit.example{PAGE}"
    assert receiver.forged == []

    page = browser.new_page()
    page.goto(dashboard.url + message["link"].removeprefix("https://stepsplit.example"))
    card = page.locator(".card.alert")
    card.wait_for()
    words = card.inner_text()
    for word in (
        "1 open alert",
        CHANGE_TEXT,
        CHANGE_CAUSE,
        "step 210,000",
        "rank 5",
        "webhook sent",
    ):
        assert word in words

    card.get_by_role("button", name="Acknowledge").click()
    page.wait_for_selector('.alert .note:has-text("acknowledged by local")')
    page.get_by_role("button", name="Silence webhooks of this run until it ends").click()
    page.wait_for_selector('.alert .note:has-text("silenced until it ends")')
    page.get_by_role("button", name="End silence").click()
    page.get_by_role("button", name="Silence webhooks of this run until it ends").wait_for()
    page.get_by_role("button", name="Undo acknowledge").click()
    page.get_by_role("button", name="Acknowledge", exact=True).wait_for()

    with open_store(folder) as store:
        done = [one.action for one in store.audit.list_entries(4)]
    assert done == [
        "acknowledgement undone", "silence ended", "alert silenced", "alert acknowledged"
    ]  # fmt: skip
    assert len(receiver.messages) == 1


def test_two_dashboards_on_one_store_send_each_alert_once(
    dashboard: Dashboard, receiver: Receiver, folder: Path
) -> None:
    runs = [f"twice {number}" for number in range(12)]
    with running_dashboard(folder, "--workers", "0", "--alert-url", receiver.url) as other:
        for number, run in enumerate(runs):
            _send((dashboard, other)[number % 2], build_story_change(run, run))
        until(lambda: set(runs) <= {one["run"] for one in receiver.messages})
        time.sleep(3)

    assert sorted(one["run"] for one in receiver.messages if one["run"] in runs) == sorted(runs)


def test_an_alert_appears_and_leaves_by_itself(dashboard: Dashboard, browser: Any) -> None:
    _send(dashboard, batch(id="1", run="short", windows=(window(0, minutes_ago(3)),)))
    page = browser.new_page()
    page.goto(f"{dashboard.url}/watch/short?range=1h")
    page.wait_for_selector("#watch-steps .main-svg")
    assert page.locator(".card.alert").count() == 0

    at_ns = minutes_ago(2)
    levels = {"before_ns": 100.0 * MS, "after_ns": 120.0 * MS}
    _send(
        dashboard,
        batch(id="2", run="short", events=(event("change", at_ns, CHANGE_TEXT, **levels),)),
    )
    page.wait_for_selector(".card.alert", timeout=20_000)

    over = event("change", at_ns, "steps take 100 ms again", is_over=True, **levels)
    _send(dashboard, batch(id="3", run="short", events=(over,)))
    page.wait_for_selector(".card.alert", state="detached", timeout=20_000)


def test_a_viewer_sees_alerts_without_buttons(folder: Path, tmp_path: Path, browser: Any) -> None:
    words = {"admin": "adm", "viewer": "vie"}
    for name, word in words.items():
        (tmp_path / name).write_text(word)
    options = ("--password-file", "admin", "--viewer-password-file", "viewer")
    given = [str(tmp_path / one) if one in words else one for one in options]
    with open_store(tmp_path) as store:
        store.watches.add_batch(build_story_change("changed"))
    with running_dashboard(tmp_path, "--workers", "0", *given) as guarded:
        for name, number in (("admin", 4), ("viewer", 0)):
            page = browser.new_context().new_page()
            page.goto(f"{guarded.url}/login?next={PAGE}")
            page.fill("#password", words[name])
            page.press("#password", "Enter")
            page.wait_for_selector(".card.alert")
            assert page.locator(".alert button").count() == number, name


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    dashboard: Dashboard, folder: Path, browser: Any, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    _send(dashboard, build_story_change("look", "look"))
    parts = {"incarnation": 1, "world_size": 16, "dropped": {"batch": 3}}
    _send(dashboard, batch(id="dropped", run="look", **parts))
    with open_store(folder) as store:
        (dropped, *_) = store.alerts.list_alerts("look", 1)
        store.alerts.acknowledge(dropped.id, "token ann")
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.goto(f"{dashboard.url}/watch/look")
    page.wait_for_selector(".card.alert")
    page.wait_for_selector("#watch-steps .main-svg")
    page.wait_for_timeout(300)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    violations = Axe().run(page).response["violations"]
    found = [one["id"] for one in violations if one["impact"] in ("serious", "critical")]
    assert (found, errors) == ([], [])
