"""Receiving uploads: parts, streams, limits and refusals."""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from werkzeug.datastructures import Headers
from werkzeug.exceptions import ClientDisconnected

from stepsplit.collectors.safe_io.atomic_file import PRIVATE, make_owner_folder
from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.ids import find_below, is_relative_path
from stepsplit.dashboard.store.store import FileRow, Store
from stepsplit.dashboard.web.http_error import HttpError

# Upload limits.

JSON_BYTES = 1 << 16
"""Largest body of a request that is not a file."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest file, largest run (bytes and files), and bytes that must stay free on the disk."""

    file_bytes: int = 8 << 30
    run_bytes: int = 64 << 30
    run_files: int = 8_192
    spare_bytes: int = 1 << 30


# Writing one part of an upload: only bytes that are on disk are recorded.

_SAME_NAME = "a file and a folder of the upload have the same name"

_CUT_OFF = "the upload was cut off; get the stored size (HEAD) and send the rest"


def parse_relative_path(path: str) -> PurePosixPath:
    """The validated relative path. Raises HttpError for paths that could leave the folder."""
    if not is_relative_path(path):
        raise HttpError(400, "the path must be relative, with plain names and no ..")
    return PurePosixPath(path)


def receive_part(
    store: Store, run_id: str, path: PurePosixPath, part: UploadPart, limits: Limits
) -> FileRow:
    """Replaces the file by the body, or appends the body to it; returns what is stored of it.

    Raises HttpError; the file is then unchanged, or longer if a part without a digest was cut off.
    """
    upload = _FileUpload(store, run_id, str(path), limits)
    upload.check_size(part)
    with _lock_file(upload) as draft:
        return _replace_file(upload, part, draft) if part.whole else _extend_file(upload, part)


def delete_file(store: Store, run_id: str, path: PurePosixPath) -> None:
    """Removes a file from an unfinished upload. Raises HttpError."""
    if store.files.find_file(run_id, str(path)) is None:
        raise HttpError(404, "file not found")
    upload = _FileUpload(store, run_id, str(path), Limits())
    with _lock_file(upload):
        upload.write_row(FileRow(str(path), 0, False))
        _remove_file(upload)
        store.files.forget(run_id, str(path))


def discard_drafts(store: Store, run_id: str) -> None:
    """Removes bytes that unfinished requests have left in the run's folder."""
    shutil.rmtree(store.find_folder(run_id) / _DRAFTS_NAME, ignore_errors=True)


def build_offset_headers(row: FileRow) -> dict[str, str]:
    """The headers of resumable uploads: Upload-Offset and Upload-Complete."""
    complete = "?1" if row.complete else "?0"
    return {"Upload-Offset": str(row.received_bytes), "Upload-Complete": complete}


def require_open_upload(is_open: bool) -> None:
    """Raises HttpError unless the run accepts files."""
    if not is_open:
        raise HttpError(409, "this upload is finished; create a new run")


@dataclass(frozen=True, slots=True)
class _FileUpload:
    """One file of a run, which a request writes."""

    store: Store
    run_id: str
    path: str
    limits: Limits

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.store.find_folder(self.run_id)

    @property
    def target(self) -> Path:
        """Where the analysis reads the file."""
        return find_below(self.folder, f"{INPUT_NAME}/{self.path}")

    def find_row(self) -> FileRow | None:
        """What is stored of the file; None if it is unknown."""
        return self.store.files.find_file(self.run_id, self.path)

    def write_row(self, row: FileRow) -> None:
        """Records what is stored of the file. Raises HttpError if the upload is finished."""
        require_open_upload(self.store.files.begin_upload(self.run_id, row))

    def restore_row(self, row: FileRow | None) -> None:
        """Records what was stored before a request that failed."""
        if row is None:
            self.store.files.forget(self.run_id, self.path)
        else:
            self.store.files.begin_upload(self.run_id, row)

    def check_size(self, part: UploadPart) -> None:
        """Refuses a part that exceeds the limits before receiving it."""
        limits = self.limits
        if part.offset + (part.length or 0) > limits.file_bytes:
            raise HttpError(
                413, f"the file exceeds the limit of this server ({limits.file_bytes} bytes)"
            )
        is_full = self.store.files.sum_size(self.run_id).files >= limits.run_files
        if is_full and self.find_row() is None:
            most = f"a run may have at most {limits.run_files} files"
            raise HttpError(413, f"{most}; pack small files into a zip or tar archive")

    def check_place(self) -> None:
        """Refuses a path that is also a folder of the upload, or lies below a file of it."""
        root = self.folder / INPUT_NAME
        parents = [place for place in self.target.parents if place.is_relative_to(root)]
        if self.target.is_dir() or any(place.exists() and not place.is_dir() for place in parents):
            raise HttpError(409, _SAME_NAME)


