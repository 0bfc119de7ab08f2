"""Check results of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds the table."""
    run = sa.ForeignKey("runs.id", ondelete="CASCADE")
    op.create_table(
        "verdicts",
        sa.Column("run_id", sa.String(32), run, primary_key=True),
        sa.Column("answer", sa.String(16), nullable=False),
        sa.Column("words", sa.String(500), nullable=False),
        sa.Column("judged_unix_ns", sa.BigInteger, nullable=False),
    )
