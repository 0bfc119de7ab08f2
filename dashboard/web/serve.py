"""The production server: gunicorn, one process, threads that stream uploads."""

from __future__ import annotations

import socket
from collections.abc import Callable

from flask import Flask
from gunicorn.app.base import BaseApplication

from stepsplit.analyzer.analysis import examine
from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.ingest import Analyze
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.app import create_app
from stepsplit.dashboard.web.security import LOOPBACK

THREADS = 8


def serve(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 8050,
    *,
    ready: Callable[[str], None] | None = None,
    analyze: Analyze = examine,
) -> None:
    """Serves until SIGINT or SIGTERM; ready is told the address (no slash at its end) once
    pages can be opened.

    Main thread only; ends with SystemExit, as gunicorn does. Raises UsageError for an address
    that others could reach, or one in use.
    """
    if host not in LOOPBACK:
        raise UsageError(f"host {host} is not of this machine alone; use 127.0.0.1 and a tunnel")
    _claim(host, port)
    shown = f"[{host}]" if ":" in host else host
    _Server(store, f"{shown}:{port}", ready, analyze).run()


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
            mend = "choose another --port"
            raise UsageError(f"{host}:{port} cannot be used ({error.strerror}); {mend}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _Server(BaseApplication):  # type: ignore[misc]
    def __init__(
        self, store: Store, bind: str, ready: Callable[[str], None] | None, analyze: Analyze
    ) -> None:
        self._store, self._bind, self._ready, self._analyze = store, bind, ready, analyze
        super().__init__()

    def load_config(self) -> None:
        settings = {
            "bind": self._bind,
            "workers": 1,
            "worker_class": "gthread",
            "threads": THREADS,
            "timeout": 300,
            "graceful_timeout": 5,
            "loglevel": "warning",
            "control_socket_disable": True,
            "post_worker_init": self._tell,
        }
        for name, value in settings.items():
            # Older releases have no control socket to switch off.
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Flask:
        """The app, built in the worker process: threads and connections do not survive a fork."""
        self._store.reopen()
        server = create_app(self._store, analyze=self._analyze).server
        assert isinstance(server, Flask)
        return server

    def _tell(self, worker: object) -> None:
        # A worker that replaces a dead one is no news.
        if self._ready is not None and getattr(worker, "age", 1) == 1:
            self._ready(f"http://{self._bind}")
