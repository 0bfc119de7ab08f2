"""The worker processes of a dashboard: started, watched, started again, ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from stepsplit.dashboard.store.store import Store

_LOG = logging.getLogger("stepsplit.jobs")
_PATIENCE_S = 10.0
_LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Place:
    """One worker at a time; after a short life the next one waits twice as long."""

    name: str = ""
    process: subprocess.Popen[bytes] | None = None
    begun: float = 0.0
    due: float = 0.0
    pause_s: float = 0.5


class Workers:
    """So many worker processes on the store. All calls come from one thread."""

    def __init__(self, store: Store, number: int, options: tuple[str, ...] = ()) -> None:
        self._store, self._options = store, options
        self._places = [_Place() for _ in range(number)]

    def watch(self) -> None:
        """Starts what is due, and frees the jobs of those that died. Call it often."""
        for place in self._places:
            if place.process is not None and place.process.poll() is not None:
                self._died(place)
            if place.process is None and time.monotonic() >= place.due:
                self._start(place)

    def stop(self) -> None:
        """Ends them all; what they were at is queued again."""
        running = [(p, p.process) for p in self._places if p.process is not None]
        for _, process in running:
            process.terminate()
        deadline = time.monotonic() + _PATIENCE_S
        for place, process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            self._clear(place)

    def _start(self, place: _Place) -> None:
        place.name, place.begun = f"{os.uname().nodename}-{uuid.uuid4().hex[:8]}", time.monotonic()
        command = [sys.executable, "-m", "stepsplit.dashboard", "worker", "--name", place.name]
        command += ["--parent", str(os.getpid()), *self._options]
        # By the environment: a URL may hold a password, and everybody may list processes.
        env = {**os.environ, **worker_environment(self._store)}
        place.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _died(self, place: _Place) -> None:
        assert place.process is not None
        status, lived = place.process.returncode, time.monotonic() - place.begun
        _LOG.warning("worker %s ended (%s); starting another", place.name, status)
        self._clear(place)
        place.pause_s = (
            0.5 if lived > _LONGEST_PAUSE_S else min(2 * place.pause_s, _LONGEST_PAUSE_S)
        )
        place.due = time.monotonic() + place.pause_s

    def _clear(self, place: _Place) -> None:
        """Ends what the worker leaves behind: itself, the processes that it started, its jobs."""
        assert place.process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(place.process.pid, signal.SIGKILL)
        place.process.wait()
        place.process = None
        with suppress(SQLAlchemyError):
            self._store.jobs.free(place.name)


def worker_environment(store: Store) -> dict[str, str]:
    """What tells a worker process where the store is."""
    return {"STEPSPLIT_STORE": store.url, "STEPSPLIT_ARTIFACTS": store.artifacts.url}
