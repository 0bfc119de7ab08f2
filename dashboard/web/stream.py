"""A request's body into a file, block by block, with an eye on size, digest and disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from werkzeug.exceptions import ClientDisconnected

from stepsplit.dashboard.web.part import Part
from stepsplit.dashboard.web.refused import Refused

BLOCK_BYTES = 1 << 20
_LOOK_EVERY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """What may be taken: so many bytes, while the folder's disk keeps so many free."""

    most_bytes: int
    folder: Path
    spare_bytes: int

    def check_disk(self, more_bytes: int = 0) -> None:
        """Raises Refused where so many bytes more would fill the disk."""
        if shutil.disk_usage(self.folder).free - more_bytes < self.spare_bytes:
            raise Refused(507, "the server's disk is full; ask who runs it to remove old runs")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a body gave. cut_off: there should have been more; false_digest: it is not what was
    sent."""

    bytes: int
    cut_off: bool
    false_digest: bool


def take(part: Part, file: BinaryIO, room: Room) -> Taken:
    """Appends the body to the file, on disk for good once this returns. Raises Refused."""
    taken, digest, blocks = 0, hashlib.sha256(), _Blocks(part.stream)
    for block in blocks:
        taken += len(block)
        if taken > room.most_bytes:
            raise Refused(413, f"that is more than this server takes ({room.most_bytes} bytes)")
        if taken % _LOOK_EVERY_BYTES < len(block):
            room.check_disk()
        if part.sha256 is not None:
            digest.update(block)
        _write(file, block)
    file.flush()
    os.fsync(file.fileno())
    cut_off = blocks.broken or (part.length is not None and taken < part.length)
    false_digest = part.sha256 is not None and digest.digest() != part.sha256
    return Taken(taken, cut_off, false_digest)


class _Blocks:
    """The body's blocks; broken where the sender went away before its end."""

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
        raise Refused(507, f"the server cannot keep the file: {error.strerror}") from None
