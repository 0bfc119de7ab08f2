"""The database: opening it, its migrations, read and write transactions."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from weakref import finalize

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.safe_io.atomic_file import create_private, make_owner_folder
from stepsplit.dashboard.store.schema import METADATA

# An open database with the current schema.

_WAIT_MS = 30_000


class Database:
    """Connections to one database. Thread-safe; call reconnect() after a fork."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._writer = engine, engine.execution_options(writes=True)
        self._turns = _take_turns(engine)
        # A store that is no longer used closes its connections: from Python 3.13 on, SQLite's
        # warn if they are left to the collector of garbage.
        finalize(self, engine.dispose).atexit = False

    @contextmanager
    def begin_read(self) -> Iterator[Connection]:
        """A read transaction."""
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def begin_write(self) -> Iterator[Connection]:
        """A write transaction: committed at the end, rolled back on an exception."""
        with self._turns, self._writer.begin() as connection:
            yield connection

    def reconnect(self) -> None:
        """Drops connections that belong to the parent process."""
        self._engine.dispose(close=False)
        # A thread of the parent may have held the lock.
        self._turns = _take_turns(self._engine)

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()


def _take_turns(engine: Engine) -> AbstractContextManager[object]:
    """A lock for this process's write transactions, which SQLite allows one at a time.

    Threads that wait in SQLite itself poll, and one may wait in vain while others get their turn.
    """
    return Lock() if engine.dialect.name == "sqlite" else nullcontext()


def open_database(url: str) -> Database:
    """Opens the database at the SQLAlchemy URL and migrates its schema.

    Raises UsageError; the message does not contain the URL's password.
    """
    try:
        database = Database(_create_engine(make_url(url)))
        try:
            with database.begin_write() as connection:
                migrate(connection)
        except BaseException:
            database.close()
            raise
        return database
    except (ArgumentError, SQLAlchemyError, ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot open the store: {reason}; choose another --store") from None


def _create_engine(url: URL) -> Engine:
    if url.get_backend_name() == "postgresql":
        if url.drivername == "postgresql":
            try:
                import psycopg  # noqa: F401
            except ImportError:
                hint = "pip install 'stepsplit[postgres]'"
                raise UsageError(f"a store in PostgreSQL needs psycopg; {hint}") from None
            url = url.set(drivername="postgresql+psycopg")
        return sa.create_engine(url, pool_pre_ping=True)
    path = find_database_file(url)
    if path is not None:
        make_owner_folder(path.parent)
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: not a file; choose another --store")
        # For this user only, whatever the umask; SQLite gives its -wal and -shm files the same
        # mode. Not opened if it exists: closing it would end the locks that SQLite has on it in
        # this process.
        with suppress(FileExistsError):
            os.close(create_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    engine = sa.create_engine(url)
    if url.get_backend_name() == "sqlite":
        sa.event.listen(engine, "connect", _prepare_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def find_database_file(url: str | URL) -> Path | None:
    """The file of an SQLite database; None in memory, for other databases and invalid URLs."""
    try:
        place = make_url(url)
    except ArgumentError:
        return None
    if place.get_backend_name() != "sqlite" or place.database in (None, "", ":memory:"):
        return None
    return Path(str(place.database))


_PLAIN_SQL = {
    "table": re.compile(
        r"CREATE TABLE(?!.*\b(?:CHECK|GENERATED|AS|DEFAULT\W*\((?!\d+\)))).*", re.S | re.I
    ),
    "index": re.compile(r"CREATE INDEX \w+ ON \w+ \([\w, ]+\)"),
}
"""What the migrations make, by kind. SQLite would run what else a file may have: triggers, views,
virtual tables, and expressions in tables and indices. Older versions of Alembic write
`DEFAULT (0)`."""


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    try:
        _set_up_sqlite(connection)
    except BaseException:
        connection.close()  # which the pool does not
        raise


def _set_up_sqlite(connection: DBAPIConnection) -> None:
    # Explicit transactions only; the write-ahead log allows reads during a write.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_WAIT_MS}")
    # The file may come from a stranger: nothing in its schema may call a function with effects.
    cursor.execute("PRAGMA trusted_schema=OFF")
    cursor.execute("PRAGMA cell_size_check=ON")
    cursor.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    for kind, name, sql in cursor.fetchall():
        if kind not in _PLAIN_SQL or not _PLAIN_SQL[kind].fullmatch(str(sql)):
            raise _build_foreign_error(str(kind), str(name))
    cursor.execute("PRAGMA foreign_keys=ON")
    # The file keeps this mode. SQLite does not wait for the lock when two processes open a new file
    # at once.
    deadline = time.monotonic() + _WAIT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    cursor.close()


def _build_foreign_error(kind: str, name: str) -> UsageError:
    return UsageError(
        f"stepsplit does not make the {kind} {name!r:.100} of this store, which was made or changed"
        " by others; choose another --store"
    )


def _begin_sqlite(connection: Connection) -> None:
    # Upgrading a read transaction to a write fails after a concurrent write, hence IMMEDIATE.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


# Migration to the newest schema, by the process that opens the database first.

VERSION = "0016"
"""The newest migration."""

_OLDER = ("0001", "0002", "0003")
"""Schemas from before stepsplit 0.1.0, whose schema is 0004; it migrates their stores."""

_UNRELEASED = tuple(f"{number:04}" for number in range(5, 16))
"""Schemas between those of two releases, which no release has written."""

_VERSIONS = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Alembic's own table, as it makes it."""

_MIGRATION_LOCK = 0x57E9_5B17
"""Advisory lock that serializes migrations of a PostgreSQL database."""


def migrate(connection: Connection) -> None:
    """Migrates the schema to the newest version within a write transaction.

    Raises UsageError for a database of a newer stepsplit, or of none of its releases.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK}
        )
    tables, version = sa.inspect(connection), None
    if tables.has_table("alembic_version"):
        found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        version = None if found is None else str(found)
    elif tables.has_table("runs"):
        # The first stores had no version.
        version = _OLDER[0]
    if version is None:
        # A new store has the tables of today, without the way there.
        METADATA.create_all(connection)
        _VERSIONS.create(connection, checkfirst=True)
        connection.execute(sa.insert(_VERSIONS), {"version_num": VERSION})
    elif version != VERSION:
        _upgrade(connection, version)
    # A table of another kind than ours was refused above; one of another name is here.
    if connection.dialect.name == "sqlite":
        known = {*METADATA.tables, "alembic_version"}
        for name in sa.inspect(connection).get_table_names():
            if name not in known:
                raise _build_foreign_error("table", name)


def _upgrade(connection: Connection, version: str) -> None:
    # Imported only here: alembic is slow to load and most stores are up to date.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if version not in known:
        place = connection.engine.url.render_as_string(hide_password=True)
        if version in _OLDER:
            raise UsageError(
                f"{place}: a store from before stepsplit 0.1.0 (schema {version}); open it once"
                " with stepsplit 0.1.0, or choose another --store"
            )
        if version in _UNRELEASED:
            raise UsageError(
                f"{place}: a store of no release of stepsplit (schema {version}); choose another"
                " --store, and upload its runs again"
            )
        hint = "upgrade stepsplit, or choose another --store"
        raise UsageError(f"the store is from a newer stepsplit (schema {version}); {hint}")
    command.upgrade(config, VERSION)
