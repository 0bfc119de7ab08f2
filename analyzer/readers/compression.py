"""Compressed files and archives: gzip, zstd, xz, bzip2, zip, tar; unpacked within limits."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.sources import (
    ZIP_ERRORS,
    DiskFile,
    RemoteFile,
    Source,
    ZipMember,
    accessing,
    is_special,
    open_url,
)
from stepsplit.collectors.safe_io.regular_file import open_regular

# zstd by pyarrow, which is imported only if needed because its import is slow.


class ZstdStream:
    """The unpacked bytes of a zstd file. Raises OSError if it is cut off or damaged."""

    def __init__(self, raw: io.RawIOBase) -> None:
        import pyarrow as pa

        self._stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")

    def read(self, size: int, /) -> bytes:
        import pyarrow as pa

        try:
            data: bytes = self._stream.read(size)
        except pa.ArrowException as error:
            raise OSError(str(error)) from None
        return data


# Listing of files in paths, folders, archives and URLs.

MAX_MEMBERS = 32_768
"""Files of an archive, of which more are refused; chosen, not measured."""

# A .gz alone is a file and no archive.
_ARCHIVE = re.compile(r"\.(zip|tar|tgz|tbz2|txz|tar\.\w+)$", re.I)

_DIGITS = re.compile(r"([0-9]+)")


def find_archive(where: str) -> str:
    """The archive of which this display name is a member or folder; "" if it is of none."""
    parts = where.split("/")
    names = ("/".join(parts[:end]) for end in range(1, len(parts)))
    return next((one for one in names if _ARCHIVE.search(one) and not Path(one).is_dir()), "")


@contextmanager
def list_files(places: Sequence[str]) -> Iterator[tuple[Source, ...]]:
    """The files at paths and URLs, each once, including the members of archives.

    Temporary files are kept while the context is open. Raises DataError if a place is missing or
    an archive is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        sources: dict[str, Source] = {}
        for place in places:
            for i, source in enumerate(_list_place(place)):
                for member in _expand_archive(source, Path(folder, str(len(sources) + i))):
                    sources.setdefault(member.identity, member)
        yield tuple(sources.values())


def is_url(place: str) -> bool:
    """Whether the place is a URL for fsspec."""
    return "://" in place


def natural_sort_key(text: str) -> list[str | tuple[int, str]]:
    """A sort key that puts rank2 before rank10."""
    # By their lengths, because Python converts no number of more than 4,300 digits.
    parts = [part.lstrip("0") if i % 2 else part for i, part in enumerate(_DIGITS.split(text))]
    return [(len(part), part) if i % 2 else part for i, part in enumerate(parts)]


def _list_place(place: str) -> Iterator[Source]:
    if is_url(place):
        filesystem, path = open_url(place)
        with accessing(place):
            paths = [path] if filesystem.isfile(path) else filesystem.find(path)
            if not paths:
                filesystem.info(path)  # raises the file system's own error if nothing is there
        if not paths:
            raise DataError(place, "no such file or folder", "check the URL")
        for remote_path in sorted(paths, key=natural_sort_key):
            remote = RemoteFile(filesystem.unstrip_protocol(remote_path))
            # file:// needs no copy, and may name a pipe.
            is_local = getattr(filesystem, "local_file", False)
            yield DiskFile(Path(remote_path), remote.url) if is_local else remote
    elif Path(place).is_dir():

        def refuse(error: OSError) -> None:
            raise DataError(error.filename, error.strerror or "unreadable", "make it readable")

        files: list[Path] = []
        for where, folders, names in os.walk(Path(place), onerror=refuse):
            # Hidden ones are the caches of editors, of notebooks and of version control.
            folders[:] = [name for name in folders if not name.startswith(".")]
            files += (Path(where, name) for name in names if not name.startswith("."))
        yield from map(DiskFile, sorted(files, key=lambda file: natural_sort_key(str(file))))
    elif Path(place).exists():
        yield DiskFile(Path(place))
    else:
        raise DataError(place, "no such file or folder", "check the path")


