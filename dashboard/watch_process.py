"""The process that reduces a watched training beside it on each host, and sends what it finds.

It runs at the lowest priority on one core, in bounded memory. Killed, it is replaced and goes on
where it was; nothing of it waits for the training, nor the training for it.
"""

from __future__ import annotations

import os
import random
import resource
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder
from stepsplit.collectors.guard import warn
from stepsplit.collectors.run_spec import Mesh
from stepsplit.dashboard.upload import Connection, ServerAnswer, TransientError

POLL_S = 5.0
"""Time between two batches."""

MEMORY_BYTES = 4 << 30
"""Memory of the process; a sample that needs more has no data."""

SEND_TIMEOUT_S = 5.0

LONGEST_PAUSE_S = 300.0
"""Longest time between two attempts to reach the dashboard."""

RESTART_S = 5.0
"""Time after which a reducer that has died is replaced."""

MOST_TRIES = 3
"""How often a reducer that dies after the job has ended is replaced."""

END_S = 120.0
"""How long the end of the job waits for its last samples."""

_ROUTE = "/api/v1/watch"


class ReducerOptions(Struct, frozen=True, kw_only=True):
    """The options of the process. url: the dashboard; "" for none. mesh: as stated, or ""."""

    folder: str
    run: str
    host: str
    mesh: str = ""
    disk_bytes: int
    url: str = ""
    token: str | None = None
    poll_s: float = POLL_S


def main() -> None:
    """Reduces until standard input has ended, after a line of options, and no rank is left."""
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=ReducerOptions)
    give_way()
    mesh = Mesh.parse(options.mesh) if options.mesh else None
    path = Path(options.folder)
    reducer = Reducer(WatchFolder(path, options.run, options.host, mesh, options.disk_bytes))
    sender = BatchSender(options.url, options.token) if options.url else None
    outage, has_ended = Outage(), False
    while not has_ended:
        is_over = _wait(options.poll_s)
        has_ended = is_over and not any(map(_is_alive, reducer.list_running()))
        try:
            while reducer.collect(is_last=has_ended) is not None:
                outage.end()
            if sender is not None:
                sender.send(reducer, is_last=has_ended)
        except (StepsplitError, OSError) as error:
            outage.report(f"{error}; what is watched waits for it")


def give_way() -> None:
    """Has the process run only when a core is free, on one core, in bounded memory."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def _wait(seconds: float) -> bool:
    """Waits so long, or until standard input ends; returns whether it has."""
    begin = time.monotonic()
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    if not readable:
        return False
    # At its end it is readable at once.
    time.sleep(max(0.0, min(1.0, seconds) - (time.monotonic() - begin)))
    return not os.read(sys.stdin.fileno(), 1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Outage:
    """Reports a failure that lasts with one line, that of its begin."""

    def __init__(self) -> None:
        self._is_reported = False

    def report(self, text: str) -> None:
        """Prints the failure if it is the first one."""
        if not self._is_reported:
            warn(text)
        self._is_reported = True

    def end(self) -> None:
        """The next failure is a new one."""
        self._is_reported = False


class BatchSender:
    """Sends batches to a dashboard, and makes longer and longer pauses while it does not answer."""

    def __init__(self, url: str, token: str | None) -> None:
        self._connection = Connection(url, token, timeout_s=SEND_TIMEOUT_S)
        self._url = self._connection.url
        self._outage = Outage()
        self._failures = 0
        self._next_s = 0.0

    def send(self, reducer: Reducer, is_last: bool = False) -> None:
        """Sends what is unsent, oldest first, until the dashboard fails.

        is_last: tries once more also within a pause. Raises UsageError.
        """
        if time.monotonic() < self._next_s and not is_last:
            return
        for batch in reducer.list_unsent():
            if not self._try_to_send(batch):
                break
            reducer.note_sent()

    def _try_to_send(self, batch: bytes) -> bool:
        """Whether the batch need not be sent again."""
        try:
            answer = self._post(batch)
        except TransientError as error:
            self._pause(str(error))
            return False
        if answer.status in (401, 403, 404):
            self._pause(f"{self._url}: answers {answer.status}")
            return False
        if answer.status >= 400:
            self._outage.report(
                f"{self._url}: refuses a batch with {answer.status}; it is left out"
            )
        else:
            self._outage.end()
        self._failures = 0
        return True

    def _post(self, batch: bytes) -> ServerAnswer:
        """The answer; the server may have closed the connection since the last batch."""
        with suppress(TransientError):
            return self._connection.request("POST", _ROUTE, batch, _JSON)
        return self._connection.request("POST", _ROUTE, batch, _JSON)

    def _pause(self, problem: str) -> None:
        self._outage.report(f"{problem}; batches are kept and sent later")
        pause_s = min(LONGEST_PAUSE_S, POLL_S * 2**self._failures)
        self._failures += 1
        # Hosts that lost the dashboard together must not come back together.
        self._next_s = time.monotonic() + pause_s * random.uniform(0.5, 1.0)


_JSON = {"Content-Type": "application/json"}


class ReducerProcess:
    """Keeps a reducer running beside the job that is started in the block."""

    def __init__(self, options: ReducerOptions) -> None:
        self._options = options
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="reducer", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        """Has the reducer tell the rest, and waits for it a limited time."""
        self._has_ended.set()
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()
        self._thread.join(END_S)

    def _run(self) -> None:
        """Replaces a reducer that has died, until one has ended after the job."""
        tries = 0
        while tries < MOST_TRIES:
            with self._lock:
                process = self._start()
            status = process.wait()
            if not self._has_ended.is_set():
                self._has_ended.wait(RESTART_S)
            elif status == 0:
                return
            else:
                tries += 1

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "stepsplit.dashboard.watch_process"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # In a session of its own, since Ctrl-C is for the job.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, start_new_session=True
        )
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.write(msgspec.json.encode(self._options) + b"\n")
                process.stdin.flush()
                if self._has_ended.is_set():
                    process.stdin.close()
        self._process = process
        return process


if __name__ == "__main__":
    main()
