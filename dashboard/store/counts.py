"""How much of everything a store holds, for those who watch over it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Table, func, select
from sqlalchemy.engine import Connection

from stepsplit.dashboard.store.schema import FILES, JOBS, RUNS


@dataclass(frozen=True, slots=True)
class Counts:
    """Runs and jobs by state, how long the oldest queued job has waited (0 without one), and the
    size of all uploads that are held."""

    runs: Mapping[str, int]
    jobs: Mapping[str, int]
    oldest_queued_s: float
    upload_bytes: int


def count(connection: Connection) -> Counts:
    """What the store holds at this moment."""
    oldest = select(func.min(JOBS.c.queued_unix_ns)).where(JOBS.c.state == "queued")
    queued = connection.execute(oldest).scalar()
    size = select(func.coalesce(func.sum(FILES.c.received_bytes), 0))
    return Counts(
        _by_state(connection, RUNS, RUNS.c.state),
        _by_state(connection, JOBS, JOBS.c.state),
        0.0 if queued is None else max(0, time.time_ns() - queued) / 1e9,
        int(connection.execute(size).scalar_one()),
    )


def _by_state(connection: Connection, table: Table, state: ColumnElement[str]) -> dict[str, int]:
    query = select(state, func.count()).select_from(table).group_by(state)
    return {name: int(number) for name, number in connection.execute(query)}
