"""The Flask server: the API, health, access and pages; its log of requests; gunicorn around it."""

from __future__ import annotations

import errno
import logging
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, NoReturn

from flask import Flask, Response, g, request
from flask_compress import Compress
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from gunicorn.workers.gthread import TConn, ThreadWorker
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from stepsplit.dashboard.store.ingest import JsonFormatter
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.api import (
    Api,
    RequestRecord,
    build_api_routes,
    build_health_routes,
    count_request,
)
from stepsplit.dashboard.web.app import add_pages
from stepsplit.dashboard.web.auth import Access, Authenticator, build_login_routes, protect
from stepsplit.dashboard.web.options import Ready, ServeOptions
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


# Connections: time-outs, rates and sizes of what they hold.

HEAD_S = 10.0
"""Within this time the head of a request must have arrived, from the connection or its first byte
on."""

MIN_BYTES_PER_S, GRACE_S = 1_024, 10.0
"""Clients that send or take less, after the first seconds, are dropped; time in which the server
itself is busy does not count."""

STALL_S = 20.0
"""A client that neither sends nor takes a byte for so long is dropped."""

HEAD_BYTES, BODY_BYTES = 32 << 10, 64 << 10
"""Largest head, and largest body that is awaited before a thread takes the request."""

UPLOAD_THREADS = 16
"""Threads for requests with larger bodies; others never wait for these."""

ANSWER_BYTES, UNSENT_BYTES = 8 << 20, 128 << 20
"""Largest part of an answer that is kept for a client that takes it slowly, and of all together in
each process; beyond it a thread waits, and the oldest connections are dropped."""

MOST_WAITING = 2_000
"""Connections without a complete request, in each process; beyond it the oldest are dropped."""

_LINGER_S, _LINGER_BYTES, _SWEEP_S = 2.0, 256 << 10, 0.5

_OPEN_FILES = 2 * MOST_WAITING + 1_000

_DRAIN_S = 0.1

_READ_BYTES, _SEND_BYTES = 64 << 10, 1 << 20


class PacedSocket(socket.socket):
    """A client's connection. Raises ConnectionResetError if the client is silent or too
    slow."""

    def __init__(self, accepted: socket.socket) -> None:
        family, kind, protocol = accepted.family, accepted.type, accepted.proto
        super().__init__(family, kind, protocol, fileno=accepted.detach())
        self.unsent = bytearray()
        self.restart_pace()

    def restart_pace(self) -> None:
        """Counts from here, for the next request."""
        self._waited_s, self._moved_bytes = 0.0, 0

    def setblocking(self, flag: bool) -> None:
        """As of a socket, but blocks for a limited time."""
        self.settimeout(STALL_S if flag else 0.0)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """As of a socket. Raises ConnectionResetError."""
        with self._timing() as moved:
            data = super().recv(bufsize, flags)
            moved.append(len(data))
        return data

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Sends the data, or keeps what the client does not take yet in `unsent`; waits for the
        client if that is too much. Raises ConnectionResetError."""
        rest = memoryview(data).cast("B")
        while rest:
            self.unsent += rest[:ANSWER_BYTES]
            rest = rest[ANSWER_BYTES:]
            self._send_at_once()
            while len(self.unsent) > ANSWER_BYTES:
                with self._timing() as moved:
                    moved.append(self.flush())

    def flush(self) -> int:
        """Sends a piece of what is unsent, and returns its size. Raises OSError, BlockingIOError if
        the socket does not block."""
        with memoryview(self.unsent) as view:
            size = super().send(view[:_SEND_BYTES])
        del self.unsent[:size]
        return size

    def _send_at_once(self) -> None:
        timeout_s = self.gettimeout()
        self.settimeout(0.0)
        with suppress(BlockingIOError):
            while self.unsent:
                self.flush()
        self.settimeout(timeout_s)

    @contextmanager
    def _timing(self) -> Iterator[list[int]]:
        """Counts the time of the block, which appends the number of bytes that it has moved."""
        begun, moved = time.monotonic(), list[int]()
        try:
            yield moved
        except TimeoutError:
            self._fail()
        self._waited_s += time.monotonic() - begun
        self._moved_bytes += sum(moved)
        if is_too_slow(self._moved_bytes, self._waited_s):
            self._fail()

    def _fail(self) -> NoReturn:
        # gunicorn logs a traceback for other errors.
        self.unsent.clear()
        raise ConnectionResetError(errno.ECONNRESET, "the client is silent or too slow")


def is_too_slow(moved_bytes: int, seconds: float) -> bool:
    """Whether so few bytes in that time are below the minimum rate."""
    return seconds > GRACE_S and moved_bytes < MIN_BYTES_PER_S * (seconds - GRACE_S)


# The begin of a request: how much of it must have arrived before a thread takes it.

_HEAD_END = b"\r\n\r\n"

_LENGTH = re.compile(rb"(?im)^content-length:[ \t]*(\d{1,18})[ \t]*\r$")

_STREAMED = re.compile(rb"(?im)^(?:transfer-encoding|expect):")


class ClientConnection(TConn):  # type: ignore[misc]
    """A connection, and what has arrived of its next request."""

    def __init__(
        self, worker: PatientWorker, accepted: PacedSocket, client: Any, server: Any
    ) -> None:
        super().__init__(worker.cfg, accepted, client, server)
        self._linger = worker.linger
        self.discarded_bytes = 0
        self.begin_request()

    def begin_request(self) -> None:
        """Starts to wait for the next request, of which a part may have been read before."""
        left = b"" if self.parser is None else self.parser.unreader.take_buffered()
        self.arrived, self.begun = bytearray(left), time.monotonic()
        self.head_bytes = self.body_bytes = 0
        self.is_streamed = False

    def parse_head(self) -> None:
        """Finds the end of the head and the length of the body, if the head has arrived."""
        end = self.arrived.find(_HEAD_END)
        if self.head_bytes or end < 0:
            return
        self.head_bytes = end + len(_HEAD_END)
        head = bytes(self.arrived[: self.head_bytes])
        length = _LENGTH.search(head)
        self.body_bytes = int(length[1]) if length else 0
        self.is_streamed = self.body_bytes > BODY_BYTES or bool(_STREAMED.search(head))

    @property
    def is_ready(self) -> bool:
        """Whether a thread can take the request without waiting for it."""
        arrived = len(self.arrived) >= self.head_bytes + self.body_bytes
        return self.head_bytes > 0 and (arrived or self.is_streamed)

    def is_late(self, now: float) -> bool:
        """Whether the head or the body has taken too long."""
        waited_s = now - self.begun
        if not self.head_bytes:
            return waited_s > HEAD_S
        return is_too_slow(len(self.arrived) - self.head_bytes, waited_s - HEAD_S)

    def open_parser(self) -> None:
        """Hands what has arrived to gunicorn's parser."""
        self.init()
        self.parser.unreader.unread(bytes(self.arrived))
        self.arrived.clear()
        self.data_ready = True
        self.sock.restart_pace()

    def close(self, graceful: bool = False) -> None:
        """Closes the connection; gracefully without waiting for the client."""
        if graceful:
            self._linger(self)
        else:
            self.sock.close()


