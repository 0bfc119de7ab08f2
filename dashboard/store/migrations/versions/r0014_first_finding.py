"""The first finding of each run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Adds its words and saving; workers fill in those of earlier runs, from their reports."""
    op.add_column("runs", sa.Column("finding", sa.String(1000)))
    op.add_column("runs", sa.Column("finding_ns", sa.BigInteger))
