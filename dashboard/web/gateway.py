"""From HTTP to Flask: a thread answers a request once it has arrived as a whole, and the answer is
sent without it. So no client holds a thread, however slowly it sends or takes."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

from flask import Flask, g, request
from werkzeug.wrappers import Response

from stepsplit.dashboard.web.uploads import BLOCK_BYTES, JSON_BYTES, Limits

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

    Spool = SpooledTemporaryFile[bytes]

MIN_BYTES_PER_S, GRACE_S, STALL_S = 1_024, 10.0, 20.0
"""Clients that send or take less, after the first seconds, or nothing for so long, are dropped."""

LINGER_S = 2.0
"""For so long the rest of a refused body is read: bytes that are unread when a connection is closed
destroy the answer on its way."""

THREADS = 8
"""Of each kind, in each process: for pages, and for the bodies of uploads."""

_SEND_BYTES = 64 << 10

Message = Mapping[str, Any]
Environ = dict[str, Any]
T = TypeVar("T")


class CutOffError(Exception):
    """The client has closed the connection."""


class Gateway:
    """The ASGI application around Flask. folder: for bodies and answers too large for memory."""

    def __init__(self, flask: Flask, limits: Limits, folder: Path) -> None:
        self._flask, self._limits, self._folder = flask, limits, folder
        self._pages = ThreadPoolExecutor(THREADS, "page")
        self._uploads = ThreadPoolExecutor(THREADS, "upload")

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        with self._open_spool() as body, self._open_spool() as answer:
            client, environ = _Client(receive, send), build_environ(scope, body)
            try:
                app = await self._receive_body(client, environ, body)
                # Two pools: uploads that write to a slow disk leave the pages their threads.
                pool = self._uploads if environ["REQUEST_METHOD"] in _UPLOADS else self._pages
                start = await _run(pool, write_answer, app, environ, answer)
                await client.send_answer(start, answer)
            except (CutOffError, TimeoutError):
                return

    def _open_spool(self) -> Spool:
        return SpooledTemporaryFile(JSON_BYTES, dir=str(self._folder))

    async def _receive_body(
        self, client: _Client, environ: Environ, body: Spool
    ) -> WSGIApplication:
        """Receives the body into the file. Returns what answers the request: Flask, or a refusal.

        Raises CutOffError.
        """
        if "HTTP_TRANSFER_ENCODING" in environ:
            # RFC 9112, section 6.3: it overrides the length.
            environ.pop("CONTENT_LENGTH", None)
        announced, limit_bytes = int(environ.get("CONTENT_LENGTH", 0)), JSON_BYTES
        is_checked, received, block = False, 0, bytearray()
        while client.has_more:
            # A small body is received without: Flask checks the request afterwards anyway.
            if max(announced, received) > limit_bytes:
                if is_checked:
                    reason = f"the body exceeds the limit of this server ({limit_bytes} bytes)"
                    return _build_refusal(413, reason)
                refusal, limit_bytes = await _run(self._pages, self._check_head, environ)
                if refusal is not None:
                    return refusal
                is_checked = True
                continue
            try:
                piece = await client.receive_piece()
            except (CutOffError, TimeoutError) as error:
                # What has arrived of a part is kept; the answer says how much.
                if environ["REQUEST_METHOD"] == "PATCH" and announced:
                    break
                if isinstance(error, CutOffError):
                    raise
                return _build_refusal(408, "the request came too slowly")
            block += piece
            received += len(piece)
            if len(block) >= BLOCK_BYTES:
                await _run(self._uploads, body.write, block)
                block.clear()
                if shutil.disk_usage(self._folder).free < self._limits.spare_bytes:
                    return _build_refusal(507, "the server's disk is full; delete old runs")
        await _run(self._uploads, body.write, block) if received > JSON_BYTES else body.write(block)
        body.seek(0)
        return self._flask.wsgi_app

    def _check_head(self, environ: Environ) -> tuple[WSGIApplication | None, int]:
        """The refusal of a request by its head alone, and the largest body that may follow."""
        with self._flask.request_context(environ):
            try:
                refusal = self._flask.preprocess_request()
            except Exception as error:  # noqa: BLE001
                refusal = self._flask.handle_user_exception(error)
            if refusal is not None:
                return self._flask.finalize_request(refusal), 0
            if request.endpoint in ("api.put", "api.patch"):
                return None, self._limits.file_bytes
            # The login page is for those who have not logged in.
            return None, self._flask.config["MAX_CONTENT_LENGTH"] if "user" in g else JSON_BYTES


_UPLOADS = ("PUT", "PATCH")


def _build_refusal(status: int, reason: str) -> Response:
    return Response(json.dumps({"error": reason}), status, mimetype="application/json")


def build_environ(scope: Message, body: Spool) -> Environ:
    """The WSGI environment of a request."""
    server, client = scope.get("server") or ("localhost", 0), scope.get("client") or ("", 0)
    environ: Environ = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(scope["raw_path"]).decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1] or 0),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        # Empty for a client of a Unix domain socket.
        "REMOTE_ADDR": client[0],
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.input": body,
        "wsgi.input_terminated": True,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
    }
    for name, value in scope["headers"]:
        # X_Forwarded_User would be X-Forwarded-User here, which only the proxy may set.
        if b"_" in name:
            continue
        key = name.decode("latin-1").upper().replace("-", "_")
        key = key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"
        text = value.decode("latin-1")
        separator = "; " if key == "HTTP_COOKIE" else ","
        environ[key] = f"{environ[key]}{separator}{text}" if key in environ else text
    return environ


def write_answer(app: WSGIApplication, environ: Environ, file: Spool) -> Message:
    """Writes the body of the app's answer to the file, and returns the message before it."""
    with Response.from_app(app, environ) as response:
        file.writelines(response.iter_encoded())
    file.seek(0)
    headers = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in response.headers]
    return {"type": "http.response.start", "status": response.status_code, "headers": headers}


@dataclass(slots=True)
class _Client:
    """The other end of the connection, during one request."""

    receive: Callable[[], Awaitable[Message]]
    send: Callable[[Message], Awaitable[None]]
    has_more: bool = True
    _moved_bytes: int = 0
    _waited_s: float = 0.0

    async def receive_piece(self) -> bytes:
        """The next piece of the body. Raises CutOffError, TimeoutError."""
        message = await self._wait(self.receive())
        if message["type"] == "http.disconnect":
            self.has_more = False
            raise CutOffError
        piece: bytes = message.get("body", b"")
        self.has_more = message.get("more_body", False)
        self._moved_bytes += len(piece)
        return piece

    async def send_answer(self, start: Message, body: Spool) -> None:
        """Sends the answer. Raises TimeoutError."""
        self._moved_bytes, self._waited_s = 0, 0.0
        await self._wait(self.send(start))
        while block := body.read(_SEND_BYTES):
            await self._wait(self.send(_build_block(block)))
            self._moved_bytes += len(block)
        try:
            async with asyncio.timeout(LINGER_S):
                while self.has_more:
                    await self.receive_piece()
        except (TimeoutError, CutOffError):
            pass
        await self._wait(self.send(_build_block(b"", more=False)))

    async def _wait(self, moving: Awaitable[T]) -> T:
        """Raises TimeoutError if the client is too slow; only waiting for it counts."""
        begun = time.monotonic()
        left_s = GRACE_S + self._moved_bytes / MIN_BYTES_PER_S - self._waited_s
        try:
            async with asyncio.timeout(min(left_s, STALL_S)):
                return await moving
        finally:
            self._waited_s += time.monotonic() - begun


def _build_block(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _run(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
