"""Rows of runs, and the queue of their analyses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, Row, Select, and_, delete, insert, or_, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.store.database import (
    DELETED,
    JOBS,
    RUNS,
    TAGS,
    VERDICTS,
    Database,
    clean_text,
)
from stepsplit.dashboard.store.metrics import (
    BUCKET_COLUMNS,
    CheckRow,
    Headline,
    JobFingerprint,
    MedianStep,
    build_headline,
    compute_job_fingerprint,
    read_job,
    record_metrics,
)

# The queue of analyses: jobs, their workers and leases, and their results.

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
        if not self._has_job(now):
            return None
        with self._database.begin_write() as connection:
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

    def complete(self, job: AnalysisJob, report: Report) -> bool:
        """Ends the job with its saved report. False if it no longer belongs to this worker."""
        with self._database.begin_write() as connection:
            is_owner = _end_job(connection, job, state="done", progress=1.0)
            if is_owner:
                record_done(connection, job.run_id, report)
        return is_owner

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

    def _has_job(self, now: int) -> bool:
        # Idle workers poll often; a read is cheaper than a lock.
        with self._database.begin_read() as connection:
            return (
                connection.execute(select(JOBS.c.id).where(_match_available(now)).limit(1)).first()
                is not None
            )

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


# The rows of runs.

NAME_LENGTH, NOTE_LENGTH, ERROR_LENGTH = 200, 1_000, 2_000


def add_run(connection: Connection, name: str, tags: Iterable[Tag], state: State) -> str:
    """Adds a run and returns its id. The last of several tags with the same key counts."""
    run_id = uuid.uuid4().hex[:12]
    row = {"id": run_id, "name": clean_text(name, NAME_LENGTH), "state": state}
    connection.execute(insert(RUNS), {**row, "created_unix_ns": time.time_ns()})
    _add_tags(connection, run_id, tags)
    return run_id


def _add_tags(connection: Connection, run_id: str, tags: Iterable[Tag]) -> None:
    values = {clean_text(tag.key, 64): clean_text(tag.value, 200) for tag in tags}
    if values:
        rows = [{"run_id": run_id, "key": k, "value": v} for k, v in values.items()]
        connection.execute(insert(TAGS), rows)


def edit_run(connection: Connection, run_id: str, edit: RunEdit) -> bool:
    """Changes the run's name, note and tags. False if there is no such run."""
    values = {}
    if edit.name is not None:
        values["name"] = clean_text(edit.name, NAME_LENGTH)
    if edit.note is not None:
        values["note"] = clean_text(edit.note, NOTE_LENGTH)
    # A run that is being deleted gets no tags.
    locked = select(RUNS.c.id).where(RUNS.c.id == run_id).with_for_update()
    if connection.execute(locked).first() is None:
        return False
    if values:
        connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))
    if edit.tags is not None:
        connection.execute(delete(TAGS).where(TAGS.c.run_id == run_id))
        _add_tags(connection, run_id, edit.tags)
    return True


def name_unnamed(connection: Connection, run_id: str, name: str) -> None:
    """Names a run that was added without a name."""
    unnamed = update(RUNS).where(RUNS.c.id == run_id, RUNS.c.name == "")
    connection.execute(unnamed.values(name=clean_text(name, NAME_LENGTH)))


def list_runs(connection: Connection) -> tuple[RunRow, ...]:
    """All runs, newest first."""
    query = _select_runs().order_by(RUNS.c.created_unix_ns.desc(), RUNS.c.id)
    return _read_run_rows(connection, query, select(TAGS))


def find_run(connection: Connection, run_id: str) -> RunRow | None:
    """The run of this id; None if there is none."""
    of_run = _select_runs().where(RUNS.c.id == run_id)
    rows = _read_run_rows(connection, of_run, select(TAGS).where(TAGS.c.run_id == run_id))
    return rows[0] if rows else None


