"""Sends files to a dashboard, part by part, and goes on where a connection broke."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, TypeVar
from urllib.parse import quote

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.upload.chosen import Chosen
from stepsplit.dashboard.upload.connection import Answer, Connection, Passing, told

PART_BYTES = 8 << 20
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_RUNS = "/api/v1/runs"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held:
    """What the server holds of a file."""

    bytes: int
    complete: bool


class GaveUp(UsageError):
    """The connection did not come back; what was sent is kept."""


class Sender:
    """One upload. sent is told the bytes of each part that the server has."""

    def __init__(
        self,
        connection: Connection,
        sent: Callable[[int], object] = lambda _: None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._connection, self._sent, self._sleep = connection, sent, sleep

    def create(self, name: str, tags: Mapping[str, str]) -> str:
        """The id of a new run. Raises UsageError."""
        body = json.dumps({"name": name, "tags": dict(tags)}).encode()
        answer = self._patiently(lambda: self._post(_RUNS, body))
        return str(_good(answer).body["id"])

    def send(self, run_id: str, one: Chosen) -> None:
        """Sends what the server does not hold of the file. Raises UsageError, GaveUp."""
        place = f"{_RUNS}/{run_id}/files/{quote(one.path)}"
        failures = 0
        with one.file.open("rb") as file:
            held = self._patiently(lambda: self._held(place))
            self._sent(held.bytes)
            while not held.complete:
                if held.bytes > one.size_bytes:
                    raise UsageError(f"{one.file} is shorter than what was sent of it before")
                before = held.bytes
                try:
                    held = self._append(place, file, held.bytes, one.size_bytes)
                    failures = 0
                except Passing as error:
                    failures = self._pause(failures, error)
                    held = self._patiently(lambda: self._held(place))
                self._sent(held.bytes - before)

    def finish(self, run_id: str) -> None:
        """Says that all files are there. Raises UsageError."""
        answer = self._patiently(lambda: self._post(f"{_RUNS}/{run_id}/finish", b"{}"))
        # The answer to an earlier try may have been lost on its way.
        if answer.status != 409 or self.state(run_id)["state"] == "uploading":
            _good(answer)

    def state(self, run_id: str) -> Mapping[str, object]:
        """Where the run stands. Raises UsageError."""
        asked = f"{_RUNS}/{quote(run_id)}"
        return _good(self._patiently(lambda: self._connection.ask("GET", asked))).body

    def _held(self, place: str) -> Held:
        answer = self._connection.ask("HEAD", place)
        return Held(0, False) if answer.status == 404 else _held_by(_good(answer))

    def _append(self, place: str, file: BinaryIO, offset: int, size: int) -> Held:
        file.seek(offset)
        part = file.read(PART_BYTES)
        ends = offset + len(part) >= size
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        headers = {
            "Upload-Offset": str(offset),
            "Upload-Complete": "?1" if ends else "?0",
            "Content-Digest": f"sha-256=:{digest}:",
        }
        answer = self._connection.ask("PATCH", place, part, headers)
        if answer.status == 409 and "Upload-Offset" in answer.headers:
            return _held_by(answer)
        if answer.status >= 300 and ("Upload-Offset" in answer.headers or answer.wait_s):
            # Damaged or cut off on its way, or an earlier try still holds the file.
            raise Passing(told(answer), answer.wait_s)
        return _held_by(_good(answer))

    def _post(self, path: str, body: bytes) -> Answer:
        headers = {"Content-Type": "application/json"}
        return self._connection.ask("POST", path, body, headers)

    def _patiently(self, ask: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return ask()
            except Passing as error:
                failures = self._pause(failures, error)

    def _pause(self, failures: int, error: Passing) -> int:
        """How many failures in a row there have been. Raises GaveUp after the last."""
        if failures == len(PAUSES_S):
            raise GaveUp(str(error))
        self._sleep(max(PAUSES_S[failures], error.wait_s))
        return failures + 1


def _held_by(answer: Answer) -> Held:
    offset = int(answer.headers.get("Upload-Offset", "0"))
    return Held(offset, answer.headers.get("Upload-Complete") == "?1")


def _good(answer: Answer) -> Answer:
    if answer.status == 401:
        raise UsageError(f"{told(answer)}; give it by --token or STEPSPLIT_TOKEN")
    if answer.status >= 300:
        raise UsageError(f"the server refused: {told(answer)}")
    return answer
