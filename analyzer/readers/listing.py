"""Paths, folders, archives and URLs -> the files in them."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.sources import (
    TORN_ZIP,
    DiskFile,
    RemoteFile,
    Source,
    ZipMember,
    fsspec,
)
from stepsplit.analyzer.readers.unpack import bomb, most_bytes, unpacked

MOST_MEMBERS = 1_000_000
_ARCHIVE = re.compile(r"\.(zip|tar|tgz|tbz2|txz|tar\.\w+)$", re.I)
_DIGITS = re.compile(r"(\d+)")


@contextmanager
def files_of(places: Sequence[str]) -> Iterator[tuple[Source, ...]]:
    """The files at paths and URLs, each once, what archives hold included.

    What has to be unpacked or fetched for that lies on disk while the context is open. Raises
    DataError where a place is missing or an archive is torn.
    """
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        found: dict[str, Source] = {}
        for place in places:
            for i, source in enumerate(_at(place)):
                for one in _opened(source, Path(folder, str(len(found) + i))):
                    found.setdefault(one.identity, one)
        yield tuple(found.values())


def is_url(place: str) -> bool:
    """Whether the place is behind a protocol that fsspec knows."""
    return "://" in place


def natural(text: str) -> list[str | int]:
    """A key that sorts rank2 before rank10."""
    parts = _DIGITS.split(text)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _at(place: str) -> Iterator[Source]:
    if is_url(place):
        yield from _behind(place)
    elif Path(place).is_dir():
        yield from map(DiskFile, sorted(_inside(Path(place)), key=lambda file: natural(str(file))))
    elif Path(place).exists():
        yield DiskFile(Path(place))
    else:
        raise DataError(place, "no such file or folder", "check the path")


def _inside(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(error.filename, error.strerror or "unreadable", "make it readable")

    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(where, name) for name in names if not name.startswith("."))


def _behind(url: str) -> Iterator[Source]:
    filesystem, path = fsspec().core.url_to_fs(url)
    try:
        found = [path] if filesystem.isfile(path) else filesystem.find(path)
    except (OSError, ValueError) as error:
        raise DataError(url, str(error) or "unreadable", "check the URL and your access") from None
    if not found:
        raise DataError(url, "no such file or folder", "check the URL")
    for one in sorted(found, key=natural):
        yield RemoteFile(filesystem.unstrip_protocol(one))


def _opened(source: Source, folder: Path) -> Iterator[Source]:
    """The members where the file is an archive, else the file."""
    if not _ARCHIVE.search(source.where):
        yield source
        return
    folder.mkdir()
    path = _on_disk(source, folder)
    if zipfile.is_zipfile(path):
        yield from _zip_members(path, source.where)
    else:
        yield from _tar_members(path, source.where, folder)


def _on_disk(source: Source, folder: Path) -> Path:
    if isinstance(source, DiskFile):
        return source.path
    with source.local() as path:
        return Path(shutil.copy(path, folder / "archive"))


def _zip_members(path: Path, shown: str) -> Iterator[Source]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [one for one in archive.infolist() if not one.is_dir()]
    except (OSError, ValueError, *TORN_ZIP) as error:
        raise DataError(shown, f"torn archive ({error})", "pack it again") from None
    _refuse_a_bomb(shown, len(members), sum(m.file_size for m in members), path)
    for member in sorted(members, key=lambda one: natural(one.filename)):
        yield ZipMember(path, member.filename, shown)


def _tar_members(path: Path, shown: str, folder: Path) -> Iterator[Source]:
    """The files of a tar, written out under numbers; of a torn one, those before the damage."""
    found: list[DiskFile] = []
    with unpacked(DiskFile(path, shown)) as content:
        try:
            with tarfile.open(fileobj=content, mode="r|") as archive:  # type: ignore[call-overload]
                for member in archive:
                    _refuse_a_bomb(shown, len(found), 0, path)
                    if (packed := archive.extractfile(member)) is not None:
                        target = folder / str(len(found))
                        found.append(DiskFile(target, f"{shown}/{member.name}"))
                        with target.open("wb") as out:
                            shutil.copyfileobj(packed, out, 1 << 16)
        except (tarfile.TarError, EOFError, ValueError) as error:
            if not found:
                problem = f"torn archive ({content.torn or error})"
                raise DataError(shown, problem, "pack it again") from None
    yield from sorted(found, key=lambda one: natural(one.where))


def _refuse_a_bomb(shown: str, members: int, unpacked_bytes: int, path: Path) -> None:
    if members > MOST_MEMBERS:
        raise DataError(shown, f"over {MOST_MEMBERS:,} files", "pack the traces alone")
    if unpacked_bytes > most_bytes(path.stat().st_size):
        raise bomb(shown)
