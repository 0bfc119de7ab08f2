"""The production server: gunicorn's processes and threads, and the workers beside them."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.log_lines import LogFormat, set_up_logs
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.workers import Workers
from stepsplit.dashboard.web.access import Access, access_to
from stepsplit.dashboard.web.children import run_until_stopped
from stepsplit.dashboard.web.limits import Limits

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
        from stepsplit.dashboard.web.gunicorn_server import GunicornServer

        GunicornServer(self.store, self.bind, self.ready, self.how).run()
