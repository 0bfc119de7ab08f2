"""What a watch sends to a dashboard: its batches, and the samples that were asked for."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

import msgspec

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.watch.records import SAMPLE_TAG, decode_batch, encode_batch
from stepsplit.analyzer.watch.reducer import (
    HOSTS,
    STATE_SUFFIX,
    Capture,
    Outbox,
    Reducer,
    WatchFolder,
)
from stepsplit.collectors.attach.processes import is_process_alive
from stepsplit.collectors.formats.watch_notes import SAMPLES
from stepsplit.collectors.guard import warn
from stepsplit.dashboard.connection import Connection, ServerAnswer, TransientError, extract_error
from stepsplit.dashboard.outage import LONGEST_PAUSE_S, Outage, choose_pause_s
from stepsplit.dashboard.upload import RetriesExhausted, Sender
from stepsplit.dashboard.upload_files import collect_files

# The loop also logs and drops samples, which a dashboard that does not answer must not hold up.
SEND_TIMEOUT_S = 5.0

MOST_STARTS = 1_000
"""Starts of the job that are sent to a dashboard that does not know them."""

_ROUTE, _REASON_LENGTH = "/api/v1/watch", 300


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
            if host == socket.gethostname() and any(map(is_process_alive, outbox.list_running())):
                raise UsageError(f"{folder}: its job still runs, and sends by itself")
            sent += sender.send(outbox, is_last=True)
            left += outbox.unsent
    if left:
        raise UsageError(f"{url}: {sent} batches sent, {left} not yet: repeat the command later")
    return sent


class CaptureUploader:
    """Uploads requested samples as runs, whose tags name the watched run and the sample."""

    def __init__(self, folder: Path, run: str, url: str, token: str | None) -> None:
        self._folder, self._run = folder, run
        self._connection = Connection(url, token)
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
