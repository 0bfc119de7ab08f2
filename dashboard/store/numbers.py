"""What is kept of a report in SQL: numbers to compare over runs, and a row a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import Connection

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.report.report import (
    Report,
    StepRow,
    bucket_medians,
    full_steps,
    step_median_ns,
)
from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.headline import Headline
from stepsplit.dashboard.store.schema import METRICS, RANKS, RUNS
from stepsplit.dashboard.store.text import plain

METRIC_NAMES = (
    "step_ns", "exposed_comm", "skew", "bubble", "idle", "bubble_fraction", "mfu",
    "peak_memory_bytes",
)  # fmt: skip
"""What is kept a run. exposed_comm, skew, bubble and idle are shares of all time, 0..1;
bubble_fraction is the schedule's; peak_memory_bytes is of the fullest rank."""

_LARGEST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a run: its median full step, and its own median of each bucket, in ns."""

    rank: int
    host: str | None
    step_ns: int
    medians: Split


@dataclass(frozen=True, slots=True)
class Point:
    """A metric of one run, for a history over runs."""

    run_id: str
    name: str
    created_unix_ns: int
    value: float


class Numbers:
    """The numbers of the runs that are done."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def history(self, metric: str) -> tuple[Point, ...]:
        """The metric of every run that has it, oldest first; one of METRIC_NAMES."""
        query = (
            select(RUNS.c.id, RUNS.c.name, RUNS.c.created_unix_ns, METRICS.c.value)
            .join(METRICS, METRICS.c.run_id == RUNS.c.id)
            .where(METRICS.c.name == metric)
            .order_by(RUNS.c.created_unix_ns, RUNS.c.id)
        )
        with self._database.reading() as connection:
            return tuple(Point(*row) for row in connection.execute(query))

    def ranks(self, run_id: str) -> tuple[RankRow, ...]:
        """The ranks of a run that is done, in their order."""
        query = select(RANKS).where(RANKS.c.run_id == run_id).order_by(RANKS.c.rank)
        with self._database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return tuple(
            RankRow(
                row["rank"], row["host"], row["step_ns"],
                Split(*(row[f"{bucket}_ns"] for bucket in BUCKETS)),
            )
            for row in rows
        )  # fmt: skip


def record_numbers(connection: Connection, run_id: str, report: Report, numbers: Headline) -> None:
    """Writes the metrics and ranks of the run, in place of those that it had."""
    for table in (METRICS, RANKS):
        connection.execute(delete(table).where(table.c.run_id == run_id))
    metrics = [
        {"run_id": run_id, "name": name, "value": float(value)}
        for name, value in _metrics(report, numbers).items()
        if value is not None
    ]
    ranks = [{"run_id": run_id, **row} for row in _rank_rows(report)]
    if metrics:
        connection.execute(insert(METRICS), metrics)
    if ranks:
        connection.execute(insert(RANKS), ranks)


def _metrics(report: Report, numbers: Headline) -> dict[str, float | None]:
    middle = numbers.middle
    peaks = [row.peak_allocated_bytes for row in report.memory or ()]
    known = [peak for peak in peaks if peak is not None]
    of_time: dict[str, float | None] = {}
    if middle is not None:
        of_time = {
            "step_ns": middle.step_ns,
            "exposed_comm": middle.share("collective", "p2p", "skew"),
            "skew": middle.share("skew"),
            "bubble": middle.share("bubble"),
            "idle": middle.share("idle"),
        }
    return {
        **of_time,
        "bubble_fraction": numbers.bubble_fraction,
        "mfu": numbers.mfu,
        "peak_memory_bytes": max(known, default=None),
    }


def _rank_rows(report: Report) -> Iterator[dict[str, Any]]:
    hosts = {rank: host.host for host in report.run.hosts for rank in host.ranks}
    by_rank: dict[int, list[StepRow]] = {}
    for step in full_steps(report.steps):
        by_rank.setdefault(step.rank, []).append(step)
    for rank, steps in sorted(by_rank.items()):
        if rank <= _LARGEST:
            host = hosts.get(rank)
            named = None if host is None else plain(host, 200)
            yield {"rank": rank, "host": named, **_medians(steps)}


def _medians(steps: Sequence[StepRow]) -> dict[str, int]:
    buckets = {f"{row.bucket}_ns": row.median_ns for row in bucket_medians(steps)}
    return {"step_ns": step_median_ns(steps), **buckets}