def set_run_state(connection: Connection, run_id: str, before: State, after: State) -> bool:
    """Changes the state; False if the run was not in the state `before`."""
    changed = update(RUNS).where(RUNS.c.id == run_id, RUNS.c.state == before).values(state=after)
    return connection.execute(changed).rowcount == 1


def can_add_files(connection: Connection, run_id: str) -> bool:
    """Whether the run accepts files; locks its state until the transaction ends."""
    state = select(RUNS.c.state).where(RUNS.c.id == run_id).with_for_update()
    return connection.execute(state).scalar() == "uploading"


def record_done(connection: Connection, run_id: str, report: Report) -> None:
    """Marks the run as done and records the metrics of its report."""
    numbers = build_headline(report)
    values = {"state": "done", "error": None, **build_columns(numbers)}
    connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))
    record_job(connection, run_id, compute_job_fingerprint(report))
    record_metrics(connection, run_id, report, numbers)


def record_job(connection: Connection, run_id: str, job: JobFingerprint | None) -> None:
    """Records the job of the run; None if it cannot be known."""
    values = {"job_key": job.key, "job_label": job.label} if job else {"job_key": ""}
    connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))


def find_run_without_job(connection: Connection) -> str | None:
    """A finished run of an earlier stepsplit, whose job was not looked for yet."""
    without = (RUNS.c.state == "done", RUNS.c.job_key.is_(None))
    return connection.execute(select(RUNS.c.id).where(*without).limit(1)).scalar()


def record_failure(connection: Connection, run_id: str, message: str) -> None:
    """Marks the run as failed with a one-line message."""
    values = {"state": "failed", "error": clean_text(message, ERROR_LENGTH)}
    connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))


def remove_run(connection: Connection, run_id: str) -> bool:
    """Deletes the run's rows; the caller then deletes its files."""
    gone = connection.execute(delete(RUNS).where(RUNS.c.id == run_id)).rowcount == 1
    if gone:
        connection.execute(insert(DELETED).values(run_id=run_id))
    return gone


def list_removed_runs(connection: Connection) -> Sequence[str]:
    """Deleted runs whose files may still exist."""
    return connection.execute(select(DELETED.c.run_id)).scalars().all()


def forget_removed_run(connection: Connection, run_id: str) -> None:
    """Records that the files of a deleted run are deleted."""
    connection.execute(delete(DELETED).where(DELETED.c.run_id == run_id))


def _select_runs() -> Select[Any]:
    job = (JOBS.c.queued_unix_ns, JOBS.c.progress, JOBS.c.progress_note)
    columns = (*RUNS.c, *job, VERDICTS.c.answer, VERDICTS.c.words)
    with_jobs = select(*columns).outerjoin(JOBS, JOBS.c.run_id == RUNS.c.id)
    return with_jobs.outerjoin(VERDICTS, VERDICTS.c.run_id == RUNS.c.id)


def _read_run_rows(
    connection: Connection, runs: Select[Any], tags: Select[Any]
) -> tuple[RunRow, ...]:
    by_run: dict[str, list[Tag]] = {}
    for tag in connection.execute(tags):
        by_run.setdefault(tag.run_id, []).append(Tag(tag.key, tag.value))
    rows = connection.execute(runs)
    return tuple(build_run_row(row, sorted(by_run.get(row.id, ()))) for row in rows)


def describe_edit(run: RunRow, edit: RunEdit) -> str:
    """The run and its changed fields, for the audit log."""
    name = [] if edit.name is None else [f"name {edit.name}"]
    note = [] if edit.note is None else [f"note {edit.note}" if edit.note else "no note"]
    pairs = " ".join(f"{tag.key}={tag.value}" for tag in edit.tags or ())
    tags = [] if edit.tags is None else [f"tags {pairs}" if pairs else "no tags"]
    return f"{run.label}: {', '.join([*name, *tags, *note])}"


