"""TOML files decoded by the fields of dataclasses, so that every mistake of a file is listed."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import KEY, MOST, AsDecimal, NumberLimits

_T = TypeVar("_T")

_MOST_BYTES = 1 << 20

_FEW = 4

_TABLE = dict[str, object]

Kinds = Mapping[str, Any]
"""The type of each key of a table: what msgspec accepts, and Annotated with Limits."""

# A TOML file, and the tables in it.


@dataclass(frozen=True, slots=True)
class TomlTable:
    """A table: the file that it stands in, its name there and its values."""

    where: str
    name: str
    values: Mapping[str, Any]

    def path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def error(self, key: str, problem: str, hint: str) -> DataError:
        return DataError(self.where, f"{self.path(key)}: {problem}", hint)

    def select(self, *keys: str) -> TomlTable:
        """The table with no other keys than these."""
        own = {key: value for key, value in self.values.items() if key in keys}
        return replace(self, values=own)

    def inner(self, key: str) -> TomlTable:
        """The table inside this one; an empty one where the key has no table."""
        value = self.values.get(key)
        return TomlTable(self.where, self.path(key), value if isinstance(value, dict) else {})


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
        raise DataError(where, f"not TOML ({error})", "fix that line") from None
    return TomlTable(str(where), "", values)


# Mistakes are collected, and raised together as one line.


class Mistakes(list[DataError]):
    """The mistakes of one file, in the order in which they were found."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keeps a DataError of the block instead of raising it."""
        try:
            yield
        except DataError as error:
            self.append(error)

    def refuse(self) -> None:
        """Raises the first mistake as a DataError, which lists the others in the same line."""
        if not self:
            return
        first, *others = self
        if not others:
            raise first
        further = ", ".join(
            f"{one.problem}; {one.hint}" if one.where == first.where else str(one) for one in others
        )
        hint = f"{first.hint}; and {len(others)} more: {further}"
        raise DataError(first.where, first.problem, hint)


# A table decoded: each key by its type.


def decode_table(table: TomlTable, kinds: Kinds, needed: Sequence[str] = ()) -> dict[str, Any]:
    """The table's values, as decode_keys. Raises DataError with all mistakes of the table."""
    mistakes = Mistakes()
    found = decode_keys(table, kinds, mistakes, needed)
    mistakes.refuse()
    return found


def decode_keys(
    table: TomlTable, kinds: Kinds, mistakes: Mistakes, needed: Sequence[str] = ()
) -> dict[str, Any]:
    """The values that the table states and that are of their types; the others go to mistakes."""
    found, known = {}, tuple(kinds)
    for key in table.values:
        if key not in kinds:
            hint = f"write {join_choices(nearest_words(key, known))}"
            mistakes.append(table.error(key, "unknown key", hint))
    for key in needed:
        if key not in table.values:
            mistakes.append(table.error(key, "missing", f"give {key}"))
    for key, value in table.values.items():
        if key in kinds and value is not None:
            with mistakes.collect():
                found[key] = _decode_value(table, key, value, kinds[key])
    return found


def decode_section(
    table: TomlTable, key: str, kind: type[_T], base: _T | None, mistakes: Mistakes, **usual: Any
) -> _T | None:
    """The dataclass of the table inside this one; what that leaves out is as in base.

    Without a base it is as usual says, or as by default, and else a mistake. base itself where
    there is no such table or one of its needed keys is missing or mistaken.
    """
    if not isinstance(table.values.get(key), dict):
        return base
    needed = [] if base is not None else [name for name in needed_keys(kind) if name not in usual]
    kinds = {**decoded_kinds(kind), "source": str}
    stated = decode_keys(table.inner(key), kinds, mistakes, needed)
    if not all(name in stated for name in needed):
        return base
    found = {**usual, **select_fields(kind, stated)}
    return kind(**found) if base is None else replace(base, **found)  # type: ignore[type-var]


def decoded_kinds(kind: type) -> dict[str, Any]:
    """The type of each key that a file may state of the dataclass, in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        key: _stated_kind(hints[field.name])
        for field in fields(kind)
        if (key := field.metadata.get(KEY, field.name))
    }


def needed_keys(kind: type) -> tuple[str, ...]:
    """The keys of the fields that have no default."""
    return tuple(
        field.metadata.get(KEY, field.name) for field in fields(kind) if field.default is MISSING
    )


def select_fields(kind: type, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a file states, the values of the dataclass's fields, by their names."""
    keys = {field.name: field.metadata.get(KEY) or field.name for field in fields(kind)}
    return {name: stated[key] for name, key in keys.items() if key in stated}


