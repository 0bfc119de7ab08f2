"""Metrics of stored runs: per run and per rank, headlines, check results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import Connection

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.report.report import (
    Report,
    StepRow,
    compute_bucket_medians,
    compute_step_median_ns,
    select_full_steps,
)
from stepsplit.dashboard.store.database import METRICS, RANKS, RUNS, VERDICTS, Database, clean_text

# Results of the check command, for the list of runs.


@dataclass(frozen=True, slots=True)
class CheckRow:
    """The last check result of a run: "pass", "regressed" or "inconclusive", and its headline."""

    answer: str
    words: str


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


# Metrics in SQL: per run to compare over runs, and one row per rank.

METRIC_NAMES = (
    "step_ns", "exposed_comm", "skew", "bubble", "idle", "bubble_fraction", "mfu",
    "peak_memory_bytes",
)  # fmt: skip
"""Stored metrics of a run.

exposed_comm, skew, bubble and idle are shares of the step time, 0..1; bubble_fraction is that of
the schedule; peak_memory_bytes is that of the fullest rank.
"""

_MAX_RANK = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a run: its median full step, and the median of each bucket, in ns."""

    rank: int
    host: str | None
    step_ns: int
    medians: Split


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """A metric of one run, for a history over runs."""

    run_id: str
    name: str
    created_unix_ns: int
    value: float


class MetricStore:
    """The metrics of finished runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read_history(self, metric: str) -> tuple[MetricPoint, ...]:
        """The metric (one of METRIC_NAMES) of every run that has it, oldest first."""
        query = (
            select(RUNS.c.id, RUNS.c.name, RUNS.c.created_unix_ns, METRICS.c.value)
            .join(METRICS, METRICS.c.run_id == RUNS.c.id)
            .where(METRICS.c.name == metric)
            .order_by(RUNS.c.created_unix_ns, RUNS.c.id)
        )
        with self._database.begin_read() as connection:
            return tuple(MetricPoint(*row) for row in connection.execute(query))

    def read_ranks(self, run_id: str) -> tuple[RankRow, ...]:
        """The ranks of a finished run, in order."""
        query = select(RANKS).where(RANKS.c.run_id == run_id).order_by(RANKS.c.rank)
        with self._database.begin_read() as connection:
            rows = connection.execute(query).mappings().all()
        return tuple(
            RankRow(
                row["rank"], row["host"], row["step_ns"],
                Split(*(row[f"{bucket}_ns"] for bucket in BUCKETS)),
            )
            for row in rows
        )  # fmt: skip


def record_metrics(connection: Connection, run_id: str, report: Report, numbers: Headline) -> None:
    """Writes the metrics and ranks of the run, replacing earlier ones."""
    for table in (METRICS, RANKS):
        connection.execute(delete(table).where(table.c.run_id == run_id))
    metrics = [
        {"run_id": run_id, "name": name, "value": float(value)}
        for name, value in _collect_metrics(report, numbers).items()
        if value is not None
    ]
    ranks = [{"run_id": run_id, **row} for row in _build_rank_rows(report)]
    if metrics:
        connection.execute(insert(METRICS), metrics)
    if ranks:
        connection.execute(insert(RANKS), ranks)


def _collect_metrics(report: Report, numbers: Headline) -> dict[str, float | None]:
    median = numbers.median_step
    peaks = [row.peak_allocated_bytes for row in report.memory or ()]
    known = [peak for peak in peaks if peak is not None]
    time_metrics: dict[str, float | None] = {}
    if median is not None:
        time_metrics = {
            "step_ns": median.step_ns,
            "exposed_comm": median.sum_share("collective", "p2p", "skew"),
            "skew": median.sum_share("skew"),
            "bubble": median.sum_share("bubble"),
            "idle": median.sum_share("idle"),
        }
    return {
        **time_metrics,
        "bubble_fraction": numbers.bubble_fraction,
        "mfu": numbers.mfu,
        "peak_memory_bytes": max(known, default=None),
    }


def _build_rank_rows(report: Report) -> Iterator[dict[str, Any]]:
    hosts = {rank: host.host for host in report.run.hosts for rank in host.ranks}
    by_rank: dict[int, list[StepRow]] = {}
    for step in select_full_steps(report.steps):
        by_rank.setdefault(step.rank, []).append(step)
    for rank, steps in sorted(by_rank.items()):
        if rank <= _MAX_RANK:
            host = hosts.get(rank)
            named = None if host is None else clean_text(host, 200)
            yield {"rank": rank, "host": named, **_collect_medians(steps)}


def _collect_medians(steps: Sequence[StepRow]) -> dict[str, int]:
    buckets = {f"{row.bucket}_ns": row.median_ns for row in compute_bucket_medians(steps)}
    return {"step_ns": compute_step_median_ns(steps), **buckets}


# Headline numbers of a run, for the list of runs.


@dataclass(frozen=True, slots=True)
class MedianStep:
    """The median step of a run, the median of each bucket, and its share of the total time.

    shares are in the order of BUCKETS and add up to one; medians need not add up.
    """

    step_ns: int
    medians: Split
    shares: tuple[float, ...]

    def sum_share(self, *buckets: str) -> float:
        """The summed share of the buckets, 0..1."""
        named = zip(BUCKETS, self.shares, strict=True)
        return sum(share for bucket, share in named if bucket in buckets)


@dataclass(frozen=True, slots=True)
class Headline:
    """Headline numbers of a run; steps is the number of steps in the medians, which are None
    without steps.

    bubble_fraction (of the schedule) and mfu are ratios, None if the report has none.
    """

    world_size: int
    mesh: str | None
    backend: str | None
    median_step: MedianStep | None
    steps: int
    warnings: int
    bubble_fraction: float | None = None
    mfu: float | None = None


def build_headline(report: Report) -> Headline:
    """Headline numbers of the report."""
    return Headline(
        world_size=report.run.world_size,
        mesh=_format_mesh(report),
        backend=report.run.backend,
        median_step=_compute_median_step(report) if report.steps else None,
        steps=len({row.step for row in select_full_steps(report.steps)}),
        warnings=len(report.warnings),
        bubble_fraction=report.pipeline.bubble_fraction if report.pipeline else None,
        mfu=report.mfu,
    )


def _compute_median_step(report: Report) -> MedianStep:
    rows = compute_bucket_medians(report.steps)
    medians = Split(*(row.median_ns for row in rows))
    return MedianStep(
        compute_step_median_ns(report.steps), medians, tuple(row.share for row in rows)
    )


def _format_mesh(report: Report) -> str | None:
    if report.run.mesh is None:
        return None
    return " ".join(f"{part.axis}{part.size}" for part in report.run.mesh)
