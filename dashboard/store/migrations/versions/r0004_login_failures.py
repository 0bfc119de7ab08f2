"""Failed logins."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds the table."""
    op.create_table(
        "login_failures",
        sa.Column("key", sa.String(100), primary_key=True),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("last_unix_ns", sa.BigInteger, nullable=False),
        sa.Column("blocked_until_unix_ns", sa.BigInteger, nullable=False),
    )