def replace_aliases(table: TomlTable, aliases: Mapping[str, Mapping[str, str]]) -> TomlTable:
    """The table with other words for the same, by key, replaced by the model's own."""
    own = {
        key: words.get(value, value)
        for key, words in aliases.items()
        if isinstance(value := table.values.get(key), str)
    }
    return replace(table, values={**table.values, **own})


def _stated_kind(kind: Any) -> Any:
    """The type in a file: no file states None, and a dataclass is a table of its own."""
    if get_origin(kind) in (Union, UnionType):
        kind = Union[tuple(each for each in get_args(kind) if each is not NoneType)]  # noqa: UP007
    return _TABLE if is_dataclass(kind) else kind


def _decode_value(table: TomlTable, key: str, value: object, kind: Any) -> Any:
    if kind == AsDecimal and isinstance(value, float) and value.is_integer():
        value = int(value)
    if fits(value, kind):
        return convert(value, kind)
    if kind == list[_TABLE]:
        raise table.error(key, f"{value!r} is no list of tables", f"write [[{table.path(key)}]]")
    if kind == _TABLE:
        raise table.error(key, f"{value!r} is no table", f"write [{table.path(key)}]")
    place, problem, hint = _describe(value, kind)
    raise table.error(f"{key}{place}", problem, hint)


# One value: whether msgspec converts it to its type, and what is wrong where it does not.


def convert(value: object, kind: Any) -> Any:
    """The value as its type. msgspec is loaded only where something is read."""
    import msgspec

    return msgspec.convert(value, _limited(kind), strict=True)


def fits(value: object, kind: Any) -> bool:
    import msgspec

    try:
        convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


@lru_cache(maxsize=256)
def _limited(kind: Any) -> Any:
    """The type with its limits as msgspec states them."""
    from msgspec import Meta

    plain = {
        int: Annotated[int, Meta(ge=1, le=MOST)],
        float: Annotated[float, Meta(gt=0, le=MOST)],
        str: Annotated[str, Meta(min_length=1)],
    }
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[arguments[0], Meta(ge=arguments[1].least, le=arguments[1].most)]
    if origin in (Union, UnionType, tuple, frozenset):
        entries = tuple(map(_limited, arguments))
        return Union[entries] if origin is UnionType else origin[entries]  # noqa: UP007
    return plain.get(kind, kind)


_PROBLEMS = {
    bool: ("is neither true nor false", "write true or false"),
    str: ("is no text", "write it in quotes"),
    float: ("is no amount", "write a number above 0"),
    int: ("is no count", "write a whole number from 1 up"),
}


def _describe(value: object, kind: Any) -> tuple[str, str, str]:
    """Where in the value the mistake is ("" or "[2]"), the problem and the hint."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _describe(value, _likeliest(value, arguments))
    if origin in (tuple, frozenset):
        return _describe_list(value, arguments[0])
    if origin is Literal:
        hint = f"write {join_choices(nearest_words(str(value), arguments))}"
        return "", f"{value!r} is unknown", hint
    if origin is Annotated:
        return "", *_describe_limits(value, *arguments)
    problem, hint = _PROBLEMS[kind]
    return "", f"{value!r} {problem}", hint


def _likeliest(value: object, kinds: tuple[Any, ...]) -> Any:
    """Of the types that a key takes, the one that is meant: the words for a text, else the last."""
    words = [kind for kind in kinds if get_origin(kind) is Literal]
    return words[0] if words and isinstance(value, str) else kinds[-1]


def _describe_limits(value: object, kind: type, limits: NumberLimits) -> tuple[str, str]:
    if kind is float:
        return f"{value!r} is no amount", f"write a number from {limits.least} up"
    if limits.noun and fits(value, Annotated[int, NumberLimits(limits.least)]):
        known = [str(number) for number in range(limits.least, limits.most + 1)]
        return f"{value!r} is no {limits.noun}", f"write {join_choices(known)}"
    return f"{value!r} is no count", f"write a whole number from {limits.least} up"


def _describe_list(value: object, entry: Any) -> tuple[str, str, str]:
    words = get_origin(entry) is Literal
    if entry is str:
        return "", f"{value!r} is no list of words", 'write ["...", "..."]'
    if not isinstance(value, list):
        return "", f"{value!r} is no list", f"write {'words' if words else 'whole numbers'} in [ ]"
    place = next(i for i, each in enumerate(value) if not fits(each, entry))
    _, problem, hint = _describe(value[place], entry)
    return "" if words else f"[{place}]", problem, hint


# The words most like one that is unknown.


def nearest_words(word: str, known: Sequence[str]) -> Sequence[str]:
    """The known words most like this one; all of them where they are few."""
    if len(known) <= _FEW:
        return known
    return difflib.get_close_matches(word.lower(), known, n=_FEW, cutoff=0.0)


def join_choices(words: Sequence[str]) -> str:
    """As a choice: a, b or c."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
