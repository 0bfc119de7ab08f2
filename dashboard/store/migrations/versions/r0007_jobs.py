"""The job of each run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Adds key and label; workers fill in those of earlier runs, from their reports."""
    op.add_column("runs", sa.Column("job_key", sa.String(16)))
    op.add_column("runs", sa.Column("job_label", sa.String(200)))
