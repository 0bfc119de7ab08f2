"""Logging in and out, and deleting a run, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.dashboard_processes import open_store, running_dashboard
from support.report_builders import analysis

from stepsplit.dashboard.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.in_turn("dashboard/web")]


@contextmanager
def _guarded_server(folder: Path) -> Iterator[str]:
    """A dashboard with a password for admins and one for viewers."""
    for name in ("admin", "viewer"):
        (folder / name).write_text(f"{name}'s\n")
    files = ["--password-file", str(folder / "admin")]
    files += ["--viewer-password-file", str(folder / "viewer")]
    with running_dashboard(folder, "--workers", "0", *files) as dashboard:
        yield dashboard.url


def _import(store: Store, name: str) -> str:
    made = analysis()
    return store.import_report(name, made.report, made.tables)


def _log_in(page: Any, password: str) -> None:
    page.fill("#password", password)
    page.click("form.login button")


def test_a_viewer_reads_an_admin_deletes_and_both_log_out(tmp_path: Path, browser: Any) -> None:
    with open_store(tmp_path) as store:
        run_id, kept = _import(store, "old"), _import(store, "kept")
    page = browser.new_context().new_page()
    page.on("dialog", lambda dialog: dialog.accept())
    with _guarded_server(tmp_path) as url:
        page.goto(f"{url}/run/{run_id}/timeline")
        page.wait_for_selector("form.login")
        _log_in(page, "wrong")
        assert page.inner_text("#problem") == "wrong password or token"
        _log_in(page, "viewer's")
        page.wait_for_url(f"{url}/run/{run_id}/timeline")
        page.wait_for_selector(".tabs .on")
        assert page.locator("[data-delete]").count() == 0

        page.click("#log-out")
        page.wait_for_selector("form.login")
        page.goto(f"{url}/run/{run_id}")
        page.wait_for_selector("form.login")
        _log_in(page, "admin's")
        page.wait_for_selector("[data-delete]")
        page.click("[data-delete]")
        page.wait_for_selector("#drop-zone")
        page.wait_for_selector(f"[href='/run/{kept}']")
        assert page.locator(f"[href='/run/{run_id}']").count() == 0
    with open_store(tmp_path) as store:
        assert [run.id for run in store.list_runs()] == [kept]
        done = [one.action for one in store.audit.list_entries(10)]
    assert done == ["run deleted", "login", "logout", "login", "login"]


def test_an_open_page_whose_session_has_ended_leads_to_the_login(
    tmp_path: Path, browser: Any
) -> None:
    page = browser.new_context().new_page()
    with _guarded_server(tmp_path) as url, open_store(tmp_path) as store:
        _import(store, "run")
        page.goto(url)
        page.wait_for_selector("form.login")
        _log_in(page, "viewer's")
        page.wait_for_selector(".run-link")
        assert page.locator("#drop-zone").count() == 0
        assert store.sessions.end_all() == 1

        page.click(".run-link")
        page.wait_for_selector("form.login")
        _log_in(page, "viewer's")

        page.wait_for_url("**/run/*")
        page.wait_for_selector(".tabs .on")
        assert store.sessions.end_all() == 1
        page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
        page.wait_for_selector("form.login")


def test_a_link_on_another_site_finds_the_session(tmp_path: Path, browser: Any) -> None:
    """The browser does not send the cookie with the first request, which the link causes."""
    page = browser.new_context().new_page()
    with _guarded_server(tmp_path) as url:
        page.goto(url)
        page.wait_for_selector("form.login")
        _log_in(page, "viewer's")
        page.wait_for_selector("#log-out")
        elsewhere = url.replace("127.0.0.1", "localhost")

        page.goto(f"{elsewhere}/login")
        page.set_content(f'<a href="{url}/history">history</a>')
        page.click("a")

        page.wait_for_selector("#log-out")
        page.wait_for_selector("h1:has-text('History')")
        assert page.url == f"{url}/history"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_the_login_page(
    tmp_path: Path, browser: Any, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_context(color_scheme=scheme).new_page()
    with _guarded_server(tmp_path) as url:
        page.goto(f"{url}/login")
        _log_in(page, "wrong")
        page.wait_for_selector("#problem")
        found = Axe().run(page).response["violations"]
        _log_in(page, "viewer's")
        page.wait_for_selector("#log-out")
        found += Axe().run(page).response["violations"]

    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
