"""The rows of runs: made, read, renamed, moved from state to state, removed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Select, delete, insert, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.store.headline import headline
from stepsplit.dashboard.store.numbers import record_numbers
from stepsplit.dashboard.store.rows import RunRow, State, Tag, columns, run_row
from stepsplit.dashboard.store.schema import DELETED, JOBS, RUNS, TAGS, VERDICTS
from stepsplit.dashboard.store.text import plain

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
    return _rows(connection, query, select(TAGS))


def find_run(connection: Connection, run_id: str) -> RunRow | None:
    """The run of this id, None where there is none."""
    of_run = _whole().where(RUNS.c.id == run_id)
    found = _rows(connection, of_run, select(TAGS).where(TAGS.c.run_id == run_id))
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


def _rows(connection: Connection, runs: Select[Any], tags: Select[Any]) -> tuple[RunRow, ...]:
    by_run: dict[str, list[Tag]] = {}
    for tag in connection.execute(tags):
        by_run.setdefault(tag.run_id, []).append(Tag(tag.key, tag.value))
    rows = connection.execute(runs)
    return tuple(run_row(row, sorted(by_run.get(row.id, ()))) for row in rows)
