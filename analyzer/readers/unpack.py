"""A file's bytes, unpacked as they are read: gzip, zstd, xz and bzip2 by their first bytes."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.sources import Source

try:
    from isal import igzip_lib
except ImportError:  # the extra [fast] is not installed
    igzip_lib = None  # type: ignore[assignment]

HEAD_BYTES = 1 << 16
"""How much of a file tells what it is."""
PACKED_BLOCK_BYTES = 1 << 16
FREE_BYTES = 256 << 20
"""Up to this size nobody asks how well a file was packed."""
MOST_RATIO = 100
_TORN: tuple[Any, ...] = (
    EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, pa.ArrowException,
    zlib.error if igzip_lib is None else igzip_lib.IsalError,
)  # fmt: skip


class Unpacked:
    """The unpacked bytes of an open file. A cut or damaged end is remembered, not raised."""

    def __init__(self, where: str, packed_bytes: int, content: Bytes) -> None:
        self._where, self._content = where, content
        self._most = max(FREE_BYTES, MOST_RATIO * packed_bytes)
        self._given = 0
        self.torn = ""
        """Why the file ended early; "" where it did not."""

    def read(self, size: int) -> bytes:
        """Up to size bytes more; none at the end, or where the file is torn.

        Raises DataError for a bomb: beyond FREE_BYTES and MOST_RATIO times the packed size.
        """
        if self.torn:
            return b""
        try:
            block = self._content.read(size)
        except _TORN as error:
            self.torn = str(error) or type(error).__name__
            return b""
        self._given += len(block)
        if self._given > self._most:
            problem = f"unpacks to over {MOST_RATIO} times its size"
            raise DataError(self._where, problem, "unpack it yourself if you trust it")
        return block

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
            yield Unpacked(source.where, path.stat().st_size, _content(raw))


def head_of(source: Source) -> bytes:
    """The first bytes, unpacked: what tells the kind of a file."""
    with unpacked(source) as content:
        return content.read(HEAD_BYTES)


def is_packed(path: Path) -> bool:
    """Whether the file's bytes have to be unpacked."""
    with path.open("rb") as raw:
        return _opener(raw.read(6)) is not None


class Bytes(Protocol):
    """Where bytes come from, piece by piece."""

    def read(self, size: int, /) -> bytes: ...


class _Decompressor(Protocol):
    """What bz2, lzma and isal agree on."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Zlib:
    """zlib's gzip with the same words."""

    def __init__(self) -> None:
        self._inner, self._rest = zlib.decompressobj(wbits=31), b""

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._rest

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        found = self._inner.decompress(self._rest + data, max_length)
        self._rest = self._inner.unconsumed_tail
        return found


def _gzip() -> _Decompressor:
    if igzip_lib is None:
        return _Zlib()
    found: _Decompressor = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    return found


class _Members:
    """The members of a packed file, one after the other; what is no member ends it."""

    def __init__(self, raw: io.RawIOBase, magic: bytes, new: Callable[[], _Decompressor]) -> None:
        self._raw, self._magic, self._new = raw, magic, new
        self._inner, self._ahead = new(), b""

    def read(self, size: int, /) -> bytes:
        while True:
            if self._inner.eof and not self._next_member():
                return b""
            block = self._inner.decompress(self._more(), size)
            if block:
                return block

    def _more(self) -> bytes:
        if not self._inner.needs_input:
            return b""
        more, self._ahead = self._ahead or self._raw.read(PACKED_BLOCK_BYTES), b""
        if not more:
            raise EOFError("it ends early")
        return more

    def _next_member(self) -> bool:
        self._ahead = self._inner.unused_data or self._raw.read(PACKED_BLOCK_BYTES)
        if not self._ahead.startswith(self._magic):
            return False
        self._inner = self._new()
        return True


_GZIP, _ZSTD, _XZ, _BZ2 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh"
_OPENERS: dict[bytes, Callable[[io.RawIOBase], Bytes]] = {
    _GZIP: lambda raw: _Members(raw, _GZIP, _gzip),
    _XZ: lambda raw: _Members(raw, _XZ, lzma.LZMADecompressor),
    _BZ2: lambda raw: _Members(raw, _BZ2, bz2.BZ2Decompressor),
    _ZSTD: lambda raw: pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"),
}


def _opener(begin: bytes) -> Callable[[io.RawIOBase], Bytes] | None:
    return next((open_ for magic, open_ in _OPENERS.items() if begin.startswith(magic)), None)


def _content(raw: io.RawIOBase) -> Bytes:
    opener = _opener(raw.read(6))
    raw.seek(0, io.SEEK_SET)
    return raw if opener is None else opener(raw)
