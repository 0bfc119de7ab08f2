"""The store of runs: SQL rows and their files."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from msgspec import structs
from sqlalchemy import ColumnElement, Row, Select, Table, delete, func, insert, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from stepsplit.analyzer.diagnose.hang.result import HANG_NAME, Hang, from_json as hang_from_json
from stepsplit.analyzer.errors import DataError, StepsplitError
from stepsplit.analyzer.model.config_decode import format_toml
from stepsplit.analyzer.report.io import TABLES_NAME, load_tables, read_report
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.roles import ROLES_NAME, RoleJob, roles_from_json
from stepsplit.analyzer.report.tables import Tables
from stepsplit.collectors.safe_io.atomic_file import write_whole
from stepsplit.dashboard.store import runs
from stepsplit.dashboard.store.alerts import AlertStore
from stepsplit.dashboard.store.analysis_queue import AnalysisQueue, add_job, queue_again
from stepsplit.dashboard.store.artifacts import (
    INPUT_NAME,
    Artifacts,
    RemoteArtifacts,
    open_artifacts,
    open_remote,
)
from stepsplit.dashboard.store.audit import AuditLog
from stepsplit.dashboard.store.database import Database, open_database
from stepsplit.dashboard.store.ids import is_run_id, split_role_id
from stepsplit.dashboard.store.job_files import JOB_BYTES, JOB_FILE, check_job_text, choose_job_path
from stepsplit.dashboard.store.logins import LoginFailures, Sessions, Tokens
from stepsplit.dashboard.store.metric_tables import CheckResults, MetricStore
from stepsplit.dashboard.store.run_row import RunEdit, RunRow, Tag
from stepsplit.dashboard.store.schema import FILES, JOBS, RUNS
from stepsplit.dashboard.store.watch import WatchStore

# Runs in SQL and their files.

LOCAL = Path(".stepsplit") / "local"


class Store:
    """The runs of one dashboard. Thread-safe; call reconnect() after a fork."""

    def __init__(self, url: str, database: Database, artifacts: Artifacts) -> None:
        self.url, self.artifacts, self._database = url, artifacts, database
        self.jobs, self.files = AnalysisQueue(database), RunFiles(database)
        self.tokens, self.numbers = Tokens(database), MetricStore(database)
        self.verdicts, self.login_failures = CheckResults(database), LoginFailures(database)
        self.sessions, self.audit = Sessions(database), AuditLog(database)
        self.watches, self.alerts = WatchStore(database), AlertStore(database)

    @classmethod
    def open(cls, url: str, artifacts: str | Path, local: Path = LOCAL) -> Self:
        """Opens the store, creating or migrating its database.

        url: SQLAlchemy URL of the database; artifacts: folder or fsspec URL of the files; local:
        cache for remote files. Raises UsageError.
        """
        opened = open_artifacts(artifacts, local)
        return cls(url, open_database(url), opened)

    def reconnect(self) -> None:
        """Drops connections that belong to the parent process."""
        self._database.reconnect()
        if isinstance(self.artifacts, RemoteArtifacts):
            self.artifacts = open_remote(self.artifacts.url, self.artifacts.local)

    def close(self) -> None:
        """Closes the connections."""
        self._database.close()

    def is_ready(self) -> bool:
        """Whether the database responds."""
        with suppress(SQLAlchemyError), self._database.begin_read() as connection:
            connection.exec_driver_sql("SELECT 1")
            return True
        return False

    def find_folder(self, run_id: str) -> Path:
        """The local folder of the run's files. Raises UsageError for an invalid id."""
        return self.artifacts.find_folder(run_id)

    def add(self, name: str, tags: Iterable[Tag] = ()) -> str:
        """Adds a run that accepts files, and returns its id."""
        with self._database.begin_write() as connection:
            return runs.add_run(connection, name, tags, "uploading")

    def queue(self, run_id: str, name: str = "") -> bool:
        """Queues the analysis after the upload; name is for a run that has none. False if the run
        is not being uploaded, or has no files or an incomplete one."""
        with self._database.begin_write() as connection:
            # Which locks the run: no file is begun between this look and the change of its state.
            is_complete = runs.can_add_files(connection, run_id) and has_all_files(
                connection, run_id
            )
            if is_complete:
                runs.name_unnamed(connection, run_id, name)
                runs.set_run_state(connection, run_id, "uploading", "queued")
                add_job(connection, run_id)
        return is_complete

    def edit(self, run_id: str, edit: RunEdit) -> bool:
        """Changes the run's name, note and tags. False if it does not exist."""
        with self._database.begin_write() as connection:
            return runs.edit_run(connection, run_id, edit)

    def analyze_again(self, run_id: str) -> bool:
        """Queues another analysis of the run's files. False if its last one has not ended, or if
        the run has no files, as an imported report."""
        with self._database.begin_write() as connection:
            return _queue_again(connection, run_id)

    def attach_job(self, run_id: str, text: bytes) -> bool:
        """Adds a job.toml to the run's files, or replaces it, and queues another analysis. False as
        for analyze_again. Raises DataError if it is not a job.toml."""
        check_job_text(text)
        draft = self.find_folder(run_id) / f"{JOB_FILE}.{uuid.uuid4().hex}"
        with self._database.begin_write() as connection:
            is_queued = _queue_again(connection, run_id)
            if is_queued:
                write_whole(draft, text)
                # Before the commit: the worker that takes the job finds the file.
                self.artifacts.keep_upload(run_id, JOB_FILE, draft)
                self.artifacts.save_file(run_id, JOB_FILE, text)
                _write_file_row(connection, run_id, FileRow(JOB_FILE, len(text), True))
        return is_queued

    def read_job(self, run_id: str) -> bytes | None:
        """The job.toml that the run's newest analysis used or inferred; None if it is unknown.

        For runs of an earlier version it is that of their report or their upload.
        """
        self.find_folder(run_id)
        kept = self.artifacts.read_file(run_id, JOB_FILE)
        return kept if kept is not None else self._find_earlier_job(run_id)

    def _find_earlier_job(self, run_id: str) -> bytes | None:
        with suppress(DataError):
            job = self.load_report(run_id).job
            if job is not None:
                return format_toml(structs.asdict(job)).encode()
        rows = self.files.list_files(run_id)
        path = choose_job_path([row.path for row in rows if row.received_bytes <= JOB_BYTES])
        return None if path is None else self.artifacts.read_file(run_id, f"{INPUT_NAME}/{path}")

    def import_report(
        self, name: str, report: Report, tables: Tables, tags: Iterable[Tag] = ()
    ) -> str:
        """Adds a run that is already analyzed, and returns its id."""
        run_id = self.add(name, tags)
        try:
            self.artifacts.save(run_id, report, tables)
        except BaseException:
            self.delete(run_id)
            raise
        with self._database.begin_write() as connection:
            runs.record_done(connection, run_id, report)
        return run_id

    def list_runs(self) -> tuple[RunRow, ...]:
        """All runs, newest first."""
        with self._database.begin_read() as connection:
            return runs.list_runs(connection)

    def complete_next_run(self) -> bool:
        """Records job and first finding of one run that an earlier stepsplit stored. False if all
        are known."""
        with self._database.begin_read() as connection:
            run_id = runs.find_incomplete_run(connection)
        if run_id is None:
            return False
        report = None
        with suppress(StepsplitError, OSError):
            report = self.load_report(run_id)
        with self._database.begin_write() as connection:
            # Also without a readable report: the run is then marked as looked at, or it would come
            # again at once.
            runs.record_known(connection, run_id, report)
        return True

    def find_run(self, run_id: str) -> RunRow | None:
        """The run of this id; None if there is none."""
        # Not all databases accept any text.
        if not is_run_id(run_id):
            return None
        with self._database.begin_read() as connection:
            return runs.find_run(connection, run_id)

    def find_run_or_role(self, run_id: str) -> RunRow | None:
        """The run of this id, or the role of one by its number, as in "ID.0"; None if there is
        none. A role can only be read."""
        owner, number = split_role_id(run_id)
        run = self.find_run(owner)
        return run if run is None or number is None else run.name_role(number)

    def load_roles(self, run_id: str) -> RoleJob:
        """What the roles of a run do. Raises DataError."""
        text = self.artifacts.read_file(run_id, ROLES_NAME)
        if text is None:
            raise DataError(ROLES_NAME, "missing", "analyze the run again")
        return roles_from_json(text)

    def load_hang(self, run_id: str) -> Hang:
        """What the Flight Recorder dumps of a run show. Raises DataError."""
        text = self.artifacts.read_file(run_id, HANG_NAME)
        if text is None:
            raise DataError(HANG_NAME, "missing", "analyze the run again")
        return hang_from_json(text)

    def load_report(self, run_id: str) -> Report:
        """The report of a finished run. Raises DataError."""
        self.find_folder(run_id)
        return read_report(self.artifacts.fetch_results(run_id))

    def load_tables(self, run_id: str) -> Tables | None:
        """The tables of a finished run; None if they were deleted to save space. Raises
        DataError."""
        self.find_folder(run_id)
        folder = self.artifacts.fetch_results(run_id) / TABLES_NAME
        return load_tables(folder) if any(folder.glob("*.parquet")) else None

    def delete(self, run_id: str) -> bool:
        """Deletes the run with its files. False if it does not exist."""
        with self._database.begin_write() as connection:
            # First the rows: a run whose files are half deleted is in no list, and `sweep` finds
            # the rest.
            removed = runs.remove_run(connection, run_id)
        if removed:
            self._remove_files(run_id)
        return removed

    def sweep(self) -> None:
        """Deletes left-over files of deleted runs."""
        with self._database.begin_read() as connection:
            run_ids = runs.list_removed_runs(connection)
        for run_id in run_ids:
            self._remove_files(run_id)

    def count_contents(self) -> StoreCounts:
        """The counts for monitoring."""
        with self._database.begin_read() as connection:
            # Current counts of the store.
            oldest = select(func.min(JOBS.c.queued_unix_ns)).where(JOBS.c.state == "queued")
            queued = connection.execute(oldest).scalar()
            size = select(func.coalesce(func.sum(FILES.c.received_bytes), 0))
            return StoreCounts(
                _count_by_state(connection, RUNS, RUNS.c.state),
                _count_by_state(connection, JOBS, JOBS.c.state),
                0.0 if queued is None else max(0, time.time_ns() - queued) / 1e9,
                int(connection.execute(size).scalar_one()),
            )

    def _remove_files(self, run_id: str) -> None:
        self.artifacts.remove(run_id)
        with self._database.begin_write() as connection:
            runs.forget_removed_run(connection, run_id)


