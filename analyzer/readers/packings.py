"""gzip, zstd, xz and bzip2, told by a file's first bytes and unpacked piece by piece."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

try:
    from isal import igzip_lib
except ImportError:  # the extra [fast] is not installed
    igzip_lib = None  # type: ignore[assignment]

_PACKED_BLOCK_BYTES = 1 << 16
_MOST_XZ_BYTES = 256 << 20
"""What unpacking xz may take of memory."""
TORN: tuple[Any, ...] = (
    EOFError, OSError, ValueError, zlib.error, lzma.LZMAError,
    zlib.error if igzip_lib is None else igzip_lib.IsalError,
)  # fmt: skip
"""What a packed file raises where it is cut off or damaged."""
LOSSLESS = (EOFError, zlib.error)
"""Of these, what comes before the damage was given."""


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
    """zlib's gzip with the same words; gives all that is before a damage, and only then fails."""

    def __init__(self) -> None:
        self._inner, self._rest, self._full = zlib.decompressobj(wbits=31), b"", False

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._rest and not self._full

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        data, before = self._rest + data, self._inner.copy()
        try:
            found = self._inner.decompress(data, max_length)
            self._rest = self._inner.unconsumed_tail
        except zlib.error:
            good = _good_bytes(before, data, max_length)
            if not good:
                raise
            self._inner = before
            found = before.decompress(data[:good], max_length)
            self._rest = before.unconsumed_tail + data[good:]
        self._full = len(found) == max_length
        return found


def _good_bytes(state: zlib._Decompress, data: bytes, max_length: int) -> int:
    """How many of the bytes come before the damage in them."""

    def fails(count: int) -> bool:
        try:
            state.copy().decompress(data[:count], max_length)
        except zlib.error:
            return True
        return False

    return bisect_left(range(1, len(data)), True, key=fails)


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
        more, self._ahead = self._ahead or self._raw.read(_PACKED_BLOCK_BYTES), b""
        if not more:
            raise EOFError("it ends early")
        return more

    def _next_member(self) -> bool:
        self._ahead = self._inner.unused_data or self._raw.read(_PACKED_BLOCK_BYTES)
        if not self._ahead.startswith(self._magic):
            return False
        self._inner = self._new()
        return True


class _Gzip:
    """gzip by isal; where that fails, by zlib, for isal keeps to itself what is before the end."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw, self._given = raw, 0
        self._fast = igzip_lib is not None
        self._members = _Members(raw, _GZIP, _isal if self._fast else _Zlib)

    def read(self, size: int, /) -> bytes:
        try:
            block = self._members.read(size)
        except TORN:
            if not self._fast:
                raise
            self._slow_down()
            block = self._members.read(size)
        self._given += len(block)
        return block

    def _slow_down(self) -> None:
        self._fast = False
        self._raw.seek(0)
        self._members = _Members(self._raw, _GZIP, _Zlib)
        skip(self._members, self._given)


def _isal() -> _Decompressor:
    found: _Decompressor = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    return found


def _xz() -> _Decompressor:
    return lzma.LZMADecompressor(memlimit=_MOST_XZ_BYTES)


def _zstd(raw: io.RawIOBase) -> Bytes:
    from stepsplit.analyzer.readers.zstd import Zstd

    return Zstd(raw)


_GZIP, _ZSTD, _XZ, _BZ2 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh"
_OPENERS: dict[bytes, Callable[[io.RawIOBase], Bytes]] = {
    _GZIP: _Gzip,
    _XZ: lambda raw: _Members(raw, _XZ, _xz),
    _BZ2: lambda raw: _Members(raw, _BZ2, bz2.BZ2Decompressor),
    _ZSTD: _zstd,
}


def opener(begin: bytes) -> Callable[[io.RawIOBase], Bytes] | None:
    """What unpacks a file that begins so; None where it is not packed."""
    return next((open_ for magic, open_ in _OPENERS.items() if begin.startswith(magic)), None)


def content_of(raw: io.RawIOBase) -> Bytes:
    """The unpacked bytes from the start of the file."""
    raw.seek(0)
    found = opener(raw.read(6))
    raw.seek(0)
    return raw if found is None else found(raw)


def skip(content: Bytes, size: int) -> None:
    """Reads so many bytes, or all there are."""
    while size > 0 and (block := content.read(min(size, 1 << 20))):
        size -= len(block)
