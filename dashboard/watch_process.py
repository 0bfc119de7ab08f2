"""The process that reduces a watched training beside it on each host, and sends what it finds.

It runs at the lowest priority on one core, in bounded memory. Killed, it is replaced and goes on
where it was; nothing of it waits for the training, nor the training for it.
"""

from __future__ import annotations

import os
import random
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.analyzer.watch.records import SAMPLE_TAG, WatchBatch, decode_batch, encode_batch
from stepsplit.analyzer.watch.reducer import (
    HOSTS,
    STATE_SUFFIX,
    Capture,
    Outbox,
    Reducer,
    WatchFolder,
)
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.collectors.formats.watch_notes import SAMPLES
from stepsplit.collectors.guard import warn
from stepsplit.collectors.record.log_to import SinkName, give_way
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)
from stepsplit.dashboard.connection import Connection, ServerAnswer, TransientError, extract_error
from stepsplit.dashboard.sinks.log_to import open_sink, parse_log_to
from stepsplit.dashboard.sinks.scalars import ScalarPoint, Sink, build_batch_points
from stepsplit.dashboard.upload import RetriesExhausted, Sender
from stepsplit.dashboard.upload_files import collect_files

POLL_S = 5.0
"""Time between two batches."""

MEMORY_BYTES = 4 << 30
"""Memory of the process; a sample that needs more has no data."""

# The loop also logs and drops samples, which a dashboard that does not answer must not hold up.
SEND_TIMEOUT_S = 5.0

LONGEST_PAUSE_S = 300.0
"""Longest time between two attempts to reach the dashboard."""

RESTART_S = 5.0
"""Time after which a reducer that has died is replaced."""

MOST_TRIES = 3
"""How often a reducer that dies after the job has ended is replaced."""

END_S = 120.0
"""How long the end of the job waits for its last samples."""

MOST_STARTS = 1_000
"""Starts of the job that are sent to a dashboard that does not know them."""

_ROUTE, _REASON_LENGTH = "/api/v1/watch", 300


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
    uploader = CaptureUploader(options) if options.url and options.has_uploads else None
    logger = PointLogger(parse_log_to(options.log_to))
    outage, has_ended = Outage(), False
    while not has_ended:
        is_over = _wait(options.poll_s)
        has_ended = is_over and not any(map(_is_alive, reducer.list_running()))
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

    def send(self, outbox: Outbox, is_last: bool = False) -> int:
        """Sends what is unsent, oldest first, until the dashboard fails.

        is_last: tries once more also within a pause. Raises UsageError.

        Returns:
            The number of batches that the dashboard has taken.
        """
        taken = 0
        if time.monotonic() < self._next_s and not is_last:
            return taken
        for batch in outbox.list_unsent():
            became = self._try_to_send(batch)
            if became == "unsent":
                break
            outbox.note_sent(is_refused=became == "refused")
            taken += became == "sent"
        return taken

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _try_to_send(self, batch: bytes) -> Literal["sent", "refused", "unsent"]:
        """Sends the batch once; an unsent one is to be sent again."""
        try:
            answer = self._post_after_starts(batch)
        except TransientError as error:
            self._pause(str(error))
            return "unsent"
        if answer.status in (401, 403, 404, 409):
            reason = extract_error(answer)[:_REASON_LENGTH]
            self._pause(f"{self._url}: answers {answer.status}: {reason}")
            return "unsent"
        self._failures = 0
        if answer.status >= 400:
            self._outage.report(
                f"{self._url}: refuses a batch with {answer.status}; it is left out"
            )
            return "refused"
        self._outage.end()
        return "sent"

    def _post_after_starts(self, batch: bytes) -> ServerAnswer:
        """The answer. A dashboard that does not know the starts of the job before, as one that was
        restored from a backup, gets an empty batch of each first."""
        answer = self._post(batch)
        newest = answer.body.get("newest_incarnation")
        if answer.status != 409 or not isinstance(newest, int):
            return answer
        whole = decode_batch(batch, "the batch")
        for number in range(newest + 1, whole.incarnation)[-MOST_STARTS:]:
            empty = msgspec.structs.replace(
                whole, id=f"{whole.id} start {number}", incarnation=number, windows=(), samples=(),
                events=(), dropped={}, ledger=None,
            )  # fmt: skip
            self._post(encode_batch(empty))
        return self._post(batch)

    def _post(self, batch: bytes) -> ServerAnswer:
        """The answer; the server may have closed the connection since the last batch."""
        with suppress(TransientError):
            return self._connection.request("POST", _ROUTE, batch, _JSON)
        return self._connection.request("POST", _ROUTE, batch, _JSON)

    def _pause(self, problem: str) -> None:
        self._outage.report(f"{problem}; batches are kept and sent later")
        self._next_s = time.monotonic() + choose_pause_s(self._failures)
        self._failures += 1


_JSON = {"Content-Type": "application/json"}


