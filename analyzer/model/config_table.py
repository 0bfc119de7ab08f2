"""One table of a TOML file: typed values by key, and errors that name the key and the mend."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from stepsplit.analyzer.errors import DataError

_D = TypeVar("_D")

_N = TypeVar("_N", bound=str)

_MOST_BYTES = 1 << 20

MOST = 10**18

_FEW = 4


@dataclass(frozen=True, slots=True)
class TomlTable:
    """A table: the file that it stands in, its name there and its values.

    Every reading method gives the value of a key, or default where the table has no such key;
    a value of another kind raises DataError.
    """

    where: str
    name: str
    values: Mapping[str, object]

    def knows(self, *keys: str) -> None:
        """Raises DataError for a key that is none of these."""
        for key in self.values:
            if key not in keys:
                raise self.error(key, "unknown key", f"write {either(near(key, keys))}")

    def needs(self, *keys: str) -> None:
        """Raises DataError for the first of these keys that is missing."""
        for key in keys:
            if key not in self.values:
                raise self.error(key, "missing", f"give {key}")

    def count(self, key: str, default: _D, least: int = 1) -> int | _D:
        value = self.values.get(key)
        if value is None:
            return default
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, int) or not whole or not least <= value <= MOST:
            raise self.error(key, f"{value!r} is no count", f"write a whole number from {least} up")
        return value

    def number(self, key: str, default: _D) -> float | _D:
        """A number above zero."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            raise self.error(key, f"{value!r} is no amount", "write a number above 0")
        return float(value)

    def flag(self, key: str, default: _D) -> bool | _D:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is neither true nor false", "write true or false")
        return value

    def text(self, key: str, default: _D) -> str | _D:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value:
            raise self.error(key, f"{value!r} is no text", "write it in quotes")
        return value

    def one_of(self, key: str, known: Sequence[_N], default: _D) -> _N | _D:
        """One of the known words."""
        value = self.values.get(key)
        return default if value is None else self._word(key, value, known)

    def same(self, words: Mapping[str, str]) -> TomlTable:
        """The table with words replaced by those that mean the same here."""
        told = {
            key: words.get(value, value) if isinstance(value, str) else value
            for key, value in self.values.items()
        }
        return replace(self, values=told)

    def some_of(self, key: str, known: Sequence[_N], default: _D) -> tuple[_N, ...] | _D:
        """A list of known words."""
        values = self.values.get(key)
        if values is None:
            return default
        if not isinstance(values, list):
            raise self.error(key, f"{values!r} is no list", "write words in [ ]")
        return tuple(self._word(key, value, known) for value in values)

    def counts(self, key: str, default: _D) -> tuple[int, ...] | _D:
        """A list of whole numbers, none negative."""
        values = self.values.get(key)
        if values is None:
            return default
        if not isinstance(values, list):
            raise self.error(key, f"{values!r} is no list", "write whole numbers in [ ]")
        each = TomlTable(self.where, self.name, {f"{key}[{i}]": v for i, v in enumerate(values)})
        return tuple(each.count(entry, 0, least=0) for entry in each.values)

    def texts(self, key: str, default: _D) -> tuple[str, ...] | _D:
        """A list of words."""
        values = self.values.get(key)
        if values is None:
            return default
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise self.error(key, f"{values!r} is no list of words", 'write ["...", "..."]')
        return tuple(values)

    def table(self, key: str, default: _D) -> TomlTable | _D:
        """The table inside this one."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, dict):
            raise self.error(key, f"{value!r} is no table", f"write [{self._path(key)}]")
        return TomlTable(self.where, self._path(key), value)

    def tables(self, key: str) -> tuple[TomlTable, ...]:
        """The tables of a list of them, none where the key is missing."""
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
            mend = f"write [[{self._path(key)}]]"
            raise self.error(key, f"{values!r} is no list of tables", mend)
        path = self._path(key)
        return tuple(TomlTable(self.where, f"{path}[{i}]", each) for i, each in enumerate(values))

    def error(self, key: str, problem: str, mend: str) -> DataError:
        return DataError(self.where, f"{self._path(key)}: {problem}", mend)

    def _path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def _word(self, key: str, value: object, known: Sequence[_N]) -> _N:
        for word in known:
            if value == word:
                return word
        raise self.error(key, f"{value!r} is unknown", f"write {either(near(str(value), known))}")


def read_table(path: str | Path) -> TomlTable:
    """The whole TOML file as a table. Raises DataError."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DataError(path, error.strerror or "unreadable", "check the path") from None
    if len(text) > _MOST_BYTES:
        raise DataError(path, "too large for a TOML file of settings", "name the right file")
    return table_of(path, text)


def table_of(where: str | Path, text: bytes) -> TomlTable:
    """The table that the text states; where names it in errors. Raises DataError."""
    try:
        values: dict[str, Any] = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"not TOML ({error})", "mend that line") from None
    return TomlTable(str(where), "", values)


def near(word: str, known: Sequence[str]) -> Sequence[str]:
    """The known words most like this one; all of them where they are few."""
    if len(known) <= _FEW:
        return known
    return difflib.get_close_matches(word.lower(), known, n=_FEW, cutoff=0.0)


def either(words: Sequence[str]) -> str:
    """As a choice: a, b or c."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
