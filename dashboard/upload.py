"""The client of a dashboard: sends files in parts, resumes after errors, asks for runs by tag."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.formats.rank_record import read_record
from stepsplit.collectors.formats.run_spec import (
    FOLDERS_OF_A_RECORDING,
    MESH_FILE,
    RUN_FILE,
    from_json,
)
from stepsplit.collectors.safe_io.regular_file import (
    describe_special,
    leads_outside,
    open_regular,
    read_regular,
)

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


# The files of an upload and their paths in the run.


@dataclass(frozen=True, slots=True)
class FileToSend:
    """A file to send; path is its POSIX path in the run."""

    file: Path
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file of the folder that is not sent, by its POSIX path in the run, and why."""

    path: str
    reason: str


def collect_files(
    places: Sequence[Path], leave_out: Callable[[LeftOut], object] = lambda _: None
) -> tuple[FileToSend, ...]:
    """Lists the files at the places; files of a folder keep their relative paths.

    Hidden files are skipped, and links of files to others of the folder, which are sent themselves.
    Other links, pipes, sockets and devices are passed to leave_out: with a link, a recording from
    somebody else would send any file of this user. Raises UsageError.
    """
    files = [one for place in places for one in _list_files_at(place, leave_out)]
    if not files:
        raise UsageError(f"{places[0]}: no files to upload; give a recording's files or folder")
    paths = [one.path for one in files]
    duplicates = sorted({path for path in paths if paths.count(path) > 1})
    if duplicates:
        raise UsageError(f"{duplicates[0]} is given twice; upload the folder that contains both")
    return tuple(files)


def _list_files_at(place: Path, leave_out: Callable[[LeftOut], object]) -> Iterator[FileToSend]:
    if place.is_file():
        # A link that the user names is followed.
        file = place.resolve() if place.is_symlink() else place
        yield FileToSend(file, place.name, place.stat().st_size)
        return
    if not place.is_dir():
        problem = describe_special(place) or "no such file or folder"
        raise UsageError(f"{place}: {problem}; check the path")
    root = place.resolve()
    for path in sorted(path for path in root.rglob("*") if not _is_hidden(path, root)):
        name, reason = path.relative_to(root.parent).as_posix(), describe_special(path)
        if not reason and path.is_symlink():
            # A link to a file of the folder needs no word: the file is sent by its own name.
            target = Path(os.path.realpath(path))
            if leads_outside(path, root):
                reason = "a link out of the folder"
            elif _is_hidden(target, root):
                reason = "a link to a hidden file"
            elif not target.is_file():
                reason = "a link to a folder, or to nothing"
        if reason:
            leave_out(LeftOut(name, reason))
        elif path.is_file() and not path.is_symlink():
            yield FileToSend(path, name, path.stat().st_size)


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


# Several recordings in one folder.

