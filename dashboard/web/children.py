"""The processes of a dashboard: the server and its workers live and end with this one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType

from stepsplit.dashboard.store.workers import Workers

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
