"""The form "describe the job" in a real browser, on runs that are analyzed for real."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser_builders import running_server
from support.dashboard_processes import open_store
from support.store_builders import queued, settled
from support.turns import PAGES
from support.waiting import until_on_page

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "dp4"
RECORDED = {
    path.name: path.read_bytes() for path in SAMPLE.glob("r*") if path.name != "report.json"
}
TRACES = {name: content for name, content in RECORDED.items() if name != "run.json"}
SIZES = {"layers": "2", "hidden": "256", "heads": "8", "vocab": "32"}
_FOCUS = "document.activeElement.id || document.activeElement.textContent"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A dashboard that analyzes the runs of the folder's store."""
    with running_server(folder, "analyze_upload") as address:
        yield address


def add(folder: Path, **files: bytes) -> str:
    """A run with these files, analyzed."""
    with open_store(folder) as store:
        run_id = queued(store, "train", **files)
        assert settled(store, run_id, 120) == ("done", None)
    return run_id


def open_page(browser: Any, address: str, **options: Any) -> Any:
    """The page of a run; what breaks its script or its policy fails the test."""
    page = browser.new_page(**options)
    page.set_default_timeout(60_000)
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda m: page.errors.append(m.text) if "Security" in m.text else None)
    page.goto(address)
    page.wait_for_selector(".tabs .on")
    return page


def open_form(page: Any, opener: str = ".heading [data-job]") -> None:
    page.locator(opener).click()
    page.wait_for_selector("#job-form fieldset")


def read_job(folder: Path, run_id: str) -> dict[str, Any]:
    with open_store(folder) as store:
        return tomllib.loads((store.read_job(run_id) or b"").decode())


def test_the_missing_sizes_are_filled_in_and_the_run_is_compared(
    folder: Path, url: str, browser: Any
) -> None:
    run_id = add(folder, **TRACES)
    address = f"{url}/run/{run_id}"
    page = open_page(browser, address)
    page.evaluate("window.isSamePage = true")
    page.get_by_text("cannot infer").first.wait_for()

    open_form(page, "section [data-job]")
    inferred = {
        key: page.locator(f"#job-{key}").input_value()
        for key in ("parallel-dp", "hardware-preset", "training-dtype")
    }
    needed = page.locator(".job-field.needed label").all_inner_texts()
    for key, value in SIZES.items():
        page.locator(f"#job-model-{key}").fill(value)
    page.locator("#job-training-seq_len").fill("64")
    page.locator("#job-training-micro_batch").fill("8")
    page.get_by_role("button", name="Analyze", exact=True).click()
    page.get_by_text("predicted").first.wait_for()

    assert inferred == {"parallel-dp": "4", "hardware-preset": "cpu", "training-dtype": "fp32"}
    assert needed == [*SIZES, "seq_len", "micro_batch"]
    assert (page.url, page.evaluate("window.isSamePage")) == (address, True)
    assert page.locator("#job-form[open]").count() == 0
    job = read_job(folder, run_id)
    assert {key: str(job["model"][key]) for key in SIZES} == SIZES
    assert (job["parallel"]["dp"], job["training"]["seq_len"]) == (4, 64)
    assert page.errors == []


def test_a_wrong_field_is_named_and_what_was_entered_stays(
    folder: Path, url: str, browser: Any
) -> None:
    run_id = add(folder, **RECORDED)
    page = open_page(browser, f"{url}/run/{run_id}/model")
    page.locator("section [data-job]").wait_for()

    open_form(page, "section [data-job]")
    page.locator("#job-training-micro_batch").fill("two")
    page.locator("#job-parallel-tp").fill("2")
    page.locator("#job-send").click()
    message = page.locator("#job-status.failed")
    message.wait_for()
    first, focus = message.inner_text(), page.evaluate(_FOCUS)
    page.locator("#job-training-micro_batch").fill("8")
    page.locator("#job-send").click()
    page.get_by_text("the layout has 8 ranks but the recording has 4").wait_for()
    kept = page.locator("#job-parallel-tp").input_value()
    page.locator("#job-parallel-tp").fill("1")
    page.locator("#job-send").click()
    until_on_page(
        page, lambda: read_job(folder, run_id).get("training", {}).get("micro_batch") == 8
    )

    assert first == (
        "Not analyzed: job.toml: training.micro_batch: 'two' is not a valid count; write an"
        " integer >= 1"
    )
    assert focus == "job-training-micro_batch"
    assert kept == "2"
    assert page.errors == []


