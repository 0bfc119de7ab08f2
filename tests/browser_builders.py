"""A real server process and a real browser for the tests of the pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from required import absent

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
from stepsplit.dashboard.web.auth import Access, ServeOptions
from stepsplit.dashboard.web.serve import find_free_port, serve
ready = lambda url: print(url, flush=True)
serve(store, port=find_free_port(), ready=ready, options=ServeOptions(Access(), workers=0))
"""
_WORKER = """
from store_builders import known_analysis
from stepsplit.dashboard.store.ingest import WorkerOptions, analyze_upload, run_worker
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


def _python(folder: Path, program: str) -> subprocess.Popen[str]:
    places = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.getenv("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": places, "HOME": str(folder / "home")}
    command = [sys.executable, "-c", _OPEN + program, str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