def send_rest(folder: Path, url: str, token: str | None) -> int:
    """Sends what a watch that has ended left unsent on all hosts of its folder.

    Returns:
        The number of batches sent.

    Raises:
        UsageError: The folder has no batches, its job still runs here, or the dashboard failed;
            what it has is noted.
    """
    hosts = [
        path.name.removesuffix(STATE_SUFFIX) for path in (folder / HOSTS).glob(f"*{STATE_SUFFIX}")
    ]
    if not hosts:
        raise UsageError(f"{folder}: no batches of a watch; name the folder that it wrote (--out)")
    sent = left = 0
    with closing(BatchSender(url, token)) as sender:
        for host in sorted(hosts):
            outbox = Outbox(WatchFolder(folder, "", host))
            if host == socket.gethostname() and any(map(_is_alive, outbox.list_running())):
                raise UsageError(f"{folder}: its job still runs, and sends by itself")
            sent += sender.send(outbox, is_last=True)
            left += outbox.unsent
    if left:
        raise UsageError(f"{url}: {sent} batches sent, {left} not yet: repeat the command later")
    return sent


MOST_POINTS = 1_000
"""Points that are kept for a sink while it cannot be reached, the newest."""


class PointLogger:
    """Logs the points of a watch to sinks, on the host of rank 0.

    A sink that fails costs one line; its points are kept in memory, and it is tried again after
    longer and longer pauses.
    """

    def __init__(self, sinks: Sequence[SinkName]) -> None:
        self._feeds = [_SinkFeed(sink) for sink in sinks]
        self._has_rank_0 = False

    def add(self, batch: WatchBatch) -> None:
        """Adds the points of a batch."""
        self._has_rank_0 |= any(window.rank == 0 for window in batch.windows)
        if self._feeds and self._has_rank_0:
            points = build_batch_points(batch)
            for feed in self._feeds:
                feed.points.extend(points)

    def write(self, is_last: bool = False) -> None:
        """Writes what is new. is_last: tries once more also within a pause."""
        for feed in self._feeds:
            feed.write(is_last)

    def close(self) -> None:
        """Ends the connections."""
        for feed in self._feeds:
            feed.close()


class _SinkFeed:
    """The points for one sink that are not written yet."""

    def __init__(self, name: SinkName) -> None:
        self.points: deque[ScalarPoint] = deque(maxlen=MOST_POINTS)
        self._name = name
        self._sink: Sink | None = None
        self._outage, self._failures, self._next_s = Outage(), 0, 0.0

    def write(self, is_last: bool) -> None:
        if not self.points or (time.monotonic() < self._next_s and not is_last):
            return
        try:
            self._sink = self._sink or open_sink(self._name)
            self._sink.write(tuple(self.points))
        except Exception as error:  # noqa: BLE001 - a library's failure must not end the watch
            text = str(error) if isinstance(error, StepsplitError) else f"{self._name}: {error!r}"
            self._outage.report(f"{text}; it is tried again, with the newest {MOST_POINTS} points")
            self._next_s = time.monotonic() + choose_pause_s(self._failures)
            self._failures += 1
            return
        self.points.clear()
        self._outage.end()
        self._failures, self._next_s = 0, 0.0

    def close(self) -> None:
        if self._sink is None:
            return
        try:
            self._sink.close()
        except StepsplitError as error:
            warn(str(error))


def choose_pause_s(failures: int) -> float:
    """The pause after so many failures and one more, of which hosts take different parts: those
    that lost a server together must not come back together."""
    return min(LONGEST_PAUSE_S, POLL_S * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)


class CaptureUploader:
    """Uploads requested samples as runs, whose tags name the watched run and the sample."""

    def __init__(self, options: ReducerOptions) -> None:
        self._folder, self._run = Path(options.folder), options.run
        self._connection = Connection(options.url, options.token)
        self._outage = Outage()
        self._next_s = 0.0

    def upload(self, reducer: Reducer) -> None:
        """Uploads what is not uploaded yet, unless the dashboard has failed a short time ago.

        Raises UsageError if the state cannot be written.
        """
        if time.monotonic() < self._next_s:
            return
        for capture in reducer.list_captures():
            try:
                self._send(reducer, capture)
                self._outage.end()
            except RetriesExhausted as error:
                self._outage.report(f"{error}; samples are uploaded later")
                self._next_s = time.monotonic() + LONGEST_PAUSE_S
                return
            except UsageError as error:
                warn(f"the sample {capture.folder} is not uploaded: {error}")
                reducer.note_capture(msgspec.structs.replace(capture, is_settled=True))

    def _send(self, reducer: Reducer, capture: Capture) -> None:
        sender = Sender(self._connection)
        files = collect_files(
            [self._folder / SAMPLES / capture.folder],
            lambda one: warn(f"{one.path} is not uploaded: it is {one.reason}"),
        )
        if not capture.run_id:
            tags = {SAMPLE_TAG: capture.sample_id, "watch": self._run}
            run_id = sender.create(f"{self._run} {capture.folder}", tags)
            capture = msgspec.structs.replace(capture, run_id=run_id)
            reducer.note_capture(capture)
        for one in files:
            sender.send(capture.run_id, one)
        sender.finish(capture.run_id)
        reducer.note_capture(msgspec.structs.replace(capture, is_settled=True))


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