def test_what_has_no_field_is_kept_and_changed_as_text(
    folder: Path, url: str, browser: Any, tmp_path: Path
) -> None:
    run_id = add(folder, **RECORDED)
    mine = tmp_path / "Mine.toml"
    mine.write_text('# mine\n[parallel]\nrank_order = "tp-cp-dp-pp"\n[hardware]\npreset = "cpu"\n')
    page = open_page(browser, f"{url}/run/{run_id}")

    open_form(page)
    page.locator("#job-upload").set_input_files(mine)
    page.get_by_text("Mine.toml is not sent before").wait_for()
    page.get_by_role("button", name="Edit as fields").click()
    page.locator("#job-hardware-preset").select_option("h100-sxm")
    page.get_by_role("button", name="Edit as text").click()
    page.locator("#job-text").wait_for()
    text = page.locator("#job-text").input_value()
    page.locator("#job-text").fill(text + "[model")
    page.get_by_role("button", name="Edit as fields").click()
    page.locator("#job-status.failed").wait_for()
    refused = page.locator("#job-status").inner_text()
    page.locator("#job-text").fill(text)
    page.locator("#job-send").click()
    page.locator(".mismatch").wait_for()

    assert text == mine.read_text().replace('"cpu"', '"h100-sxm"')
    assert "not valid TOML" in refused
    assert "does not describe this recording" in page.locator(".mismatch").inner_text()
    with open_store(folder) as store:
        kept = (store.find_folder(run_id) / "input" / "job.toml").read_text()
    assert kept == text
    assert page.errors == []


def test_the_keyboard_alone_describes_the_job(folder: Path, url: str, browser: Any) -> None:
    run_id = add(folder, **RECORDED)
    page = open_page(browser, f"{url}/run/{run_id}")

    def press_until(key: str, focus: str) -> None:
        for _ in range(80):
            if page.evaluate(_FOCUS) == focus:
                return
            page.keyboard.press(key)
        raise AssertionError(page.evaluate(_FOCUS))

    press_until("Tab", "describe the job")
    page.keyboard.press("Enter")
    page.wait_for_selector("#job-form fieldset")
    page.keyboard.press("Escape")
    closed = page.evaluate(_FOCUS)
    page.keyboard.press("Enter")
    page.wait_for_selector("#job-form[open] fieldset")
    press_until("Tab", "job-training-global_batch")
    page.keyboard.press("Control+a")
    page.keyboard.type("64")
    page.keyboard.press("Enter")
    page.wait_for_selector("#job-form:not([open])", state="attached")
    until_on_page(page, lambda: read_job(folder, run_id)["training"]["global_batch"] == 64)
    page.wait_for_selector(".tabs .on")

    assert (closed, page.evaluate(_FOCUS)) == ("describe the job", "page")
    assert page.errors == []


def test_the_page_is_where_it_was_after_the_analysis(folder: Path, url: str, browser: Any) -> None:
    run_id = add(folder, **TRACES)
    page = open_page(browser, f"{url}/run/{run_id}", viewport={"width": 390, "height": 700})
    page.locator("section [data-job]").scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    before = page.evaluate("window.scrollY")

    open_form(page, "section [data-job]")
    page.locator("#job-parallel-zero").fill("1")
    for key, value in SIZES.items():
        page.locator(f"#job-model-{key}").fill(value)
    page.locator("#job-training-seq_len").fill("32")
    page.locator("#job-training-micro_batch").fill("1")
    page.locator("#job-send").click()
    page.locator(".status").first.wait_for()
    page.wait_for_selector(".tabs .on")

    assert before > 100
    until_on_page(page, lambda: abs(page.evaluate("window.scrollY") - before) < 5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_nothing_in_the_open_form(
    folder: Path, url: str, browser: Any, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    run_id = add(folder, **TRACES)
    size = {"width": width, "height": 900}
    page = open_page(browser, f"{url}/run/{run_id}", color_scheme=scheme, viewport=size)
    open_form(page)
    found = {}
    for view in ("fields", "text"):
        if view == "text":
            page.locator("#job-toggle").click()
            page.locator("#job-text").wait_for()
        violations = Axe().run(page).response["violations"]
        found[view] = [one["id"] for one in violations if one["impact"] in ("serious", "critical")]
        box = page.locator("#job-form").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert box["y"] >= 0 and box["y"] + box["height"] <= 900
        form = "document.getElementById('job-form')"
        assert page.evaluate(f"{form}.scrollWidth <= {form}.clientWidth")

    assert not any(found.values()), found
    assert page.errors == []
