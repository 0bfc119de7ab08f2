"""The database: schema, migrations, read and write transactions."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.safe_io.atomic_file import create_private, make_owner_folder
from stepsplit.collectors.safe_io.safe_text import escape_controls
from stepsplit.dashboard.store.ids import RelativePath, RunId, WatchName

# Cleaning of untrusted text before it is stored.


def clean_text(text: str, max_length: int) -> str:
    """The text on one line of at most max_length characters, with controls as escapes."""
    line = escape_controls(" ".join(text.split()))
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


# An open database with the current schema.

_WAIT_MS = 30_000


class Database:
    """Connections to one database. Thread-safe; call reopen() after a fork."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._writer = engine, engine.execution_options(writes=True)
        self._turns = _take_turns(engine)

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
        return _migrate_database(Database(_create_engine(make_url(url))))
    except (ArgumentError, SQLAlchemyError, ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot open the store: {reason}; choose another --store") from None


def _migrate_database(database: Database) -> Database:
    try:
        with database.begin_write() as connection:
            migrate(connection)
    except BaseException:
        database.close()
        raise
    return database


def _create_engine(url: URL) -> Engine:
    if url.get_backend_name() == "postgresql":
        return sa.create_engine(_select_psycopg(url), pool_pre_ping=True)
    if (path := find_database_file(url)) is not None:
        _make_database_file(path)
    engine = sa.create_engine(url)
    if url.get_backend_name() == "sqlite":
        sa.event.listen(engine, "connect", _prepare_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _select_psycopg(url: URL) -> URL:
    """Selects the psycopg driver for postgresql:// URLs."""
    if url.drivername != "postgresql":
        return url
    try:
        import psycopg  # noqa: F401
    except ImportError:
        hint = "pip install 'stepsplit[postgres]'"
        raise UsageError(f"a store in PostgreSQL needs psycopg; {hint}") from None
    return url.set(drivername="postgresql+psycopg")


def find_database_file(url: str | URL) -> Path | None:
    """The file of an SQLite database; None in memory, for other databases and invalid URLs."""
    try:
        place = make_url(url)
    except ArgumentError:
        return None
    if place.get_backend_name() != "sqlite" or place.database in (None, "", ":memory:"):
        return None
    return Path(str(place.database))


def _make_database_file(path: Path) -> None:
    """Creates the file for this user only, whatever the umask; SQLite gives its -wal and -shm files
    the same mode. Raises OSError, and UsageError for what is not a file."""
    make_owner_folder(path.parent)
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: not a file; choose another --store")
    # Not opened if it exists: closing it would end the locks that SQLite has on it in this process.
    with suppress(FileExistsError):
        os.close(create_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    # Explicit transactions only; the write-ahead log allows reads during a write.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_WAIT_MS}")
    # The file may come from a stranger: nothing in its schema may call a function with effects.
    cursor.execute("PRAGMA trusted_schema=OFF")
    cursor.execute("PRAGMA cell_size_check=ON")
    _refuse_foreign_schema(cursor)
    cursor.execute("PRAGMA foreign_keys=ON")
    _use_write_ahead_log(cursor)
    cursor.close()


_PLAIN_SQL = {
    "table": re.compile(
        r"CREATE TABLE(?!.*\b(?:CHECK|GENERATED|AS|DEFAULT\W*\((?!\d+\)))).*", re.S | re.I
    ),
    "index": re.compile(r"CREATE INDEX \w+ ON \w+ \([\w, ]+\)"),
}
"""What the migrations make, by kind. Older versions of Alembic write `DEFAULT (0)`."""


def _refuse_foreign_schema(cursor: DBAPICursor) -> None:
    """Refuses what no migration makes and SQLite would run: triggers, views, virtual tables, and
    expressions in tables and indices. Raises UsageError."""
    cursor.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    for kind, name, sql in cursor.fetchall():
        if kind not in _PLAIN_SQL or not _PLAIN_SQL[kind].fullmatch(str(sql)):
            raise _build_foreign_error(str(kind), str(name))


def _build_foreign_error(kind: str, name: str) -> UsageError:
    return UsageError(
        f"stepsplit does not make the {kind} {name!r:.100} of this store, which was made or changed"
        " by others; choose another --store"
    )


def _use_write_ahead_log(cursor: DBAPICursor) -> None:
    """Sets WAL mode, which the file keeps. Retries, because SQLite does not wait for the lock when
    two processes open a new file at once."""
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
    # Upgrading a read transaction to a write fails after a concurrent write, hence IMMEDIATE.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


# Migration to the newest schema, by the process that opens the database first.

_FIRST_REVISION = "0001"

_MIGRATION_LOCK = 0x57E9_5B17
"""Advisory lock that serializes migrations of a PostgreSQL database."""


def migrate(connection: Connection) -> None:
    """Migrates the schema to the newest version within a write transaction.

    Raises UsageError for a database of a newer stepsplit.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK}
        )
    version = _read_version(connection)
    if version != VERSION:
        _upgrade(connection, version)
    if connection.dialect.name == "sqlite":
        known = {*METADATA.tables, "alembic_version"}
        for name in sa.inspect(connection).get_table_names():
            if name not in known:
                raise _build_foreign_error("table", name)


def _read_version(connection: Connection) -> str | None:
    """The database's revision; None if it has none of stepsplit's tables."""
    tables = sa.inspect(connection)
    if tables.has_table("alembic_version"):
        revision = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        return None if revision is None else str(revision)
    # Databases created before migrations existed have no version table.
    return _FIRST_REVISION if tables.has_table("runs") else None


def _upgrade(connection: Connection, version: str | None) -> None:
    # Imported only here: alembic is slow to load and most stores are up to date.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if version is not None and version not in known:
        hint = "upgrade stepsplit, or choose another --store"
        raise UsageError(f"the store is from a newer stepsplit (schema {version}); {hint}")
    if version == _FIRST_REVISION:
        command.stamp(config, _FIRST_REVISION)
    command.upgrade(config, VERSION)


# The SQL tables of the newest migration.

VERSION = "0013"
"""The newest migration."""

METADATA = sa.MetaData()


def _build_run_column(**kind: bool) -> sa.Column[str]:
    """The run of a row; deleting the run deletes the row."""
    run = sa.ForeignKey("runs.id", ondelete="CASCADE")
    return sa.Column("run_id", RunId, run, nullable=False, **kind)  # type: ignore[arg-type]


RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("id", RunId, primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("created_unix_ns", sa.BigInteger, nullable=False, index=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("note", sa.String(1000), nullable=False, server_default=""),
    sa.Column("world_size", sa.Integer),
    sa.Column("mesh", sa.String(200)),
    sa.Column("backend", sa.String(100)),
    sa.Column("step_ns", sa.BigInteger),
    *(sa.Column(f"{bucket}_ns", sa.BigInteger) for bucket in BUCKETS),
    *(sa.Column(f"{bucket}_share", sa.Float) for bucket in BUCKETS),
    sa.Column("steps", sa.Integer),
    sa.Column("warnings", sa.Integer),
    sa.Column("bubble_fraction", sa.Float),
    sa.Column("mfu", sa.Float),
    sa.Column("job_key", sa.String(16)),
    sa.Column("job_label", sa.String(200)),
)
"""job_key is NULL until the job was looked for, and empty if it is unknown."""

TAGS = sa.Table(
    "tags",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(200), nullable=False),
)

RANKS = sa.Table(
    "ranks",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("host", sa.String(200)),
    sa.Column("step_ns", sa.BigInteger, nullable=False),
    *(sa.Column(f"{bucket}_ns", sa.BigInteger, nullable=False) for bucket in BUCKETS),
)

METRICS = sa.Table(
    "metrics",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True, index=True),
    sa.Column("value", sa.Float, nullable=False),
)

FILES = sa.Table(
    "files",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("path", RelativePath, primary_key=True),
    sa.Column("received_bytes", sa.BigInteger, nullable=False),
    sa.Column("complete", sa.Boolean, nullable=False),
)

JOBS = sa.Table(
    "jobs",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    _build_run_column(unique=True),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("queued_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(200)),
    sa.Column("lease_until_unix_ns", sa.BigInteger),
    sa.Column("progress", sa.Float),
    sa.Column("progress_note", sa.String(200)),
    sa.Column("error", sa.Text),
)

TOKENS = sa.Table(
    "tokens",
    METADATA,
    sa.Column("id", RunId, primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),
    sa.Column("created_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("last_used_unix_ns", sa.BigInteger),
    sa.Column("revoked", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("role", sa.String(16), nullable=False, server_default="viewer"),
    sa.Column("expires_unix_ns", sa.BigInteger),
)

SESSIONS = sa.Table(
    "sessions",
    METADATA,
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("token_id", RunId, sa.ForeignKey("tokens.id", ondelete="CASCADE")),
    sa.Column("proof", sa.String(64)),
    sa.Column("created_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("last_used_unix_ns", sa.BigInteger, nullable=False, index=True),
)
"""Logins: proof shows which password was entered; token_id names the token that was."""

AUDIT = sa.Table(
    "audit",
    METADATA,
    # Only an INTEGER is numbered by SQLite; it has 64 bits there.
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("at_unix_ns", sa.BigInteger, nullable=False, index=True),
    sa.Column("user_name", sa.String(200), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("address", sa.String(100), nullable=False),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("target", sa.String(300), nullable=False),
    sa.Column("outcome", sa.String(200), nullable=False),
    sa.Column("count", sa.Integer, nullable=False, server_default="1"),
)

VERDICTS = sa.Table(
    "verdicts",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("answer", sa.String(16), nullable=False),
    sa.Column("words", sa.String(500), nullable=False),
    sa.Column("judged_unix_ns", sa.BigInteger, nullable=False),
)

LOGIN_FAILURES = sa.Table(
    "login_failures",
    METADATA,
    sa.Column("key", sa.String(100), primary_key=True),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("last_unix_ns", sa.BigInteger, nullable=False),
)

WATCHES = sa.Table(
    "watches",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", WatchName, nullable=False, unique=True),
    sa.Column("created_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("received_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("newest_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("rolled_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("trimmed_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    sa.Column("batches", sa.Integer, nullable=False),
    sa.Column("sender", sa.String(300)),
)
"""Watched runs. sender is who began it, and NULL if that may be anyone. newest is the latest time
in the data, rolled and trimmed how far of it is rolled up and rid of old rows; received is by the
clock of the server."""


def _build_watch_column(**kind: bool) -> sa.Column[int]:
    """The watched run of a row; deleting the run deletes the row."""
    watch = sa.ForeignKey("watches.id", ondelete="CASCADE")
    return sa.Column("watch_id", sa.Integer, watch, nullable=False, **kind)  # type: ignore[arg-type]


WATCH_STARTS = sa.Table(
    "watch_starts",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("first_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("newest_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_unix_ns", sa.BigInteger),
)
"""The incarnations of a watched run: the starts of its job."""

WATCH_HOSTS = sa.Table(
    "watch_hosts",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("host", sa.String(200), primary_key=True),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("newest_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("interval_steps", sa.BigInteger),
    sa.Column("budget", sa.Float, nullable=False),
    sa.Column("overhead", sa.Float),
)
"""The newest batch of each host."""

WATCH_BATCHES = sa.Table(
    "watch_batches",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("digest", sa.LargeBinary(16), primary_key=True),
    sa.Column("unix_ns", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""The ids of received batches, hashed; a batch that is received twice counts once."""


def _build_slot_columns() -> list[sa.Column[int]]:
    """The key of a slot of time."""
    return [
        _build_watch_column(primary_key=True),
        sa.Column("level_s", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("start_unix_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
    ]


WATCH_STEPS = sa.Table(
    "watch_steps",
    METADATA,
    *_build_slot_columns(),
    sa.Column("rolled", sa.Boolean, nullable=False),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("ranks", sa.Integer, nullable=False),
    sa.Column("min_step_ns", sa.BigInteger, nullable=False),
    sa.Column("median_step_ns", sa.BigInteger, nullable=False),
    sa.Column("max_step_ns", sa.BigInteger, nullable=False),
    sa.Column("slowest_rank", sa.Integer, nullable=False),
    sa.Column("slowest_median_ns", sa.BigInteger, nullable=False),
    sa.Column("by_rank", sa.LargeBinary, nullable=False),
    sa.Column("local", sa.LargeBinary),
)
"""Step times in slots of a minute, ten minutes, an hour and a day. by_rank, and local for local
times: packed arrays."""

WATCH_SPLITS = sa.Table(
    "watch_splits",
    METADATA,
    *_build_slot_columns(),
    sa.Column("samples", sa.Integer, nullable=False),
    sa.Column("rank_samples", sa.BigInteger, nullable=False),
    *(sa.Column(f"{bucket}_ns", sa.BigInteger, nullable=False) for bucket in BUCKETS),
    sa.Column("exposed", sa.Text, nullable=False),
    sa.Column("no_data", sa.Text, nullable=False),
    sa.Column("waits", sa.LargeBinary, nullable=False),
)
"""Sums over the sampled ranks, in the same slots. exposed: ns by axis, and no_data: samples by
reason, in JSON; waits: packed arrays over ranks."""

WATCH_SAMPLES = sa.Table(
    "watch_samples",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("sample_id", sa.String(200), primary_key=True),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("unix_ns", sa.BigInteger, nullable=False),
    sa.Column("host", sa.String(200), nullable=False),
    sa.Column("pivot", sa.Integer),
    sa.Column("no_data", sa.String(500), nullable=False),
    sa.Column("finding", sa.String(500), nullable=False),
    sa.Column("cost_ns", sa.BigInteger, nullable=False),
    sa.Column("traces", sa.String(500), nullable=False),
    sa.Column("by_rank", sa.LargeBinary, nullable=False),
    sa.Index("ix_watch_samples_time", "watch_id", "unix_ns"),
)

WATCH_EVENTS = sa.Table(
    "watch_events",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    _build_watch_column(),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("unix_ns", sa.BigInteger, nullable=False),
    sa.Column("host", sa.String(200), nullable=False),
    sa.Column("rank", sa.Integer),
    sa.Column("text", sa.String(500), nullable=False),
    sa.Index("ix_watch_events_time", "watch_id", "unix_ns"),
)

WATCH_DROPPED = sa.Table(
    "watch_dropped",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("reason", sa.String(200), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
)
"""What the hosts gave up, by reason."""

WATCH_ALERTS = sa.Table(
    "watch_alerts",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    _build_watch_column(),
    sa.Column("metric", sa.String(32), nullable=False),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("host", sa.String(200), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("since_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("seen_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("before", sa.Float),
    sa.Column("after", sa.Float),
    sa.Column("rank", sa.Integer),
    sa.Column("text", sa.String(500), nullable=False),
    sa.Column("cause", sa.String(500), nullable=False),
    sa.Column("opened_unix_ns", sa.BigInteger),
    sa.Column("ended_unix_ns", sa.BigInteger),
    sa.Column("acknowledged_unix_ns", sa.BigInteger),
    sa.Column("acknowledged_by", sa.String(200)),
    sa.Column("silenced_until_unix_ns", sa.BigInteger),
    sa.Column("due_unix_ns", sa.BigInteger, index=True),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("delivered_unix_ns", sa.BigInteger),
    sa.Column("failure", sa.String(200), nullable=False),
    sa.Index("ix_watch_alerts_since", "watch_id", "since_unix_ns"),
)
"""Alerts. since is by the clocks of the hosts, the other times by that of the server. opened is
NULL while a condition has not lasted long enough; due is when the webhook is to be tried next, and
NULL when it need not be any more."""

DELETED = sa.Table("deleted", METADATA, sa.Column("run_id", RunId, primary_key=True))
"""Deleted runs whose files may still exist."""
