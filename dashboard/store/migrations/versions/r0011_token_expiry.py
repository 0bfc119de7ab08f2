"""Tokens that expire."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Adds the column; tokens without it do not expire."""
    op.add_column("tokens", sa.Column("expires_unix_ns", sa.BigInteger))
