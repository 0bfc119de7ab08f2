"""From the tables of stepsplit 0.1.0 to those of 0.2.0.

Written out, unlike the tables of schema.py: they go on changing, and what this migration makes does
not.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0004"

_BUCKETS = ("compute", "collective", "p2p", "skew", "bubble", "copy", "idle")


def upgrade() -> None:
    """Adds the tables and columns. Workers fill in the job and the finding of earlier runs."""
    for column in (
        sa.Column("note", sa.String(1000), nullable=False, server_default=""),
        sa.Column("job_key", sa.String(16)),
        sa.Column("job_label", sa.String(200)),
        sa.Column("finding", sa.String(1000)),
        sa.Column("finding_ns", sa.BigInteger),
        sa.Column("roles", sa.Text),
    ):
        op.add_column("runs", column)
    op.add_column(
        "tokens", sa.Column("role", sa.String(16), nullable=False, server_default="viewer")
    )
    # The tokens of 0.1.0 may do everything and do not expire, as before.
    op.execute("UPDATE tokens SET role = 'admin'")
    op.add_column("tokens", sa.Column("expires_unix_ns", sa.BigInteger))
    # How long a client waits follows from its failures now.
    op.drop_column("login_failures", "blocked_until_unix_ns")
    op.create_table(
        "sessions",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("token_id", sa.String(32), sa.ForeignKey("tokens.id", ondelete="CASCADE")),
        sa.Column("proof", sa.String(64)),
        _build_number("created_unix_ns"),
        _build_number("last_used_unix_ns", index=True),
    )
    op.create_table(
        "audit",
        _build_id(),
        _build_number("at_unix_ns", index=True),
        _build_text("user_name", 200),
        _build_text("role", 16),
        _build_text("address", 100),
        _build_text("action", 32),
        _build_text("target", 300),
        _build_text("outcome", 200),
        sa.Column("count", sa.Integer, nullable=False, server_default="1"),
    )
    op.create_table(
        "watches",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
        *map(_build_number, ("created_unix_ns", "received_unix_ns", "newest_unix_ns")),
        *map(_build_number, ("rolled_unix_ns", "trimmed_unix_ns", "last_step")),
        sa.Column("batches", sa.Integer, nullable=False),
        sa.Column("sender", sa.String(300)),
    )
    op.create_table(
        "watch_starts",
        _build_watch_column(primary_key=True),
        sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("world_size", sa.Integer, nullable=False),
        _build_number("first_unix_ns"),
        _build_number("newest_unix_ns"),
        sa.Column("ended_unix_ns", sa.BigInteger),
    )
    op.create_table(
        "watch_hosts",
        _build_watch_column(primary_key=True),
        sa.Column("host", sa.String(200), primary_key=True),
        sa.Column("incarnation", sa.Integer, nullable=False),
        _build_number("newest_unix_ns"),
        sa.Column("interval_steps", sa.BigInteger),
        sa.Column("budget", sa.Float, nullable=False),
        sa.Column("overhead", sa.Float),
    )
    op.create_table(
        "watch_ledgers",
        _build_watch_column(primary_key=True),
        sa.Column("host", sa.String(200), primary_key=True),
        sa.Column("incarnation", sa.Integer, nullable=False),
        _build_number("unix_ns"),
        sa.Column("lowest_rank", sa.Integer, nullable=False),
        sa.Column("ledger", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "watch_batches",
        _build_watch_column(primary_key=True),
        sa.Column("digest", sa.LargeBinary(16), primary_key=True),
        _build_number("unix_ns"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "watch_dropped",
        _build_watch_column(primary_key=True),
        sa.Column("reason", sa.String(200), primary_key=True),
        _build_number("number"),
    )
    op.create_table(
        "watch_steps",
        *_build_slot_columns(),
        sa.Column("rolled", sa.Boolean, nullable=False),
        _build_number("steps"),
        sa.Column("ranks", sa.Integer, nullable=False),
        *map(_build_number, ("min_step_ns", "median_step_ns", "max_step_ns")),
        sa.Column("slowest_rank", sa.Integer, nullable=False),
        _build_number("slowest_median_ns"),
        sa.Column("by_rank", sa.LargeBinary, nullable=False),
        sa.Column("local", sa.LargeBinary),
    )
    op.create_table(
        "watch_splits",
        *_build_slot_columns(),
        sa.Column("samples", sa.Integer, nullable=False),
        _build_number("rank_samples"),
        *(_build_number(f"{bucket}_ns") for bucket in _BUCKETS),
        sa.Column("exposed", sa.Text, nullable=False),
        sa.Column("no_data", sa.Text, nullable=False),
        sa.Column("waits", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "watch_samples",
        _build_watch_column(primary_key=True),
        sa.Column("sample_id", sa.String(200), primary_key=True),
        sa.Column("incarnation", sa.Integer, nullable=False),
        _build_number("step"),
        _build_number("unix_ns"),
        _build_text("host", 200),
        sa.Column("pivot", sa.Integer),
        _build_text("no_data", 500),
        _build_text("finding", 500),
        _build_number("cost_ns"),
        _build_text("traces", 500),
        sa.Column("by_rank", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_watch_samples_time", "watch_samples", ["watch_id", "unix_ns"])
    op.create_table(
        "watch_events",
        _build_id(),
        _build_watch_column(),
        sa.Column("incarnation", sa.Integer, nullable=False),
        _build_text("kind", 32),
        _build_number("step"),
        _build_number("unix_ns"),
        _build_text("host", 200),
        sa.Column("rank", sa.Integer),
        _build_text("text", 500),
    )
    op.create_index("ix_watch_events_time", "watch_events", ["watch_id", "unix_ns"])
    op.create_table(
        "watch_alerts",
        _build_id(),
        _build_watch_column(),
        _build_text("metric", 32),
        sa.Column("incarnation", sa.Integer, nullable=False),
        _build_text("host", 200),
        *map(_build_number, ("step", "since_unix_ns", "seen_unix_ns")),
        sa.Column("before", sa.Float),
        sa.Column("after", sa.Float),
        sa.Column("rank", sa.Integer),
        _build_text("text", 500),
        _build_text("cause", 500),
        sa.Column("opened_unix_ns", sa.BigInteger),
        sa.Column("ended_unix_ns", sa.BigInteger),
        sa.Column("acknowledged_unix_ns", sa.BigInteger),
        sa.Column("acknowledged_by", sa.String(200)),
        sa.Column("silenced_until_unix_ns", sa.BigInteger),
        sa.Column("due_unix_ns", sa.BigInteger, index=True),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("delivered_unix_ns", sa.BigInteger),
        _build_text("failure", 200),
    )
    op.create_index("ix_watch_alerts_since", "watch_alerts", ["watch_id", "since_unix_ns"])


def _build_id() -> sa.Column[Any]:
    # Only an INTEGER is numbered by SQLite; it has 64 bits there.
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True)


def _build_number(name: str, index: bool | None = None) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, index=index)


def _build_text(name: str, length: int) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _build_watch_column(primary_key: bool = False) -> sa.Column[int]:
    watch = sa.ForeignKey("watches.id", ondelete="CASCADE")
    return sa.Column("watch_id", sa.Integer, watch, nullable=False, primary_key=primary_key)


def _build_slot_columns() -> list[sa.Column[int]]:
    return [
        _build_watch_column(primary_key=True),
        sa.Column("level_s", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("start_unix_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
    ]
