"""Runs in SQL and their files in a folder beside it."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from sqlalchemy import Row, insert, select, update
from sqlalchemy.engine import Engine

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.files import save
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables
from stepsplit.dashboard.store import artifacts
from stepsplit.dashboard.store.headline import Headline, Middle, headline
from stepsplit.dashboard.store.schema import RUNS, open_engine

State = Literal["uploading", "queued", "running", "done", "failed"]
_MEDIANS = tuple(f"{bucket}_ns" for bucket in BUCKETS)
_SHARES = tuple(f"{bucket}_share" for bucket in BUCKETS)
_ID = re.compile(r"[0-9a-f]{8,32}")


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the list shows it. error is told when failed; headline is there when done."""

    id: str
    name: str
    created_unix_ns: int
    state: State
    error: str | None
    headline: Headline | None

    @property
    def pending(self) -> bool:
        """Whether an analysis of it is still to come or under way."""
        return self.state in ("queued", "running")


class Store:
    """The runs of one dashboard. Threads may share it; after a fork call reopen() first."""

    def __init__(self, engine: Engine, artifact_folder: Path) -> None:
        self._engine, self._artifacts = engine, artifact_folder

    @classmethod
    def open(cls, url: str, artifact_folder: Path) -> Self:
        """The store at the SQLAlchemy URL, made where it is missing. Raises UsageError."""
        try:
            artifact_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = f"{artifact_folder}: {error.strerror}"
            raise UsageError(f"{where}; name another --artifacts") from None
        return cls(open_engine(url), artifact_folder)

    def reopen(self) -> None:
        """Forgets connections that belong to the parent process."""
        self._engine.dispose(close=False)

    def close(self) -> None:
        """Gives the connections back."""
        self._engine.dispose()

    def folder(self, run_id: str) -> Path:
        """Where the run's files are: uploads in input/, results report.json and tables/."""
        if not _ID.fullmatch(run_id):
            raise UsageError(f"no run is called {run_id!r}; take an id from the list of runs")
        return self._artifacts / run_id

    def add(self, name: str) -> str:
        """The id of a new run that waits for its files."""
        run_id = uuid.uuid4().hex[:12]
        self.folder(run_id).joinpath(artifacts.INPUT_NAME).mkdir(parents=True)
        row = {"id": run_id, "name": name, "created_unix_ns": time.time_ns(), "state": "uploading"}
        with self._engine.begin() as connection:
            connection.execute(insert(RUNS).values(row))
        return run_id

    def queue(self, run_id: str) -> bool:
        """All files are here. False where the run was not waiting for any."""
        return self._move(run_id, "uploading", "queued")

    def start(self, run_id: str) -> bool:
        """Claims a queued run for analysis: of several callers one gets True."""
        return self._move(run_id, "queued", "running")

    def finish(self, run_id: str, report: Report) -> None:
        """Records the headline of a report that was saved."""
        numbers = headline(report)
        self._set(
            run_id,
            state="done",
            error=None,
            world_size=numbers.world_size,
            mesh=numbers.mesh,
            backend=numbers.backend,
            steps=numbers.steps,
            warnings=numbers.warnings,
            **_columns(numbers.middle),
        )

    def fail(self, run_id: str, message: str) -> None:
        """Records why the run has no report, in one line."""
        self._set(run_id, state="failed", error=message)

    def save(self, run_id: str, report: Report, tables: Tables) -> None:
        """Writes the results of a run beside its uploads."""
        save(self.folder(run_id), report, tables)

    def import_report(self, name: str, report: Report, tables: Tables) -> str:
        """The id of a new run that is analyzed already."""
        run_id = self.add(name)
        self.save(run_id, report, tables)
        self.finish(run_id, report)
        return run_id

    def report(self, run_id: str) -> Report:
        """The report of a finished run. Raises DataError."""
        return artifacts.load_report(self.folder(run_id))

    def tables(self, run_id: str) -> Tables | None:
        """The tables of a finished run, None where they are gone."""
        return artifacts.load_tables(self.folder(run_id))

    def runs(self) -> tuple[RunRow, ...]:
        """All runs, newest first."""
        query = select(RUNS).order_by(RUNS.c.created_unix_ns.desc(), RUNS.c.id)
        with self._engine.connect() as connection:
            return tuple(_run(row) for row in connection.execute(query))

    def run(self, run_id: str) -> RunRow | None:
        """The run of this id, None where there is none."""
        with self._engine.connect() as connection:
            row = connection.execute(select(RUNS).where(RUNS.c.id == run_id)).one_or_none()
        return None if row is None else _run(row)

    def _move(self, run_id: str, before: State, after: State) -> bool:
        change = update(RUNS).where(RUNS.c.id == run_id, RUNS.c.state == before)
        with self._engine.begin() as connection:
            return connection.execute(change.values(state=after)).rowcount == 1

    def _set(self, run_id: str, **values: Any) -> None:
        with self._engine.begin() as connection:
            connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))


def _run(row: Row[Any]) -> RunRow:
    state = cast(State, row.state)
    numbers = _headline(row) if state == "done" else None
    return RunRow(row.id, row.name, row.created_unix_ns, state, row.error, numbers)


def _columns(middle: Middle | None) -> dict[str, int | float]:
    if middle is None:
        return {}
    medians = zip(_MEDIANS, middle.medians.buckets_ns, strict=True)
    shares = zip(_SHARES, middle.shares, strict=True)
    return {"step_ns": middle.step_ns, **dict(medians), **dict(shares)}


def _headline(row: Row[Any]) -> Headline:
    middle = None
    if row.step_ns is not None:
        medians = Split(*(row._mapping[name] for name in _MEDIANS))
        middle = Middle(row.step_ns, medians, tuple(row._mapping[name] for name in _SHARES))
    return Headline(row.world_size, row.mesh, row.backend, middle, row.steps, row.warnings)
