"""The tables in SQL, and how an engine for them is opened."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
)
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.errors import UsageError

METADATA = MetaData()
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
)


def open_engine(url: str) -> Engine:
    """An engine whose database holds the tables. Raises UsageError where it cannot be reached."""
    try:
        parsed = make_url(url)
        _make_parent(parsed)
        engine = create_engine(parsed)
        if parsed.get_backend_name() == "sqlite":
            event.listen(engine, "connect", _prepare_sqlite)
        METADATA.create_all(engine)
    except (ArgumentError, SQLAlchemyError, ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"the store cannot be opened: {reason}; name another --store") from None
    return engine


def _make_parent(url: URL) -> None:
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    # With the write-ahead log, pages can be read while an analysis is being recorded.
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()