def _expand_archive(source: Source, folder: Path) -> Iterator[Source]:
    """The members if the file is an archive, else the file itself."""
    # A pipe is refused later, with its own message, by whatever opens it.
    if not _ARCHIVE.search(source.where) or is_special(source):
        yield source
        return
    folder.mkdir()
    if isinstance(source, DiskFile):
        path = source.path
    else:
        with source.open_local() as local:
            path = Path(shutil.copy(local, folder / "archive"))
    if not zipfile.is_zipfile(path):
        yield from _extract_tar_members(path, source.where, folder)
        return
    try:
        with zipfile.ZipFile(path) as archive:
            members = [one for one in archive.infolist() if not one.is_dir()]
    except (OSError, ValueError, *ZIP_ERRORS) as error:
        raise DataError(source.where, f"damaged archive ({error})", "pack it again") from None
    _refuse_bomb(source.where, len(members), sum(m.file_size for m in members), path)
    for member in sorted(members, key=lambda one: natural_sort_key(one.filename)):
        yield ZipMember(path, member.filename, source.where)


def _extract_tar_members(path: Path, shown: str, folder: Path) -> Iterator[Source]:
    """Unpacks the files of a tar under numbers; of a damaged one, those before the damage.

    The size of a member is that of its contents, also if the tar holds only parts of a sparse file.
    """
    members: list[DiskFile] = []
    unpacked_bytes = 0
    with open_unpacked(DiskFile(path, shown)) as content:
        try:
            # As a stream: a packed tar cannot be searched, and its members come once.
            with tarfile.open(fileobj=content, mode="r|") as archive:  # type: ignore[call-overload]
                for member in filter(tarfile.TarInfo.isreg, archive):
                    unpacked_bytes += member.size
                    _refuse_bomb(shown, len(members) + 1, unpacked_bytes, path)
                    if (packed := archive.extractfile(member)) is not None:
                        target = folder / str(len(members))
                        members.append(DiskFile(target, f"{shown}/{member.name}"))
                        with target.open("wb") as out:
                            shutil.copyfileobj(packed, out, 1 << 16)
        except (tarfile.TarError, EOFError, ValueError) as error:
            if not members:
                problem = f"damaged archive ({content.torn or error})"
                raise DataError(shown, problem, "pack it again") from None
    yield from sorted(members, key=lambda one: natural_sort_key(one.where))


def _refuse_bomb(shown: str, members: int, unpacked_bytes: int, path: Path) -> None:
    if members > MAX_MEMBERS:
        raise DataError(shown, f"more than {MAX_MEMBERS:,} files", "pack only the traces")
    if unpacked_bytes > compute_max_unpacked_bytes(path.stat().st_size):
        raise make_bomb_error(shown)


# Unpacking of a file while it is read, with limits and tolerance of a damaged end.

HEAD_BYTES = 1 << 16
"""How many bytes are read to recognize the kind of a file."""

FREE_BYTES = 256 << 20
"""Up to this unpacked size, the compression ratio is not checked."""

MAX_RATIO = 100
"""A trace packs into a tenth to a twentieth, zeros into a thousandth."""

# The failed read is repeated in blocks of a page, and in the page of the damage byte by byte.
_STEPS = (1 << 12, 1)


def compute_max_unpacked_bytes(packed_bytes: int) -> int:
    """The largest allowed unpacked size of a file of this size."""
    return max(FREE_BYTES, MAX_RATIO * packed_bytes)


def make_bomb_error(where: str) -> DataError:
    """The error for a file that unpacks to more."""
    problem = f"unpacks to over {MAX_RATIO} times its size"
    return DataError(where, problem, "unpack it yourself if you trust it")


