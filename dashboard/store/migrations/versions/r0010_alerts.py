"""Alerts of watched runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Adds the table."""
    watch = sa.ForeignKey("watches.id", ondelete="CASCADE")
    op.create_table(
        "watch_alerts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("watch_id", sa.Integer, watch, nullable=False),
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
    )
    op.create_index("ix_watch_alerts_since", "watch_alerts", ["watch_id", "since_unix_ns"])
