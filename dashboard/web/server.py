"""The server: Flask, gunicorn or the development server, logs and shutdown."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from flask import Flask, Response, g, request
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.ingest import JsonLines, LogFormat, Workers, set_up_logs
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.api import Answered, Api, blueprint, count_request, health
from stepsplit.dashboard.web.app import add_pages
from stepsplit.dashboard.web.auth import Access, Gate, access_to, protect
from stepsplit.dashboard.web.uploads import Limits, Refused, as_json, away

# gunicorn with this server's settings: few processes, threads that stream uploads.

PROCESSES, THREADS = 2, 8


class GunicornServer(BaseApplication):  # type: ignore[misc]
    """One run of the server."""

    def __init__(self, store: Store, bind: str, ready: Ready | None, how: Serving) -> None:
        self._store, self._bind, self._ready, self._how = store, bind, ready, how
        super().__init__()

    def load_config(self) -> None:
        settings = {
            "bind": self._bind,
            "workers": PROCESSES,
            "worker_class": "gthread",
            "threads": THREADS,
            "timeout": 300,
            "graceful_timeout": 5,
            "loglevel": "warning",
            "logger_class": _JsonLogger if self._how.log_format == "json" else Logger,
            "control_socket_disable": True,
            "post_worker_init": self._tell,
        }
        for name, value in settings.items():
            # Older releases have no control socket to switch off.
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Flask:
        """The app, built in each process: threads and connections do not survive a fork."""
        self._store.reopen()
        return create_server(self._store, self._how.access, self._how.limits)

    def _tell(self, worker: object) -> None:
        # A process that replaces a dead one is no news.
        if self._ready is not None and getattr(worker, "age", 1) == 1:
            self._ready(f"http://{self._bind}")


class _JsonLogger(Logger):  # type: ignore[misc]
    """What gunicorn itself has to say, in lines like all others."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers:
            handler.setFormatter(JsonLines())


# The Flask server: the API, health, who may come in, and the pages.

_BODY_BYTES = 4 << 20
"""What a request may hold that is no file of an upload."""


def create_server(
    store: Store, access: Access | None = None, limits: Limits | None = None
) -> Flask:
    """The dashboard on the store, for this machine alone unless access says otherwise."""
    server = Flask(__name__, static_folder=None)
    server.url_map.merge_slashes = False
    server.config["MAX_CONTENT_LENGTH"] = _BODY_BYTES
    watch(server)
    server.register_blueprint(blueprint(Api(store, limits or Limits())))
    server.register_blueprint(health(store))
    server.register_error_handler(Refused, as_json)
    server.register_error_handler(SQLAlchemyError, away)
    server.register_error_handler(HTTPException, _plain)
    # The pages come last: what is no other route is theirs.
    script_hashes = add_pages(server, store)
    _draw_once(server)
    protect(server, Gate(access or Access(), store.tokens), script_hashes)
    return server


def _draw_once(server: Flask) -> None:
    """Dash gives out only those scripts that it has put into a page, and the process that drew the
    browser's page may be another."""
    with server.test_request_context():
        server.view_functions["/"]()


def _plain(error: HTTPException) -> Response | HTTPException:
    """Scripts get errors as they get everything, in JSON."""
    if not request.path.startswith("/api/"):
        return error
    return as_json(Refused(error.code or 500, error.description or error.name))


# The production server: gunicorn's processes and threads, and the workers beside them.

Ready = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Serving:
    """How to serve: who may come in, how much is taken, how many workers run beside the server."""

    access: Access
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    log_format: LogFormat = "text"


def serve(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 8050,
    *,
    ready: Ready | None = None,
    how: Serving | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; ready is told the address (no slash at its end) once
    pages can be opened.

    Main thread only; ends with SystemExit. Raises UsageError for an address that others could reach
    where nothing says who may come in, or one in use.
    """
    how = how or Serving(access_to(host))
    _claim(host, port)
    shown = f"[{host}]" if ":" in host else host
    set_up_logs(how.log_format)
    store.sweep()
    workers = Workers(store, how.workers, ("--log-format", how.log_format))
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        # Server processes count their requests together in this folder.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        server = _Process(store, f"{shown}:{port}", ready, how)
        status = run_until_stopped(server.run, workers)
    raise SystemExit(status)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _claim(host: str, port: int) -> None:
    # gunicorn would retry for seconds, then print a traceback.
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            mend = "choose another --host or --port"
            raise UsageError(f"{host}:{port} cannot be used ({error.strerror}); {mend}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@dataclass(frozen=True, slots=True)
class _Process:
    """What the server's own process does."""

    store: Store
    bind: str
    ready: Ready | None
    how: Serving

    def run(self) -> None:
        """Serves until it is told to stop."""
        # Loaded here, where the metrics' folder is known, and where pages are made.

        GunicornServer(self.store, self.bind, self.ready, self.how).run()


# The processes of a dashboard: the server and its workers live and end with this one.

_LOOK_EVERY_S = 0.2

_PATIENCE_S = 15.0

_SIGNAL_AT_PARENTS_DEATH = 1


class _Stopped(Exception):
    """Somebody asked this process to end."""


def run_until_stopped(server: Callable[[], None], workers: Workers) -> int:
    """Runs the server in a process of its own, and the workers, until a signal or until the server
    ends. The exit status: 0 after a signal, else the server's."""
    # A fork: the server is given as a call, with what it is about.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_as_child, args=(server, os.getpid()), name="server")
    process.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        while process.is_alive():
            workers.watch()
            time.sleep(_LOOK_EVERY_S)
        return process.exitcode or 1
    except _Stopped:
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _end(process)
        workers.stop()


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        process.terminate()
    process.join(_PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()


def _as_child(server: Callable[[], None], parent: int) -> None:
    """Without its parent nobody would ever end the server, and its port would stay taken."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)
        if os.getppid() != parent:
            return
    server()


# Every request is counted, and logged where somebody wants lines.

_LOG = logging.getLogger("stepsplit.requests")


def watch(server: Flask) -> None:
    """Watches all requests of the server. To be called first, so that refused ones count too."""

    @server.before_request
    def begin() -> None:
        g.begun = time.monotonic()

    @server.after_request
    def end(response: Response) -> Response:
        seconds = time.monotonic() - g.get("begun", time.monotonic())
        rule = request.url_rule
        route = None if rule is None else rule.rule
        size = request.content_length or 0
        done = Answered(route, request.method, response.status_code, seconds, size)
        count_request(done)
        _log(done)
        return response


def _log(done: Answered) -> None:
    # The path alone: a query or a header might tell what nobody should read in a log.
    fields = {
        "method": done.method,
        "path": request.path,
        "status": done.status,
        "ms": round(done.seconds * 1e3, 1),
        "bytes": done.body_bytes,
        "address": request.remote_addr,
    }
    _LOG.info("request", extra={"fields": fields})
