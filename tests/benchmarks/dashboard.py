"""How long pages take with many viewers: python tests/benchmarks/dashboard.py

Simulates a run of tp 4 x dp 4 x pp 4, analyzes it, cuts its kernels into a million, and serves it
by the real dashboard; with --recording a recording of your own. Prints what viewers waited for each
page's data, and how long one of them, in a real browser, waited for the overview, for each page
after a click and for each move of the timeline. Ends with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import numpy as np
from msgspec.structs import replace

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.layers import Work
from simulator.meshes import Fleet
from simulator.noise import Noise
from simulator.pipelines import pipeline
from simulator.plans import Pipeline
from simulator.scenarios import Scenario
from support.browser_builders import CHROMIUM, running_chromium, running_unobserved_chromium
from support.dashboard_processes import open_store, running_dashboard

from benchmarks.table import in_markdown
from stepsplit.analyzer import Analysis, examine
from stepsplit.analyzer.report.tables import Slices

PAGES = (
    "", "/timeline", "/pipeline", "/collectives", "/compute", "/structure", "/memory", "/model",
)  # fmt: skip
SETTLED_S = 3
"""A server loads plotly's classes in its first seconds."""
PAGE_MS, FIGURE_BYTES, PAN_MS = 500, 1_000_000, 300
OPEN_MS, CLICK_MS = 2_000, 1_000
_CALLBACK = {
    "output": "..page.children...zone.hidden...tick.disabled...mark.data..",
    "outputs": [
        {"id": "page", "property": "children"},
        {"id": "zone", "property": "hidden"},
        {"id": "tick", "property": "disabled"},
        {"id": "mark", "property": "data"},
    ],
    "state": [{"id": "mark", "property": "data", "value": ""}],
    "changedPropIds": ["url.pathname"],
}


@dataclass(frozen=True)
class Waited:
    """What viewers waited for one thing, in ms, and the largest answer."""

    what: str
    ms: tuple[float, ...]
    most_bytes: int

    @property
    def p95_ms(self) -> float:
        return float(np.percentile(self.ms, 95))

    def row(self) -> tuple[str, ...]:
        middle = f"{np.median(self.ms):.0f} ms"
        return self.what, str(len(self.ms)), middle, f"{self.p95_ms:.0f} ms", f"{self.most_bytes:,}"


def simulated(stages: int, folder: Path) -> Analysis:
    """A run of tp 4, dp 4 and so many stages, as its traces are analyzed."""
    fleet = Fleet((("pp", stages), ("dp_replicate", 4), ("tp", 4)), ("mp",), "megatron", 8)
    work = Work(2_000_000, 2, activation_bytes=16_000_000, weight_bytes=50_000_000)
    job = pipeline(fleet, work, 1, Pipeline("1f1b", 2 * stages, boxes=True))
    write_recording(Scenario(job, 1), simulate(job, Noise.of(1)), folder)
    return examine([folder], workers=2)


def cut(slices: Slices, times: int) -> Slices:
    """Each slice in so many equal parts, as far as its nanoseconds go."""
    part, rest = slices.dur_ns // times, slices.dur_ns % times
    dur = np.repeat(part, times) + (np.tile(np.arange(times), len(part)) < np.repeat(rest, times))
    before = np.cumsum(dur.reshape(-1, times), axis=1) - dur.reshape(-1, times)
    start = (slices.start_ns[:, None] + before).ravel()
    columns = ("lane", "depth", "name", "bucket", "owner")
    repeated = {name: np.repeat(getattr(slices, name), times) for name in columns}
    return replace(slices, **repeated, start_ns=start, dur_ns=dur)


