"""The database: its schema, its migrations, transactions to read and to write."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    false,
    inspect,
    text,
)
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.errors import UsageError

# Texts from files and strangers, made fit for any database.


def plain(text: str, most: int) -> str:
    """The text on one line of at most so many characters, without what PostgreSQL refuses."""
    whole = text.encode("utf-8", "replace").decode().replace("\0", "")
    line = " ".join(whole.split())
    return line if len(line) <= most else line[: most - 1] + "…"


# A database that is open and of this schema: transactions to read, and transactions to write.

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
        hint = "pip install 'stepsplit[postgres]'"
        raise UsageError(f"a store in PostgreSQL needs psycopg; {hint}") from None
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


# A database of any earlier schema is brought to the newest, by whoever opens it first.

_FIRST = "0001"

_LOCK = 0x57E9_5B17
"""What processes that open one PostgreSQL database agree to wait for."""


def migrate(connection: Connection) -> None:
    """Brings the schema up to date within the transaction, which must be one that writes.

    Raises UsageError for a database that a newer stepsplit has written.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    found = _version(connection)
    if found != VERSION:
        _upgrade(connection, found)


def _version(connection: Connection) -> str | None:
    """The migration that the database is at, None for one without any of our tables."""
    tables = inspect(connection)
    if tables.has_table("alembic_version"):
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        return None if found is None else str(found)
    # Before there were migrations, the tables were made without a word about their version.
    return _FIRST if tables.has_table("runs") else None


def _upgrade(connection: Connection, found: str | None) -> None:
    # Alembic takes a while to load, and most stores are up to date.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        hint = "upgrade stepsplit, or name another --store"
        raise UsageError(f"the store is of a newer stepsplit (schema {found}); {hint}")
    if found == _FIRST:
        command.stamp(config, _FIRST)
    command.upgrade(config, VERSION)


# The tables in SQL, as the newest migration leaves them.

VERSION = "0003"
"""The newest migration."""

METADATA = MetaData()


def _of_run(**kind: bool) -> Column[str]:
    """The run that a row belongs to, and goes with."""
    run = ForeignKey("runs.id", ondelete="CASCADE")
    return Column("run_id", String(32), run, nullable=False, **kind)  # type: ignore[arg-type]


RUNS = Table(
    "runs",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("created_unix_ns", BigInteger, nullable=False, index=True),
    Column("state", String(16), nullable=False),
    Column("error", Text),
    Column("world_size", Integer),
    Column("mesh", String(200)),
    Column("backend", String(100)),
    Column("step_ns", BigInteger),
    *(Column(f"{bucket}_ns", BigInteger) for bucket in BUCKETS),
    *(Column(f"{bucket}_share", Float) for bucket in BUCKETS),
    Column("steps", Integer),
    Column("warnings", Integer),
    Column("bubble_fraction", Float),
    Column("mfu", Float),
)

TAGS = Table(
    "tags",
    METADATA,
    _of_run(primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("value", String(200), nullable=False),
)

RANKS = Table(
    "ranks",
    METADATA,
    _of_run(primary_key=True),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("host", String(200)),
    Column("step_ns", BigInteger, nullable=False),
    *(Column(f"{bucket}_ns", BigInteger, nullable=False) for bucket in BUCKETS),
)

METRICS = Table(
    "metrics",
    METADATA,
    _of_run(primary_key=True),
    Column("name", String(64), primary_key=True, index=True),
    Column("value", Float, nullable=False),
)

FILES = Table(
    "files",
    METADATA,
    _of_run(primary_key=True),
    Column("path", Text, primary_key=True),
    Column("received_bytes", BigInteger, nullable=False),
    Column("complete", Boolean, nullable=False),
)

JOBS = Table(
    "jobs",
    METADATA,
    Column("id", Integer, primary_key=True),
    _of_run(unique=True),
    Column("state", String(16), nullable=False, index=True),
    Column("queued_unix_ns", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("worker", String(200)),
    Column("lease_until_unix_ns", BigInteger),
    Column("progress", Float),
    Column("progress_note", String(200)),
    Column("error", Text),
)

TOKENS = Table(
    "tokens",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("created_unix_ns", BigInteger, nullable=False),
    Column("last_used_unix_ns", BigInteger),
    Column("revoked", Boolean, nullable=False, server_default=false()),
)

VERDICTS = Table(
    "verdicts",
    METADATA,
    _of_run(primary_key=True),
    Column("answer", String(16), nullable=False),
    Column("words", String(500), nullable=False),
    Column("judged_unix_ns", BigInteger, nullable=False),
)

DELETED = Table("deleted", METADATA, Column("run_id", String(32), primary_key=True))
"""Runs whose rows are gone and whose files may not be yet."""
