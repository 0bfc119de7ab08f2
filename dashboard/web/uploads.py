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


def parse_relative_path(path: str) -> PurePosixPath:
    """The validated relative path. Raises Refused for paths that could leave the folder."""
    parts = path.split("/")
    wrong = any(part in ("", ".", "..") or len(part.encode()) > _NAME_BYTES for part in parts)
    if wrong or "\\" in path or not path.isprintable() or len(parts) > 16:
        raise HttpError(400, "the path must be relative, with plain names and no ..")
    return PurePosixPath(path)


def receive_part(
    store: Store, run_id: str, path: PurePosixPath, part: UploadPart, limits: Limits
) -> FileRow:
    """Appends the part to the file and returns what is stored of it.

    Raises Refused; the file is then unchanged, or longer if a part without a digest was cut off.
    """
    folder = store.find_folder(run_id)
    _check_size(store, run_id, path, part, limits)
    with _lock_file(folder / INPUT_NAME / path) as file:
        stored = _prepare_file(store, run_id, str(path), part, file)
        try:
            quota = _compute_quota(store, run_id, stored, limits)
            quota.check_disk(part.length or 0)
            received = append_body(part, file, quota)
            _check_received(store, run_id, stored, part, received, limits)
        except BaseException:
            _roll_back(store, run_id, stored, part, file, folder / INPUT_NAME / path)
            raise
        row = FileRow(
            stored.path, stored.received_bytes + received.bytes, _is_whole(part, received)
        )
        if row.complete:
            store.artifacts.keep_upload(run_id, row.path)
        store.files.write(run_id, row)
    if received.cut_off:
        raise HttpError(400, _CUT_OFF, build_offset_headers(row))
    return row


def delete_file(store: Store, run_id: str, path: PurePosixPath) -> None:
    """Removes a file from an unfinished upload. Raises Refused."""
    if store.files.find_file(run_id, str(path)) is None:
        raise HttpError(404, "file not found")
    target = store.find_folder(run_id) / INPUT_NAME / path
    with _lock_file(target):
        _require_open_upload(store.files.begin_upload(run_id, FileRow(str(path), 0, False)))
        target.unlink()
        store.files.forget(run_id, str(path))


def build_offset_headers(row: FileRow) -> dict[str, str]:
    """The headers of resumable uploads: Upload-Offset and Upload-Complete."""
    complete = "?1" if row.complete else "?0"
    return {"Upload-Offset": str(row.received_bytes), "Upload-Complete": complete}


def _check_size(
    store: Store, run_id: str, path: PurePosixPath, part: UploadPart, limits: Limits
) -> None:
    """Refuses a part that exceeds the limits before receiving it."""
    if part.offset + (part.length or 0) > limits.file_bytes:
        raise HttpError(
            413, f"the file exceeds the limit of this server ({limits.file_bytes} bytes)"
        )
    new = store.files.find_file(run_id, str(path)) is None
    if new and store.files.sum_size(run_id).files >= limits.run_files:
        most = f"a run may have at most {limits.run_files} files"
        raise HttpError(413, f"{most}; pack small files into a zip or tar archive")


@contextmanager
def _lock_file(target: Path) -> Iterator[BinaryIO]:
    """Opens the file, creating it if missing, and locks it for this request."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise HttpError(409, "a file and a folder of the upload have the same name") from None
    except OSError as error:
        raise HttpError(507, f"the server cannot store the file: {error.strerror}") from None
    with os.fdopen(opened, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            again = {"Retry-After": "1"}
            raise HttpError(409, "another request is sending this file", again) from None
        if not os.fstat(opened).st_nlink:
            raise HttpError(409, "another request has removed this file; send it again")
        yield file


def _prepare_file(
    store: Store, run_id: str, path: str, part: UploadPart, file: BinaryIO
) -> FileRow:
    """What is stored before the part; truncates the file on disk to that size. Raises Refused."""
    known = None if part.whole else store.files.find_file(run_id, path)
    row = known or FileRow(path, 0, False)
    # The disk may have more bytes (from an unfinished request) or fewer (after a crash).
    stored_bytes = min(row.received_bytes, os.fstat(file.fileno()).st_size)
    now = FileRow(path, stored_bytes, row.complete)
    if row.complete or stored_bytes != part.offset:
        reason = f"{stored_bytes} bytes of the file are stored: this is not the next part"
        raise HttpError(409, reason, build_offset_headers(now))
    _require_open_upload(store.files.begin_upload(run_id, now))
    os.ftruncate(file.fileno(), stored_bytes)
    file.seek(stored_bytes)
    return now


def _require_open_upload(is_open: bool) -> None:
    if not is_open:
        raise HttpError(409, "this upload is finished; create a new run")


def _compute_quota(store: Store, run_id: str, stored: FileRow, limits: Limits) -> Quota:
    of_run = limits.run_bytes - store.files.sum_size(run_id).bytes
    most = min(limits.file_bytes - stored.received_bytes, of_run)
    return Quota(most, store.find_folder(run_id), limits.spare_bytes)


def _check_received(
    store: Store,
    run_id: str,
    stored: FileRow,
    part: UploadPart,
    received: ReceivedBody,
    limits: Limits,
) -> None:
    # A part with a digest must be complete; concurrent uploads may exceed the limit together.
    if received.cut_off and (part.whole or part.sha256 is not None):
        raise HttpError(400, _CUT_OFF, build_offset_headers(stored))
    if received.digest_mismatch:
        reason = "the body does not match Content-Digest; send the part again"
        raise HttpError(422, reason, build_offset_headers(stored))
    if store.files.sum_size(run_id).bytes + received.bytes > limits.run_bytes:
        raise HttpError(413, f"the run exceeds the limit of this server ({limits.run_bytes} bytes)")


def _is_whole(part: UploadPart, received: ReceivedBody) -> bool:
    return part.ends and not received.cut_off


def _roll_back(
    store: Store, run_id: str, stored: FileRow, part: UploadPart, file: BinaryIO, target: Path
) -> None:
    """Removes a file that failed as a whole; truncates other files to their previous size."""
    if part.whole or stored.received_bytes == 0:
        target.unlink(missing_ok=True)
        store.files.forget(run_id, stored.path)
    else:
        file.flush()
        os.ftruncate(file.fileno(), stored.received_bytes)


# Writing a request body to a file in blocks, checking size, digest and disk space.

BLOCK_BYTES = 1 << 20

_DISK_CHECK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Quota:
    """Largest number of bytes to accept, and bytes that must stay free on the folder's disk."""

    max_bytes: int
    folder: Path
    spare_bytes: int

    def check_disk(self, more_bytes: int = 0) -> None:
        """Raises Refused if that many more bytes would not leave enough free disk space."""
        if shutil.disk_usage(self.folder).free - more_bytes < self.spare_bytes:
            raise HttpError(
                507, "the server's disk is full; ask its administrator to delete old runs"
            )


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """Result of receiving a body. cut_off: it ended early; false_digest: it does not match its
    digest."""

    bytes: int
    cut_off: bool
    digest_mismatch: bool


