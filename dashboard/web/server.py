"""The Flask server and its process: the API, health, access and pages; workers and logs."""

from __future__ import annotations

import logging
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
from typing import Any

from flask import Flask, Response, g, request
from flask_compress import Compress
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.ingest import (
    JsonFormatter,
    Workers,
    choose_memory_bytes,
    end_with_parent,
    set_up_logs,
)
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.api import (
    Api,
    RequestRecord,
    build_api_routes,
    build_health_routes,
    count_request,
)
from stepsplit.dashboard.web.app import add_pages
from stepsplit.dashboard.web.auth import (
    Access,
    Authenticator,
    Ready,
    ServeOptions,
    build_login_routes,
    choose_access,
    protect,
)
from stepsplit.dashboard.web.connections import MOST_WAITING, PatientWorker
from stepsplit.dashboard.web.uploads import (
    HttpError,
    Limits,
    build_error_response,
    handle_database_error,
)

# gunicorn with this server's settings: few processes with threads for complete requests.

PROCESSES, THREADS = 2, 8


class GunicornServer(BaseApplication):  # type: ignore[misc]
    """The gunicorn application that serves the dashboard."""

    def __init__(self, store: Store, bind: str, ready: Ready | None, options: ServeOptions) -> None:
        self._store, self._bind, self._ready, self._how = store, bind, ready, options
        super().__init__()

    def load_config(self) -> None:
        settings = {
            "bind": self._bind,
            "workers": PROCESSES,
            "worker_class": PatientWorker,
            "worker_connections": 2 * MOST_WAITING,
            "threads": THREADS,
            # Else a thread waits until the client has taken the file.
            "sendfile": False,
            "timeout": 300,
            "graceful_timeout": 5,
            "loglevel": "warning",
            "logger_class": _JsonLogger if self._how.log_format == "json" else Logger,
            "control_socket_disable": True,
            "post_worker_init": self._notify_ready,
        }
        for name, value in settings.items():
            # Older releases have no control socket to switch off.
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Flask:
        """The app, built in each process: threads and connections do not survive a fork."""
        self._store.reconnect()
        return create_server(self._store, self._how.access, self._how.limits)

    def _notify_ready(self, worker: object) -> None:
        # Only for the first process, not for replacements of dead ones.
        if self._ready is not None and getattr(worker, "age", 1) == 1:
            self._ready(f"http://{self._bind}")


class _JsonLogger(Logger):  # type: ignore[misc]
    """Gunicorn's own log messages as JSON lines."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers:
            handler.setFormatter(JsonFormatter())


# The Flask server: the API, health, access control and the pages.

_BODY_BYTES = 4 << 20
"""Largest request body, except for uploaded files."""


def create_server(
    store: Store, access: Access | None = None, limits: Limits | None = None
) -> Flask:
    """The dashboard on the store; by default only for requests from this machine."""
    server = Flask(__name__, static_folder=None)
    server.url_map.merge_slashes = False
    server.config["MAX_CONTENT_LENGTH"] = _BODY_BYTES
    log_requests(server)
    server.register_blueprint(build_api_routes(Api(store, limits or Limits())))
    server.register_blueprint(build_health_routes(store))
    server.register_error_handler(HttpError, build_error_response)
    server.register_error_handler(SQLAlchemyError, handle_database_error)
    server.register_error_handler(HTTPException, _convert_error)
    authenticator = Authenticator(access or Access(), store)
    server.register_blueprint(build_login_routes(authenticator))
    _compress_pages(server)
    # The pages come last, because they catch all remaining routes.
    script_hashes = add_pages(server, store)
    _render_once(server)
    protect(server, authenticator, script_hashes)
    return server


def _compress_pages(server: Flask) -> None:
    """Compresses the pages with their scripts and data, that of the timeline included; the API's
    other answers stay as they are."""
    server.config["COMPRESS_REGISTER"] = False
    # Files of assets/ are small, and would stay open when a client has them already.
    server.config["COMPRESS_STREAMS"] = False
    compress = Compress(server)

    @server.after_request
    def compress_page(response: Response) -> Response:
        of_page = not request.path.startswith("/api/") or request.blueprint == "timeline"
        whole = of_page and response.status_code == 200
        return compress.after_request(response) if whole else response


def _render_once(server: Flask) -> None:
    """Renders the page once in this process: Dash serves only scripts of a page it has rendered,
    and requests may go to different processes."""
    with server.test_request_context():
        server.view_functions["/"]()


def _convert_error(error: HTTPException) -> Response | HTTPException:
    """Errors of the API as JSON, other errors unchanged."""
    if not request.path.startswith("/api/"):
        return error
    return build_error_response(HttpError(error.code or 500, error.description or error.name))


# Constants of the parent process that starts the server and its workers.

_POLL_S = 0.2

_STOP_TIMEOUT_S = 15.0

# Counting and logging of requests.

_LOG = logging.getLogger("stepsplit.requests")


def log_requests(server: Flask) -> None:
    """Counts and logs all requests. Call it first, so that refused requests are included."""

    @server.before_request
    def start_timer() -> None:
        g.begun = time.monotonic()

    @server.after_request
    def record_request(response: Response) -> Response:
        seconds = time.monotonic() - g.get("begun", time.monotonic())
        rule = request.url_rule
        route = None if rule is None else rule.rule
        size = request.content_length or 0
        done = RequestRecord(route, request.method, response.status_code, seconds, size)
        count_request(done)
        _log_request(done)
        return response


def _log_request(record: RequestRecord) -> None:
    # Only the path: queries and headers may contain secrets.
    fields = {
        "method": record.method,
        "path": request.path,
        "status": record.status,
        "ms": round(record.seconds * 1e3, 1),
        "bytes": record.body_bytes,
        "address": request.remote_addr,
    }
    _LOG.info("request", extra={"fields": fields})


# The serving process: checks the port, starts workers and the server, stops them together.


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
        status = run_until_stopped(server.run, workers)
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
        from stepsplit.dashboard.web.server import GunicornServer

        # Imported in this process, after the metrics folder is set.

        GunicornServer(self.store, self.bind, self.ready, self.options).run()


class _StopRequested(Exception):
    """Raised by SIGINT or SIGTERM."""


def run_until_stopped(server: Callable[[], None], workers: Workers) -> int:
    """Runs the server in its own process, and the workers, until a signal or the server's end.

    Returns the exit status: 0 after a signal, else the server's.
    """
    from stepsplit.dashboard.web.server import _POLL_S

    # fork, because the server callable need not be picklable.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run_as_child, args=(server, os.getpid()), name="server")
    process.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
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


def _stop(number: int, frame: FrameType | None) -> None:
    raise _StopRequested


def _terminate(process: BaseProcess) -> None:
    from stepsplit.dashboard.web.server import _STOP_TIMEOUT_S

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
