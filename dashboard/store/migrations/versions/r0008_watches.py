"""Watched runs: step times, samples and events of trainings that go on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_BUCKETS = ("compute", "collective", "p2p", "skew", "bubble", "copy", "idle")


def upgrade() -> None:
    """Adds the tables."""
    op.create_table(
        "watches",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
        *_build_times("created", "received", "newest", "rolled", "trimmed"),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("batches", sa.Integer, nullable=False),
    )
    _create_status_tables()
    _create_slot_tables()
    _create_sample_tables()


def _create_status_tables() -> None:
    op.create_table(
        "watch_starts",
        _build_watch_column(primary_key=True),
        sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("world_size", sa.Integer, nullable=False),
        *_build_times("first", "newest"),
        sa.Column("ended_unix_ns", sa.BigInteger),
    )
    op.create_table(
        "watch_hosts",
        _build_watch_column(primary_key=True),
        sa.Column("host", sa.String(200), primary_key=True),
        sa.Column("incarnation", sa.Integer, nullable=False),
        *_build_times("newest"),
        sa.Column("interval_steps", sa.BigInteger),
        sa.Column("budget", sa.Float, nullable=False),
        sa.Column("overhead", sa.Float),
    )
    op.create_table(
        "watch_batches",
        _build_watch_column(primary_key=True),
        sa.Column("digest", sa.LargeBinary(16), primary_key=True),
        sa.Column("unix_ns", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "watch_dropped",
        _build_watch_column(primary_key=True),
        sa.Column("reason", sa.String(200), primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
    )


def _create_slot_tables() -> None:
    op.create_table(
        "watch_steps",
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
    )
    op.create_table(
        "watch_splits",
        *_build_slot_columns(),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("rank_samples", sa.BigInteger, nullable=False),
        *(sa.Column(f"{bucket}_ns", sa.BigInteger, nullable=False) for bucket in _BUCKETS),
        sa.Column("exposed", sa.Text, nullable=False),
        sa.Column("no_data", sa.Text, nullable=False),
        sa.Column("waits", sa.LargeBinary, nullable=False),
    )


def _create_sample_tables() -> None:
    op.create_table(
        "watch_samples",
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
    )
    op.create_index("ix_watch_samples_time", "watch_samples", ["watch_id", "unix_ns"])
    op.create_table(
        "watch_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        _build_watch_column(),
        sa.Column("incarnation", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("unix_ns", sa.BigInteger, nullable=False),
        sa.Column("host", sa.String(200), nullable=False),
        sa.Column("rank", sa.Integer),
        sa.Column("text", sa.String(500), nullable=False),
    )
    op.create_index("ix_watch_events_time", "watch_events", ["watch_id", "unix_ns"])


def _build_watch_column(**kind: bool) -> sa.Column[int]:
    watch = sa.ForeignKey("watches.id", ondelete="CASCADE")
    return sa.Column("watch_id", sa.Integer, watch, nullable=False, **kind)  # type: ignore[arg-type]


def _build_slot_columns() -> list[sa.Column[int]]:
    return [
        _build_watch_column(primary_key=True),
        sa.Column("level_s", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("start_unix_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
    ]


def _build_times(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(f"{name}_unix_ns", sa.BigInteger, nullable=False) for name in names]
