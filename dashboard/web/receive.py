"""One uploaded file: from the request's stream to its place, whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path, PurePosixPath
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
_NAME_BYTES = 240


class Refused(Exception):
    """An upload that is not taken: the HTTP status, and a line for the uploader."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def relative(path: str) -> PurePosixPath:
    """The path, when it stays below the folder that it will be put in. Raises Refused."""
    parts = path.split("/")
    wrong = any(part in ("", ".", "..") or len(part.encode()) > _NAME_BYTES for part in parts)
    if wrong or "\\" in path or not path.isprintable() or len(parts) > 16:
        raise Refused(400, "the path must be relative, with plain names and no ..")
    return PurePosixPath(path)


def receive(
    stream: BinaryIO, length: int | None, folder: Path, path: PurePosixPath, limit: int
) -> int:
    """Bytes taken. length is what the sender announced, None for a chunked body. Raises Refused."""
    if length is not None and length > limit:
        raise Refused(413, f"the file is larger than this server takes ({limit} bytes)")
    draft = folder.parent / f".incoming-{uuid.uuid4().hex}"
    try:
        taken = _copy(stream, draft, limit)
        if length is not None and taken != length:
            raise Refused(400, "the upload was cut off; send the file again")
        _place(draft, folder / path)
    finally:
        draft.unlink(missing_ok=True)
    return taken


def _copy(stream: BinaryIO, draft: Path, limit: int) -> int:
    taken = 0
    with draft.open("xb") as file:
        while block := stream.read(BLOCK_BYTES):
            taken += len(block)
            if taken > limit:
                raise Refused(413, f"the file is larger than this server takes ({limit} bytes)")
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return taken


def _place(draft: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.replace(target)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise Refused(409, "a file and a folder of the upload have the same name") from None
