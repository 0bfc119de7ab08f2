"""The tables of stepsplit 0.1.0, the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = None

_BUCKETS = ("compute", "collective", "p2p", "skew", "bubble", "copy", "idle")


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "runs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger, nullable=False, index=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("world_size", sa.Integer),
        sa.Column("mesh", sa.String(200)),
        sa.Column("backend", sa.String(100)),
        sa.Column("step_ns", sa.BigInteger),
        *(sa.Column(f"{bucket}_ns", sa.BigInteger) for bucket in _BUCKETS),
        *(sa.Column(f"{bucket}_share", sa.Float) for bucket in _BUCKETS),
        sa.Column("steps", sa.Integer),
        sa.Column("warnings", sa.Integer),
        sa.Column("bubble_fraction", sa.Float),
        sa.Column("mfu", sa.Float),
    )
    op.create_table(
        "tags",
        _build_run_column(primary_key=True),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(200), nullable=False),
    )
    op.create_table(
        "ranks",
        _build_run_column(primary_key=True),
        sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("host", sa.String(200)),
        sa.Column("step_ns", sa.BigInteger, nullable=False),
        *(sa.Column(f"{bucket}_ns", sa.BigInteger, nullable=False) for bucket in _BUCKETS),
    )
    op.create_table(
        "metrics",
        _build_run_column(primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True, index=True),
        sa.Column("value", sa.Float, nullable=False),
    )
    op.create_table(
        "files",
        _build_run_column(primary_key=True),
        sa.Column("path", sa.Text, primary_key=True),
        sa.Column("received_bytes", sa.BigInteger, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
    )
    op.create_table(
        "jobs",
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
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False, unique=True),
        sa.Column("created_unix_ns", sa.BigInteger, nullable=False),
        sa.Column("last_used_unix_ns", sa.BigInteger),
        sa.Column("revoked", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.create_table("deleted", sa.Column("run_id", sa.String(32), primary_key=True))
    op.create_table(
        "verdicts",
        _build_run_column(primary_key=True),
        sa.Column("answer", sa.String(16), nullable=False),
        sa.Column("words", sa.String(500), nullable=False),
        sa.Column("judged_unix_ns", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "login_failures",
        sa.Column("key", sa.String(100), primary_key=True),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("last_unix_ns", sa.BigInteger, nullable=False),
        sa.Column("blocked_until_unix_ns", sa.BigInteger, nullable=False),
    )


def _build_run_column(**kind: bool) -> sa.Column[str]:
    run = sa.ForeignKey("runs.id", ondelete="CASCADE")
    return sa.Column("run_id", sa.String(32), run, nullable=False, **kind)  # type: ignore[arg-type]
