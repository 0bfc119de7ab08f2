"""Every kind of database that a store may be in, PostgreSQL in a private cluster among them."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.required import absent

_PLACES = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")
_USER = "stepsplit"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/deep/runs.db"
    return new_database(request.getfixturevalue("postgres"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Path]:
    """The socket's folder of a running PostgreSQL, which ends with the tests."""
    with running_postgres() as folder:
        yield folder


def new_database(folder: Path) -> str:
    """The URL of an empty database in the cluster."""
    import psycopg

    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(host=str(folder), user=_USER, dbname="postgres", autocommit=True) as link:
        link.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    return f"postgresql://{_USER}@/{name}?host={folder}"


@contextmanager
def running_postgres() -> Iterator[Path]:
    """A cluster of its own on a unix socket: no port, no other data."""
    binaries = _binaries()
    folder = Path(tempfile.mkdtemp(prefix="stepsplit-pg-", dir="/tmp"))
    owner = _owner()
    if owner:
        os.chown(folder, pwd.getpwnam(owner["user"]).pw_uid, -1)
    data = folder / "data"
    made = [str(binaries / "initdb"), "-D", str(data), "-U", _USER, "-A", "trust", "--no-sync"]
    options = ["-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
    try:
        _run(made, owner)
        server = subprocess.Popen(
            [str(binaries / "postgres"), "-D", str(data), *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **owner,
        )  # fmt: skip
        try:
            _run([str(binaries / "pg_isready"), "-h", str(folder), "-t", "20"], owner, tries=100)
            yield folder
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path:
    for place in _PLACES:
        for folder in sorted(Path("/").glob(place.lstrip("/")), reverse=True):
            if (folder / "initdb").exists():
                return folder
    absent("postgresql", "no PostgreSQL server is installed")
    raise AssertionError


def _owner() -> dict[str, Any]:
    """As whom the server runs: it refuses to be root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    return {"user": "postgres" if "postgres" in names else "daemon"}


def _run(command: Sequence[str], owner: dict[str, Any], tries: int = 1) -> None:
    for left in reversed(range(tries)):
        done = subprocess.run(command, capture_output=True, text=True, **owner)
        if done.returncode == 0:
            return
        if not left:
            raise RuntimeError(done.stdout + done.stderr)
        subprocess.run(["sleep", "0.1"], check=True)
