"""The pages in a real browser: figures are drawn, no external requests, uploads arrive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from support.browser_builders import running_server
from support.dashboard_processes import running_dashboard
from support.report_builders import analysis
from support.turns import PAGES
from support.waiting import list_addresses, until_on_page

from stepsplit.analyzer import examine
from stepsplit.analyzer.report.headline import compute_mean_step_ns, round_shares, summarize
from stepsplit.analyzer.report.io import from_json
from stepsplit.analyzer.units import choose_part_unit_ns, format_parts, format_percent
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.html_export import export_html

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]
BARS = ".bars .point"
TIMELINE = "gpt-pp2-tp2 - Timeline - stepsplit"
SAMPLES = Path(__file__).parents[2] / "sample_traces"
_TIMELINE = 'document.getElementById("timeline-view").timeline'
_SPAN = f"() => {_TIMELINE}.to - {_TIMELINE}.from"
_LONGEST = """() => {
  const t = document.getElementById("timeline-view").timeline;
  let best = null, most = 0;
  for (const hit of t.hits) {
    if (hit.gutter || hit.y < 40 || hit.y + hit.height > t.body.clientHeight) continue;
    const row = hit.row;
    for (let i = 0; i < row.start.length; i++) {
      const inside = row.start[i] > t.from && row.start[i] + row.dur[i] < t.to;
      if (inside && (WHICH) && row.dur[i] > most) {
        most = row.dur[i];
        best = [t.x(row.start[i] + row.dur[i] / 2), hit.y + hit.height / 2];
      }
    }
  }
  return best;
}"""
_LONGEST_WAIT = _LONGEST.replace("WHICH", "row.lane === 'buckets' && row.owner[i] >= 0")
_LONGEST_OP = _LONGEST.replace(
    "WHICH", "row.lane !== 'buckets' && row.bucket[i] === 0 && row.name[i] >= 0"
)
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
        page.on("requestfailed", self._note_failure)
        page.add_init_script(
            "document.addEventListener('securitypolicyviolation',"
            " e => console.error('CSP refused ' + e.violatedDirective))"
        )
        return page

    def _note_failure(self, request) -> None:  # type: ignore[no-untyped-def]
        """A request that the next page ended has not failed."""
        if request.failure != "net::ERR_ABORTED":
            self.errors.append(f"failed: {request.url}, {request.failure}")


@dataclass(frozen=True)
class Shared:
    """A server for all tests that only look at runs of their own, and the folder of its store."""

    url: str
    folder: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    with running_server(folder) as url:
        yield Shared(url, folder)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with running_server(tmp_path) as url:
        yield url


FIGURES = {
    "": ("by-rank", "by-step", "critical-path"),
    "/pipeline": ("pipeline", "stage-bubbles"),
    "/collectives": ("bandwidth",),
    "/compute": (),
    "/memory": (),
    "/model": (),
}


def test_every_page_of_a_run_draws_itself(shared: Shared, browser) -> None:  # type: ignore[no-untyped-def]
    run_id = _import(shared.folder)
    watch = Watch()
    page = watch.on(browser.new_page(viewport={"width": 1280, "height": 900}))

    for path, figures in FIGURES.items():
        page.goto(f"{shared.url}/run/{run_id}{path}")
        page.wait_for_selector(".tabs .on")
        for figure in figures:
            page.wait_for_selector(f"#{figure} .point")
        _assert_only_own_buttons(page)

    assert (watch.errors, watch.hosts) == ([], {"127.0.0.1"})


def _assert_only_own_buttons(page) -> None:  # type: ignore[no-untyped-def]
    """A chart is not sent anywhere."""
    labels = "all => all.map(one => (one.ariaLabel || one.dataset.title).toLowerCase())"
    buttons = page.locator(".modebar-btn").evaluate_all(labels)
    assert set(buttons) <= {"download plot as a png", "reset axes"}, buttons
    assert page.locator(".js-plotly-plot .bars, .js-plotly-plot .scatter").count() == 0 or buttons


def test_the_overviews_numbers_are_the_reports(shared: Shared, browser) -> None:  # type: ignore[no-untyped-def]
    run_id = _import(shared.folder)
    page = browser.new_page()

    page.goto(f"{shared.url}/run/{run_id}")
    page.wait_for_selector(".card.number")
    report = from_json(
        page.request.get(f"{shared.url}/api/v1/runs/{run_id}/report.json").body(), "it"
    )

    shown = dict(zip(page.locator(".number .label").all_inner_texts(),
                     page.locator(".number .value").all_inner_texts(), strict=True))  # fmt: skip
    summary = summarize(report.steps, report.exposed)
    compute, collective, p2p, skew, bubble, *others = round_shares(
        [row.mean_ns for row in summary.buckets]
    )
    unit_ns = choose_part_unit_ns(summary.step_ns)
    assert shown == {
        "mean step": format_parts(round(summary.step_ns / unit_ns), unit_ns),
        "compute": format_percent(compute),
        "collective": format_percent(collective + p2p + skew),
        "bubble": format_percent(bubble),
        "other": format_percent(sum(others)),
        "pipeline bubble": format_percent(report.pipeline.bubble_fraction),
        "MFU": format_percent(report.mfu),
    }


def test_a_bar_opens_its_timeline_and_a_menu_changes_the_url(
    shared: Shared, browser  # type: ignore[no-untyped-def]
) -> None:  # fmt: skip
    run_id = _import(shared.folder)
    page = browser.new_page()
    opened = list_addresses(page)

    page.goto(f"{shared.url}/run/{run_id}")
    page.locator(f"#by-rank {BARS}").nth(2).click(force=True)
    page.wait_for_selector("#timeline-view")
    assert f"{shared.url}/run/{run_id}/timeline?rank=2" in opened

    page.goto(f"{shared.url}/run/{run_id}/pipeline")
    page.locator("select").select_option("7")
    page.wait_for_url("**/pipeline?step=7")
    page.get_by_text("step 7 took").wait_for()
    page.reload()
    page.get_by_text("step 7 took").wait_for()
    page.go_back()
    page.get_by_text("step 6 took").wait_for()


def test_two_runs_are_chosen_and_compared(server: str, browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    older, newer = _import(tmp_path), _import(tmp_path)
    page = browser.new_page()

    page.goto(server)
    page.locator("[data-pick]").nth(0).click()
    page.locator("[data-pick]").nth(1).click()
    page.locator("#compare-link.on").click()

    page.wait_for_url(f"**/compare?baseline={older}&candidate={newer}")
    page.get_by_text("within step-to-step noise").wait_for()


def test_selected_runs_are_one_click_away_on_the_page_compare(  # type: ignore[no-untyped-def]
    server: str, browser, tmp_path: Path
) -> None:
    older, newer = _import(tmp_path), _import(tmp_path)
    page = browser.new_page()
    page.goto(server)
    page.locator("[data-pick]").nth(0).click()
    page.locator("[data-pick]").nth(1).click()

    page.get_by_role("link", name="Compare", exact=True).click()
    page.get_by_text("2 runs selected").wait_for()
    page.locator("#compare-link.on").click()

    page.wait_for_url(f"**/compare?baseline={older}&candidate={newer}")
    page.get_by_text("within step-to-step noise").wait_for()
    assert not page.locator("#picks").count(), "these are compared"

    page.goto(f"{server}/compare")
    page.get_by_text("clear selection").click()
    assert not page.locator("#picks").is_visible()
    page.goto(server)
    page.wait_for_selector("[data-pick]")
    assert page.locator('[data-pick][aria-checked="true"]').count() == 0


def test_the_list_is_searched_and_sorted(server: str, browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = analysis()
    for name in ("beta", "alpha", "gamma"):
        _store(tmp_path).import_report(name, made.report, made.tables)
    page = browser.new_page()

    page.goto(server)
    page.locator("th a", has_text="run").click()
    page.wait_for_url("**/?sort=name")
    until_on_page(
        page, lambda: page.locator(".run-link").all_inner_texts() == ["alpha", "beta", "gamma"]
    )
    page.locator("#choose-q").fill("gam")
    page.wait_for_url("**/?sort=name&q=gam")
    until_on_page(page, lambda: page.locator(".run-link").all_inner_texts() == ["gamma"])


def test_the_timeline_zooms_to_a_kernel_and_follows_a_wait(
    shared: Shared, browser  # type: ignore[no-untyped-def]
) -> None:  # fmt: skip
    run = examine([SAMPLES / "tp2_pp2"])
    run_id = _store(shared.folder).import_report("tp2_pp2", run.report, run.tables)
    watch = Watch()
    page = watch.on(browser.new_page(viewport={"width": 1280, "height": 900}))
    page.goto(f"{shared.url}/run/{run_id}/timeline")
    page.wait_for_selector("#timeline-view[data-drawn]")
    shown = page.locator(".tl-steps option:checked").inner_text().split()[1]
    readout = page.locator(".tl-where").inner_text()
    assert re.fullmatch(rf"step {shown}: -\d+(\.\d)? to \d+(\.\d)? ms", readout), readout

    _click(page, _LONGEST_WAIT)
    message = page.locator(".tl-status").inner_text()
    owner = re.search(r"waits for rank (\d)", message)
    assert owner is not None
    page.get_by_text(f"go to rank {owner.group(1)}").click()

    _click(page, _LONGEST_OP)
    wide = 1.6 * page.evaluate(f"() => {_TIMELINE}.chosen.dur")
    page.get_by_text("zoom to it").click()
    until_on_page(page, lambda: page.evaluate(_SPAN) == pytest.approx(wide, rel=1e-3))
    until_on_page(page, lambda: _span_of(page.url) == pytest.approx(wide, rel=1e-3))
    name = page.locator(".tl-status b").inner_text()
    page.reload()
    page.wait_for_selector("#timeline-view[data-drawn]")
    until_on_page(page, lambda: page.evaluate(_SPAN) == pytest.approx(wide, rel=1e-3))
    assert name in page.evaluate(
        "() => document.getElementById('timeline-view').timeline.data.names"
    )
    assert (watch.errors, watch.hosts) == ([], {"127.0.0.1"})


_PERFETTO = """<script>
  window.addEventListener("message", (event) => {
    if (event.data === "PING") return event.source.postMessage("PONG", event.origin);
    const received = event.data.perfetto;
    document.title = received.title + ": " + new Uint8Array(received.buffer).slice(0, 2).join(" ");
  });
