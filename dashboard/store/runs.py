"""Rows of runs: created, read, renamed, moved between states, removed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import Row, Select, delete, insert, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.store.database import DELETED, JOBS, RUNS, TAGS, VERDICTS, plain
from stepsplit.dashboard.store.metrics import Headline, Middle, VerdictRow, headline, record_numbers

# The rows of runs: made, read, renamed, moved from state to state, removed.

NAME_LENGTH, ERROR_LENGTH = 200, 2_000


def add_run(connection: Connection, name: str, tags: Iterable[Tag], state: State) -> str:
    """The id of a new run. Of tags with one key the last counts."""
    run_id = uuid.uuid4().hex[:12]
    row = {"id": run_id, "name": plain(name, NAME_LENGTH), "state": state}
    connection.execute(insert(RUNS), {**row, "created_unix_ns": time.time_ns()})
    values = {plain(tag.key, 64): plain(tag.value, 200) for tag in tags}
    if values:
        rows = [{"run_id": run_id, "key": k, "value": v} for k, v in values.items()]
        connection.execute(insert(TAGS), rows)
    return run_id


def list_runs(connection: Connection) -> tuple[RunRow, ...]:
    """All runs, newest first."""
    query = _whole().order_by(RUNS.c.created_unix_ns.desc(), RUNS.c.id)
    return _run_rows(connection, query, select(TAGS))


def find_run(connection: Connection, run_id: str) -> RunRow | None:
    """The run of this id, None where there is none."""
    of_run = _whole().where(RUNS.c.id == run_id)
    found = _run_rows(connection, of_run, select(TAGS).where(TAGS.c.run_id == run_id))
    return found[0] if found else None


def move_run(connection: Connection, run_id: str, before: State, after: State) -> bool:
    """Changes the state; False where the run was in another."""
    changed = update(RUNS).where(RUNS.c.id == run_id, RUNS.c.state == before).values(state=after)
    return connection.execute(changed).rowcount == 1


def waits_for_files(connection: Connection, run_id: str) -> bool:
    """Whether the run takes files; that stays so until the transaction ends."""
    state = select(RUNS.c.state).where(RUNS.c.id == run_id).with_for_update()
    return connection.execute(state).scalar() == "uploading"


def rename_run(connection: Connection, run_id: str, name: str) -> bool:
    """False where there is no such run."""
    changed = update(RUNS).where(RUNS.c.id == run_id).values(name=plain(name, NAME_LENGTH))
    return connection.execute(changed).rowcount == 1


def run_done(connection: Connection, run_id: str, report: Report) -> None:
    """Records the numbers of the run's report, which is kept elsewhere."""
    numbers = headline(report)
    values = {"state": "done", "error": None, **columns(numbers)}
    connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))
    record_numbers(connection, run_id, report, numbers)


def run_failed(connection: Connection, run_id: str, message: str) -> None:
    """Records why the run has no report, in one line."""
    values = {"state": "failed", "error": plain(message, ERROR_LENGTH)}
    connection.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))


def remove_run(connection: Connection, run_id: str) -> bool:
    """Removes the run with all that is known of it; its files are then to be removed."""
    gone = connection.execute(delete(RUNS).where(RUNS.c.id == run_id)).rowcount == 1
    if gone:
        connection.execute(insert(DELETED).values(run_id=run_id))
    return gone


def removed_runs(connection: Connection) -> Sequence[str]:
    """Runs whose files may still be there."""
    return connection.execute(select(DELETED.c.run_id)).scalars().all()


def files_are_gone(connection: Connection, run_id: str) -> None:
    """Forgets a removed run for good."""
    connection.execute(delete(DELETED).where(DELETED.c.run_id == run_id))


def _whole() -> Select[Any]:
    columns = (*RUNS.c, JOBS.c.progress, JOBS.c.progress_note, VERDICTS.c.answer, VERDICTS.c.words)
    with_jobs = select(*columns).outerjoin(JOBS, JOBS.c.run_id == RUNS.c.id)
    return with_jobs.outerjoin(VERDICTS, VERDICTS.c.run_id == RUNS.c.id)


def _run_rows(connection: Connection, runs: Select[Any], tags: Select[Any]) -> tuple[RunRow, ...]:
    by_run: dict[str, list[Tag]] = {}
    for tag in connection.execute(tags):
        by_run.setdefault(tag.run_id, []).append(Tag(tag.key, tag.value))
    rows = connection.execute(runs)
    return tuple(run_row(row, sorted(by_run.get(row.id, ()))) for row in rows)


# A run as the list of runs shows it, and how it becomes a row and comes back.

State = Literal["uploading", "queued", "running", "done", "failed"]

_MEDIANS = tuple(f"{bucket}_ns" for bucket in BUCKETS)

_SHARES = tuple(f"{bucket}_share" for bucket in BUCKETS)


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """What its uploader calls a run by, such as branch = main."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the list shows it. error is told when failed; headline is there when done.

    progress (0..1) and its note, what is being done, are there while it is analyzed, where known.
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
    verdict: VerdictRow | None = None

    @property
    def pending(self) -> bool:
        """Whether an analysis of it is still to come or under way."""
        return self.state in ("queued", "running")


def run_row(row: Row[Any], tags: Iterable[Tag]) -> RunRow:
    """The run of a row of runs with its job's progress and its verdict."""
    state = cast(State, row.state)
    numbers = _headline(row) if state == "done" else None
    verdict = None if row.answer is None else VerdictRow(row.answer, row.words)
    progress, note = (row.progress, row.progress_note) if state == "running" else (None, None)
    return RunRow(
        row.id, row.name, row.created_unix_ns, state, row.error, numbers, tuple(tags),
        progress, note, verdict,
    )  # fmt: skip


def columns(numbers: Headline) -> dict[str, Any]:
    """The columns that a headline fills."""
    return {
        "world_size": numbers.world_size,
        "mesh": None if numbers.mesh is None else plain(numbers.mesh, 200),
        "backend": None if numbers.backend is None else plain(numbers.backend, 100),
        "steps": numbers.steps,
        "warnings": numbers.warnings,
        "bubble_fraction": numbers.bubble_fraction,
        "mfu": numbers.mfu,
        **_middle_columns(numbers.middle),
    }


def _middle_columns(middle: Middle | None) -> dict[str, int | float]:
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
    return Headline(
        row.world_size, row.mesh, row.backend, middle, row.steps, row.warnings,
        row.bubble_fraction, row.mfu,
    )  # fmt: skip
