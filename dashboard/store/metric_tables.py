"""Metrics, ranks and check results of the runs in SQL."""

from __future__ import annotations

import time

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import Connection

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.ids import clean_text
from stepsplit.dashboard.store.metrics import (
    BUCKET_COLUMNS,
    Headline,
    MetricPoint,
    RankRow,
    build_rank_rows,
    collect_metrics,
    read_job,
)
from stepsplit.dashboard.store.schema import METRICS, RANKS, RUNS, VERDICTS


class CheckResults:
    """The last check result of each run."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, run_id: str, answer: str, words: str) -> None:
        """Stores the result, replacing an earlier one."""
        row = {"run_id": run_id, "answer": answer, "words": clean_text(words, 500)}
        with self._database.begin_write() as connection:
            connection.execute(delete(VERDICTS).where(VERDICTS.c.run_id == run_id))
            connection.execute(insert(VERDICTS), {**row, "judged_unix_ns": time.time_ns()})


class MetricStore:
    """The metrics of finished runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read_history(self, metric: str) -> tuple[MetricPoint, ...]:
        """The metric (one of METRIC_NAMES) of every run that has it, oldest first."""
        job = (RUNS.c.job_key, RUNS.c.job_label)
        query = (
            select(RUNS.c.id, RUNS.c.name, RUNS.c.created_unix_ns, METRICS.c.value, *job)
            .join(METRICS, METRICS.c.run_id == RUNS.c.id)
            .where(METRICS.c.name == metric)
            .order_by(RUNS.c.created_unix_ns, RUNS.c.id)
        )
        with self._database.begin_read() as connection:
            return tuple(
                MetricPoint(*row[:4], read_job(*row[4:])) for row in connection.execute(query)
            )

    def read_ranks(self, run_id: str) -> tuple[RankRow, ...]:
        """The ranks of a finished run, in order."""
        query = select(RANKS).where(RANKS.c.run_id == run_id).order_by(RANKS.c.rank)
        with self._database.begin_read() as connection:
            rows = connection.execute(query).mappings().all()
        return tuple(
            RankRow(
                row["rank"], row["host"], row["step_ns"],
                Split(*(row[name] for name in BUCKET_COLUMNS)),
            )
            for row in rows
        )  # fmt: skip


def record_metrics(connection: Connection, run_id: str, report: Report, numbers: Headline) -> None:
    """Writes the metrics and ranks of the run, replacing earlier ones."""
    for table in (METRICS, RANKS):
        connection.execute(delete(table).where(table.c.run_id == run_id))
    metrics = [
        {"run_id": run_id, "name": name, "value": float(value)}
        for name, value in collect_metrics(report, numbers).items()
        if value is not None
    ]
    ranks = [{"run_id": run_id, **row} for row in build_rank_rows(report)]
    if metrics:
        connection.execute(insert(METRICS), metrics)
    if ranks:
        connection.execute(insert(RANKS), ranks)
