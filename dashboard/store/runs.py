"""The rows of runs in SQL."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, cast

from sqlalchemy import Row, Select, delete, insert, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.diagnose.hang.result import Hang
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.dashboard.store.ids import clean_text
from stepsplit.dashboard.store.metric_tables import record_metrics
from stepsplit.dashboard.store.metrics import (
    BUCKET_COLUMNS,
    CheckRow,
    FirstFinding,
    Headline,
    MedianStep,
    build_headline,
    compute_job_fingerprint,
    read_job,
)
from stepsplit.dashboard.store.run_row import RunEdit, RunRow, State, Tag
from stepsplit.dashboard.store.schema import DELETED, JOBS, RUNS, TAGS, VERDICTS

NAME_LENGTH, NOTE_LENGTH, ERROR_LENGTH, FINDING_LENGTH = 200, 1_000, 2_000, 1_000


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


_MOST_LABELS = 16
"""So many names of a job become tags: as many as a recording has, whatever a report says."""


def record_done(connection: Connection, run_id: str, report: Report) -> None:
    """Marks the run as done and records the metrics of its report. What else the job is called,
    such as SLURM_JOB_ID, becomes tags where the run has none of that name."""
    numbers = build_headline(report)
    # The columns of a headline.
    values: dict[str, Any] = {
        "state": "done",
        "error": None,
        "roles": None,
        "world_size": numbers.world_size,
        "mesh": None if numbers.mesh is None else clean_text(numbers.mesh, 200),
        "backend": None if numbers.backend is None else clean_text(numbers.backend, 100),
        "steps": numbers.steps,
        "warnings": numbers.warnings,
        "bubble_fraction": numbers.bubble_fraction,
        "mfu": numbers.mfu,
    }
    if (middle := numbers.median_step) is not None:
        values["step_ns"] = middle.step_ns
        values |= zip(BUCKET_COLUMNS, middle.mean.buckets_ns, strict=True)
        values |= zip(_SHARES, middle.shares, strict=True)
    connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))
    own = select(TAGS.c.key).where(TAGS.c.run_id == run_id)
    known = set(connection.execute(own).scalars())
    labels = [Tag(one.name, one.value) for one in (report.run.labels or ())[:_MOST_LABELS]]
    _add_tags(connection, run_id, [tag for tag in labels if clean_text(tag.key, 64) not in known])
    record_known(connection, run_id, report)
    record_metrics(connection, run_id, report, numbers)


def record_hang(connection: Connection, run_id: str, hang: Hang) -> None:
    """Marks the run as done; what the job waits for is in place of an error, and it has no
    metrics."""
    words = clean_text(hang.verdict or hang.condition, ERROR_LENGTH)
    world_size = len(hang.ranks) + len(hang.no_dump)
    _record_without_report(connection, run_id, words, world_size, None)


def record_roles(connection: Connection, run_id: str, job: RoleJob) -> None:
    """Marks the run as done; what to look at first is in place of an error. It has no metrics:
    those of its roles are not those of a program."""
    words = clean_text(job.first_line, ERROR_LENGTH)
    world_size = sum(len(role.ranks) for role in job.roles)
    roles = ",".join(role.name for role in job.roles)
    _record_without_report(connection, run_id, words, world_size, roles)


def _record_without_report(
    connection: Connection, run_id: str, words: str, world_size: int, roles: str | None
) -> None:
    values = {"state": "done", "error": words, "world_size": world_size, "roles": roles}
    # Of an earlier analysis, which had a report.
    values |= dict.fromkeys(("step_ns", "mesh", "backend", "steps", "warnings", "mfu"))
    connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))
    record_known(connection, run_id, None)


def record_known(connection: Connection, run_id: str, report: Report | None) -> None:
    """Records the job and the first finding of the run; without a report both are unknown."""
    job = None if report is None else compute_job_fingerprint(report)
    first = None if report is None else build_headline(report).first_finding
    values = {
        "job_key": job.key if job else "",
        "job_label": job.label if job else None,
        "finding": clean_text(first.words, FINDING_LENGTH) if first else "",
        "finding_ns": first.gain_ns if first else None,
    }
    connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))


def find_incomplete_run(connection: Connection) -> str | None:
    """A finished run of an earlier stepsplit, whose job or first finding was not looked for yet."""
    missing = RUNS.c.job_key.is_(None) | RUNS.c.finding.is_(None)
    wanted = select(RUNS.c.id).where(RUNS.c.state == "done", missing)
    return connection.execute(wanted.limit(1)).scalar()


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
        tuple(row.roles.split(",")) if row.roles else (),
    )  # fmt: skip


_SHARES = tuple(f"{bucket}_share" for bucket in BUCKETS)


def _read_headline(row: Row[Any]) -> Headline:
    middle = None
    if row.step_ns is not None:
        mean = Split(*(row._mapping[name] for name in BUCKET_COLUMNS))
        middle = MedianStep(row.step_ns, mean, tuple(row._mapping[name] for name in _SHARES))
    first = FirstFinding(row.finding, row.finding_ns) if row.finding else None
    return Headline(
        row.world_size, row.mesh, row.backend, middle, row.steps, row.warnings,
        row.bubble_fraction, row.mfu, first,
    )  # fmt: skip