</script>"""


def test_the_trace_is_sent_to_perfetto_in_the_browser(shared: Shared, browser) -> None:  # type: ignore[no-untyped-def]
    """Perfetto's own protocol with a page that stands in for its own."""
    run_id = _import(shared.folder)
    context = browser.new_context()
    stand_in = {"body": _PERFETTO, "content_type": "text/html"}
    context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(**stand_in))
    page = context.new_page()
    page.goto(f"{shared.url}/run/{run_id}/timeline")
    page.wait_for_selector("#timeline-view[data-drawn]")

    with context.expect_page() as opened:
        page.get_by_text("open in Perfetto").click()
    page.get_by_text("The trace was sent to Perfetto").wait_for()

    until_on_page(page, lambda: opened.value.title() == f"{TIMELINE}: 31 139")  # gzip


def test_without_the_internet_the_trace_is_downloaded(shared: Shared, browser) -> None:  # type: ignore[no-untyped-def]
    run_id = _import(shared.folder)
    context = browser.new_context(accept_downloads=True)
    context.route("https://ui.perfetto.dev/**", lambda route: route.abort("internetdisconnected"))
    page = context.new_page()
    page.goto(f"{shared.url}/run/{run_id}/timeline")
    page.wait_for_selector("#timeline-view[data-drawn]")
    page.evaluate("document.getElementById('timeline-view').dataset.patience = 500")

    with context.expect_page() as opened:
        page.get_by_text("open in Perfetto").click()
    page.get_by_text("ui.perfetto.dev does not answer: download the trace").wait_for()
    until_on_page(page, lambda: opened.value.is_closed())

    with page.expect_download() as download:
        page.get_by_role("link", name="download trace").click()
    assert download.value.suggested_filename == f"gpt-pp2-tp2-{run_id}.pftrace.gz"
    with page.expect_download() as saved:
        page.get_by_role("link", name="download as HTML").click()
    assert saved.value.suggested_filename == f"gpt-pp2-tp2-{run_id}.html"


