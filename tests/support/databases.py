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
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepsplit.collectors.safe_io.private_folder import open_private
from support.required import absent

_PLACES = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")
_USER = "stepsplit"


KINDS = ("sqlite", "postgresql")


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind with the tables of a store and nothing in them."""
    if request.param == "sqlite":
        return make_sqlite(tmp_path / "deep" / "runs.db")
    return new_database(*request.getfixturevalue("postgres"))


@pytest.fixture(params=KINDS)
def bare_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind without tables; of SQLite, without a file."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/deep/runs.db"
    return new_database(request.getfixturevalue("postgres")[0])


def make_sqlite(file: Path) -> str:
    """The URL of a new file with the tables of a store.

    The migrations that make them take a tenth of a second, and hundreds of tests open a store: they
    run once, and each file is a copy.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "xb", opener=open_private) as copy:
        copy.write(_migrate_sqlite())
    return f"sqlite:///{file}"


@cache
def _migrate_sqlite() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        _migrate(f"sqlite:///{folder}/runs.db")
        return Path(folder, "runs.db").read_bytes()


def _migrate(url: str) -> None:
    # Imported only here: other tests need no SQLAlchemy.
    from stepsplit.dashboard.store.database import open_database

    open_database(url).close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[tuple[Path, str]]:
    """The socket's folder of a running PostgreSQL, which ends with the tests, and the name of a
    database in it with the tables of a store, to be copied."""
    with running_postgres() as folder:
        migrated = new_database(folder)
        _migrate(migrated)
        yield folder, migrated.removeprefix(f"postgresql://{_USER}@/").partition("?")[0]


def new_database(folder: Path, template: str = "template1") -> str:
    """The URL of a new database in the cluster, a copy of the template."""
    import psycopg

    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(host=str(folder), user=_USER, dbname="postgres", autocommit=True) as link:
        link.execute(f"CREATE DATABASE {name} TEMPLATE {template}")  # type: ignore[arg-type]
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
    options = ["-k", str(folder), "-c", "listen_addresses="]
    # What keeps data through a crash, and what tidies up later.
    for setting in ("fsync", "synchronous_commit", "full_page_writes", "autovacuum"):
        options += ["-c", f"{setting}=off"]
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
