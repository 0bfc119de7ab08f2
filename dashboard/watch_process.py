"""The process that reduces a watched training beside it on each host, and sends what it finds.

It runs at the lowest priority on one core, in bounded memory. Killed, it is replaced and goes on
where it was; nothing of it waits for the training, nor the training for it.
"""

from __future__ import annotations

import os
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
from stepsplit.collectors.attach.processes import is_process_alive
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.collectors.record.log_to import give_way
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)
from stepsplit.dashboard.outage import POLL_S, Outage
from stepsplit.dashboard.sinks.log_to import parse_log_to
from stepsplit.dashboard.sinks.point_logger import PointLogger
from stepsplit.dashboard.watch_sender import BatchSender, CaptureUploader

MEMORY_BYTES = 4 << 30
"""Memory of the process; a sample that needs more has no data."""

RESTART_S = 5.0
"""Time after which a reducer that has died is replaced."""

MOST_TRIES = 3
"""How often a reducer that dies after the job has ended is replaced."""

END_S = 120.0
"""How long the end of the job waits for its last samples."""


class ReducerOptions(Struct, frozen=True, kw_only=True):
    """The options of the process. url: the dashboard; "" for none. mesh: as stated, or "".

    has_uploads: whether requested samples are uploaded. log_to: sinks, as the option has them.
    """

    folder: str
    run: str
    host: str
    mesh: str = ""
    disk_bytes: int
    url: str = ""
    token: str | None = None
    log_to: tuple[str, ...] = ()
    poll_s: float = POLL_S
    has_uploads: bool = False


def main() -> None:
    """Reduces until standard input has ended, after a line of options, and no rank is left."""
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=ReducerOptions)
    # Runs only when a core is free, on one core, in bounded memory.
    give_way()
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    mesh = Mesh.parse(options.mesh) if options.mesh else None
    path = Path(options.folder)
    reducer = Reducer(WatchFolder(path, options.run, options.host, mesh, options.disk_bytes))
    sender = BatchSender(options.url, options.token) if options.url else None
    uploader = (
        CaptureUploader(path, options.run, options.url, options.token)
        if options.url and options.has_uploads
        else None
    )
    logger = PointLogger(parse_log_to(options.log_to))
    outage, is_over, has_ended = Outage(), False, False
    while not has_ended:
        is_over = _wait(options.poll_s, must_pause=is_over)
        has_ended = is_over and not any(map(is_process_alive, reducer.list_running()))
        try:
            while (batch := reducer.collect(is_last=has_ended)) is not None:
                outage.end()
                logger.add(batch)
            if sender is not None:
                sender.send(reducer, is_last=has_ended)
            if uploader is not None:
                uploader.upload(reducer)
        except (StepsplitError, OSError) as error:
            outage.report(f"{error}; what is watched waits for it")
        logger.write(is_last=has_ended)
    logger.close()


def _wait(seconds: float, must_pause: bool) -> bool:
    """Waits so long, or until standard input ends; returns whether it has. must_pause: it had ended
    before, and ranks that go on are looked for once a second; the end itself holds up the job."""
    if must_pause:
        time.sleep(min(1.0, seconds))
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


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
        # In a session of its own, since Ctrl-C is for the job.
        process = subprocess.Popen(
            build_helper_command("stepsplit.dashboard.watch_process"),
            stdin=subprocess.PIPE,
            env=build_helper_environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
            start_new_session=True,
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
