"""Job queue, resumable uploads, tags, metrics per run and rank, tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_BUCKETS = ("compute", "collective", "p2p", "skew", "bubble", "copy", "idle")
_TORN = "the server stopped during the upload; upload it again"


def upgrade() -> None:
    """Adds the tables, and queues unfinished analyses."""
    op.add_column("runs", sa.Column("bubble_fraction", sa.Float))
    op.add_column("runs", sa.Column("mfu", sa.Float))
    _create_run_tables()
    _create_upload_tables()
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
    _queue_unfinished()


def _create_run_tables() -> None:
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


def _create_upload_tables() -> None:
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


def _build_run_column(**kind: bool) -> sa.Column[str]:
    run = sa.ForeignKey("runs.id", ondelete="CASCADE")
    return sa.Column("run_id", sa.String(32), run, nullable=False, **kind)  # type: ignore[arg-type]


def _queue_unfinished() -> None:
    """Queues unfinished analyses again; fails unfinished uploads, whose progress is unknown."""
    op.execute("UPDATE runs SET state = 'queued' WHERE state = 'running'")
    op.execute(
        "INSERT INTO jobs (run_id, state, queued_unix_ns, attempts) "
        "SELECT id, 'queued', created_unix_ns, 0 FROM runs WHERE state = 'queued'"
    )
    op.execute(f"UPDATE runs SET state = 'failed', error = '{_TORN}' WHERE state = 'uploading'")
