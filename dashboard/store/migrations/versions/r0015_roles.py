"""The roles of a run that is a job of several."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Adds their names."""
    op.add_column("runs", sa.Column("roles", sa.Text))
