"""Runs in SQL, their files beside: what a dashboard is of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.io import TABLES_NAME, read_report
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables, read_tables
from stepsplit.dashboard.store import runs
from stepsplit.dashboard.store.artifacts import Artifacts, open_artifacts
from stepsplit.dashboard.store.counts import Counts, count
from stepsplit.dashboard.store.database import Database, open_database
from stepsplit.dashboard.store.files import Files, all_complete
from stepsplit.dashboard.store.jobs import Jobs, add_job
from stepsplit.dashboard.store.numbers import Numbers
from stepsplit.dashboard.store.rows import RunRow, Tag
from stepsplit.dashboard.store.tokens import Tokens
from stepsplit.dashboard.store.verdicts import Verdicts

__all__ = ["RunRow", "Store", "Tag"]

LOCAL = Path(".stepsplit") / "local"
_ID = re.compile(r"[0-9a-f]{8,32}")


class Store:
    """The runs of one dashboard. Threads may share it; after a fork call reopen() first."""

    def __init__(self, url: str, database: Database, artifacts: Artifacts) -> None:
        self.url, self.artifacts, self._database = url, artifacts, database
        self.jobs, self.files = Jobs(database), Files(database)
        self.tokens, self.numbers = Tokens(database), Numbers(database)
        self.verdicts = Verdicts(database)

    @classmethod
    def open(cls, url: str, artifacts: str | Path, local: Path = LOCAL) -> Self:
        """The store at the SQLAlchemy URL, made or brought up to date, with its files in the folder
        or beyond the URL; copies of files from beyond are in local. Raises UsageError."""
        opened = open_artifacts(artifacts, local)
        return cls(url, open_database(url), opened)

    def reopen(self) -> None:
        """Forgets connections that belong to the parent process."""
        self._database.reopen()

    def close(self) -> None:
        """Gives the connections back."""
        self._database.close()

    def ready(self) -> bool:
        """Whether the database answers."""
        with suppress(SQLAlchemyError), self._database.reading() as connection:
            connection.exec_driver_sql("SELECT 1")
            return True
        return False

    def folder(self, run_id: str) -> Path:
        """Where the run's files are on this machine. Raises UsageError for what is no id."""
        if not _ID.fullmatch(run_id):
            raise UsageError(f"no run is called {run_id!r}; take an id from the list of runs")
        return self.artifacts.folder(run_id)

    def add(self, name: str, tags: Iterable[Tag] = ()) -> str:
        """The id of a new run that waits for its files."""
        with self._database.writing() as connection:
            return runs.add_run(connection, name, tags, "uploading")

    def queue(self, run_id: str) -> bool:
        """All files are here: its analysis may begin. False where the run did not wait for any, has
        none, or still waits for the rest of one."""
        with self._database.writing() as connection:
            ready = runs.waits_for_files(connection, run_id) and all_complete(connection, run_id)
            if ready:
                runs.move_run(connection, run_id, "uploading", "queued")
                add_job(connection, run_id)
        return ready

    def import_report(
        self, name: str, report: Report, tables: Tables, tags: Iterable[Tag] = ()
    ) -> str:
        """The id of a new run that is analyzed already."""
        run_id = self.add(name, tags)
        try:
            self.artifacts.save(run_id, report, tables)
        except BaseException:
            self.delete(run_id)
            raise
        with self._database.writing() as connection:
            runs.run_done(connection, run_id, report)
        return run_id

    def runs(self) -> tuple[RunRow, ...]:
        """All runs, newest first."""
        with self._database.reading() as connection:
            return runs.list_runs(connection)

    def run(self, run_id: str) -> RunRow | None:
        """The run of this id, None where there is none."""
        with self._database.reading() as connection:
            return runs.find_run(connection, run_id)

    def report(self, run_id: str) -> Report:
        """The report of a finished run. Raises DataError."""
        self.folder(run_id)
        return read_report(self.artifacts.results(run_id))

    def tables(self, run_id: str) -> Tables | None:
        """The tables of a finished run; None where someone has removed them to save space."""
        self.folder(run_id)
        try:
            return read_tables(self.artifacts.results(run_id) / TABLES_NAME)
        except FileNotFoundError:
            return None

    def rename(self, run_id: str, name: str) -> bool:
        """False where there is no such run."""
        with self._database.writing() as connection:
            return runs.rename_run(connection, run_id, name)

    def delete(self, run_id: str) -> bool:
        """Removes the run with all its files. False where there is no such run."""
        with self._database.writing() as connection:
            removed = runs.remove_run(connection, run_id)
        if removed:
            self._remove_files(run_id)
        return removed

    def sweep(self) -> None:
        """Removes the files of removed runs that an earlier process did not come to."""
        with self._database.reading() as connection:
            left = runs.removed_runs(connection)
        for run_id in left:
            self._remove_files(run_id)

    def counts(self) -> Counts:
        """How much of everything there is."""
        with self._database.reading() as connection:
            return count(connection)

    def _remove_files(self, run_id: str) -> None:
        self.artifacts.remove(run_id)
        with self._database.writing() as connection:
            runs.files_are_gone(connection, run_id)