class UnpackedStream:
    """The unpacked bytes of an open file. A damaged end sets `torn` and is not an error."""

    def __init__(self, where: str, packed_bytes: int, raw: io.RawIOBase) -> None:
        self._where, self._raw, self._content = where, raw, open_content(raw)
        self._most = compute_max_unpacked_bytes(packed_bytes)
        self._given = 0
        self.torn = ""
        """Why the file ended early, "" if it did not."""

    def read(self, size: int) -> bytes:
        """Reads the next size bytes; fewer only at the end or at damage.

        Raises DataError if the file unpacks to more than FREE_BYTES and MOST_RATIO times its size.
        """
        blocks = []
        while size > 0 and (block := self._read_block(size)):
            blocks.append(block)
            size -= len(block)
        return b"".join(blocks)

    def _read_block(self, size: int) -> bytes:
        if self.torn:
            return b""
        try:
            block = self._content.read(size)
        except DAMAGE_ERRORS as error:
            self.torn = " ".join(str(error).split()) or type(error).__name__
            block = b"" if isinstance(error, LOSSLESS_ERRORS) else self._recover_before_damage(size)
        self._given += len(block)
        if self._given > self._most:
            raise make_bomb_error(self._where)
        return block

    def _recover_before_damage(self, size: int) -> bytes:
        """The bytes before the damage that a failed read of this size lost, read in small steps."""
        recovered = bytearray()
        for step in _STEPS:
            with suppress(*DAMAGE_ERRORS):
                content = open_content(self._raw)
                skip(content, self._given + len(recovered))
                while (n_left := size - len(recovered)) and (
                    block := content.read(min(step, n_left))
                ):
                    recovered += block
        return bytes(recovered)

    def readinto(self, buffer: memoryview) -> int:
        """Reads bytes into room and returns their number; 0 at the end or at damage."""
        if isinstance(self._content, io.RawIOBase) and not self.torn:
            # Not packed: into the buffer itself, as traces of hundreds of MB are read by this.
            try:
                return self._content.readinto(buffer) or 0
            except OSError as error:
                self.torn = str(error)
                return 0
        block = self.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def read_lines(self) -> Iterator[bytes]:
        """The lines without line ends; a line of more than 1 MiB comes in parts."""
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
def open_unpacked(source: Source) -> Iterator[UnpackedStream]:
    """Opens the file's unpacked bytes. Raises DataError if it cannot be opened."""
    with source.open_local() as path, open_source_file(path, source.where) as raw:
        yield UnpackedStream(source.where, os.fstat(raw.fileno()).st_size, raw)


def open_source_file(path: Path, where: str) -> io.FileIO:
    """Opens a regular file, as it is on disk. Raises DataError if it cannot be opened."""
    try:
        return open_regular(path)
    except OSError as error:
        raise DataError(where, error.strerror or "unreadable", "check the path") from None


def read_head(source: Source) -> bytes:
    """The first unpacked bytes, enough to recognize the kind of a file."""
    with open_unpacked(source) as content:
        return content.read(HEAD_BYTES)


def is_packed(path: Path) -> bool:
    """Whether the file is compressed."""
    with open_regular(path) as raw:
        return find_opener(raw.read(6)) is not None


# gzip, zstd, xz and bzip2: recognized by the first bytes and unpacked incrementally.

try:
    from isal import igzip_lib
except ImportError:  # the extra [fast] is not installed
    igzip_lib = None  # type: ignore[assignment]

_PACKED_BLOCK_BYTES = 1 << 16
"""Read at a time; chosen, not measured."""

_MAX_XZ_BYTES = 256 << 20
"""Memory limit for unpacking xz."""

DAMAGE_ERRORS: tuple[Any, ...] = (
    EOFError, OSError, ValueError, zlib.error, lzma.LZMAError,
    zlib.error if igzip_lib is None else igzip_lib.IsalError,
)  # fmt: skip
"""The errors of a compressed file that is cut off or damaged."""

LOSSLESS_ERRORS = (EOFError, zlib.error)
"""The errors that are raised only after all bytes before the damage were returned."""


