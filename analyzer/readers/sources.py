"""Files on disk, in a zip archive or at a URL; readers get a local path."""

from __future__ import annotations

import lzma
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from msgspec import Struct

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.collectors.safe_io.regular_file import describe_special

ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError)
"""The errors of zipfile for a damaged archive, in addition to OSError and ValueError."""


class Source(Protocol):
    """A file of a recording at any location; can be sent to another process."""

    @property
    def where(self) -> str:
        """The location to display: the path, the archive and its member, or the URL."""

    @property
    def identity(self) -> str:
        """A key that is equal for the same file under different paths."""

    @property
    def inner(self) -> PurePosixPath:
        """The path as the run wrote it; file and folder names may contain the rank."""

    @property
    def stamp(self) -> str:
        """Changes with the content: location, size and modification time."""

    @contextmanager
    def open_local(self) -> Iterator[Path]:
        """The file on disk while the context is open. Raises DataError if there is none."""


class DiskFile(Struct, frozen=True):
    """A file on disk; shown is the display name of a file unpacked from an archive."""

    path: Path
    shown: str = ""

    @property
    def where(self) -> str:
        return self.shown or str(self.path)

    @property
    def identity(self) -> str:
        return os.path.realpath(self.path)

    @property
    def inner(self) -> PurePosixPath:
        return PurePosixPath(self.where)

    @property
    def stamp(self) -> str:
        try:
            status = self.path.stat()
        except OSError as error:
            raise DataError(self.where, error.strerror or "unreadable", "check the path") from None
        return f"{os.path.realpath(self.path)}|{status.st_size}|{status.st_mtime_ns}"

    @contextmanager
    def open_local(self) -> Iterator[Path]:
        if problem := describe_special(self.path):
            raise DataError(self.where, problem, "leave it out, or copy its content to a file")
        yield self.path


class ZipMember(Struct, frozen=True):
    """A file in a zip archive, unpacked on access."""

    archive: Path
    member: str
    shown: str = ""

    @property
    def where(self) -> str:
        return f"{self.shown or self.archive}/{self.member}"

    @property
    def identity(self) -> str:
        return f"{os.path.realpath(self.archive)}/{self.member}"

    @property
    def inner(self) -> PurePosixPath:
        return PurePosixPath(self.where)

    @property
    def stamp(self) -> str:
        return f"{DiskFile(self.archive, self.where).stamp}|{self.member}"

    @contextmanager
    def open_local(self) -> Iterator[Path]:
        # Unpacked when it is read: an archive of many ranks need not fit on the disk at once.
        with tempfile.NamedTemporaryFile(prefix="stepsplit-") as unpacked:
            try:
                archive = _open_zip(DiskFile(self.archive).stamp, self.archive)
                with archive.open(self.member) as packed:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
                unpacked.flush()
            except (OSError, EOFError, ValueError, RuntimeError, *ZIP_ERRORS) as error:
                raise DataError(self.where, f"damaged archive ({error})", "pack it again") from None
            yield Path(unpacked.name)


def is_special(source: Source) -> bool:
    """Whether the file is a pipe, a socket or a device, which `open_local` refuses."""
    return isinstance(source, DiskFile) and describe_special(source.path) != ""


def make_absolute(source: Source) -> Source:
    """The file with the same display name, for a process that runs in another folder."""
    if isinstance(source, DiskFile):
        return DiskFile(source.path.absolute(), source.where)
    if isinstance(source, ZipMember):
        shown = source.shown or str(source.archive)
        return ZipMember(source.archive.absolute(), source.member, shown)
    return source


@lru_cache(maxsize=1)
def _open_zip(stamp: str, path: Path) -> zipfile.ZipFile:
    """The archive with its list of members, which takes long to read for each member anew."""
    return zipfile.ZipFile(path)


class RemoteFile(Struct, frozen=True):
    """A file at a URL that fsspec supports, downloaded on access."""

    url: str

    @property
    def where(self) -> str:
        return self.url

    @property
    def identity(self) -> str:
        return self.url

    @property
    def inner(self) -> PurePosixPath:
        return PurePosixPath(self.url)

    @property
    def stamp(self) -> str:
        filesystem, path = open_url(self.url)
        return f"{self.url}|{filesystem.ukey(path)}"

    @contextmanager
    def open_local(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
            target = Path(folder, "fetched")
            filesystem, path = open_url(self.url)
            with accessing(self.url):
                filesystem.get_file(path, str(target))
            yield target


def open_url(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path in it.

    Raises UsageError if fsspec or the backend of its protocol is not installed or unknown,
    DataError if the server does not answer.
    """
    try:
        import fsspec.core  # the extra [cloud]
    except ImportError:
        raise UsageError("URLs need fsspec; pip install 'stepsplit[cloud]'") from None
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url}: {error}") from None
    except Exception as error:  # noqa: BLE001  each backend has errors of its own
        raise _build_access_error(url, error) from None
    return filesystem, path


@contextmanager
def accessing(url: str) -> Iterator[None]:
    """Raises DataError for whatever a backend raises in the block: few raise OSError alone."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise _build_access_error(url, error) from None


def _build_access_error(url: str, error: Exception) -> DataError:
    problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        # Over HTTP a server that does not answer has no file, and why is the cause of that.
        problem = str(error.__cause__ or "no such file or folder")
    return DataError(url, " ".join(problem.split()), "check the URL and your access")
