"""gunicorn with this server's settings: few processes, threads that stream uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask import Flask
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger

from stepsplit.dashboard.store.log_lines import JsonLines
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server

if TYPE_CHECKING:
    from stepsplit.dashboard.web.serve import Ready, Serving

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