class ByteReader(Protocol):
    """A source of bytes."""

    def read(self, size: int, /) -> bytes: ...


class _Decompressor(Protocol):
    """The common interface of bz2, lzma and isal."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Zlib:
    """gzip by zlib; returns all bytes before damage and only then fails."""

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
        # The state before this call, which a failed call has lost.
        data, before = self._rest + data, self._inner.copy()
        try:
            block = self._inner.decompress(data, max_length)
            self._rest = self._inner.unconsumed_tail
        except zlib.error:

            def fails(count: int) -> bool:
                try:
                    before.copy().decompress(data[:count], max_length)
                except zlib.error:
                    return True
                return False

            # zlib does not say where the damage begins, and keeps what it unpacked of this call.
            good = bisect_left(range(1, len(data)), True, key=fails)
            if not good:
                raise
            self._inner = before
            block = before.decompress(data[:good], max_length)
            self._rest = before.unconsumed_tail + data[good:]
        self._full = len(block) == max_length
        return block


class _MemberStream:
    """The members of a compressed file one after the other, up to the first non-member."""

    def __init__(self, raw: io.RawIOBase, magic: bytes, new: Callable[[], _Decompressor]) -> None:
        self._raw, self._magic, self._new = raw, magic, new
        self._inner, self._ahead = new(), b""

    def read(self, size: int, /) -> bytes:
        while True:
            if self._inner.eof:
                # What follows the last member is no damage: gzip too ignores padding there.
                self._ahead = self._inner.unused_data or self._raw.read(_PACKED_BLOCK_BYTES)
                if not self._ahead.startswith(self._magic):
                    return b""
                self._inner = self._new()
            packed = b""
            if self._inner.needs_input:
                packed, self._ahead = self._ahead or self._raw.read(_PACKED_BLOCK_BYTES), b""
                if not packed:
                    raise EOFError("it ends early")
            if block := self._inner.decompress(packed, size):
                return block


class _Gzip:
    """gzip by isal; on damage by zlib, because isal loses the bytes before the damage."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw, self._given = raw, 0
        self._fast = igzip_lib is not None
        self._members = (
            _MemberStream(
                raw, _GZIP, partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP)
            )
            if self._fast
            else _MemberStream(raw, _GZIP, _Zlib)
        )

    def read(self, size: int, /) -> bytes:
        try:
            block = self._members.read(size)
        except DAMAGE_ERRORS:
            if not self._fast:
                raise
            self._fast = False
            self._raw.seek(0)
            self._members = _MemberStream(self._raw, _GZIP, _Zlib)
            skip(self._members, self._given)
            block = self._members.read(size)
        self._given += len(block)
        return block


_open_xz = partial(lzma.LZMADecompressor, memlimit=_MAX_XZ_BYTES)

_GZIP, _ZSTD, _XZ, _BZ2 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh"

_OPENERS: dict[bytes, Callable[[io.RawIOBase], ByteReader]] = {
    _GZIP: _Gzip,
    _XZ: lambda raw: _MemberStream(raw, _XZ, _open_xz),
    _BZ2: lambda raw: _MemberStream(raw, _BZ2, bz2.BZ2Decompressor),
    _ZSTD: ZstdStream,
}


def find_opener(begin: bytes) -> Callable[[io.RawIOBase], ByteReader] | None:
    """The decompressor for a file with these first bytes; None if it is not compressed."""
    return next((open_ for magic, open_ in _OPENERS.items() if begin.startswith(magic)), None)


def open_content(raw: io.RawIOBase) -> ByteReader:
    """Opens the unpacked bytes from the start of the file."""
    raw.seek(0)
    open_packed = find_opener(raw.read(6))
    raw.seek(0)
    return raw if open_packed is None else open_packed(raw)


def skip(content: ByteReader, size: int) -> None:
    """Skips size bytes, or all that are left."""
    while size > 0 and (block := content.read(min(size, 1 << 20))):
        size -= len(block)
