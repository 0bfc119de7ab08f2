"""Roles of tokens, sessions, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds the role and the tables. Existing tokens may do everything, as before."""
    role = sa.Column("role", sa.String(16), nullable=False, server_default="viewer")
    op.add_column("tokens", role)
    op.execute("UPDATE tokens SET role = 'admin'")
    op.create_table(
        "sessions",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("token_id", sa.String(32), sa.ForeignKey("tokens.id", ondelete="CASCADE")),
        sa.Column("proof", sa.String(64)),
        sa.Column("created_unix_ns", sa.BigInteger, nullable=False),
        sa.Column("last_used_unix_ns", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("at_unix_ns", sa.BigInteger, nullable=False, index=True),
        sa.Column("user_name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("address", sa.String(100), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("target", sa.String(300), nullable=False),
        sa.Column("outcome", sa.String(200), nullable=False),
    )
