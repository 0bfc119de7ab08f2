"""The HTTP server: uvicorn, and the address that all of its processes listen on."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.web.gateway import STALL_S, Gateway

HEAD_S = 10.0
"""The head of a request must arrive within this time, or twice as long at most."""

GRACEFUL_S = 5
"""For so long requests in progress may go on when the server is stopped."""

HEAD_BYTES = 16 << 10
"""The head of a request, when more must follow: twice that is never accepted."""

UNIX = "unix:"

_BACKLOG = 2_048


def answer_requests(gateway: Gateway, listener: socket.socket) -> None:
    """Answers requests until this process is terminated."""
    # Each connection is an open file, and the usual soft limit is 1,024.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = uvicorn.Config(
        gateway, http=HttpConnection, ws="none", loop="asyncio", lifespan="off",
        # X-Forwarded-For is the business of the access control.
        proxy_headers=False, server_header=False, access_log=False,
        # So many are accepted at a time: else one process takes all that wait, and a core idles.
        log_config=None, log_level="error", backlog=1,
        h11_max_incomplete_event_size=HEAD_BYTES, timeout_keep_alive=int(HEAD_S),
        timeout_graceful_shutdown=GRACEFUL_S,
    )  # fmt: skip
    _Server(config).run(sockets=[listener])


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio's number is also that of connections which may wait.
            listener.listen(_BACKLOG)


class HttpConnection(H11Protocol):
    """A connection that is closed if no request comes of it: uvicorn waits for ever for the rest of
    a head, and for that of a body which was refused."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock."""
        super().connection_made(transport)
        self.loop.call_later(HEAD_S, self._close_if_idle, None)

    def data_received(self, data: bytes) -> None:
        """Hands on little at a time: of all that comes at once h11 would accept any head, or parse
        each line of a trailer, and answer no other client meanwhile."""
        for start in range(0, len(data), HEAD_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + HEAD_BYTES])

    def _close_if_idle(self, before: object) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if not (answering or self.transport.get_write_buffer_size()) and self.cycle is before:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEAD_S, self._close_if_idle, self.cycle)


@contextmanager
def open_listener(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket. host: an address of this machine, or unix:PATH. Raises UsageError."""
    path = Path(host.removeprefix(UNIX)).absolute() if host.startswith(UNIX) else None
    try:
        if path is None:
            both = ":" in host and socket.has_dualstack_ipv6()
            listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=_BACKLOG, dualstack_ipv6=both,
            )  # fmt: skip
            # Its connections inherit this: one whose client reads nothing ends with all that waits
            # for it.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                stall_ms = int(STALL_S * 1_000)
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        else:
            listener = _listen_on_path(path)
    except OSError as error:
        where = f"{host}:{port}" if path is None else host
        hint = "choose another --host or --port"
        raise UsageError(f"cannot listen on {where} ({error.strerror}); {hint}") from None
    with listener:
        try:
            yield listener
        finally:
            if path is not None:
                path.unlink(missing_ok=True)


def _listen_on_path(path: Path) -> socket.socket:
    """A Unix domain socket for its owner only."""
    folder = path.parent.stat()
    if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
        # They could put a socket of theirs in its place.
        raise UsageError(f"{path.parent}: others may write here; use a folder of your own")
    listener = socket.socket(socket.AF_UNIX)
    # What a killed server has left; connecting to a server that runs succeeds.
    if path.is_socket() and listener.connect_ex(str(path)) == errno.ECONNREFUSED:
        path.unlink()
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def format_url(host: str, listener: socket.socket) -> str:
    """The URL of the server, or unix:PATH."""
    if host.startswith(UNIX):
        return host
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
