"""Files and folders that are written whole or not at all, and for their owner only by default.

A recording has the names, paths and stacks of a job, and others have accounts on its hosts: so it
is private, whatever the umask. Standard library only, and nothing of this package: pack.py runs
this file by its path.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_DESCRIPTOR = re.compile(r"/proc/(?P<pid>\d+)(/task/\d+)?/fd/(?P<number>\d+)")
_MAX_LINKS = 40
"""Maximum number of symbolic links followed in a path, as on Linux."""


PRIVATE, SHARED = 0o600, 0o666
"""Modes of a new file: of a recording, and of an output that the user names for others, from which
the umask is taken."""


def make_owner_folder(folder: Path) -> None:
    """Creates the folder, and those above it that are missing, for this user only. Raises OSError.

    A folder that exists keeps its mode: its owner may have shared it.
    """
    try:
        folder.mkdir(0o700, exist_ok=True)
    except FileNotFoundError:
        make_owner_folder(folder.parent)
        folder.mkdir(0o700, exist_ok=True)


def create_private(path: str, flags: int) -> int:
    """An opener of open(): a file that it creates is for this user only."""
    return os.open(path, flags, PRIVATE)


def write_whole(path: Path, content: bytes, mode: int = PRIVATE) -> Path:
    """Writes the file atomically, as whole_file does."""
    with whole_file(path, mode) as file:
        file.write(content)
    return path


@contextmanager
def whole_file(path: Path, mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """Opens a file that is written atomically; every output of stepsplit is written this way.

    A regular file is written as a draft in the same folder, synced and renamed: see replace_whole.
    Any other file is written in place: see open_special.
    """
    _make_folder_above(path, mode)
    special = open_special(path)
    if special is not None:
        with special:
            yield special
        return
    with replace_whole(path, mode) as draft, draft.open("wb") as file:
        yield file


@contextmanager
def replace_whole(path: Path, mode: int = PRIVATE) -> Iterator[Path]:
    """Yields a draft path; when the block has ended, the draft is synced and replaces the file.

    mode: of a new file, PRIVATE or SHARED; missing folders are made alike. If the path is a
    symbolic link, its target is replaced, not the link. An existing file keeps its mode, and its
    owner as far as the system permits. If the path is a device, a pipe or a socket, the draft is
    the path itself and is not renamed.
    """
    _make_folder_above(path, mode)
    if _is_special(path):
        yield path
        return
    target = path.resolve() if path.is_symlink() else path
    # A unique name: two threads may write the same file at the same time.
    draft = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    previous = target.stat() if target.exists() else None
    try:
        # The draft must not be readable by users who cannot read the file.
        if previous is not None:
            mode = stat.S_IMODE(previous.st_mode) & 0o777 | stat.S_IWUSR
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield draft
        _sync(draft)
        if previous is not None:
            _set_owner_and_mode(draft, previous)
        draft.replace(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            # write() and fsync() do not name the file.
            error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)


def _make_folder_above(path: Path, mode: int) -> None:
    if mode == PRIVATE:
        make_owner_folder(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)


def open_special(path: Path) -> BinaryIO | None:
    """Opens a file that must not be replaced (a device, a pipe, /dev/stdout); None if regular.

    /dev/stdout, /dev/fd/N and /proc/self/fd/N are written through the open descriptor, after its
    earlier output. Raises OSError if the file cannot be opened.
    """
    if (descriptor := _find_descriptor(path)) is not None:
        if descriptor["pid"] == Path("/proc/self").resolve().name:
            return os.fdopen(os.dup(int(descriptor["number"])), "wb")
    elif not _is_special(path):
        return None
    # Without O_CREAT: Linux refuses that for another user's pipe in /tmp.
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOCTTY), "wb")


def _is_special(path: Path) -> bool:
    try:
        return _find_descriptor(path) is not None or not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _find_descriptor(path: Path) -> re.Match[str] | None:
    """The /proc path of the open file descriptor that the path leads to; None if it does not."""
    for _ in range(_MAX_LINKS):
        descriptor = _DESCRIPTOR.fullmatch(str(path.parent.resolve() / path.name))
        if descriptor or not path.is_symlink():
            return descriptor
        path = path.parent / path.readlink()
    return None


def _set_owner_and_mode(draft: Path, previous: os.stat_result) -> None:
    created = draft.stat()
    # Only root can change a file's owner; some file systems have no owners or modes.
    for uid, gid in ((-1, previous.st_gid), (previous.st_uid, -1)):
        if uid not in (-1, created.st_uid) or gid not in (-1, created.st_gid):
            with suppress(PermissionError):
                os.chown(draft, uid, gid)
    with suppress(PermissionError):
        draft.chmod(stat.S_IMODE(previous.st_mode))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