def test_a_changed_model_is_shown_and_in_the_url(
    shared: Shared, browser  # type: ignore[no-untyped-def]
) -> None:  # fmt: skip
    run = examine([SAMPLES / "tp2_pp2"], job="auto")
    run_id = _store(shared.folder).import_report("tp2_pp2", run.report, run.tables)
    page = browser.new_page()
    page.goto(f"{shared.url}/run/{run_id}/model")
    before = page.locator(".number .value").first.inner_text()

    page.locator("select[data-choice=micro_batch]").select_option("4")
    page.wait_for_url("**/model?micro_batch=4")

    until_on_page(page, lambda: page.locator(".number .value").first.inner_text() != before)
    page.locator("select[data-choice=micro_batch]").select_option("8")
    page.wait_for_url("**/model")
    until_on_page(page, lambda: page.locator(".number .value").first.inner_text() == before)


def test_the_timeline_answers_the_keyboard(shared: Shared, browser) -> None:  # type: ignore[no-untyped-def]
    run_id = _import(shared.folder)
    page = browser.new_page()
    page.goto(f"{shared.url}/run/{run_id}/timeline")
    page.wait_for_selector("#timeline-view[data-drawn]")
    page.locator("#timeline-view canvas").focus()

    whole = page.evaluate(_SPAN)
    page.keyboard.press("+")
    assert page.evaluate(_SPAN) == pytest.approx(whole / 2)
    page.keyboard.press(".")
    assert "rank 0" in page.locator(".tl-status").inner_text()
    page.keyboard.press("ArrowDown")
    assert page.locator(".tl-status").inner_text().startswith("rank 1")


