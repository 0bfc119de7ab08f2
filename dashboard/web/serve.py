"""The serving processes: those that answer requests and those that analyze, stopped together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from types import FrameType

from flask import Flask

from stepsplit.dashboard.store.logs import set_up_logs
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.worker import Workers, choose_memory_bytes, end_with_parent
from stepsplit.dashboard.web.alerting import AlertWorker
from stepsplit.dashboard.web.gateway import Gateway
from stepsplit.dashboard.web.http_server import answer_requests, format_url, open_listener
from stepsplit.dashboard.web.options import Ready, ServeOptions, choose_access

PROCESSES = 2
"""That answer requests."""

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
    host: an address of this machine, or unix:PATH for a Unix domain socket; port: 0 for a free one.
    Raises UsageError if the address cannot be used, or if the server is reachable from other
    machines and no access control is set.
    """
    options = options or ServeOptions(choose_access(host))
    with ExitStack() as stack:
        listener = stack.enter_context(open_listener(host, port))
        url = format_url(host, listener)
        set_up_logs(options.log_format)
        store.sweep()
        memory_gib = (options.memory_bytes or choose_memory_bytes(options.workers)) / 2**30
        limits = ("--limit", f"{options.limit_s / 60:g}", "--memory", f"{memory_gib:g}")
        arguments = ("--log-format", options.log_format, *limits)
        workers = Workers(store, options.workers, arguments)
        # Server processes share their request counters in this folder.
        folder = stack.enter_context(TemporaryDirectory(prefix="stepsplit-"))
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        announce = partial(ready or str, url)
        server = _ServerProcesses(store, listener, announce, options)
        alerts = AlertWorker(store, options.alert_target, options.public_url or url)
        status = run_until_stopped(server.run, workers, alerts)
    raise SystemExit(status)


@dataclass(frozen=True, slots=True)
class _ServerProcesses:
    """The processes that answer requests."""

    store: Store
    listener: socket.socket
    announce: Callable[[], object]
    options: ServeOptions

    def run(self) -> None:
        """Serves until terminated. A killed process is replaced; one that fails ends all."""
        # Imported in this process, after the metrics folder is set.
        from stepsplit.dashboard.web.server import create_server

        # Built once, and before all forks: another process is there at once. This one has no other
        # threads, as a lock that a thread holds at a fork stays locked in the child.
        flask = create_server(self.store, self.options.access, self.options.limits)
        answer = partial(self._answer, flask)
        signal.signal(signal.SIGTERM, _stop)
        running: list[BaseProcess] = []
        try:
            running = [_fork("answers", answer) for _ in range(PROCESSES)]
            self.announce()
            while all((process.exitcode or 0) <= 0 for process in running):
                running = [process for process in running if process.is_alive()]
                running += [_fork("answers", answer) for _ in range(PROCESSES - len(running))]
                wait([process.sentinel for process in running])
            raise SystemExit(1)
        except _StopRequested:
            pass
        finally:
            _terminate(*running)

    def _answer(self, flask: Flask) -> None:
        self.store.reconnect()
        # The folder of all runs.
        folder = self.store.artifacts.folder
        answer_requests(Gateway(flask, self.options.limits, folder), self.listener)


class _StopRequested(Exception):
    """Raised by SIGINT or SIGTERM."""


def run_until_stopped(
    server: Callable[[], None], workers: Workers, alerts: AlertWorker | None = None
) -> int:
    """Runs the server in its own process, the workers, and the thread of alerts, until a signal or
    the server's end.

    Returns the exit status: 0 after a signal, else the server's.
    """
    process = _fork("server", server)
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


def _terminate(*processes: BaseProcess) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_STOP_TIMEOUT_S)
        process.kill()
        process.join()


def _fork(name: str, run: Callable[[], None]) -> BaseProcess:
    """Starts a child of this process that ends with it; otherwise it would keep the port."""
    # fork, because what runs need not be picklable.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run_as_child, args=(run, os.getpid()), name=name)
    process.start()
    return process


def _run_as_child(run: Callable[[], None], parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C in a terminal reaches all processes; the first one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGTERM)
    run()
