"""A real server process and a real browser for the tests of the pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from required import absent

CHROMIUM = Path("/usr/bin/chromium")
ARGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
_SERVER = """
import sys
from pathlib import Path
from report_builders import analysis
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.serve import free_port, serve
folder = Path(sys.argv[1])
store = Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")
serve(store, "127.0.0.1", free_port(), ready=lambda url: print(url, flush=True), analyze=analysis)
"""


def need_chromium() -> None:
    """Skips without a browser, except where the environment says that there must be one."""
    if not CHROMIUM.exists():
        absent("chromium", f"no {CHROMIUM}")


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """The address of a dashboard on the store in the folder; its analyzer knows one answer."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HOME": str(folder / "home")}
    command = [sys.executable, "-c", _SERVER, str(folder)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(timeout=30)