def append_body(part: UploadPart, file: BinaryIO, quota: Quota) -> ReceivedBody:
    """Appends the body to the file and syncs it to disk. Raises Refused."""
    received_bytes, digest, blocks = 0, hashlib.sha256(), _Blocks(part.stream)
    for block in blocks:
        received_bytes += len(block)
        if received_bytes > quota.max_bytes:
            raise HttpError(
                413, f"the upload exceeds the limit of this server ({quota.max_bytes} bytes)"
            )
        if received_bytes % _DISK_CHECK_BYTES < len(block):
            quota.check_disk()
        if part.sha256 is not None:
            digest.update(block)
        _write(file, block)
    file.flush()
    os.fsync(file.fileno())
    cut_off = blocks.broken or (part.length is not None and received_bytes < part.length)
    false_digest = part.sha256 is not None and digest.digest() != part.sha256
    return ReceivedBody(received_bytes, cut_off, false_digest)


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
        raise HttpError(507, f"the server cannot store the file: {error.strerror}") from None


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


def build_whole_file_part(stream: BinaryIO, length: int | None, headers: Headers) -> UploadPart:
    """The part of a PUT. Raises Refused."""
    return UploadPart(stream, length, 0, True, _parse_digest(headers), whole=True)


def parse_next_part(stream: BinaryIO, length: int | None, headers: Headers) -> UploadPart:
    """The part of a PATCH: Upload-Offset, and Upload-Complete: ?1 with the last. Raises Refused."""
    offset = headers.get("Upload-Offset", "")
    if not _OFFSET.fullmatch(offset):
        raise HttpError(400, "send Upload-Offset: the stored size of the file (from HEAD)")
    complete = headers.get("Upload-Complete", "?0")
    if complete not in ("?0", "?1"):
        raise HttpError(400, "Upload-Complete must be ?1 for the last part of a file, else ?0")
    return UploadPart(stream, length, int(offset), complete == "?1", _parse_digest(headers))


def _parse_digest(headers: Headers) -> bytes | None:
    """The SHA-256 digest of the body (RFC 9530); None if absent or of another algorithm."""
    header = headers.get("Content-Digest")
    match = None if header is None else _DIGEST.search(header)
    if match is None:
        return None
    try:
        digest = base64.b64decode(match[1], validate=True)
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise HttpError(400, "Content-Digest is not a valid SHA-256 digest (RFC 9530)")
    return digest


# Errors of requests.

_LOG = logging.getLogger("stepsplit.requests")


class HttpError(Exception):
    """A refused request: HTTP status, message, and extra response headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.headers = status, dict(headers or {})
        super().__init__(message)


def build_error_response(error: HttpError) -> Response:
    """The error as JSON response."""
    response = jsonify(error=str(error))
    response.status_code = error.status
    response.headers.update(error.headers)
    return response


def handle_database_error(error: SQLAlchemyError) -> Response:
    """The response if the database is unavailable."""
    _LOG.error("the database is unavailable: %s", str(error).splitlines()[0])
    return build_error_response(
        HttpError(503, "the database is unavailable; try again", {"Retry-After": "5"})
    )