# State of each uploaded file, from which an upload resumes.


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of an upload: bytes on disk, and whether the file is complete."""

    path: str
    received_bytes: int
    complete: bool


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Total size of a run's upload."""

    files: int
    bytes: int


class RunFiles:
    """The files of uploads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_files(self, run_id: str) -> tuple[FileRow, ...]:
        """The files of the run, sorted by path."""
        query = _select_files(run_id).order_by(FILES.c.path)
        with self._database.begin_read() as connection:
            return tuple(_read_file_row(row) for row in connection.execute(query))

    def find_file(self, run_id: str, path: str) -> FileRow | None:
        """The file; None if it is unknown."""
        with self._database.begin_read() as connection:
            row = connection.execute(
                _select_files(run_id).where(FILES.c.path == path)
            ).one_or_none()
        return None if row is None else _read_file_row(row)

    def sum_size(self, run_id: str) -> StoredSize:
        """Total size of the run's upload."""
        counted = select(func.count(), func.coalesce(func.sum(FILES.c.received_bytes), 0))
        with self._database.begin_read() as connection:
            files, size = connection.execute(counted.where(FILES.c.run_id == run_id)).one()
        return StoredSize(int(files), int(size))

    def begin_upload(self, run_id: str, row: FileRow) -> bool:
        """Records that an upload to the file starts. False if the run accepts no more files."""
        with self._database.begin_write() as connection:
            if not runs.can_add_files(connection, run_id):
                return False
            _write_file_row(connection, run_id, row)
        return True

    def write(self, run_id: str, row: FileRow) -> None:
        """Records the number of bytes on disk."""
        with self._database.begin_write() as connection:
            _write_file_row(connection, run_id, row)

    def forget(self, run_id: str, path: str) -> None:
        """Deletes the file's record."""
        of_file = (FILES.c.run_id == run_id, FILES.c.path == path)
        with self._database.begin_write() as connection:
            connection.execute(delete(FILES).where(*of_file))