def with_events(made: Analysis, events: int) -> Analysis:
    """The analysis with so many slices at least."""
    slices = dict(made.tables.slices)
    times = -(-events // sum(len(one.lane) for one in slices.values()))
    finer = {rank: cut(one, times) for rank, one in slices.items()}
    return Analysis(made.report, replace(made.tables, slices=finer))


class Viewer:
    """A connection that asks as the pages do."""

    def __init__(self, url: str, run_id: str) -> None:
        self._at, self._run_id = urlsplit(url), run_id

    def page(self, path: str) -> tuple[float, int]:
        """ms and bytes of a page's data."""
        values = (f"/run/{self._run_id}{path}", "", 0)
        names = (("url", "pathname"), ("url", "search"), ("tick", "n_intervals"))
        inputs = [
            {"id": id_, "property": name, "value": value}
            for (id_, name), value in zip(names, values, strict=True)
        ]
        return self._asked("POST", "/_dash-update-component", {**_CALLBACK, "inputs": inputs})

    def window(self, from_ns: int, to_ns: int, ranks: Sequence[int]) -> tuple[float, int]:
        """ms and bytes of a window of the timeline, the first ranks with their lanes."""
        shown, opened = ",".join(map(str, ranks)), ",".join(map(str, ranks[:4]))
        query = f"from={from_ns}&to={to_ns}&slots=1200&ranks={shown}&open={opened}"
        return self._asked("GET", f"/api/v1/runs/{self._run_id}/timeline/window?{query}")

    def _asked(self, method: str, path: str, body: object = None) -> tuple[float, int]:
        connection = http.client.HTTPConnection(str(self._at.hostname), self._at.port, timeout=60)
        packed = None if body is None else json.dumps(body)
        begin = time.perf_counter()
        connection.request(method, path, packed, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        took_ms = 1e3 * (time.perf_counter() - begin)
        connection.close()
        assert answer.status == 200, content[:200]
        return took_ms, len(content)


def together(what: str, viewers: int, ask: Callable[[int], Iterator[tuple[float, int]]]) -> Waited:
    """All viewers ask at once, each one question after the other."""
    with ThreadPoolExecutor(viewers) as pool:
        found = [one for own in pool.map(lambda n: list(ask(n)), range(viewers)) for one in own]
    return Waited(what, tuple(ms for ms, _ in found), max(size for _, size in found))


def pages(url: str, run_id: str, viewers: int) -> list[Waited]:
    """Every page, first by all at once when nothing is kept yet, then three times more."""
    viewer = Viewer(url, run_id)

    def of(path: str) -> Waited:
        return together(
            path or "overview", viewers, lambda _: (viewer.page(path) for _ in range(4))
        )

    return [of(path) for path in PAGES]


def windows(url: str, run_id: str, made: Analysis, viewers: int) -> Waited:
    """Each viewer at 12 windows of any place and width."""
    end = max(row.start_ns + row.step_ns for row in made.report.steps)
    ranks = made.report.run.ranks

    def ask(number: int) -> Iterator[tuple[float, int]]:
        random = Random(number)
        for _ in range(12):
            wide = int(end / 4 ** random.randrange(8))
            begin, first = random.randrange(end), random.randrange(max(1, len(ranks) - 20))
            yield Viewer(url, run_id).window(begin, begin + wide, ranks[first : first + 20])

    return together("timeline window", viewers, ask)


_DRAWN = """() => {
  const page = document.getElementById("page"), timeline = document.getElementById("timeline-view");
  const loading = document.querySelector("[data-dash-is-loading=true]");
  if (!page || !page.innerText || loading || (timeline && !timeline.dataset.drawn)) return false;
  const shown = page.querySelector(".tabs .on").getAttribute("href").split("/").pop();
  const asked = location.pathname.split("/").pop();
  const graphs = [...page.querySelectorAll(".dash-graph")];
  return shown === asked && graphs.every((graph) => graph.querySelector(".main-svg"));
}"""
"""Whether the page of the address is there, with its figures."""


def openings(url: str, run_id: str) -> Waited:
    """A browser that has nothing kept opens the overview."""
    with running_unobserved_chromium() as browser:
        took = [1e3 * browser.open(f"{url}/run/{run_id}", _DRAWN) for _ in range(20)]
    return Waited("overview opened in a browser", tuple(took), 0)


def clicks(url: str, run_id: str) -> list[Waited]:
    """A browser that goes from page to page of a run."""
    took: dict[str, list[float]] = {path: [] for path in PAGES}
    with running_chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{url}/run/{run_id}")
        page.wait_for_function(_DRAWN, polling=10)
        for path in [*PAGES[1:], *(PAGES * 9)]:
            begin = time.perf_counter()
            page.click(f".tabs a[href='/run/{run_id}{path}']")
            page.wait_for_function(_DRAWN, polling=10)
            took[path].append(1e3 * (time.perf_counter() - begin))
    return [Waited(f"click on {path or 'overview'}", tuple(ms), 0) for path, ms in took.items()]


def pans(url: str, run_id: str, step: int) -> Waited:
    """A browser that moves and zooms the timeline, from the key to the drawn window."""
    move = """async (key) => {
      const root = document.getElementById("timeline-view"), canvas = root.querySelector("canvas");
      delete root.dataset.drawn;
      const begin = performance.now();
      canvas.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      while (!root.dataset.drawn) await new Promise((done) => setTimeout(done, 4));
      return performance.now() - begin;
    }"""
    with running_chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{url}/run/{run_id}/timeline?step={step}")
        page.wait_for_selector("#timeline-view[data-drawn]")
        page.get_by_text("all lanes").click()
        page.wait_for_timeout(2_000)
        keys = ["ArrowRight", "ArrowRight", "-", "ArrowLeft", "+", "+", "ArrowRight", "ArrowLeft"]
        took = [page.evaluate(move, key) for key in keys * 6]
    return Waited("pan in a browser", tuple(took), 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; the status to end with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4, help="of 16 ranks each")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--recording", type=Path, metavar="FOLDER", help="as it is, not simulated")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        rows = measured(chosen, Path(name))
    head = ("what", "asked", "median", "p95", "most bytes")
    sys.stdout.write(f"{in_markdown([head, *(row.row() for row in rows)])}\n")
    return 1 if any(map(missed, rows)) else 0


def measured(chosen: argparse.Namespace, folder: Path) -> list[Waited]:
    """Everything, on one run in one dashboard."""
    (folder / "traces").mkdir()
    if chosen.recording:
        made = examine([chosen.recording], workers=2)
    else:
        made = with_events(simulated(chosen.stages, folder / "traces"), chosen.events)
    count = sum(len(made.tables.slices[rank].lane) for rank in made.tables.slices)
    sys.stderr.write(f"{len(made.report.run.ranks)} ranks, {count:,} slices\n")
    with open_store(folder) as store:
        run_id = store.import_report("load", made.report, made.tables)
    with running_dashboard(folder, "--workers", "0") as dashboard:
        url = dashboard.url
        time.sleep(SETTLED_S)
        # First, while the server has nothing kept.
        rows = [openings(url, run_id), *clicks(url, run_id)] if CHROMIUM.exists() else []
        rows += pages(url, run_id, chosen.viewers)
        rows.append(windows(url, run_id, made, chosen.viewers))
        if CHROMIUM.exists():
            rows.append(pans(url, run_id, made.report.steps[-1].step))
    return rows


def missed(row: Waited) -> bool:
    """Whether the row misses its target."""
    of_browser = {"pan": PAN_MS, "overview opened": OPEN_MS, "click": CLICK_MS}
    most_ms = next((ms for what, ms in of_browser.items() if row.what.startswith(what)), PAGE_MS)
    return row.p95_ms >= most_ms or row.most_bytes >= FIGURE_BYTES


if __name__ == "__main__":
    raise SystemExit(main())