# The worker: its main loop reads requests, its threads answer them.


@dataclass(frozen=True, slots=True)
class _Sending:
    """A request that is answered, except for bytes that the client has not taken yet."""

    done: Future[Any]
    begun: float
    all_bytes: int

    def is_late(self, unsent_bytes: int, now: float) -> bool:
        return is_too_slow(self.all_bytes - unsent_bytes, now - self.begun)


class PatientWorker(ThreadWorker):  # type: ignore[misc]
    """gunicorn's threaded worker, which reads requests in its main loop.

    Requests whose bodies are not awaited there (uploads) have threads of their own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[ClientConnection, None] = {}
        self._sending: dict[ClientConnection, _Sending] = {}
        self._closing: dict[ClientConnection, float] = {}
        self._next_sweep = 0.0
        self._uploads = ThreadPoolExecutor(UPLOAD_THREADS, "upload")

    def init_process(self) -> None:
        """Serves until the worker is stopped."""
        _allow_open_files()
        super().init_process()

    def accept(self, listener: socket.socket) -> None:
        """Accepts a connection, and waits for its request."""
        try:
            accepted, address = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop_oldest(1)
            elif error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                raise
            return
        self.nr_conns += 1
        link = PacedSocket(accepted)
        self.enqueue_req(ClientConnection(self, link, address, listener.getsockname()))

    def enqueue_req(self, conn: ClientConnection) -> None:
        """Waits for the next request of the connection."""
        conn.begin_request()
        conn.sock.setblocking(False)
        self._waiting[conn] = None
        self.poller.register(conn.sock, EVENT_READ, partial(self._receive, conn))
        self._drop_oldest(len(self._waiting) - MOST_WAITING)
        if conn.arrived:
            self._start_if_ready(conn)

    def _receive(self, conn: ClientConnection, _: object) -> None:
        # It may have been dropped since the poller reported it.
        if conn not in self._waiting:
            return
        try:
            data = conn.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        conn.arrived += data
        if data:
            self._start_if_ready(conn)
        else:
            self._drop(conn)

    def _start_if_ready(self, conn: ClientConnection) -> None:
        conn.parse_head()
        if (conn.head_bytes or len(conn.arrived)) > HEAD_BYTES:
            self._refuse(conn, "431 Request Header Fields Too Large")
        elif conn.is_ready:
            self._forget(conn)
            conn.open_parser()
            pool = self._uploads if conn.is_streamed else self.tpool
            pool.submit(self.handle, conn).add_done_callback(self._build_callback(conn))

    def _build_callback(self, conn: ClientConnection) -> Callable[[Future[Any]], None]:
        return lambda done: self.method_queue.defer(self.finish_request, conn, done)

    def _keepalive_after(self, conn: ClientConnection, keepalive: bool) -> bool:
        """Whether the connection can have another request: not if its body has not arrived."""
        drained = keepalive and conn.parser.finish_body(deadline=time.monotonic() + _DRAIN_S)
        return bool(drained)

    # Answers that clients take slowly: the main loop sends the rest.

    def finish_request(self, conn: ClientConnection, fs: Future[Any]) -> None:
        """Ends the request, or has the rest of its answer sent first."""
        if not conn.sock.unsent or conn.sock.fileno() < 0:
            super().finish_request(conn, fs)
            return
        conn.sock.setblocking(False)
        self._sending[conn] = _Sending(fs, time.monotonic(), len(conn.sock.unsent))
        self.poller.register(conn.sock, EVENT_WRITE, partial(self._send, conn))
        while sum(len(other.sock.unsent) for other in self._sending) > UNSENT_BYTES:
            self._stop_sending(next(iter(self._sending)))

    def _send(self, conn: ClientConnection, _: object) -> None:
        if conn not in self._sending:
            return
        try:
            conn.sock.flush()
        except BlockingIOError:
            return
        except OSError:
            self._stop_sending(conn)
            return
        if not conn.sock.unsent:
            self.poller.unregister(conn.sock)
            super().finish_request(conn, self._sending.pop(conn).done)

    def _stop_sending(self, conn: ClientConnection) -> None:
        del self._sending[conn]
        self.poller.unregister(conn.sock)
        self.nr_conns -= 1
        conn.close()

    # Ends of connections: none blocks the main loop.

    def murder_pending(self) -> None:
        """Refuses late requests, and ends connections that clients have not closed in time, or
        whose answers they have not taken."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_S
        for conn in [conn for conn in self._waiting if conn.is_late(now)]:
            self._refuse(conn, "408 Request Timeout")
        sending = list(self._sending.items())
        for conn in [conn for conn, rest in sending if rest.is_late(len(conn.sock.unsent), now)]:
            self._stop_sending(conn)
        if not self.alive:
            for conn in [conn for conn in self._waiting if not conn.arrived]:
                self._drop(conn)
        for conn in [conn for conn, until in self._closing.items() if until < now]:
            self._end(conn)

    def linger(self, conn: ClientConnection) -> None:
        """Closes the connection after the client has, at most some seconds from now: else what it
        still sends would destroy the answer on its way."""
        try:
            conn.sock.setblocking(False)
            conn.sock.shutdown(socket.SHUT_WR)
            self.poller.register(conn.sock, EVENT_READ, partial(self._discard, conn))
        except (OSError, ValueError, KeyError):
            conn.sock.close()
            return
        self._closing[conn] = time.monotonic() + _LINGER_S
        if len(self._closing) > MOST_WAITING:
            self._end(next(iter(self._closing)))

    def _discard(self, conn: ClientConnection, _: object) -> None:
        if conn not in self._closing:
            return
        try:
            size = len(conn.sock.recv(_READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            size = 0
        conn.discarded_bytes += size
        if size == 0 or conn.discarded_bytes > _LINGER_BYTES:
            self._end(conn)

    def _end(self, conn: ClientConnection) -> None:
        del self._closing[conn]
        self.poller.unregister(conn.sock)
        conn.sock.close()

    def _drop_oldest(self, number: int) -> None:
        for conn in list(self._waiting)[: max(number, 0)]:
            self._refuse(conn, "408 Request Timeout")

    def _refuse(self, conn: ClientConnection, status: str) -> None:
        answer = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        with suppress(OSError):
            conn.sock.send(answer.encode())
        self._drop(conn, graceful=True)

    def _drop(self, conn: ClientConnection, graceful: bool = False) -> None:
        self._forget(conn)
        self.nr_conns -= 1
        conn.close(graceful)

    def _forget(self, conn: ClientConnection) -> None:
        del self._waiting[conn]
        self.poller.unregister(conn.sock)


def _allow_open_files() -> None:
    """Raises this process's limit of open files to what its connections may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
