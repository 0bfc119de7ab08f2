"""A file's bytes, unpacked as they are read, with an eye on bombs and torn ends."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.packings import LOSSLESS, TORN, content_of, opener, skip
from stepsplit.analyzer.readers.sources import Source

HEAD_BYTES = 1 << 16
"""How much of a file tells what it is."""
FREE_BYTES = 256 << 20
"""Up to this size nobody asks how well a file was packed."""
MOST_RATIO = 100
_STEPS = (1 << 12, 1)


def most_bytes(packed_bytes: int) -> int:
    """What a file of that size may unpack to."""
    return max(FREE_BYTES, MOST_RATIO * packed_bytes)


def bomb(where: str) -> DataError:
    """What is wrong with a file that unpacks to more."""
    problem = f"unpacks to over {MOST_RATIO} times its size"
    return DataError(where, problem, "unpack it yourself if you trust it")


class Unpacked:
    """The unpacked bytes of an open file. A cut or damaged end is remembered, not raised."""

    def __init__(self, where: str, packed_bytes: int, raw: io.RawIOBase) -> None:
        self._where, self._raw, self._content = where, raw, content_of(raw)
        self._most = most_bytes(packed_bytes)
        self._given = 0
        self.torn = ""
        """Why the file ended early; "" where it did not."""

    def read(self, size: int) -> bytes:
        """size bytes more; fewer only at the end, or where the file is torn.

        Raises DataError for a bomb: beyond FREE_BYTES and MOST_RATIO times the packed size.
        """
        blocks = []
        while size > 0 and (block := self._block(size)):
            blocks.append(block)
            size -= len(block)
        return b"".join(blocks)

    def _block(self, size: int) -> bytes:
        if self.torn:
            return b""
        try:
            block = self._content.read(size)
        except TORN as error:
            self.torn = " ".join(str(error).split()) or type(error).__name__
            block = b"" if isinstance(error, LOSSLESS) else self._before_the_damage(size)
        self._given += len(block)
        if self._given > self._most:
            raise bomb(self._where)
        return block

    def _before_the_damage(self, size: int) -> bytes:
        """What a read of so many bytes lost with the damage behind it, read in small steps."""
        found = bytearray()
        for step in _STEPS:
            with suppress(*TORN):
                content = content_of(self._raw)
                skip(content, self._given + len(found))
                while (left := size - len(found)) and (block := content.read(min(step, left))):
                    found += block
        return bytes(found)

    def readinto(self, room: memoryview) -> int:
        """Fills the room as far as the next bytes go; 0 at the end, or where the file is torn."""
        if isinstance(self._content, io.RawIOBase) and not self.torn:
            return self._readinto(self._content, room)
        block = self.read(len(room))
        room[: len(block)] = block
        return len(block)

    def _readinto(self, raw: io.RawIOBase, room: memoryview) -> int:
        """As readinto, without a copy."""
        try:
            return raw.readinto(room) or 0
        except OSError as error:
            self.torn = str(error)
            return 0

    def lines(self) -> Iterator[bytes]:
        """The lines without their ends; one beyond 1 MiB comes in parts."""
        rest = b""
        while block := self.read(1 << 20):
            *whole, rest = (rest + block).split(b"\n")
            yield from whole
            if len(rest) > 1 << 20:
                yield rest
                rest = b""
        if rest:
            yield rest


@contextmanager
def unpacked(source: Source) -> Iterator[Unpacked]:
    """The file's bytes, unpacked. Raises DataError where it cannot be opened."""
    with source.local() as path:
        try:
            raw = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(
                source.where, error.strerror or "unreadable", "check the path"
            ) from None
        with raw:
            yield Unpacked(source.where, path.stat().st_size, raw)


def head_of(source: Source) -> bytes:
    """The first bytes, unpacked: what tells the kind of a file."""
    with unpacked(source) as content:
        return content.read(HEAD_BYTES)


def is_packed(path: Path) -> bool:
    """Whether the file's bytes have to be unpacked."""
    with path.open("rb") as raw:
        return opener(raw.read(6)) is not None
