"""One part of an upload, to its place: what is counted is on disk, and what is not is forgotten."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.files import FileRow
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.limits import Limits
from stepsplit.dashboard.web.part import Part
from stepsplit.dashboard.web.refused import Refused
from stepsplit.dashboard.web.stream import Room, Taken, take

_NAME_BYTES = 240
_CUT_OFF = "the upload was cut off; ask what is held (HEAD), and send the rest"


def relative(path: str) -> PurePosixPath:
    """The path, when it stays below the folder that it will be put in. Raises Refused."""
    parts = path.split("/")
    wrong = any(part in ("", ".", "..") or len(part.encode()) > _NAME_BYTES for part in parts)
    if wrong or "\\" in path or not path.isprintable() or len(parts) > 16:
        raise Refused(400, "the path must be relative, with plain names and no ..")
    return PurePosixPath(path)


def receive(store: Store, run_id: str, path: PurePosixPath, part: Part, limits: Limits) -> FileRow:
    """What is held of the file with this part. Raises Refused: then it is what was held before, or
    more where a part without a digest was cut off."""
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
    """Removes a file from an upload that is not finished. Raises Refused."""
    if store.files.one(run_id, str(path)) is None:
        raise Refused(404, "there is no such file")
    target = store.folder(run_id) / INPUT_NAME / path
    with _locked(target):
        _must_wait(store.files.begin(run_id, FileRow(str(path), 0, False)))
        target.unlink()
        store.files.forget(run_id, str(path))


def offset_headers(row: FileRow) -> dict[str, str]:
    """How far the file is, in the words of resumable uploads."""
    complete = "?1" if row.complete else "?0"
    return {"Upload-Offset": str(row.received_bytes), "Upload-Complete": complete}


def _check_size(store: Store, run_id: str, path: PurePosixPath, part: Part, limits: Limits) -> None:
    """Refuses early what would be refused late."""
    if part.offset + (part.length or 0) > limits.file_bytes:
        raise Refused(413, f"the file is larger than this server takes ({limits.file_bytes} bytes)")
    new = store.files.one(run_id, str(path)) is None
    if new and store.files.held(run_id).files >= limits.run_files:
        most = f"a run holds at most {limits.run_files} files"
        raise Refused(413, f"{most}; send small ones together in a zip or tar archive")


@contextmanager
def _locked(target: Path) -> Iterator[BinaryIO]:
    """The file, for this request alone; made where it is missing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise Refused(409, "a file and a folder of the upload have the same name") from None
    except OSError as error:
        raise Refused(507, f"the server cannot keep the file: {error.strerror}") from None
    with os.fdopen(opened, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            again = {"Retry-After": "1"}
            raise Refused(409, "another request is sending this file", again) from None
        if not os.fstat(opened).st_nlink:
            raise Refused(409, "another request has just removed this file; send it again")
        yield file


def _before(store: Store, run_id: str, path: str, part: Part, file: BinaryIO) -> FileRow:
    """What is held before the part; the file on disk is cut to that. Raises Refused."""
    known = None if part.whole else store.files.one(run_id, path)
    row = known or FileRow(path, 0, False)
    # More than was counted came with a request that did not end; less, and the disk lost it.
    held = min(row.received_bytes, os.fstat(file.fileno()).st_size)
    now = FileRow(path, held, row.complete)
    if row.complete or held != part.offset:
        told = f"{held} bytes of the file are held, so that is not its next part"
        raise Refused(409, told, offset_headers(now))
    _must_wait(store.files.begin(run_id, now))
    os.ftruncate(file.fileno(), held)
    file.seek(held)
    return now


def _must_wait(waits: bool) -> None:
    if not waits:
        raise Refused(409, "this run takes no more files; make a new one")


def _room(store: Store, run_id: str, before: FileRow, limits: Limits) -> Room:
    of_run = limits.run_bytes - store.files.held(run_id).bytes
    most = min(limits.file_bytes - before.received_bytes, of_run)
    return Room(most, store.folder(run_id), limits.spare_bytes)


def _check_taken(
    store: Store, run_id: str, before: FileRow, part: Part, taken: Taken, limits: Limits
) -> None:
    # What cannot be checked is not kept; and several files may have come at once.
    if taken.cut_off and (part.whole or part.sha256 is not None):
        raise Refused(400, _CUT_OFF, offset_headers(before))
    if taken.false_digest:
        told = "the body is not what Content-Digest says; send the part again"
        raise Refused(422, told, offset_headers(before))
    if store.files.held(run_id).bytes + taken.bytes > limits.run_bytes:
        raise Refused(413, f"the run is larger than this server takes ({limits.run_bytes} bytes)")


def _is_whole(part: Part, taken: Taken) -> bool:
    return part.ends and not taken.cut_off


def _undo(
    store: Store, run_id: str, before: FileRow, part: Part, file: BinaryIO, target: Path
) -> None:
    """A whole file that failed was never there; of other files only the last part is forgotten."""
    if part.whole or before.received_bytes == 0:
        target.unlink(missing_ok=True)
        store.files.forget(run_id, before.path)
    else:
        file.flush()
        os.ftruncate(file.fileno(), before.received_bytes)
