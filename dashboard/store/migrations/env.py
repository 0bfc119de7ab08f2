"""Runs the migrations in the transaction of the process that opens the store."""

from __future__ import annotations

from alembic import context

from stepsplit.dashboard.store.schema import METADATA

context.configure(context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
