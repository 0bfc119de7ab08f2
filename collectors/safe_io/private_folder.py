"""Folders and files of this user alone, in places where other users of the host may write too.

Whoever comes first may make /tmp/NAME, as a folder, a link or a pipe. So a folder is used only if
only this user has access to it, and a file in it is opened only if it is a regular one.
Standard library only, and nothing of this package: pack.py runs this file by its path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def make_private_folder(folder: Path, *, named: bool = False, shared_reading: bool = False) -> Path:
    """Makes the folder, mode 0700, if it is missing, and checks it; returns its path without links.

    named: the user has named it; see find_flaw. Raises PermissionError, whose text says why the
    folder is not private, and OSError if it cannot be made.
    """
    folder = _resolve_parent(folder)
    missing = [each for each in folder.parents if not os.path.lexists(each)]
    existing = folder.parents[len(missing)]
    flaw = _find_intruder(existing, named)
    if not flaw:
        for each in (*reversed(missing), folder):
            # Neither existing folders nor links are followed or changed.
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
        flaw = find_flaw(folder, named=named, shared_reading=shared_reading)
    if flaw:
        raise PermissionError(errno.EPERM, flaw, str(folder))
    return folder


def _resolve_parent(folder: Path) -> Path:
    # A link above the folder may be another user's, and lead elsewhere a moment later.
    return Path(os.path.realpath(folder.parent), folder.name)


def make_scratch_folder(parent: Path, prefix: str, *, named: bool = False) -> Path:
    """Makes a folder of a random name, mode 0700. Raises OSError, as make_private_folder does."""
    parent.mkdir(parents=True, exist_ok=True)
    if flaw := _find_intruder(parent, named):
        raise PermissionError(errno.EPERM, flaw, str(parent))
    # Not by tempfile, whose import takes longer than the rest of this file.
    folder = Path(os.path.realpath(parent), f"{prefix}{os.urandom(8).hex()}")
    folder.mkdir(mode=0o700)
    return folder


def find_flaw(folder: Path, *, named: bool = False, shared_reading: bool = False) -> str:
    """Why other users may read or replace what is in an existing folder; "" if they may not.

    named: the user has named the folder, such as a volume of a pod (mode 0777, without the sticky
    bit): whoever may rename the folder is his choice. shared_reading: others may read, not write.
    """
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if _is_writable_by_others(found) if shared_reading else found.st_mode & 0o077:
        return "it is accessible to other users"
    return _find_intruder(folder.parent, named)


def is_private(folder: Path, *, named: bool = False) -> bool:
    """Whether the folder exists and find_flaw finds nothing."""
    with suppress(OSError):
        return not find_flaw(folder, named=named)
    return False


def _find_intruder(folder: Path, named: bool) -> str:
    """Why other users may replace what lies in this folder, by their rights to it or to one above;
    "" if they may not."""
    # In a user namespace without a root, files of the host's root seem to be another user's.
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}
    real = Path(os.path.realpath(folder))
    for each in (real, *real.parents):
        found = each.lstat()
        if found.st_uid not in trusted:
            return f"another user owns {each}"
        if not named and _is_writable_by_others(found) and not found.st_mode & stat.S_ISVTX:
            return f"other users may rename what is in {each}"
    return ""


def _is_writable_by_others(found: os.stat_result) -> bool:
    # With umask 002 each user has a group of his own, of the same number.
    has_own_group = found.st_gid == os.getegid() == os.geteuid()
    return bool(found.st_mode & (0o002 if has_own_group else 0o022))


def open_private(path: str, flags: int) -> int:
    """An opener for open(): a regular file of this user without another name, never by a link.

    It does not wait for the other end of a pipe. Raises OSError.
    """
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, safe, 0o600)
    try:
        found = os.fstat(descriptor)
        # A second name may be that of a hard link to any file of this user. A new file is his, also
        # where NFS gives root's another owner.
        is_own = flags & os.O_EXCL or found.st_uid == os.geteuid()
        if not stat.S_ISREG(found.st_mode) or not is_own or found.st_nlink > 1:
            raise PermissionError(errno.EPERM, "it is not a file of this user alone", path)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# Where processes of this user find each other: agents of jobs, attach, hang, packing processes.

RUNTIME, TEMPORARY = Path("/run/user"), Path("/tmp")

SOCKETS_VARIABLE = "STEPSPLIT_SOCKETS"
"""Names the only place, instead of the list."""


def make_meeting_folder(*, local: bool = False) -> Path:
    """The first place that is private, made if it is missing. Raises PermissionError.

    local: none in the home folder, whose file system may be a network's, with slow locks.
    """
    flaws = []
    for place in _list_places(local):
        try:
            return make_private_folder(place, named=_is_named())
        except OSError as error:
            flaws.append(f"{place}: {error.strerror}")
    raise PermissionError(errno.EPERM, "; ".join(flaws) or "no place for a private folder")


def list_meeting_folders() -> list[Path]:
    """All places that are private now: two processes may have different first ones."""
    places = dict.fromkeys(map(_resolve_parent, _list_places()))
    return [place for place in places if is_private(place, named=_is_named())]


def _is_named() -> bool:
    return bool(os.environ.get(SOCKETS_VARIABLE))


def _list_places(local: bool = False) -> Iterator[Path]:
    """The places in order. They depend on as little as possible of the environment, which may
    differ between a job and a shell: not on TMPDIR, and on XDG_RUNTIME_DIR last."""
    if _is_named():
        yield Path(os.environ[SOCKETS_VARIABLE]).absolute()
        return
    # The usual value of XDG_RUNTIME_DIR. It ends with the last login of the user, unlike a job.
    yield from _list_in_runtime_folder(RUNTIME / str(os.geteuid()))
    yield TEMPORARY / f"stepsplit-{os.geteuid()}"
    yield from _list_in_runtime_folder(Path(os.environ.get("XDG_RUNTIME_DIR", "")))
    # The only place that others cannot take. In a container the user may have no home.
    with suppress(RuntimeError, OSError):
        # It is not made: /nonexistent, as the home of a service, is to stay so.
        if not local and Path.home().is_absolute() and Path.home().is_dir():
            # Hosts may share it.
            host = os.uname().nodename.replace("/", "_")
            yield Path.home() / ".cache" / "stepsplit" / f"sockets-{host}"


def _list_in_runtime_folder(folder: Path) -> Iterator[Path]:
    # It is never made here: as root, /run/user/0 would look like a login.
    if folder.is_absolute() and is_private(folder):
        yield folder / "stepsplit"