def explain_no_retry(run: RunRow) -> str:
    """Why the run cannot be analyzed again."""
    if run.pending:
        return "its analysis has not ended yet"
    if run.state == "uploading":
        return "its upload is not finished"
    return "the store has only its report, not its files; upload the recording"


# A run in the list of runs, and its conversion to and from a row.

State = Literal["uploading", "queued", "running", "done", "failed"]

_SHARES = tuple(f"{bucket}_share" for bucket in BUCKETS)


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """A label of a run, such as branch = main."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class RunEdit:
    """New name, note and tags of a run; None leaves what it has. tags replace all of its tags."""

    name: str | None = None
    note: str | None = None
    tags: tuple[Tag, ...] | None = None


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list of runs. error is set if it failed; headline if it is done.

    progress (0..1) and progress_note are set during the analysis, if known. queued_unix_ns: when
    its last analysis was queued, which tells one report of the run from the next; 0 if it was
    added with its report. job is None if it is unknown.
    """

    id: str
    name: str
    created_unix_ns: int
    state: State
    error: str | None
    headline: Headline | None
    tags: tuple[Tag, ...] = ()
    progress: float | None = None
    progress_note: str | None = None
    verdict: CheckRow | None = None
    note: str = ""
    queued_unix_ns: int = 0
    job: JobFingerprint | None = None

    def has_tags(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Whether the run has all the tags, each a key and a value."""
        return {(tag.key, tag.value) for tag in self.tags} >= set(pairs)

    @property
    def job_key(self) -> str | None:
        """The key of its job; None if the job is unknown."""
        return None if self.job is None else self.job.key

    @property
    def label(self) -> str:
        """Id and name, as in the audit log."""
        return f"{self.id} {self.name}"

    @property
    def can_be_analyzed_again(self) -> bool:
        """Whether its last analysis has ended, unless it was added with its report."""
        return self.state in ("done", "failed") and self.queued_unix_ns > 0

    @property
    def pending(self) -> bool:
        """Whether its analysis is queued or running."""
        return self.state in ("queued", "running")


def build_run_row(row: Row[Any], tags: Iterable[Tag]) -> RunRow:
    """The run of a row, with the progress of its job and its check result."""
    state = cast(State, row.state)
    numbers = _read_headline(row) if state == "done" else None
    verdict = None if row.answer is None else CheckRow(row.answer, row.words)
    progress, note = (row.progress, row.progress_note) if state == "running" else (None, None)
    job = read_job(row.job_key, row.job_label)
    return RunRow(
        row.id, row.name or row.id, row.created_unix_ns, state, row.error, numbers, tuple(tags),
        progress, note, verdict, row.note, row.queued_unix_ns or 0, job,
    )  # fmt: skip


def build_columns(headline: Headline) -> dict[str, Any]:
    """The columns of a headline."""
    return {
        "world_size": headline.world_size,
        "mesh": None if headline.mesh is None else clean_text(headline.mesh, 200),
        "backend": None if headline.backend is None else clean_text(headline.backend, 100),
        "steps": headline.steps,
        "warnings": headline.warnings,
        "bubble_fraction": headline.bubble_fraction,
        "mfu": headline.mfu,
        **_build_median_columns(headline.median_step),
    }


def _build_median_columns(middle: MedianStep | None) -> dict[str, int | float]:
    if middle is None:
        return {}
    means = zip(BUCKET_COLUMNS, middle.mean.buckets_ns, strict=True)
    shares = zip(_SHARES, middle.shares, strict=True)
    return {"step_ns": middle.step_ns, **dict(means), **dict(shares)}


def _read_headline(row: Row[Any]) -> Headline:
    middle = None
    if row.step_ns is not None:
        mean = Split(*(row._mapping[name] for name in BUCKET_COLUMNS))
        middle = MedianStep(row.step_ns, mean, tuple(row._mapping[name] for name in _SHARES))
    return Headline(
        row.world_size, row.mesh, row.backend, middle, row.steps, row.warnings,
        row.bubble_fraction, row.mfu,
    )  # fmt: skip
