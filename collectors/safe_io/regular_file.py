"""Files that somebody else may have made are opened only if they are regular files.

Opening a named pipe waits for its other end, for ever if there is none, and opening a device may do
anything.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def describe_special(path: Path) -> str:
    """Says that the path, or what it links to, is a pipe, a socket or a device; "" if it is not."""
    try:
        return _describe(path.stat())
    except (OSError, ValueError):
        return ""


def leads_outside(path: Path, folder: Path) -> bool:
    """Whether the path is a link to something that is not in the folder."""
    target = Path(os.path.realpath(path))
    return path.is_symlink() and not target.is_relative_to(os.path.realpath(folder))


def open_regular(path: Path, flags: int = 0) -> io.FileIO:
    """Opens the file for reading, unbuffered. Raises OSError, also if it is no regular file."""
    _refuse_special(path.stat(), path)
    # It may have been replaced since; then this does not wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags)
    try:
        _refuse_special(os.fstat(descriptor), path)
        return io.FileIO(descriptor)
    except OSError:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """The content of the file. Raises OSError, also if it is no regular file."""
    with open_regular(path) as file:
        return file.readall()


def _refuse_special(status: os.stat_result, path: Path) -> None:
    if problem := _describe(status):
        raise OSError(errno.EINVAL, problem, str(path))


def _describe(status: os.stat_result) -> str:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    return "" if kind is None else f"{kind}, not a file"