def has_all_files(connection: Connection, run_id: str) -> bool:
    """Whether the run has files and all of them are complete."""
    of_run = select(FILES.c.complete).where(FILES.c.run_id == run_id).distinct()
    return list(connection.execute(of_run).scalars()) == [True]


def _queue_again(connection: Connection, run_id: str) -> bool:
    return has_all_files(connection, run_id) and queue_again(connection, run_id)


def _write_file_row(connection: Connection, run_id: str, row: FileRow) -> None:
    values = {"received_bytes": row.received_bytes, "complete": row.complete}
    of_file = update(FILES).where(FILES.c.run_id == run_id, FILES.c.path == row.path)
    if not connection.execute(of_file.values(values)).rowcount:
        connection.execute(insert(FILES).values(run_id=run_id, path=row.path, **values))


def _read_file_row(row: Row[tuple[str, int, bool]]) -> FileRow:
    return FileRow(row.path, row.received_bytes, row.complete)


def _select_files(run_id: str) -> Select[tuple[str, int, bool]]:
    columns = (FILES.c.path, FILES.c.received_bytes, FILES.c.complete)
    return select(*columns).where(FILES.c.run_id == run_id)


# Counts of a store, for monitoring.


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Runs and jobs by state, waiting time of the oldest queued job (0 without one), and total
    size of stored uploads."""

    runs: Mapping[str, int]
    jobs: Mapping[str, int]
    oldest_queued_s: float
    upload_bytes: int


def _count_by_state(
    connection: Connection, table: Table, state: ColumnElement[str]
) -> dict[str, int]:
    query = select(state, func.count()).select_from(table).group_by(state)
    return {name: int(number) for name, number in connection.execute(query)}
