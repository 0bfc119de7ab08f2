"""An Nsight Systems SQLite export, open to read: its tables as columns, whatever its version."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.unpack import is_packed, unpacked
from stepsplit.analyzer.trace import Int64

EXPORT_AGAIN = "export it again with nsys export --type sqlite"
MOST_TEXT = 4096
"""How much is read of a name or a payload."""
_AT_ONCE = 30_000


@dataclass(frozen=True, slots=True)
class Database:
    """An open export. A table that it lacks reads as empty, a column or a NULL as -1."""

    where: str
    connection: sqlite3.Connection
    columns: Mapping[str, frozenset[str]]

    def has(self, table: str, column: str) -> bool:
        """Whether the export has that column."""
        return column in self.columns.get(table, ())

    def ints(self, table: str, columns: tuple[str, ...], condition: str = "1") -> Int64:
        """The rows of the table, shape (rows, columns)."""
        terms = [
            f"IFNULL(CAST({name} AS INTEGER), -1)" if self.has(table, name) else "-1"
            for name in columns
        ]
        rows = self._rows(table, ", ".join(terms), condition)
        return np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, len(columns))

    def texts(
        self, table: str, column: str, condition: str = "1", most: int = MOST_TEXT
    ) -> Iterator[str]:
        """One column of the table as text, cut after so many characters; "" for NULL."""
        if self.has(table, column):
            term = f"IFNULL(SUBSTR(CAST({column} AS TEXT), 1, {most}), '')"
            yield from chain.from_iterable(self._rows(table, term, condition))

    def blobs(self, table: str, column: str, condition: str) -> Iterator[tuple[int, bytes]]:
        """The bytes of one column with their row numbers, where they are not NULL."""
        if self.has(table, column):
            term = f"_rowid_, SUBSTR(CAST({column} AS BLOB), 1, {MOST_TEXT})"
            yield from self._rows(table, term, f"{column} IS NOT NULL AND {condition}")

    def strings(self, ids: Int64) -> tuple[str, ...]:
        """The text of each id of StringIds, "" where it has none."""
        found: dict[int, str] = {}
        for begin in range(0, len(ids), _AT_ONCE):
            some = ",".join(map(str, ids[begin : begin + _AT_ONCE].tolist()))
            term = f"id, SUBSTR(CAST(value AS TEXT), 1, {MOST_TEXT})"
            found.update(self._rows("StringIds", term, f"id IN ({some})"))
        return tuple(found.get(number) or "" for number in ids.tolist())

    def _rows(self, table: str, terms: str, condition: str) -> Iterator[tuple[Any, ...]]:
        if table not in self.columns:
            return iter(())
        return self.connection.execute(f"SELECT {terms} FROM {table} WHERE {condition}")


@contextmanager
def opened(source: Source) -> Iterator[Database]:
    """The export, open to read. Raises DataError where it is none, or damaged."""
    with _on_disk(source) as path:
        try:
            address = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
            with closing(sqlite3.connect(address, uri=True)) as connection:
                connection.text_factory = lambda text: text.decode("utf-8", "replace")
                connection.execute("PRAGMA trusted_schema = OFF")
                yield Database(source.where, connection, _columns(connection))
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from its own messages
            problem = " ".join(str(error).split())[:100]
            raise DataError(
                source.where, f"not a whole database ({problem})", EXPORT_AGAIN
            ) from None


@contextmanager
def _on_disk(source: Source) -> Iterator[Path]:
    """The unpacked file; SQLite reads it out of order, so a packed one is unpacked first."""
    with source.local() as path:
        try:
            packed = is_packed(path)
        except OSError as error:
            raise DataError(
                source.where, error.strerror or "unreadable", "check the path"
            ) from None
        if not packed:
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        target = Path(folder, "export.sqlite")
        with unpacked(source) as content, target.open("wb") as plain:
            while block := content.read(1 << 20):
                plain.write(block)
        if content.torn:
            raise DataError(source.where, f"the packed file is torn ({content.torn})", EXPORT_AGAIN)
        yield target


def _columns(connection: sqlite3.Connection) -> Mapping[str, frozenset[str]]:
    """The columns of each real table: views and virtual tables could compute without end."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
    names = [str(name) for (name,) in connection.execute(query) if str(name).isidentifier()]
    return {
        name: frozenset(
            ["_rowid_", *(row[1] for row in connection.execute(f"PRAGMA table_info({name})"))]
        )
        for name in names
    }