def test_each_page_has_a_title_a_marked_link_and_a_way_past_the_menu(
    shared: Shared, browser  # type: ignore[no-untyped-def]
) -> None:  # fmt: skip
    run_id = _import(shared.folder)
    page = browser.new_page()

    def marked() -> list[str]:
        return [one.inner_text() for one in page.locator("[aria-current=page]").all()]

    page.goto(f"{shared.url}/run/{run_id}/timeline")
    until_on_page(page, lambda: page.title() == TIMELINE)
    assert marked() == ["Timeline"]
    page.click("text=History")
    until_on_page(page, lambda: page.title() == "History - stepsplit")
    assert marked() == ["History"]
    page.goto(shared.url)
    page.wait_for_selector("h1")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "page"


def test_a_page_is_printed_light_and_without_its_controls(
    shared: Shared, browser  # type: ignore[no-untyped-def]
) -> None:  # fmt: skip
    run_id = _import(shared.folder)
    page = browser.new_page(color_scheme="dark")
    page.goto(f"{shared.url}/run/{run_id}")
    page.wait_for_selector(".js-plotly-plot .main-svg")
    color = "getComputedStyle(document.body).color"
    on_screen = page.evaluate(color)

    page.emulate_media(media="print")

    assert page.locator(".top, .tabs, [data-edit]").filter(visible=True).count() == 0
    assert (on_screen, page.evaluate(color)) == ("rgb(230, 234, 240)", "rgb(27, 36, 48)")
    themes = []
    for event in ("beforeprint", "afterprint"):
        page.evaluate(f"window.dispatchEvent(new Event('{event}'))")
        themes.append(page.evaluate("document.documentElement.dataset.theme"))
    assert themes == ["light", "dark"], "what is painted on a canvas has no style sheet"


