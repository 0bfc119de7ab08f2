"""The serving process: takes the address, starts workers and the server, stops them together."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.ingest import Workers, set_up_logs
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import Ready, Serving, access_to


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
            hint = "choose another --host or --port"
            raise UsageError(f"{host}:{port} cannot be used ({error.strerror}); {hint}") from None


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
        from stepsplit.dashboard.web.server import GunicornServer

        # Loaded here, where the metrics' folder is known, and where pages are made.

        GunicornServer(self.store, self.bind, self.ready, self.how).run()


class _Stopped(Exception):
    """Somebody asked this process to end."""


def run_until_stopped(server: Callable[[], None], workers: Workers) -> int:
    """Runs the server in a process of its own, and the workers, until a signal or until the server
    ends. The exit status: 0 after a signal, else the server's."""
    from stepsplit.dashboard.web.server import _LOOK_EVERY_S

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
    from stepsplit.dashboard.web.server import _PATIENCE_S

    if process.is_alive():
        process.terminate()
    process.join(_PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()


def _as_child(server: Callable[[], None], parent: int) -> None:
    """Without its parent nobody would ever end the server, and its port would stay taken."""
    from stepsplit.dashboard.web.server import _SIGNAL_AT_PARENTS_DEATH

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)
        if os.getppid() != parent:
            return
    server()
