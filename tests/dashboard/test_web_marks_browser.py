"""In a browser: every mark that stands for a rank, a step, a call or a run leads to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs
from support.browser_builders import ServedRuns, serving_runs
from support.report_builders import analysis, make_run_of_many_ranks
from support.samples import SAMPLES
from support.turns import PAGES
from support.waiting import list_addresses

from stepsplit.analyzer import examine

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]

_CENTER = """(plot) => {
  /* The middle of the first mark, in the page: of a bar or point, or of a cell with a number. */
  const area = plot.querySelector('.nsewdrag').getBoundingClientRect(), [trace] = plot._fullData;
  if (trace.type === 'heatmap') {
    const rows = Array.from(trace.z, (row) => Array.from(row));
    for (const [i, row] of rows.entries()) for (const [j, value] of row.entries()) {
      if (!Number.isFinite(value)) continue;
      const [x, y] = [(j + 0.5) / row.length, (i + 0.5) / rows.length];
      return [area.left + area.width * x, area.top + area.height * y];
    }
  }
  for (const mark of plot.querySelectorAll('.points .point path, .points path.point')) {
    const box = mark.getBoundingClientRect();
    if (box.width * box.height < 9) continue;
    const x = Math.max(area.left + 1, Math.min(area.right - 1, box.left + box.width / 2));
    const y = Math.max(area.top + 1, Math.min(area.bottom - 1, box.top + box.height / 2));
    return [x, y];
  }
  return null;
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRuns]:
    names = ("h100_pp2", "tp2_pp2_dp2", "built_tp_pp_dp_slow_rank")
    runs = {name: examine([SAMPLES / name]) for name in names}
    runs["many"] = structs.replace(analysis(), report=make_run_of_many_ranks())
    with serving_runs(tmp_path_factory.mktemp("marks"), runs) as made:
        yield made


def click_mark(page: Any, chart: str) -> str:
    """Clicks on a mark of the chart, and returns the address that it leads to; the pointer says
    before that it leads somewhere."""
    plot = page.locator(f"#{chart}.js-plotly-plot, #{chart} .js-plotly-plot").first
    plot.scroll_into_view_if_needed()
    plot.locator(".points path, .hm image").first.wait_for(state="attached")
    page.wait_for_timeout(300)
    before = page.url
    point = plot.evaluate(_CENTER)
    assert point is not None, chart
    page.mouse.move(point[0] - 1, point[1])
    page.mouse.move(*point)
    page.wait_for_timeout(150)
    assert plot.locator(".nsewdrag").first.evaluate("one => getComputedStyle(one).cursor") == (
        "pointer"
    ), chart
    page.mouse.click(*point)
    page.wait_for_function("(before) => location.href !== before", arg=before)
    return str(page.url)


@pytest.mark.parametrize(
    ("run", "path", "chart", "leads"),
    [
        ("tp2_pp2_dp2", "", "by-rank", "/timeline?"),
        ("tp2_pp2_dp2", "", "by-step", "/timeline?"),
        ("tp2_pp2_dp2", "", "critical-path", "/timeline?"),
        ("tp2_pp2_dp2", "/pipeline", "pipeline", "/timeline?"),
        ("tp2_pp2_dp2", "/pipeline", "stage-bubbles", "/timeline?"),
        ("tp2_pp2_dp2", "/collectives", "waits", "/timeline?"),
        ("tp2_pp2_dp2", "/collectives", "wait-transfer", "/timeline?"),
        ("tp2_pp2_dp2", "/collectives", "bandwidth", "/timeline?"),
        ("h100_pp2", "/memory", "memory", "/timeline?"),
    ],
)
def test_a_mark_of_a_run_leads_to_its_timeline(
    served: ServedRuns, browser: Any, run: str, path: str, chart: str, leads: str
) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    run_id = served.ids[run]
    page.goto(f"{served.url}/run/{run_id}{path}")
    url = click_mark(page, chart)
    assert url.startswith(f"{served.url}/run/{run_id}{leads}"), url
    page.wait_for_selector("#timeline-view[data-drawn]")
    status = page.locator(".tl-status").inner_text()
    assert "Cannot" not in status, status
    page.go_back()
    page.locator(f"#{chart}").wait_for()


def test_a_mark_of_several_runs_leads_to_one(served: ServedRuns, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    a, b = served.ids["h100_pp2"], served.ids["tp2_pp2_dp2"]
    page.goto(f"{served.url}/compare?baseline={a}&candidate={b}")
    assert click_mark(page, "splits") in (f"{served.url}/run/{a}", f"{served.url}/run/{b}")
    page.goto(f"{served.url}/history")
    assert click_mark(page, "history").removeprefix(f"{served.url}/run/") in served.ids.values()


def test_a_rank_in_a_table_leads_to_its_timeline(served: ServedRuns, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    for path in ("collectives", "compute", "memory"):
        page.goto(f"{served.url}/run/{served.ids['h100_pp2']}/{path}")
        link = page.locator("td a:visible", has_text="rank 1").first
        link.wait_for()
        opened = list_addresses(page)
        link.click()
        page.wait_for_selector("#timeline-view[data-drawn]")
        assert "/timeline?rank=1" in opened[0]


def test_the_numbers_of_a_chart_lead_there_too(served: ServedRuns, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{served.url}/run/{served.ids['tp2_pp2_dp2']}")
    page.wait_for_selector("#by-rank .point")
    section = page.locator("section.card", has=page.locator("#by-rank"))
    section.get_by_text("data of this chart").click()
    opened = list_addresses(page)
    section.get_by_role("link", name="5", exact=True).click()
    page.wait_for_selector("#timeline-view")
    assert "/timeline?rank=5" in opened[0]


def test_a_finding_shows_the_ranks_that_wait_and_the_one_they_wait_for(
    served: ServedRuns, browser: Any
) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{served.url}/run/{served.ids['built_tp_pp_dp_slow_rank']}")
    page.get_by_role("link", name="open in timeline").first.click()
    page.wait_for_selector("#timeline-view[data-drawn]")
    page.wait_for_timeout(600)
    timeline = "document.querySelector('#timeline-view').timeline"
    assert page.evaluate(f"{timeline}.shownRanks()") == [1, 3]
    assert page.evaluate(f"[...{timeline}.open].sort()") == [1, 3]
    step = page.evaluate(f"{timeline}.shownStep().step")
    assert page.locator(".tl-where").inner_text().startswith(f"step {step}: ")
    status = page.locator(".tl-status").inner_text()
    assert "2 of 8 ranks shown" in status, status


@pytest.mark.parametrize("chart", ["by-group", "busy-ranks"])
def test_a_mark_of_many_ranks_leads_to_them(served: ServedRuns, browser: Any, chart: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{served.url}/run/{served.ids['many']}")
    url = click_mark(page, chart)
    asked = "/timeline?group=stage&show=stage%20" if chart == "by-group" else "/timeline?rank="
    assert url.startswith(f"{served.url}/run/{served.ids['many']}{asked}"), url
