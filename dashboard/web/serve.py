"""The serving process: checks the port, starts workers and the server, stops them together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.ingest import (
    Workers,
    choose_memory_bytes,
    end_with_parent,
    set_up_logs,
)
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.alerting import AlertWorker
from stepsplit.dashboard.web.auth import choose_access
from stepsplit.dashboard.web.options import Ready, ServeOptions

_POLL_S = 0.2
_STOP_TIMEOUT_S = 15.0


def serve(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 8050,
    *,
    ready: Ready | None = None,
    options: ServeOptions | None = None,
) -> None:
    """Runs the dashboard until SIGINT or SIGTERM, then raises SystemExit. Main thread only.

    ready: called with the URL (no trailing slash) once pages can be opened.
    Raises UsageError if the port is in use, or if the server is reachable from other machines and
    no access control is set.
    """
    options = options or ServeOptions(choose_access(host))
    _check_port(host, port)
    shown = f"[{host}]" if ":" in host else host
    set_up_logs(options.log_format)
    store.sweep()
    workers = Workers(store, options.workers, build_worker_arguments(options))
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        # Server processes share their request counters in this folder.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        server = _ServerProcess(store, f"{shown}:{port}", ready, options)
        address = options.public_url or f"http://{shown}:{port}"
        alerts = AlertWorker(store, options.alert_target, address)
        status = run_until_stopped(server.run, workers, alerts)
    raise SystemExit(status)


def build_worker_arguments(options: ServeOptions) -> tuple[str, ...]:
    """The arguments of the server's workers."""
    memory_gib = (options.memory_bytes or choose_memory_bytes(options.workers)) / 2**30
    limits = ("--limit", f"{options.limit_s / 60:g}", "--memory", f"{memory_gib:g}")
    return ("--log-format", options.log_format, *limits)


def find_free_port(host: str = "127.0.0.1") -> int:
    """A port that is free at this moment."""
    with socket.socket(_choose_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    # Checked first, because gunicorn would retry for seconds and then print a traceback.
    with socket.socket(_choose_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            hint = "choose another --host or --port"
            raise UsageError(f"cannot listen on {host}:{port} ({error.strerror}); {hint}") from None


def _choose_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@dataclass(frozen=True, slots=True)
class _ServerProcess:
    """The function that runs in the server process."""

    store: Store
    bind: str
    ready: Ready | None
    options: ServeOptions

    def run(self) -> None:
        """Serves until terminated."""
        # Imported in this process, after the metrics folder is set.
        from stepsplit.dashboard.web.server import GunicornServer

        GunicornServer(self.store, self.bind, self.ready, self.options).run()


class _StopRequested(Exception):
    """Raised by SIGINT or SIGTERM."""


def run_until_stopped(
    server: Callable[[], None], workers: Workers, alerts: AlertWorker | None = None
) -> int:
    """Runs the server in its own process, the workers, and the thread of alerts, until a signal or
    the server's end.

    Returns the exit status: 0 after a signal, else the server's.
    """
    # fork, because the server callable need not be picklable.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run_as_child, args=(server, os.getpid()), name="server")
    process.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        if alerts is not None:
            alerts.start()
        while process.is_alive():
            workers.watch()
            time.sleep(_POLL_S)
        return process.exitcode or 1
    except _StopRequested:
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _terminate(process)
        workers.stop()
        if alerts is not None:
            alerts.stop()


def _stop(number: int, frame: FrameType | None) -> None:
    raise _StopRequested


def _terminate(process: BaseProcess) -> None:
    if process.is_alive():
        process.terminate()
    process.join(_STOP_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()


def _run_as_child(server: Callable[[], None], parent: int) -> None:
    """Runs the server and ends it with its parent; otherwise it would keep the port."""
    end_with_parent(parent, signal.SIGTERM)
    server()
