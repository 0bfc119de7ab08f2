"""A database of any earlier schema is brought to the newest, by whoever opens it first."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import inspect, text
from sqlalchemy.engine import Connection

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.schema import VERSION

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
        mend = "upgrade stepsplit, or name another --store"
        raise UsageError(f"the store is of a newer stepsplit (schema {found}); {mend}")
    if found == _FIRST:
        command.stamp(config, _FIRST)
    command.upgrade(config, VERSION)
