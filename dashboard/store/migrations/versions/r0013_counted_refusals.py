"""Refusals that are counted in one entry of the audit log; waits follow from the failures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Changes the columns; entries from before are of one refusal each."""
    op.add_column("audit", sa.Column("count", sa.Integer, nullable=False, server_default="1"))
    op.drop_column("login_failures", "blocked_until_unix_ns")
