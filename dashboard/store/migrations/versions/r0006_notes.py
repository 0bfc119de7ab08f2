"""Notes on runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Adds the note; existing runs have an empty one."""
    op.add_column("runs", sa.Column("note", sa.String(1000), nullable=False, server_default=""))