# The draft of a file: it takes the body of a PUT until that is complete, and locks the file.

_DRAFTS_NAME = "drafts"
"""Folder of drafts in a run's folder; outside of input/, so that no analysis reads a draft."""


@contextmanager
def _lock_file(upload: _FileUpload) -> Iterator[_Draft]:
    """Locks the file for this request by an empty draft, which is removed at the end."""
    # By its digest, since a path with folders may be longer than one name.
    name = hashlib.sha256(upload.path.encode()).hexdigest()
    place = find_below(upload.folder, f"{_DRAFTS_NAME}/{name}")
    with _open_locked(place) as file:
        # What a request that was cut off has left.
        os.ftruncate(file.fileno(), 0)
        draft = _Draft(place, file)
        try:
            yield draft
        finally:
            if draft.is_in_place():
                place.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Draft:
    """An open file, and its path while it is a draft."""

    place: Path
    file: BinaryIO

    def is_in_place(self) -> bool:
        """Whether the file still has this path; not after it was renamed or removed."""
        try:
            return os.path.samestat(self.place.stat(), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False


@contextmanager
def _open_locked(place: Path) -> Iterator[BinaryIO]:
    while True:
        with _open_file(place) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                again = {"Retry-After": "1"}
                raise HttpError(409, "another request is sending this file", again) from None
            # The request before this one may have renamed or removed the file meanwhile.
            if _Draft(place, file).is_in_place():
                yield file
                return


def _open_file(place: Path) -> BinaryIO:
    """Opens the file for reading and writing, creating it if missing."""
    with _refuse_disk_errors():
        make_owner_folder(place.parent)
        opened = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE)
    return os.fdopen(opened, "r+b")


@contextmanager
def _refuse_disk_errors() -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise HttpError(409, _SAME_NAME) from None
    except OSError as error:
        raise HttpError(507, f"the server cannot store the file: {error.strerror}") from None


# A PUT replaces the file once its body is complete; a PATCH extends it.


def _replace_file(upload: _FileUpload, part: UploadPart, draft: _Draft) -> FileRow:
    known, empty = upload.find_row(), FileRow(upload.path, 0, False)
    upload.check_place()
    upload.write_row(known or empty)
    try:
        received = _receive_body(upload, known or empty, part, draft.file)
        # The upload cannot finish between here and the last line; a crash leaves an empty file.
        upload.write_row(empty)
        row = FileRow(upload.path, received.bytes, True)
        with _refuse_disk_errors():
            upload.store.artifacts.keep_upload(upload.run_id, upload.path, draft.place)
        upload.write_row(row)
    except BaseException:
        upload.restore_row(known)
        raise
    return row


def _extend_file(upload: _FileUpload, part: UploadPart) -> FileRow:
    known = upload.find_row()
    stored = _require_next_part(upload, known, part)
    upload.check_place()
    upload.write_row(stored)
    try:
        row, received = _append_part(upload, stored, part)
        if row.complete:
            upload.store.artifacts.keep_upload(upload.run_id, row.path, upload.target)
        upload.write_row(row)
    except BaseException:
        # Nothing was stored of it before: an empty file would be taken for one of the upload.
        if stored.received_bytes == 0:
            _remove_file(upload)
        upload.restore_row(known)
        raise
    if received.cut_off:
        raise HttpError(400, _CUT_OFF, build_offset_headers(row))
    return row


def _require_next_part(upload: _FileUpload, known: FileRow | None, part: UploadPart) -> FileRow:
    """What is stored of the file before the part. Raises HttpError for another offset."""
    row = known or FileRow(upload.path, 0, False)
    # The disk may have more bytes (from an unfinished request) or fewer (after a crash).
    on_disk = upload.target.stat().st_size if upload.target.is_file() else 0
    stored = FileRow(upload.path, min(row.received_bytes, on_disk), row.complete)
    if row.complete or stored.received_bytes != part.offset:
        reason = f"{stored.received_bytes} bytes of the file are stored: this is not the next part"
        raise HttpError(409, reason, build_offset_headers(stored))
    return stored


