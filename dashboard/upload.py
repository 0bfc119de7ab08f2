"""The client of a dashboard: sends files in parts, resumes after errors, asks for runs by tag."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import TypeVar
from urllib.parse import quote, urlencode

from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.safe_io.regular_file import open_regular
from stepsplit.dashboard.connection import Connection, ServerAnswer, TransientError, extract_error
from stepsplit.dashboard.upload_files import FileToSend

PART_BYTES = 8 << 20
"""What is sent again at most after a connection broke; each part is one request."""

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Before each new attempt: half a minute in all, in which a server can start again."""

_RUNS = "/api/v1/runs"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerFile:
    """How much of a file the server has."""

    bytes: int
    complete: bool


class RetriesExhausted(UsageError):
    """The connection could not be restored; the server keeps the parts that were sent."""


class Sender:
    """One upload. The callback receives the number of bytes of each uploaded part."""

    def __init__(
        self,
        connection: Connection,
        on_sent: Callable[[int], object] = lambda _: None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._connection, self._sent, self._sleep = connection, on_sent, sleep

    def create(self, name: str, tags: Mapping[str, str]) -> str:
        """Creates a run and returns its id. Raises UsageError."""
        body = json.dumps({"name": name, "tags": dict(tags)}).encode()
        answer = self._retry(lambda: self._post(_RUNS, body))
        return str(_check_answer(answer).body["id"])

    def send(self, run_id: str, item: FileToSend) -> None:
        """Sends the parts of the file that the server does not have.

        Raises UsageError, RetriesExhausted.
        """
        place = f"{_RUNS}/{run_id}/files/{quote(item.path)}"
        failures = 0
        # Not a link either, which the file may have become since it was listed.
        with open_regular(item.file, os.O_NOFOLLOW) as file:
            stored = self._retry(lambda: self._fetch_server_file(place))
            self._sent(stored.bytes)
            while not stored.complete:
                if stored.bytes > item.size_bytes:
                    raise UsageError(f"{item.file} is shorter than the part already uploaded")
                before = stored.bytes
                try:
                    stored = self._append(place, file, stored.bytes, item.size_bytes)
                    failures = 0
                except TransientError as error:
                    failures = self._pause(failures, error)
                    stored = self._retry(lambda: self._fetch_server_file(place))
                # What the server has now: of a request that broke it may have kept a part.
                self._sent(stored.bytes - before)

    def finish(self, run_id: str) -> None:
        """Marks the upload as complete. Raises UsageError."""
        answer = self._retry(lambda: self._post(f"{_RUNS}/{run_id}/finish", b"{}"))
        # The response to an earlier attempt may have been lost.
        if answer.status != 409 or self.fetch_run(run_id)["state"] == "uploading":
            _check_answer(answer)

    def fetch_run(self, run_id: str) -> Mapping[str, object]:
        """The run as the server returns it, with its state. Raises UsageError."""
        path = f"{_RUNS}/{quote(run_id)}"
        return _check_answer(self._retry(lambda: self._connection.request("GET", path))).body

    def _fetch_server_file(self, place: str) -> ServerFile:
        answer = self._connection.request("HEAD", place)
        return (
            ServerFile(0, False)
            if answer.status == 404
            else _parse_server_file(_check_answer(answer))
        )

    def _append(self, place: str, file: FileIO, offset: int, size: int) -> ServerFile:
        file.seek(offset)
        part = file.read(PART_BYTES)
        ends = offset + len(part) >= size
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        headers = {
            "Upload-Offset": str(offset),
            "Upload-Complete": "?1" if ends else "?0",
            "Content-Digest": f"sha-256=:{digest}:",
        }
        answer = self._connection.request("PATCH", place, part, headers)
        # It has more or less of the file than we believe, and says how much.
        if answer.status == 409 and "Upload-Offset" in answer.headers:
            return _parse_server_file(answer)
        if answer.status >= 300 and ("Upload-Offset" in answer.headers or answer.wait_s):
            # Damaged or truncated in transit, or the file is still locked by an earlier attempt.
            raise TransientError(extract_error(answer), answer.wait_s)
        return _parse_server_file(_check_answer(answer))

    def _post(self, path: str, body: bytes) -> ServerAnswer:
        return self._connection.request("POST", path, body, _JSON)

    def _retry(self, attempt: Callable[[], T]) -> T:
        return _retry(attempt, self._sleep)

    def _pause(self, failures: int, error: TransientError) -> int:
        return _pause(failures, error, self._sleep)


_JSON = {"Content-Type": "application/json"}


def _retry(attempt: Callable[[], T], sleep: Callable[[float], object] = time.sleep) -> T:
    failures = 0
    while True:
        try:
            return attempt()
        except TransientError as error:
            failures = _pause(failures, error, sleep)


def _pause(failures: int, error: TransientError, sleep: Callable[[float], object]) -> int:
    """Waits and returns the number of consecutive failures. Raises RetriesExhausted after too
    many."""
    if failures == len(PAUSES_S):
        raise RetriesExhausted(str(error))
    sleep(max(PAUSES_S[failures], error.wait_s))
    return failures + 1


def _parse_server_file(answer: ServerAnswer) -> ServerFile:
    offset = int(answer.headers.get("Upload-Offset", "0"))
    return ServerFile(offset, answer.headers.get("Upload-Complete") == "?1")


def _check_answer(answer: ServerAnswer) -> ServerAnswer:
    if answer.status == 401:
        raise UsageError(
            f"{extract_error(answer)}; set it with --token or STEPSPLIT_TOKEN (stepsplit token"
            " create NAME prints one, where the dashboard's store is)"
        )
    if answer.status >= 300:
        raise UsageError(f"the server refused: {extract_error(answer)}")
    return answer


# The runs of a dashboard, for a check on another machine.


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """A finished run of a dashboard."""

    id: str
    name: str


class RemoteStore:
    """Reads the finished runs of a dashboard, and records results of checks with them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list_done(self, tags: Sequence[tuple[str, str]], last: int) -> tuple[RemoteRun, ...]:
        """The last finished runs that have all tags, newest first. Raises UsageError."""
        pairs = [("tag", f"{key}={value}") for key, value in tags]
        query = urlencode([*pairs, ("state", "done"), ("last", last)])
        rows = self._get(f"{_RUNS}?{query}").body.get("runs")
        if rows is None:
            raise UsageError(f"{self._connection.url} does not list runs; update its stepsplit")
        # A run of Flight Recorder dumps has what the job waits for, and no report.
        done = [row for row in rows if not row.get("error")]
        return tuple(RemoteRun(str(row["id"]), str(row["name"])) for row in done)

    def find_done(self, run_id: str) -> RemoteRun | None:
        """The run of this id; None if it is not finished. Raises UsageError."""
        row = self._get(f"{_RUNS}/{quote(run_id)}").body
        return RemoteRun(run_id, str(row["name"])) if row["state"] == "done" else None

    def fetch_report(self, run_id: str) -> bytes:
        """The run's report.json. Raises UsageError."""
        return self._get(f"{_RUNS}/{quote(run_id)}/report.json").content

    def record_check(self, run_id: str, answer: str, headline: str) -> None:
        """Shows the result of a check with the run. Raises UsageError."""
        body = json.dumps({"answer": answer, "headline": headline}).encode()
        path = f"{_RUNS}/{quote(run_id)}/check"
        _check_answer(_retry(lambda: self._connection.request("POST", path, body, _JSON)))

    def _get(self, path: str) -> ServerAnswer:
        return _check_answer(_retry(lambda: self._connection.request("GET", path)))
