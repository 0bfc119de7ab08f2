"""Receiving uploads: parts, streams, limits and refusals."""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from flask import Response, jsonify
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.datastructures import Headers
from werkzeug.exceptions import ClientDisconnected

from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.store import FileRow, Store

# Upload limits.

JSON_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest file, largest run (bytes and files), and bytes that must stay free on the disk."""

    file_bytes: int = 8 << 30
    run_bytes: int = 64 << 30
    run_files: int = 8_192
    spare_bytes: int = 1 << 30


# Writing one part of an upload: only bytes that are on disk are recorded.

_NAME_BYTES = 240

_CUT_OFF = "the upload was cut off; get the stored size (HEAD) and send the rest"


def relative(path: str) -> PurePosixPath:
    """The validated relative path. Raises Refused for paths that could leave the folder."""
    parts = path.split("/")
    wrong = any(part in ("", ".", "..") or len(part.encode()) > _NAME_BYTES for part in parts)
    if wrong or "\\" in path or not path.isprintable() or len(parts) > 16:
        raise Refused(400, "the path must be relative, with plain names and no ..")
    return PurePosixPath(path)


def receive(
    store: Store, run_id: str, path: PurePosixPath, part: UploadPart, limits: Limits
) -> FileRow:
    """Appends the part to the file and returns what is stored of it.

    Raises Refused; the file is then unchanged, or longer if a part without a digest was cut off.
    """
    folder = store.folder(run_id)
    _check_size(store, run_id, path, part, limits)
    with _locked(folder / INPUT_NAME / path) as file:
        before = _before(store, run_id, str(path), part, file)
        try:
            room = _room(store, run_id, before, limits)
            room.check_disk(part.length or 0)
            taken = take(part, file, room)
            _check_taken(store, run_id, before, part, taken, limits)
        except BaseException:
            _undo(store, run_id, before, part, file, folder / INPUT_NAME / path)
            raise
        row = FileRow(before.path, before.received_bytes + taken.bytes, _is_whole(part, taken))
        if row.complete:
            store.artifacts.keep_upload(run_id, row.path)
        store.files.write(run_id, row)
    if taken.cut_off:
        raise Refused(400, _CUT_OFF, offset_headers(row))
    return row


def forget(store: Store, run_id: str, path: PurePosixPath) -> None:
    """Removes a file from an unfinished upload. Raises Refused."""
    if store.files.one(run_id, str(path)) is None:
        raise Refused(404, "file not found")
    target = store.folder(run_id) / INPUT_NAME / path
    with _locked(target):
        _must_wait(store.files.begin(run_id, FileRow(str(path), 0, False)))
        target.unlink()
        store.files.forget(run_id, str(path))


def offset_headers(row: FileRow) -> dict[str, str]:
    """The headers of resumable uploads: Upload-Offset and Upload-Complete."""
    complete = "?1" if row.complete else "?0"
    return {"Upload-Offset": str(row.received_bytes), "Upload-Complete": complete}


def _check_size(
    store: Store, run_id: str, path: PurePosixPath, part: UploadPart, limits: Limits
) -> None:
    """Refuses a part that exceeds the limits before receiving it."""
    if part.offset + (part.length or 0) > limits.file_bytes:
        raise Refused(413, f"the file exceeds the limit of this server ({limits.file_bytes} bytes)")
    new = store.files.one(run_id, str(path)) is None
    if new and store.files.held(run_id).files >= limits.run_files:
        most = f"a run may have at most {limits.run_files} files"
        raise Refused(413, f"{most}; pack small files into a zip or tar archive")


@contextmanager
def _locked(target: Path) -> Iterator[BinaryIO]:
    """Opens the file, creating it if missing, and locks it for this request."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise Refused(409, "a file and a folder of the upload have the same name") from None
    except OSError as error:
        raise Refused(507, f"the server cannot store the file: {error.strerror}") from None
    with os.fdopen(opened, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            again = {"Retry-After": "1"}
            raise Refused(409, "another request is sending this file", again) from None
        if not os.fstat(opened).st_nlink:
            raise Refused(409, "another request has removed this file; send it again")
        yield file


def _before(store: Store, run_id: str, path: str, part: UploadPart, file: BinaryIO) -> FileRow:
    """What is stored before the part; truncates the file on disk to that size. Raises Refused."""
    known = None if part.whole else store.files.one(run_id, path)
    row = known or FileRow(path, 0, False)
    # The disk may have more bytes (from an unfinished request) or fewer (after a crash).
    held = min(row.received_bytes, os.fstat(file.fileno()).st_size)
    now = FileRow(path, held, row.complete)
    if row.complete or held != part.offset:
        reason = f"{held} bytes of the file are stored: this is not the next part"
        raise Refused(409, reason, offset_headers(now))
    _must_wait(store.files.begin(run_id, now))
    os.ftruncate(file.fileno(), held)
    file.seek(held)
    return now


def _must_wait(waits: bool) -> None:
    if not waits:
        raise Refused(409, "this upload is finished; create a new run")


def _room(store: Store, run_id: str, before: FileRow, limits: Limits) -> Room:
    of_run = limits.run_bytes - store.files.held(run_id).bytes
    most = min(limits.file_bytes - before.received_bytes, of_run)
    return Room(most, store.folder(run_id), limits.spare_bytes)


def _check_taken(
    store: Store,
    run_id: str,
    before: FileRow,
    part: UploadPart,
    taken: ReceivedBody,
    limits: Limits,
) -> None:
    # A part with a digest must be complete; concurrent uploads may exceed the limit together.
    if taken.cut_off and (part.whole or part.sha256 is not None):
        raise Refused(400, _CUT_OFF, offset_headers(before))
    if taken.false_digest:
        reason = "the body does not match Content-Digest; send the part again"
        raise Refused(422, reason, offset_headers(before))
    if store.files.held(run_id).bytes + taken.bytes > limits.run_bytes:
        raise Refused(413, f"the run exceeds the limit of this server ({limits.run_bytes} bytes)")


def _is_whole(part: UploadPart, taken: ReceivedBody) -> bool:
    return part.ends and not taken.cut_off


def _undo(
    store: Store, run_id: str, before: FileRow, part: UploadPart, file: BinaryIO, target: Path
) -> None:
    """Removes a file that failed as a whole; truncates other files to their previous size."""
    if part.whole or before.received_bytes == 0:
        target.unlink(missing_ok=True)
        store.files.forget(run_id, before.path)
    else:
        file.flush()
        os.ftruncate(file.fileno(), before.received_bytes)


# Writing a request body to a file in blocks, checking size, digest and disk space.

BLOCK_BYTES = 1 << 20

_LOOK_EVERY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Largest number of bytes to accept, and bytes that must stay free on the folder's disk."""

    most_bytes: int
    folder: Path
    spare_bytes: int

    def check_disk(self, more_bytes: int = 0) -> None:
        """Raises Refused if that many more bytes would not leave enough free disk space."""
        if shutil.disk_usage(self.folder).free - more_bytes < self.spare_bytes:
            raise Refused(
                507, "the server's disk is full; ask its administrator to delete old runs"
            )


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """Result of receiving a body. cut_off: it ended early; false_digest: it does not match its
    digest."""

    bytes: int
    cut_off: bool
    false_digest: bool


def take(part: UploadPart, file: BinaryIO, room: Room) -> ReceivedBody:
    """Appends the body to the file and syncs it to disk. Raises Refused."""
    taken, digest, blocks = 0, hashlib.sha256(), _Blocks(part.stream)
    for block in blocks:
        taken += len(block)
        if taken > room.most_bytes:
            raise Refused(
                413, f"the upload exceeds the limit of this server ({room.most_bytes} bytes)"
            )
        if taken % _LOOK_EVERY_BYTES < len(block):
            room.check_disk()
        if part.sha256 is not None:
            digest.update(block)
        _write(file, block)
    file.flush()
    os.fsync(file.fileno())
    cut_off = blocks.broken or (part.length is not None and taken < part.length)
    false_digest = part.sha256 is not None and digest.digest() != part.sha256
    return ReceivedBody(taken, cut_off, false_digest)


class _Blocks:
    """The body in blocks; `broken` is set if the client disconnected."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.broken = stream, False

    def __iter__(self) -> Iterator[bytes]:
        try:
            while block := self._stream.read(BLOCK_BYTES):
                yield block
        except (ClientDisconnected, OSError):
            self.broken = True


def _write(file: BinaryIO, block: bytes) -> None:
    try:
        file.write(block)
    except OSError as error:
        raise Refused(507, f"the server cannot store the file: {error.strerror}") from None


# Headers of an upload request: offset, completeness, digest.

_OFFSET = re.compile(r"\d{1,15}")

_DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]*):")


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A body and its offset in the file.

    length: the announced length, None for a chunked body; ends: it is the last part; sha256: None
    if not sent; whole: the body replaces the file.
    """

    stream: BinaryIO
    length: int | None
    offset: int
    ends: bool
    sha256: bytes | None
    whole: bool = False


def whole_file(stream: BinaryIO, length: int | None, headers: Headers) -> UploadPart:
    """The part of a PUT. Raises Refused."""
    return UploadPart(stream, length, 0, True, _sha256(headers), whole=True)


def next_part(stream: BinaryIO, length: int | None, headers: Headers) -> UploadPart:
    """The part of a PATCH: Upload-Offset, and Upload-Complete: ?1 with the last. Raises Refused."""
    offset = headers.get("Upload-Offset", "")
    if not _OFFSET.fullmatch(offset):
        raise Refused(400, "send Upload-Offset: the stored size of the file (from HEAD)")
    complete = headers.get("Upload-Complete", "?0")
    if complete not in ("?0", "?1"):
        raise Refused(400, "Upload-Complete must be ?1 for the last part of a file, else ?0")
    return UploadPart(stream, length, int(offset), complete == "?1", _sha256(headers))


def _sha256(headers: Headers) -> bytes | None:
    """The SHA-256 digest of the body (RFC 9530); None if absent or of another algorithm."""
    given = headers.get("Content-Digest")
    found = None if given is None else _DIGEST.search(given)
    if found is None:
        return None
    try:
        digest = base64.b64decode(found[1], validate=True)
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise Refused(400, "Content-Digest is not a valid SHA-256 digest (RFC 9530)")
    return digest


# Errors of requests.

_LOG = logging.getLogger("stepsplit.requests")


class Refused(Exception):
    """A refused request: HTTP status, message, and extra response headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.headers = status, dict(headers or {})
        super().__init__(message)


def as_json(error: Refused) -> Response:
    """The error as JSON response."""
    answer = jsonify(error=str(error))
    answer.status_code = error.status
    answer.headers.update(error.headers)
    return answer


def away(error: SQLAlchemyError) -> Response:
    """The response if the database is unavailable."""
    _LOG.error("the database is unavailable: %s", str(error).splitlines()[0])
    return as_json(Refused(503, "the database is unavailable; try again", {"Retry-After": "5"}))
