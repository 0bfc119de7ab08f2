"""Stores and runs for the tests of the dashboard's server side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from flask.testing import FlaskClient

from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.dashboard.store.analysis_queue import AnalysisJob
from stepsplit.dashboard.store.run_row import RunRow
from stepsplit.dashboard.store.store import FileRow, Store
from support.report_builders import analysis


def known_analysis(folder: Path, progress: Progress) -> Analysis:
    """An analyzer that knows one answer."""
    return analysis()


def uploaded(store: Store, name: str = "run", **files: bytes) -> str:
    """A run whose upload is complete: by default one small file."""
    run_id = store.add(name)
    for path, content in (files or {"rank0": b"trace"}).items():
        target = store.find_folder(run_id) / "input" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        store.files.write(run_id, FileRow(path, len(content), True))
        store.artifacts.keep_upload(run_id, path, target)
    return run_id


def queued(store: Store, name: str = "run", **files: bytes) -> str:
    """A run that waits for a worker."""
    run_id = uploaded(store, name, **files)
    assert store.queue(run_id)
    return run_id


def claimed(store: Store, worker: str = "w1", lease_s: float = 60.0) -> AnalysisJob:
    """The next job, taken by the worker."""
    job = store.jobs.claim(worker, lease_s)
    assert job is not None
    return job


def state(store: Store, run_id: str) -> tuple[str, str | None]:
    """How far the run is, and why it failed."""
    run = found(store, run_id)
    return run.state, run.error


def found(store: Store, run_id: str) -> RunRow:
    """The run, which must be there."""
    run = store.find_run(run_id)
    assert run is not None
    return run


def settled(store: Store, run_id: str, within_s: float = 30.0) -> tuple[str, str | None]:
    """As state, once the run is done or failed."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if state(store, run_id)[0] in ("done", "failed"):
            return state(store, run_id)
        time.sleep(0.05)
    raise TimeoutError(state(store, run_id))


def ask_page(client: FlaskClient, path: str, search: str = "", **headers: str) -> str:
    """What the server answers a browser that shows a page."""
    properties = [("page", "children"), ("zone", "hidden"), ("tick", "disabled"), ("mark", "data")]
    body = {
        "output": ".." + "...".join(f"{name}.{prop}" for name, prop in properties) + "..",
        "outputs": [{"id": name, "property": prop} for name, prop in properties],
        "inputs": [
            {"id": "url", "property": "pathname", "value": path},
            {"id": "url", "property": "search", "value": search},
            {"id": "tick", "property": "n_intervals"},
        ],
        "state": [{"id": "mark", "property": "data"}],
        "changedPropIds": [],
    }
    answer = client.post("/_dash-update-component", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.text


# A dashboard on a free port, served from a thread.

App = Callable[..., Any]


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class Serving:
    """Serves the app within the block, which gets its address."""

    def __init__(self, app: App) -> None:
        self.server: WSGIServer = make_server("127.0.0.1", 0, app, handler_class=_Quiet)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> str:
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