def _append_part(
    upload: _FileUpload, stored: FileRow, part: UploadPart
) -> tuple[FileRow, ReceivedBody]:
    """Appends the part to the file; truncates the file to its previous size if that fails."""
    with _open_file(upload.target) as file:
        os.ftruncate(file.fileno(), stored.received_bytes)
        file.seek(stored.received_bytes)
        try:
            received = _receive_body(upload, stored, part, file)
        except BaseException:
            file.flush()
            os.ftruncate(file.fileno(), stored.received_bytes)
            raise
    is_complete = part.ends and not received.cut_off
    return FileRow(stored.path, stored.received_bytes + received.bytes, is_complete), received


def _receive_body(
    upload: _FileUpload, stored: FileRow, part: UploadPart, file: BinaryIO
) -> ReceivedBody:
    """Writes the body to the file.

    Raises HttpError if it breaks a limit or is not what was sent.
    """
    # A file counts until it is replaced, and so do all drafts.
    limits = upload.limits
    of_run = limits.run_bytes - upload.store.files.sum_size(upload.run_id).bytes
    of_file = limits.file_bytes - (0 if part.whole else stored.received_bytes)
    drafts = sum(draft.stat().st_size for draft in (upload.folder / _DRAFTS_NAME).iterdir())
    quota = Quota(min(of_file, of_run - drafts), upload.folder, limits.spare_bytes)
    quota.check_disk(part.length or 0)
    received_bytes, digest, blocks = 0, hashlib.sha256(), _Blocks(part.stream)
    for block in blocks:
        received_bytes += len(block)
        if received_bytes > quota.max_bytes:
            raise HttpError(
                413, f"the upload exceeds the limit of this server ({quota.max_bytes} bytes)"
            )
        # Now and then: other requests write to the disk meanwhile.
        if received_bytes % _DISK_CHECK_BYTES < len(block):
            quota.check_disk()
        if part.sha256 is not None:
            digest.update(block)
        _write(file, block)
    file.flush()
    os.fsync(file.fileno())
    cut_off = blocks.broken or (part.length is not None and received_bytes < part.length)
    false_digest = part.sha256 is not None and digest.digest() != part.sha256
    received = ReceivedBody(received_bytes, cut_off, false_digest)
    # A part with a digest must be complete; concurrent uploads may exceed the limit together.
    if received.cut_off and (part.whole or part.sha256 is not None):
        raise HttpError(400, _CUT_OFF, build_offset_headers(stored))
    if received.digest_mismatch:
        reason = "the body does not match Content-Digest; send the part again"
        raise HttpError(422, reason, build_offset_headers(stored))
    most = upload.limits.run_bytes
    if upload.store.files.sum_size(upload.run_id).bytes + received.bytes > most:
        raise HttpError(413, f"the run exceeds the limit of this server ({most} bytes)")
    return received


def _remove_file(upload: _FileUpload) -> None:
    """Removes the file, and folders of the upload that are then empty."""
    upload.target.unlink(missing_ok=True)
    root = upload.folder / INPUT_NAME
    for folder in upload.target.parents:
        if folder == root:
            return
        with suppress(OSError):
            folder.rmdir()


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
        """Raises HttpError if that many more bytes would not leave enough free disk space."""
        with _refuse_disk_errors():
            free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes - more_bytes < self.spare_bytes:
            raise HttpError(507, "the server's disk is full; delete old runs (stepsplit delete)")


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """Result of receiving a body. cut_off: it ended early; digest_mismatch: it does not match
    its digest."""

    bytes: int
    cut_off: bool
    digest_mismatch: bool


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
        # Other requests count what is on the disk, and a buffer holds 128 KiB since Python 3.14.
        file.flush()
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
    """The part of a PUT. Raises HttpError."""
    if "Content-Range" in headers:
        # RFC 9110, section 14.5: as a whole file, the rest of an upload would replace all of it.
        raise HttpError(400, "PUT takes whole files; send the rest as PATCH with Upload-Offset")
    return UploadPart(stream, length, 0, True, _parse_digest(headers), whole=True)


def parse_next_part(stream: BinaryIO, length: int | None, headers: Headers) -> UploadPart:
    """The part of a PATCH: Upload-Offset, and Upload-Complete: ?1 with the last.

    Raises HttpError.
    """
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
