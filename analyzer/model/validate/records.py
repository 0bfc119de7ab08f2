"""The rows of a folder of published tables, with their ids."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.validate.ids import row_id

PUBLISHED = Path(__file__).parent.parent / "published"
_T = TypeVar("_T")
_MEND = "give the column as the tables of stepsplit have it"


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a table. Reading a column that is absent or no number raises DataError."""

    table: str
    id: str
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        try:
            return self.values[column]
        except KeyError:
            raise DataError(f"{self.table}.csv", f"no column {column!r}", _MEND) from None

    def number(self, column: str) -> float:
        text = self.text(column)
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        problem = f"{column} of {self.id} is {text!r}, not a number"
        raise DataError(f"{self.table}.csv", problem, _MEND)

    def count(self, column: str) -> int:
        return int(self.number(column))

    def choice(self, column: str, choices: Mapping[str, _T]) -> _T:
        """What the row's word there stands for."""
        word = self.text(column)
        if word in choices:
            return choices[word]
        problem, known = f"{column} of {self.id} is {word!r}", ", ".join(choices)
        raise DataError(f"{self.table}.csv", problem, f"known are {known}")

    def known(self, column: str) -> bool:
        """Whether the row has anything there."""
        return bool(self.values.get(column, "").strip())


@dataclass(frozen=True, slots=True)
class Published:
    """A folder of tables; columns that nobody asks for are ignored."""

    folder: Path = PUBLISHED

    def has(self, table: str) -> bool:
        return (self.folder / f"{table}.csv").is_file()

    def records(self, table: str) -> tuple[Record, ...]:
        """The table's rows, none where there is no such file. Raises DataError."""
        if not self.has(table):
            return ()
        rows = _read(self.folder / f"{table}.csv")
        try:
            names = [row_id(table, row) for row in rows]
        except KeyError as missing:
            raise DataError(f"{table}.csv", f"no column {missing}", _MEND) from None
        return tuple(Record(table, *each) for each in zip(_distinct(names), rows, strict=True))


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(path, f"cannot be read ({error})", "give a CSV file in UTF-8") from None


def _distinct(names: list[str]) -> list[str]:
    """The second row of one name ends in #2, and so on."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found