@pytest.mark.parametrize("width", [390, 1024, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(  # type: ignore[no-untyped-def]
    shared: Shared, browser, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    run = examine([SAMPLES / "tp2_pp2"], job="auto")
    run_id = _store(shared.folder).import_report("tp2_pp2", run.report, run.tables)
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    found = {}
    for path in ("", "/timeline", *list(FIGURES)[1:]):
        page.goto(f"{shared.url}/run/{run_id}{path}")
        page.wait_for_selector(".tabs .on")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        found[path] = _serious(Axe().run(page).response)
    for path in ("/", "/history", "/compare"):
        page.goto(f"{shared.url}{path}")
        page.wait_for_selector("h1")
        found[path] = _serious(Axe().run(page).response)
    assert not any(found.values()), found


def _serious(response) -> list[str]:  # type: ignore[no-untyped-def]
    return [one["id"] for one in response["violations"] if one["impact"] in ("serious", "critical")]


def test_the_exported_page_works_without_a_server(browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = examine([SAMPLES / "tp2_pp2"])
    file = tmp_path / "kept.html"
    file.write_text(export_html(View("kept", run.report, run.tables)))
    watch = Watch()
    page = watch.on(browser.new_page())

    page.goto(file.as_uri())
    page.wait_for_selector("#timeline-view[data-drawn]")

    assert page.locator(".figure .main-svg").count() >= page.locator(".figure").count() > 5
    _click(page, _LONGEST_WAIT)
    assert "waits for rank" in page.locator(".tl-status").inner_text()
    assert (watch.errors, watch.hosts) == ([], {None})


def _span_of(url: str) -> int:
    asked = parse_qs(urlsplit(url).query)
    return int(asked["to"][0]) - int(asked["from"][0])


def _click(page, which: str) -> None:  # type: ignore[no-untyped-def]
    """Clicks the middle of a slice that is in sight."""
    page.locator("#timeline-view canvas").scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    x, y = page.evaluate(which)
    box = page.locator("#timeline-view canvas").bounding_box()
    page.mouse.click(box["x"] + x, box["y"] + y)
    page.wait_for_selector(".tl-status b")


def test_a_recording_by_hand_ends_as_its_golden_report(browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    golden = from_json((SAMPLES / "pp2_m2" / "report.json").read_bytes(), "golden")
    watch = Watch()
    with running_dashboard(tmp_path) as dashboard:
        page = watch.on(browser.new_page())
        page.goto(dashboard.url)
        page.wait_for_selector("#drop-zone")
        page.locator("#upload-folder").set_input_files(SAMPLES / "pp2_m2")
        page.wait_for_selector(".cards", timeout=60_000)
        shown = page.locator(".number .value").first.inner_text()
        run_id = page.url.rpartition("/")[2]
        made = page.request.get(f"{dashboard.url}/api/v1/runs/{run_id}/report.json").body()

    step_ns = compute_mean_step_ns(golden.steps)
    unit_ns = choose_part_unit_ns(step_ns)
    assert shown == format_parts(round(step_ns / unit_ns), unit_ns)
    assert from_json(made, "made").steps == golden.steps
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
    page.wait_for_selector(f"#by-rank {BARS}")

    (run,) = _store(tmp_path).list_runs()
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

    (run,) = _store(tmp_path).list_runs()
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

    (run,) = _store(tmp_path).list_runs()
    assert run.name == "rank0.json"
    assert (tmp_path / "artifacts" / run.id / "input" / "rank0.json").read_text() == "dropped"


def test_the_policy_is_in_force(shared: Shared, browser) -> None:  # type: ignore[no-untyped-def]
    watch = Watch()
    page = watch.on(browser.new_page())
    page.goto(shared.url)
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
