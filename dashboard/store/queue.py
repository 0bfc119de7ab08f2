"""The queue of analyses: which is next, which worker has it until when, how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, insert, or_, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.store.database import JOBS, RUNS, Database, plain
from stepsplit.dashboard.store.runs import move_run, run_done, run_failed

LEASE_S = 60.0

MOST_ATTEMPTS = 3

_SPENT = (
    f"the analysis broke off {MOST_ATTEMPTS} times without an answer, perhaps for lack of memory; "
    "upload fewer ranks or steps"
)


@dataclass(frozen=True, slots=True)
class Job:
    """An analysis that one worker has claimed; attempt counts from 1."""

    id: int
    run_id: str
    worker: str
    attempt: int


class Jobs:
    """The queue. Each change is one transaction; a job is changed by the worker that holds it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, worker: str, lease_s: float = LEASE_S) -> Job | None:
        """The oldest job that is queued, or whose worker is silent; of several callers one gets
        it. None where nothing is to be done."""
        now = time.time_ns()
        if not self._any(now):
            return None
        with self._database.writing() as connection:
            _give_up_job(connection, _silent(now))
            row = connection.execute(_claim(worker, now, lease_s)).one_or_none()
            if row is None:
                return None
            running = update(RUNS).where(RUNS.c.id == row.run_id).values(state="running")
            connection.execute(running)
        return Job(row.id, row.run_id, worker, row.attempts)

    def beat(self, job: Job, lease_s: float = LEASE_S) -> bool:
        """Prolongs the lease. False where the job is no longer this worker's."""
        return self._set(job, lease_until_unix_ns=time.time_ns() + int(lease_s * 1e9))

    def tell(self, job: Job, progress: float, note: str) -> bool:
        """Records how far the analysis is, 0..1, and what it is at."""
        share = min(max(progress, 0.0), 1.0)
        return self._set(job, progress=share, progress_note=plain(note, 200))

    def done(self, job: Job, report: Report) -> bool:
        """Ends the job with a report that is saved. False where it is no longer this worker's."""
        with self._database.writing() as connection:
            ended = _end(connection, job, state="done", progress=1.0)
            if ended:
                run_done(connection, job.run_id, report)
        return ended

    def failed(self, job: Job, message: str) -> bool:
        """Ends the job with why there is no report. False where it is no longer this worker's."""
        with self._database.writing() as connection:
            ended = _end(connection, job, state="failed", error=plain(message, 2_000))
            if ended:
                run_failed(connection, job.run_id, message)
        return ended

    def put_back(self, job: Job) -> bool:
        """Gives up the job for another worker; the attempt does not count."""
        with self._database.writing() as connection:
            back = {"state": "queued", "worker": None, "attempts": job.attempt - 1}
            ended = _end(connection, job, **back)
            if ended:
                move_run(connection, job.run_id, "running", "queued")
        return ended

    def free(self, worker: str) -> None:
        """The worker is dead: what it held is queued again, or failed when it was the last try."""
        with self._database.writing() as connection:
            its = and_(JOBS.c.state == "running", JOBS.c.worker == worker)
            _give_up_job(connection, its)
            freed = update(JOBS).where(its).values(state="queued", worker=None)
            for run_id in connection.execute(freed.returning(JOBS.c.run_id)).scalars().all():
                move_run(connection, run_id, "running", "queued")

    def _any(self, now: int) -> bool:
        # Idle workers ask often; to look costs less than to lock.
        with self._database.reading() as connection:
            return (
                connection.execute(select(JOBS.c.id).where(_free(now)).limit(1)).first() is not None
            )

    def _set(self, job: Job, **values: Any) -> bool:
        with self._database.writing() as connection:
            return connection.execute(_held(job).values(values)).rowcount == 1


def add_job(connection: Connection, run_id: str) -> None:
    """Queues the analysis of a run."""
    row = {"run_id": run_id, "state": "queued", "queued_unix_ns": time.time_ns(), "attempts": 0}
    connection.execute(insert(JOBS).values(row))


def _claim(worker: str, now: int, lease_s: float) -> Any:
    oldest = select(JOBS.c.id).where(_free(now)).order_by(JOBS.c.queued_unix_ns, JOBS.c.id).limit(1)
    # PostgreSQL looks at the row again when another worker had it first; SQLite has one writer.
    locked = oldest.with_for_update(skip_locked=True).scalar_subquery()
    claimed = {
        "state": "running",
        "worker": worker,
        "attempts": JOBS.c.attempts + 1,
        "lease_until_unix_ns": now + int(lease_s * 1e9),
        "progress": None,
        "progress_note": None,
    }
    changed = update(JOBS).where(JOBS.c.id == locked, _free(now)).values(claimed)
    return changed.returning(JOBS.c.id, JOBS.c.run_id, JOBS.c.attempts)


def _free(now: int) -> ColumnElement[bool]:
    return or_(JOBS.c.state == "queued", _silent(now))


def _silent(now: int) -> ColumnElement[bool]:
    return and_(JOBS.c.state == "running", JOBS.c.lease_until_unix_ns < now)


def _give_up_job(connection: Connection, which: ColumnElement[bool]) -> None:
    """Fails those of the jobs that have been tried often enough."""
    spent = update(JOBS).where(which, JOBS.c.attempts >= MOST_ATTEMPTS)
    failed = spent.values(state="failed", error=_SPENT).returning(JOBS.c.run_id)
    for run_id in connection.execute(failed).scalars().all():
        run_failed(connection, run_id, _SPENT)


def _held(job: Job) -> Any:
    return update(JOBS).where(
        JOBS.c.id == job.id,
        JOBS.c.state == "running",
        JOBS.c.worker == job.worker,
        JOBS.c.attempts == job.attempt,
    )


def _end(connection: Connection, job: Job, **values: Any) -> bool:
    return connection.execute(_held(job).values(values)).rowcount == 1
