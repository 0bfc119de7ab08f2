"""Watched runs that belong to who sends them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Adds the column; runs without a sender belong to who sends the next batch."""
    op.add_column("watches", sa.Column("sender", sa.String(300)))
