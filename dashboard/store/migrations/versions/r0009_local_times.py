"""Watched runs: local times of the ranks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Adds the column; slots without it have no local times."""
    op.add_column("watch_steps", sa.Column("local", sa.LargeBinary))
