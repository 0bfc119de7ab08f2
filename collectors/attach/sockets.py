"""The sockets of agents: one per process, in private folders where processes of a user meet."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.safe_io.private_folder import (
    SOCKETS_VARIABLE,
    list_meeting_folders,
    make_meeting_folder,
)


def make_socket_folder() -> Path:
    """The folder for this user's new agent sockets, created if missing; no other user has access.

    Raises CollectError if there is none.
    """
    try:
        return make_meeting_folder()
    except OSError as error:
        raise CollectError(
            f"{error.strerror}; set {SOCKETS_VARIABLE} to a private folder, in the job too"
        ) from None


def build_socket_path(pid: int) -> Path:
    """The socket of an agent that begins to listen in the process."""
    return make_socket_folder() / f"{pid}.sock"


def find_files(pid: int, suffix: str = ".sock") -> list[Path]:
    """What the agent in the process has in the folders of this user."""
    paths = (folder / f"{pid}{suffix}" for folder in list_meeting_folders())
    return [path for path in paths if os.path.lexists(path)]


def list_agents() -> list[int]:
    """The process ids of this user on this host that may have an agent."""
    names = {path.stem for folder in list_meeting_folders() for path in folder.glob("*.sock")}
    return sorted(int(name) for name in names if name.isdecimal())


def listen(path: Path) -> socket.socket:
    """Listens at the path, instead of an agent that has ended. Raises OSError and CollectError."""
    if is_listening(path):
        raise CollectError(
            f"{path} is in use, by a process of another container with the same number; set"
            f" {SOCKETS_VARIABLE} to a folder of this one"
        )
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _shorten(path) as short:
            server.bind(short)
        server.listen(4)
    except OSError:
        server.close()
        raise
    return server


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    )
    return uid in (os.geteuid(), 0)


_CREDENTIALS = struct.Struct("=iII")


def connect(path: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _shorten(path) as short:
            connection.connect(short)
        if not is_of_this_user(connection):
            raise PermissionError(f"{path} is another user's")
    except OSError:
        connection.close()
        raise
    return connection


def is_listening(path: Path) -> bool:
    with suppress(OSError), connect(path, timeout_s=0.2):
        return True
    return False


# Linux: sun_path has 108 bytes, one of them for the NUL at the end (unix(7)).
_MAX_ADDRESS_BYTES = 107


@contextmanager
def _shorten(path: Path) -> Iterator[str]:
    """The path, or a shorter one for now: the address of a socket has a limit."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    # Linux takes the folder by its open descriptor, whatever the length of its name.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
