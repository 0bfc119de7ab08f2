"""The pages in a real browser: figures are drawn, nothing comes from elsewhere, uploads arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser_builders import ARGS, CHROMIUM, need_chromium, running_server
from report_builders import analysis

from stepsplit.dashboard.store.store import Store

pytestmark = pytest.mark.slow
BARS = ".bars .point"
_DROP = """() => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File(["dropped"], "rank0.json"));
  const event = new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true});
  document.getElementById("drop-zone").dispatchEvent(event);
}"""
_INLINE = """() => {
  const script = document.createElement("script");
  script.textContent = "window.broken = true";
  document.body.append(script);
}"""


@dataclass
class Watch:
    """What a page said and asked for. A refused script or style is a console error."""

    errors: list[str] = field(default_factory=list)
    hosts: set[str | None] = field(default_factory=set)

    def on(self, page):  # type: ignore[no-untyped-def]
        noisy = ("error", "warning")
        page.on("console", lambda m: self.errors.append(m.text) if m.type in noisy else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname))
        page.on("requestfailed", lambda request: self.errors.append(f"failed: {request.url}"))
        page.add_init_script(
            "document.addEventListener('securitypolicyviolation',"
            " e => console.error('CSP refused ' + e.violatedDirective))"
        )
        return page


@pytest.fixture
def browser() -> Iterator[object]:
    need_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGS))
        yield chromium
        chromium.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with running_server(tmp_path) as url:
        yield url


def test_a_runs_page_draws_its_figures(server: str, browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run_id = _import(tmp_path)
    watch = Watch()
    page = watch.on(browser.new_page(viewport={"width": 1280, "height": 900}))

    page.goto(f"{server}/run/{run_id}?step=5")
    page.wait_for_function("document.title === 'stepsplit'")
    for figure in ("by-rank", "by-step", "critical-path", "timeline", "pipeline"):
        page.wait_for_selector(f"#{figure} {BARS}")
    before = page.locator(f"#timeline {BARS}").count()
    page.locator("#step").click()
    page.get_by_text("all steps").click()
    page.wait_for_url("**/run/*?step=all")
    page.wait_for_function(f"document.querySelectorAll('#timeline {BARS}').length > {2 * before}")

    page.get_by_text("by rank, most idle first").click()
    page.locator("details[open] th", has_text="data loading").wait_for()

    assert page.locator(".card.number").count() == 7
    assert page.get_by_text("slower compute").count() == 1
    assert (watch.errors, watch.hosts) == ([], {"127.0.0.1"})


def test_a_name_from_a_file_is_text(server: str, browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = analysis()
    with_store = _store(tmp_path)
    with_store.import_report("<img src=x onerror=alert(1)>", made.report, made.tables)
    watch = Watch()
    page = watch.on(browser.new_page())

    page.goto(server)
    page.wait_for_selector(".run-link")

    assert page.locator(".run-link").inner_text() == "<img src=x onerror=alert(1)>"
    assert watch.errors == []


def test_an_upload_ends_on_the_runs_page(server: str, browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trace = tmp_path / "rank0_trace.json"
    trace.write_bytes(b"x" * 3_000_000)
    watch = Watch()
    page = watch.on(browser.new_page())

    page.goto(server)
    page.wait_for_selector("#choose-files")
    with page.expect_file_chooser() as chooser:
        page.locator("#choose-files").click()
    chooser.value.set_files(trace)
    page.wait_for_url("**/run/*")
    page.wait_for_selector(f"#timeline {BARS}")

    (run,) = _store(tmp_path).runs()
    assert (run.name, run.state) == ("rank0_trace.json", "done")
    uploaded = tmp_path / "artifacts" / run.id / "input" / "rank0_trace.json"
    assert uploaded.stat().st_size == 3_000_000
    assert (watch.errors, watch.hosts) == ([], {"127.0.0.1"})


def test_a_folder_keeps_its_paths(server: str, browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    nested = tmp_path / "exp1" / "nccl"
    nested.mkdir(parents=True)
    nested.joinpath("debug é#1.log").write_text("log")
    page = browser.new_page()

    page.goto(server)
    page.wait_for_selector("#drop-zone")
    page.locator("#upload-folder").set_input_files(tmp_path / "exp1")
    page.wait_for_url("**/run/*")
    page.wait_for_selector(".cards")

    (run,) = _store(tmp_path).runs()
    assert run.name == "exp1"
    uploaded = tmp_path / "artifacts" / run.id / "input" / "exp1" / "nccl" / "debug é#1.log"
    assert uploaded.read_text() == "log"


def test_a_dropped_file_is_uploaded(server: str, browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    page = browser.new_page()
    page.goto(server)
    page.wait_for_selector("#drop-zone")

    page.evaluate(_DROP)
    page.wait_for_url("**/run/*")
    page.wait_for_selector(".cards")

    (run,) = _store(tmp_path).runs()
    assert run.name == "rank0.json"
    assert (tmp_path / "artifacts" / run.id / "input" / "rank0.json").read_text() == "dropped"


def test_the_policy_is_in_force(server: str, browser) -> None:  # type: ignore[no-untyped-def]
    watch = Watch()
    page = watch.on(browser.new_page())
    page.goto(server)
    page.wait_for_selector("#drop-zone")

    page.evaluate(_INLINE)
    page.wait_for_timeout(200)

    assert any("CSP refused script-src" in error for error in watch.errors)


def test_the_server_writes_nothing_at_home(server: str, tmp_path: Path) -> None:
    assert server.startswith("http://127.0.0.1:")
    assert not (tmp_path / "home").exists()


def _import(folder: Path) -> str:
    made = analysis()
    return _store(folder).import_report("gpt-pp2-tp2", made.report, made.tables)


def _store(folder: Path) -> Store:
    return Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")
