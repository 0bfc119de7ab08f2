"""The store in the current folder, which is opened unasked: only if this user made it on this host.

A folder that was downloaded may bring a .stepsplit of its own, which then belongs to the user: its
runs, tokens and files would be a stranger's. So the file of each store that is made by default has
a random number, and the user's state folder says which number and inode it has at which path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from grp import getgrgid
from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.safe_io.atomic_file import create_private, make_owner_folder, write_whole

_STATE = "stepsplit/stores"


def check_own_place(place: Path, option: str) -> None:
    """Raises UsageError unless the place is missing, or is this user's own, no symbolic link, and
    written by no one else; option is the one that names another place."""
    try:
        found = place.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror}; name another one with {option}") from None
    reason = None
    if stat.S_ISLNK(found.st_mode):
        reason = "is a symbolic link"
    elif found.st_uid != os.geteuid():
        reason = f"belongs to another user ({found.st_uid})"
    elif found.st_mode & stat.S_IWOTH or (
        found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    ):
        reason = "can be written by other users"
    if reason is not None:
        raise UsageError(f"{place} {reason}; if you trust what is in it, name it with {option}")


def _is_own_group(gid: int) -> bool:
    """Whether the group is the user's own, as where each user has one of the same name."""
    with suppress(KeyError):
        group, user = getgrgid(gid), pwd.getpwuid(os.geteuid())
        return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return False


def claim_default_store(home: Path, database: Path) -> None:
    """Makes the database in the folder if it is missing, and notes that this user has made it.

    Raises UsageError if it is there without such a note, or the note cannot be written.
    """
    check_own_place(home, "--store")
    try:
        with _lock_state() as state:
            make_owner_folder(home)
            check_own_place(database, "--store")
            note = state / hashlib.sha256(os.fsencode(database.absolute().resolve())).hexdigest()
            if not database.exists():
                _make_database(database, note)
            elif not note.exists() or note.read_text() != _describe(database):
                raise UsageError(
                    f"{database}: not made by you on this host; it may have come with this folder."
                    f" Move {home} away, or if you trust it and the tokens in it, name it:"
                    f" --store sqlite:///{database}"
                )
    except OSError as error:
        hint = "name a store with --store"
        raise UsageError(f"{error.filename or home}: {error.strerror}; {hint}") from None
    journal = database.with_name(f"{database.name}-journal")
    if journal.exists() or journal.is_symlink():
        # SQLite would play it back. A store has a write-ahead log instead.
        raise UsageError(f"{journal}: not of this store; remove it")


@contextmanager
def _lock_state() -> Iterator[Path]:
    """The folder of the notes, while no other process of the user reads or writes them."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    state = Path(base, _STATE)
    make_owner_folder(state)
    check_own_place(state, "--store")
    with open(state / ".lock", "ab", opener=create_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield state


def _make_database(database: Path, note: Path) -> None:
    draft = database.with_name(f".{database.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    os.close(create_private(str(draft), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
    try:
        with closing(sqlite3.connect(draft)) as connection:
            connection.execute(f"PRAGMA application_id={secrets.randbelow(1 << 31)}")
        write_whole(note, _describe(draft).encode())
        draft.rename(database)
    finally:
        draft.unlink(missing_ok=True)


_NUMBER_AT, _NUMBER_BYTES = 68, 4
"""Where the header of an SQLite file has its application id: read without SQLite, which trusts a
file more than it may be."""


def _describe(database: Path) -> str:
    """The inode of the database and the number in it."""
    with database.open("rb") as file:
        header = file.read(_NUMBER_AT + _NUMBER_BYTES)
        return f"{os.fstat(file.fileno()).st_ino} {header[_NUMBER_AT:].hex()}\n"
