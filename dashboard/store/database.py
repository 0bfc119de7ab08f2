"""A database that is open and of this schema: transactions to read, and transactions to write."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.migrate import migrate

_WAIT_MS = 30_000


class Database:
    """Connections to one database. Threads may share it; after a fork call reopen() first."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._writer = engine, engine.execution_options(writes=True)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that may write: committed at the end, or rolled back by an exception."""
        with self._writer.begin() as connection:
            yield connection

    def reopen(self) -> None:
        """Forgets connections that belong to the parent process."""
        self._engine.dispose(close=False)

    def close(self) -> None:
        """Gives the connections back."""
        self._engine.dispose()


def open_database(url: str) -> Database:
    """The database at the SQLAlchemy URL, with this schema. Raises UsageError, without the URL's
    password."""
    try:
        return _migrated(Database(_engine(make_url(url))))
    except (ArgumentError, SQLAlchemyError, ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"the store cannot be opened: {reason}; name another --store") from None


def _migrated(database: Database) -> Database:
    try:
        with database.writing() as connection:
            migrate(connection)
    except BaseException:
        database.close()
        raise
    return database


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "postgresql":
        return create_engine(_with_psycopg(url), pool_pre_ping=True)
    _make_parent(url)
    engine = create_engine(url)
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _with_psycopg(url: URL) -> URL:
    """postgresql://... as people write it, by the driver that the extra brings."""
    if url.drivername != "postgresql":
        return url
    try:
        import psycopg  # noqa: F401
    except ImportError:
        mend = "pip install 'stepsplit[postgres]'"
        raise UsageError(f"a store in PostgreSQL needs psycopg; {mend}") from None
    return url.set(drivername="postgresql+psycopg")


def _make_parent(url: URL) -> None:
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    # Transactions begin where we say so; with the write-ahead log, pages can be read meanwhile.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_WAIT_MS}")
    cursor.execute("PRAGMA foreign_keys=ON")
    _use_write_ahead_log(cursor)
    cursor.close()


def _use_write_ahead_log(cursor: DBAPICursor) -> None:
    """The file remembers it. Two that open a new file at once are refused without any waiting."""
    deadline = time.monotonic() + _WAIT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _begin_sqlite(connection: Connection) -> None:
    # A reader that turns into a writer is refused when another wrote meanwhile; so writers say it.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
