"""The queue of analyses: jobs, their workers and leases, and their results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, insert, or_, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.diagnose.hang.result import Hang
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.ids import clean_text
from stepsplit.dashboard.store.runs import (
    record_done,
    record_failure,
    record_hang,
    record_roles,
    set_run_state,
)
from stepsplit.dashboard.store.schema import JOBS, RUNS

LEASE_S = 60.0

MAX_ATTEMPTS = 3

_ATTEMPTS_ERROR = (
    f"the analysis crashed {MAX_ATTEMPTS} times without an error message, perhaps out of memory; "
    "upload fewer ranks or steps"
)


@dataclass(frozen=True, slots=True)
class AnalysisJob:
    """An analysis that one worker has claimed; attempt counts from 1."""

    id: int
    run_id: str
    worker: str
    attempt: int


class AnalysisQueue:
    """The queue. Each change is one transaction; only the worker of a job may change it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, worker: str, lease_s: float = LEASE_S) -> AnalysisJob | None:
        """Claims the oldest job that is queued or whose lease has expired; None without one."""
        now = time.time_ns()
        # Idle workers poll often; a read is cheaper than a lock.
        available = select(JOBS.c.id).where(_match_available(now)).limit(1)
        with self._database.begin_read() as connection:
            if connection.execute(available).first() is None:
                return None
        with self._database.begin_write() as connection:
            # An analysis that has ended its worker so often would end the next one too.
            _give_up_job(connection, _match_expired(now))
            row = connection.execute(_build_claim(worker, now, lease_s)).one_or_none()
            if row is None:
                return None
            running = update(RUNS).where(RUNS.c.id == row.run_id).values(state="running")
            connection.execute(running)
        return AnalysisJob(row.id, row.run_id, worker, row.attempts)

    def extend_lease(self, job: AnalysisJob, lease_s: float = LEASE_S) -> bool:
        """Renews the lease. False if the job no longer belongs to this worker."""
        return self._set(job, lease_until_unix_ns=time.time_ns() + int(lease_s * 1e9))

    def record_progress(self, job: AnalysisJob, progress: float, note: str) -> bool:
        """Records the progress (0..1) of the analysis and a note on what it does."""
        share = min(max(progress, 0.0), 1.0)
        return self._set(job, progress=share, progress_note=clean_text(note, 200))

    def complete(self, job: AnalysisJob, result: Report | Hang | RoleJob) -> bool:
        """Ends the job with its saved report, or what its dumps show of a hang, or what its roles
        do. False if it no longer belongs to this worker."""
        with self._database.begin_write() as connection:
            is_owner = _end_job(connection, job, state="done", progress=1.0)
            if not is_owner:
                return False
            if isinstance(result, Hang):
                record_hang(connection, job.run_id, result)
            elif isinstance(result, RoleJob):
                record_roles(connection, job.run_id, result)
            else:
                record_done(connection, job.run_id, result)
        return True

    def fail(self, job: AnalysisJob, message: str) -> bool:
        """Ends the job with an error. False if it no longer belongs to this worker."""
        with self._database.begin_write() as connection:
            is_owner = _end_job(connection, job, state="failed", error=clean_text(message, 2_000))
            if is_owner:
                record_failure(connection, job.run_id, message)
        return is_owner

    def put_back(self, job: AnalysisJob) -> bool:
        """Returns the job to the queue; the attempt does not count."""
        with self._database.begin_write() as connection:
            # The worker was stopped, which says nothing about the run.
            back = {"state": "queued", "worker": None, "attempts": job.attempt - 1}
            is_owner = _end_job(connection, job, **back)
            if is_owner:
                set_run_state(connection, job.run_id, "running", "queued")
        return is_owner

    def release_worker(self, worker: str) -> None:
        """Releases the jobs of a dead worker: queued again, or failed after the last attempt."""
        with self._database.begin_write() as connection:
            of_worker = and_(JOBS.c.state == "running", JOBS.c.worker == worker)
            _give_up_job(connection, of_worker)
            freed = update(JOBS).where(of_worker).values(state="queued", worker=None)
            for run_id in connection.execute(freed.returning(JOBS.c.run_id)).scalars().all():
                set_run_state(connection, run_id, "running", "queued")

    def _set(self, job: AnalysisJob, **values: Any) -> bool:
        with self._database.begin_write() as connection:
            return connection.execute(_update_own_job(job).values(values)).rowcount == 1


def add_job(connection: Connection, run_id: str) -> None:
    """Queues the analysis of a run."""
    row = {"run_id": run_id, "state": "queued", "queued_unix_ns": time.time_ns(), "attempts": 0}
    connection.execute(insert(JOBS).values(row))


def queue_again(connection: Connection, run_id: str) -> bool:
    """Queues another analysis of a run. False unless its last one has ended."""
    ended = (RUNS.c.id == run_id, RUNS.c.state.in_(("done", "failed")))
    queued = update(RUNS).where(*ended).values(state="queued", error=None)
    if connection.execute(queued).rowcount != 1:
        return False
    # A run has one job; that of the analysis before has ended.
    connection.execute(delete(JOBS).where(JOBS.c.run_id == run_id))
    add_job(connection, run_id)
    return True


def _build_claim(worker: str, now: int, lease_s: float) -> Any:
    oldest = (
        select(JOBS.c.id)
        .where(_match_available(now))
        .order_by(JOBS.c.queued_unix_ns, JOBS.c.id)
        .limit(1)
    )
    # PostgreSQL checks the row again if another worker had locked it; SQLite has one writer.
    locked = oldest.with_for_update(skip_locked=True).scalar_subquery()
    claimed = {
        "state": "running",
        "worker": worker,
        "attempts": JOBS.c.attempts + 1,
        "lease_until_unix_ns": now + int(lease_s * 1e9),
        "progress": None,
        "progress_note": None,
    }
    changed = update(JOBS).where(JOBS.c.id == locked, _match_available(now)).values(claimed)
    return changed.returning(JOBS.c.id, JOBS.c.run_id, JOBS.c.attempts)


def _match_available(now: int) -> ColumnElement[bool]:
    return or_(JOBS.c.state == "queued", _match_expired(now))


def _match_expired(now: int) -> ColumnElement[bool]:
    return and_(JOBS.c.state == "running", JOBS.c.lease_until_unix_ns < now)


def _give_up_job(connection: Connection, which: ColumnElement[bool]) -> None:
    """Fails the jobs that have used up their attempts."""
    spent = update(JOBS).where(which, JOBS.c.attempts >= MAX_ATTEMPTS)
    failed = spent.values(state="failed", error=_ATTEMPTS_ERROR).returning(JOBS.c.run_id)
    for run_id in connection.execute(failed).scalars().all():
        record_failure(connection, run_id, _ATTEMPTS_ERROR)


def _update_own_job(job: AnalysisJob) -> Any:
    return update(JOBS).where(
        JOBS.c.id == job.id,
        JOBS.c.state == "running",
        JOBS.c.worker == job.worker,
        JOBS.c.attempts == job.attempt,
    )


def _end_job(connection: Connection, job: AnalysisJob, **values: Any) -> bool:
    return connection.execute(_update_own_job(job).values(values)).rowcount == 1
