"""The tables in SQL, as the newest migration leaves them."""

from __future__ import annotations

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
    false,
)

from stepsplit.analyzer.buckets import BUCKETS

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
