"""A real server process and a real browser for the tests of the pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stepsplit.analyzer.analysis import Analysis
from stepsplit.dashboard.store.store import Store
from support.required import absent

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = Path("/usr/bin/chromium")
_ARGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
_OPEN = """
import sys
from pathlib import Path
from stepsplit.dashboard.store.store import Store
folder = Path(sys.argv[1])
store = Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")
"""
_SERVER = """
from support.dashboard_processes import find_free_port
from stepsplit.dashboard.web.auth import Access
from stepsplit.dashboard.web.options import ServeOptions
from stepsplit.dashboard.web.serve import serve
ready = lambda url: print(url, flush=True)
serve(store, port=find_free_port(), ready=ready, options=ServeOptions(Access(), workers=0))
"""
_WORKER = """
from support.store_builders import known_analysis
from stepsplit.dashboard.store.ingest import analyze_upload
from stepsplit.dashboard.store.worker import WorkerOptions, run_worker
run_worker(store, WorkerOptions("known", poll_s=0.1), {analyze})
"""


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """A browser; skips without one, except where the environment says that there must be one."""
    if not CHROMIUM.exists():
        absent("chromium", f"no {CHROMIUM}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=str(CHROMIUM), args=list(_ARGS))
        yield browser
        browser.close()


class UnobservedChromium:
    """A browser as a viewer has it, asked over a pipe whether a page is there.

    Playwright observes what scripts do, for which V8 parses plotly.js three times more: it locates
    each exception that a script throws and catches. That is 0.3 of 1.0 s of plotly's start.
    """

    def __init__(self, to_browser: IO[bytes], from_browser: IO[bytes]) -> None:
        self._to, self._from, self._sent = to_browser, from_browser, 0

    def open(self, url: str, is_drawn: str) -> float:
        """The seconds until the page is drawn, with nothing kept from before."""
        context = self._ask("Target.createBrowserContext")["browserContextId"]
        blank = {"url": "about:blank", "browserContextId": context, "width": 1280, "height": 900}
        target = self._ask("Target.createTarget", blank)["targetId"]
        attach = {"targetId": target, "flatten": True}
        session = self._ask("Target.attachToTarget", attach)["sessionId"]
        begin = time.perf_counter()
        self._ask("Page.navigate", {"url": url}, session)
        question = {"expression": f"({is_drawn})()", "returnByValue": True}
        while not self._ask("Runtime.evaluate", question, session)["result"].get("value"):
            time.sleep(0.01)
        took_s = time.perf_counter() - begin
        self._ask("Target.disposeBrowserContext", {"browserContextId": context})
        return took_s

    def _ask(self, method: str, params: object = None, session: str = "") -> dict[str, Any]:
        self._sent += 1
        question = {"id": self._sent, "method": method, "params": params or {}}
        if session:
            question["sessionId"] = session
        self._to.write(json.dumps(question).encode() + b"\0")
        while (answer := self._read()).get("id") != self._sent:
            pass
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return dict(json.loads(message))


@contextmanager
def running_unobserved_chromium() -> Iterator[UnobservedChromium]:
    """A browser whose pipes are the descriptors 3 and 4, as it has them."""
    asked, to_browser = os.pipe()
    from_browser, answers = os.pipe()

    def place_pipes() -> None:
        # Above both first, as either may be in the place of the other.
        pipes = [os.dup2(one, 100 + at) for at, one in enumerate((asked, answers))]
        os.dup2(pipes[0], 3)
        os.dup2(pipes[1], 4)

    with tempfile.TemporaryDirectory() as profile:
        command = [
            str(CHROMIUM), *_ARGS, "--headless", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        browser = subprocess.Popen(
            command, pass_fds=(3, 4), preexec_fn=place_pipes, stderr=subprocess.DEVNULL
        )
        os.close(asked)
        os.close(answers)
        with os.fdopen(to_browser, "wb", 0) as to, os.fdopen(from_browser, "rb") as answered:
            yield UnobservedChromium(to, answered)
        browser.wait(timeout=30)


@contextmanager
def running_server(folder: Path, analyze: str = "known_analysis") -> Iterator[str]:
    """The address of a dashboard on the store in the folder; its analyzer knows one answer, or is
    the real one: analyze_upload."""
    server, worker = _python(folder, _SERVER), _python(folder, _WORKER.format(analyze=analyze))
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        for process in (server, worker):
            process.terminate()
        for process in (server, worker):
            process.communicate(timeout=30)


@dataclass(frozen=True)
class ServedRuns:
    """A dashboard and the ids of its runs by their names."""

    url: str
    ids: Mapping[str, str]


@contextmanager
def serving_runs(folder: Path, analyses: Mapping[str, Analysis]) -> Iterator[ServedRuns]:
    """A dashboard with these runs."""
    store = Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")
    ids = {
        name: store.import_report(name, made.report, made.tables) for name, made in analyses.items()
    }
    store.close()
    with running_server(folder) as url:
        yield ServedRuns(url, ids)


def _python(folder: Path, program: str) -> subprocess.Popen[str]:
    places = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")))
    )
    env = {**os.environ, "PYTHONPATH": places, "HOME": str(folder / "home")}
    command = [sys.executable, "-c", _OPEN + program, str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
