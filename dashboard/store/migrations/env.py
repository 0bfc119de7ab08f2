"""Alembic runs the migrations in the transaction of whoever opens a store."""

from __future__ import annotations

from alembic import context

from stepsplit.dashboard.store.database import METADATA

context.configure(context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
