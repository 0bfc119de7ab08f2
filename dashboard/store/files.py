"""What is held of each uploaded file: the truth that an upload goes on from."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Row, Select, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.runs import waits_for_files
from stepsplit.dashboard.store.schema import FILES


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of an upload: so many bytes are on disk for good, and whether that is all of it."""

    path: str
    received_bytes: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Held:
    """What a run's upload holds in all."""

    files: int
    bytes: int


class Files:
    """The files of uploads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, run_id: str) -> tuple[FileRow, ...]:
        """The files of the run by path."""
        query = _rows(run_id).order_by(FILES.c.path)
        with self._database.reading() as connection:
            return tuple(_file(row) for row in connection.execute(query))

    def one(self, run_id: str, path: str) -> FileRow | None:
        """The file, None where nothing is known of it."""
        with self._database.reading() as connection:
            row = connection.execute(_rows(run_id).where(FILES.c.path == path)).one_or_none()
        return None if row is None else _file(row)

    def held(self, run_id: str) -> Held:
        """How much the run's upload holds."""
        counted = select(func.count(), func.coalesce(func.sum(FILES.c.received_bytes), 0))
        with self._database.reading() as connection:
            files, size = connection.execute(counted.where(FILES.c.run_id == run_id)).one()
        return Held(int(files), int(size))

    def begin(self, run_id: str, row: FileRow) -> bool:
        """Records that more of the file is coming. False where the run takes no more files."""
        with self._database.writing() as connection:
            if not waits_for_files(connection, run_id):
                return False
            _write(connection, run_id, row)
        return True

    def write(self, run_id: str, row: FileRow) -> None:
        """Records how much of the file is on disk."""
        with self._database.writing() as connection:
            _write(connection, run_id, row)

    def forget(self, run_id: str, path: str) -> None:
        """Nothing of the file is held any more."""
        of_file = (FILES.c.run_id == run_id, FILES.c.path == path)
        with self._database.writing() as connection:
            connection.execute(delete(FILES).where(*of_file))


def all_complete(connection: Connection, run_id: str) -> bool:
    """Whether the run has files, and none of them is still to be sent."""
    of_run = select(FILES.c.complete).where(FILES.c.run_id == run_id).distinct()
    return list(connection.execute(of_run).scalars()) == [True]


def _write(connection: Connection, run_id: str, row: FileRow) -> None:
    values = {"received_bytes": row.received_bytes, "complete": row.complete}
    of_file = update(FILES).where(FILES.c.run_id == run_id, FILES.c.path == row.path)
    if not connection.execute(of_file.values(values)).rowcount:
        connection.execute(insert(FILES).values(run_id=run_id, path=row.path, **values))


def _file(row: Row[tuple[str, int, bool]]) -> FileRow:
    return FileRow(row.path, row.received_bytes, row.complete)


def _rows(run_id: str) -> Select[tuple[str, int, bool]]:
    columns = (FILES.c.path, FILES.c.received_bytes, FILES.c.complete)
    return select(*columns).where(FILES.c.run_id == run_id)
