"""The schema of stepsplit 0.1.0, where migrations begin: a new store has today's tables at once."""

from __future__ import annotations

revision = "0004"
down_revision = None


def upgrade() -> None:
    """Does nothing: no store is migrated to this schema, only from it."""