_RANK_IN_NAME = re.compile(r"rank[-_. ]?[0-9]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RecordingPlaces:
    """One of several recordings: its folder, and what to upload for it."""

    folder: str
    places: tuple[Path, ...]


def split_recordings(files: Sequence[FileToSend]) -> tuple[RecordingPlaces, ...]:
    """The recordings of the files; () if they are one.

    Folders that have traces of the same ranks, with the same names, are several recordings, unless
    they are the roles of one job. Each of them has the files outside of these folders too, such as
    a job.toml.
    """
    by_name: dict[str, set[str]] = {}
    for one in files:
        folder, _, name = one.path.rpartition("/")
        if _RANK_IN_NAME.search(name):
            by_name.setdefault(name, set()).add(folder)
    folders = sorted({one for found in by_name.values() if len(found) > 1 for one in found})
    if not folders or _are_roles(files):
        return ()
    top = posixpath.commonpath(folders)
    heads = {posixpath.join(top, _read_next_part(folder, top)) for folder in folders}
    by_head: dict[str, dict[Path, None]] = {head: {} for head in sorted(heads)}
    shared: dict[Path, None] = {}
    for one in files:
        head, place = _find_head(one, top, heads)
        (shared if head is None else by_head[head])[place] = None
    return tuple(
        RecordingPlaces(posixpath.normpath(head), (*places, *shared))
        for head, places in by_head.items()
    )


def _are_roles(files: Sequence[FileToSend]) -> bool:
    """Whether the files of ranks lie in the folders of different roles of one job, by their
    run.json or a rank's record. Memory snapshots and the like lie in a folder of such a folder."""
    folders = {
        posixpath.dirname(one.path)
        for one in files
        if _RANK_IN_NAME.search(posixpath.basename(one.path))
    }
    folders = {
        posixpath.dirname(one) if posixpath.basename(one) in FOLDERS_OF_A_RECORDING else one
        for one in folders
    }
    of_path = {one.path: one for one in files}
    # The first record of each folder.
    records: dict[str, FileToSend] = {}
    for one in files:
        if _RECORD.fullmatch(one.file.name):
            records.setdefault(posixpath.dirname(one.path), one)
    roles: set[tuple[str, str]] = set()
    for folder in folders:
        # Of a process group of several roles only that of rank 0 has a run.json.
        named = of_path.get(posixpath.join(folder, RUN_FILE)) or records.get(folder)
        if named is None or named.size_bytes > _LARGEST_RUN_FILE_BYTES:
            return False
        try:
            text = read_regular(named.file)
            if named.file.name == RUN_FILE:
                spec = from_json(text)
                roles.add((spec.name, spec.role))
            else:
                record = read_record(text)
                roles.add((record.run, record.role))
        except (OSError, ValueError):
            return False
    return (
        len(roles) == len(folders)
        and len({name for name, _ in roles}) == 1
        and all(role for _, role in roles)
    )


_RECORD = re.compile(r"rank[0-9]+_record\.json")

_LARGEST_RUN_FILE_BYTES = 64 << 20
"""Of a run.json that is opened before it is sent; that of 100,000 ranks has 20 MB."""


def _read_next_part(path: str, top: str) -> str:
    """The first part of the path below the folder; "" for the folder itself."""
    return posixpath.relpath(path, top or ".").removeprefix(".").partition("/")[0]


def _find_head(item: FileToSend, top: str, heads: Set[str]) -> tuple[str | None, Path]:
    """The recording of a file and what to upload of it; None if it belongs to all of them."""
    folder = posixpath.dirname(item.path)
    own = posixpath.join(top, "")
    if folder == top:
        is_trace = _RANK_IN_NAME.search(posixpath.basename(item.path)) is not None
        return (own if own in heads and is_trace else None), item.file
    if top and not folder.startswith(own):
        return None, item.file
    head = posixpath.join(top, _read_next_part(folder, top))
    if head not in heads:
        return None, item.file
    return head, item.file.parents[len(item.path.split("/")) - len(head.split("/")) - 1]


# The name of a run without one, by its files.

_NOT_TRACES = (MESH_FILE, RUN_FILE)

_RANK_END = re.compile(r"[\s._-]*(rank|r)?[\s._-]*[0-9]*[\s._-]*$", re.IGNORECASE)


def choose_run_name(paths: Sequence[str]) -> str:
    """The outermost folder of all files, else what the names of the files begin with.

    >>> choose_run_name(["exp1/rank0.json", "exp1/rank1.json", "mesh.txt"])
    'exp1'
    >>> choose_run_name(["exp2_rank0.json", "exp2_rank1.json"])
    'exp2'
    """
    named = [path for path in paths if path not in _NOT_TRACES and not path.endswith(".toml")]
    traces = named or list(paths)
    if len(traces) == 1 and "/" not in traces[0]:
        return traces[0]
    folder = posixpath.commonpath([posixpath.dirname(path) for path in traces])
    name = folder.partition("/")[0] or _RANK_END.sub("", posixpath.commonprefix(traces))
    return name or f"{traces[0].partition('/')[0]} and {len(traces) - 1} more"


# Requests to a dashboard, with the standard library only.

# Timeouts, limits of rate, and gateways whose server starts anew: the same request may pass later.
_TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)

_TIMEOUT_S = 120.0


class TransientError(Exception):
    """A temporary error, such as a broken connection, after which a retry makes sense."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A response of the server; body is {} if its content is not a JSON object."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]
    content: bytes = b""

    @property
    def wait_s(self) -> float:
        """The delay before a retry that the server asks for, at most 60 s; 0 if none."""
        asked = self.headers.get("Retry-After", "")
        return min(float(asked), 60.0) if asked.isdecimal() else 0.0


class Connection:
    """One connection, reopened after an error."""

    def __init__(self, url: str, token: str | None, timeout_s: float = _TIMEOUT_S) -> None:
        self.url, self._token = url.rstrip("/"), token
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url}: not a dashboard address such as http://host:8050")
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._prefix = parts.path
        try:
            self._http = kind(parts.hostname, parts.port, timeout=timeout_s)
        except ValueError as error:
            raise UsageError(f"{url}: {error}") from None

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> ServerAnswer:
        """Sends a request and returns the response, whatever its status.

        Raises TransientError if there is no response, or if its status is a temporary error.
        """
        auth = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            self._http.request(method, self._prefix + path, body, {**auth, **(headers or {})})
            response = self._http.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise TransientError(f"{self.url}: {reason}") from None
        answer = ServerAnswer(
            response.status, dict(response.headers), _parse_object(content), content
        )
        if answer.status in _TRANSIENT_STATUS:
            raise TransientError(f"{self.url}: {extract_error(answer)}", answer.wait_s)
        return answer

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()


def extract_error(answer: ServerAnswer) -> str:
    """The error message of a response."""
    return str(answer.body.get("error") or f"the server answered {answer.status}")


def _parse_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
