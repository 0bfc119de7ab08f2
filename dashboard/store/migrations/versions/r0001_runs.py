"""The table of runs, as before migrations were introduced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_BUCKETS = ("compute", "collective", "p2p", "skew", "bubble", "copy", "idle")


def upgrade() -> None:
    """Creates the table of runs."""
    op.create_table(
        "runs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger, nullable=False, index=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("world_size", sa.Integer),
        sa.Column("mesh", sa.String(200)),
        sa.Column("backend", sa.String(100)),
        sa.Column("step_ns", sa.BigInteger),
        *(sa.Column(f"{bucket}_ns", sa.BigInteger) for bucket in _BUCKETS),
        *(sa.Column(f"{bucket}_share", sa.Float) for bucket in _BUCKETS),
        sa.Column("steps", sa.Integer),
        sa.Column("warnings", sa.Integer),
    )
