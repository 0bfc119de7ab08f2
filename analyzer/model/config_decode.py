"""Decodes TOML files by the fields of dataclasses and lists all mistakes of a file at once."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from datetime import date, time
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stepsplit.analyzer.errors import DataError, parse_toml, read_toml
from stepsplit.analyzer.model.config_limits import KEY, MAX_NUMBER, AsDecimal, NumberLimits

_T = TypeVar("_T")

_MAX_CHOICES, _FEW = 4, 7
"""Words that a hint proposes, and those that it lists as a whole; chosen, not measured."""

_MAX_MISTAKES = 20
"""After so many mistakes no more unknown keys are listed."""

_TABLE = dict[str, object]

Kinds = Mapping[str, Any]
"""The type of each key of a table: a type of msgspec, or Annotated with NumberLimits."""

# A TOML file, and the tables in it.


@dataclass(frozen=True, slots=True)
class TomlTable:
    """A table: the file that contains it, its name there and its values."""

    where: str
    name: str
    values: Mapping[str, Any]

    def join_key(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def build_error(self, key: str, problem: str, hint: str) -> DataError:
        return DataError(self.where, f"{self.join_key(key)}: {problem}", hint)

    def select(self, *keys: str) -> TomlTable:
        """Returns the table with only these keys."""
        chosen = frozenset(keys)
        own = {key: value for key, value in self.values.items() if key in chosen}
        return replace(self, values=own)

    def get_subtable(self, key: str) -> TomlTable:
        """Returns the table of the key; an empty one if the key has no table."""
        value = self.values.get(key)
        return TomlTable(self.where, self.join_key(key), value if isinstance(value, dict) else {})

    def list_subtables(self, key: str) -> tuple[TomlTable, ...]:
        """Returns the tables of the key, an array of tables; none if it is missing."""
        name, tables = self.join_key(key), self.values.get(key, ())
        return tuple(TomlTable(self.where, f"{name}[{i}]", each) for i, each in enumerate(tables))


def read_table(path: str | Path) -> TomlTable:
    """Reads a TOML file as one table. Raises DataError."""
    return TomlTable(str(path), "", read_toml(path))


def parse_table(where: str | Path, text: bytes) -> TomlTable:
    """Parses TOML text; where is the file name in errors. Raises DataError: with all lines that are
    not TOML by themselves, if there are any."""
    try:
        return TomlTable(str(where), "", parse_toml(where, text))
    except DataError:
        _list_broken_lines(where, text.decode("utf-8", "replace")).raise_all()
        raise


_ASSIGNMENT = re.compile(r"""\A\s*([\w.-]+)\s*=\s*([^\s#].*?)\s*(?:\#.*)?""")

_OPENS = re.compile(r"""[\[{]|\"{3}|'{3}""")
"""How values begin that may go on in further lines."""

_STRING = re.compile(r""""[^"]*"|'[^']*'""")

_IN_TABLE = re.compile(r"""[{,]\s*([\w.-]+)\s*=\s*([^\s,{}\[\]#"']+)(?=\s*[,}])""")
"""A key of an inline table, and its value if that is one word or number."""

_SEVERAL = re.compile(r"""\A\s*[\w.-]+\s*=\s*("[^"]*"|[^\s,;]+)\s*[,;]?\s+[\w.-]+\s*=.*""")

_MOST_LINES = 10_000
"""A longer text is no job.toml; chosen, not measured."""


def _list_broken_lines(where: str | Path, text: str) -> Mistakes:
    """What is wrong with each line that assigns a key, for a parser stops at the first."""
    mistakes = Mistakes()
    for number, line in enumerate(text.splitlines()[:_MOST_LINES], 1):
        for key, value, rest in _list_assignments(line):
            with suppress(ValueError, RecursionError):
                # The value alone: a key of many parts takes a parser seconds.
                tomllib.loads(f"key{rest}")
                continue
            place = f"line {number}: {key}"
            if _SEVERAL.fullmatch(f"{key}{rest}"):
                problem, hint = "is followed by another key", "write one key in each line"
            elif value.lower() in ("true", "false"):
                problem, hint = f"{value} is not TOML", f"write {key} = {value.lower()}"
            elif value[0].isdigit():
                problem, hint = f"{value} is no number", "write digits alone"
            else:
                problem, hint = f"{value} is not TOML", f'write {key} = "{value}" for a word'
            mistakes.append(DataError(where, f"{place} {problem}", hint))
    return mistakes


def _list_assignments(line: str) -> Iterator[tuple[str, str, str]]:
    """Each key that a line assigns, its value, and the text from the equals sign on."""
    found = _ASSIGNMENT.fullmatch(line)
    if found is None:
        return
    if found[2].startswith("{"):
        # Not what only looks like a key, in quotes.
        for inside in _IN_TABLE.finditer(_STRING.sub('""', line[:_MOST_OF_LINE])):
            if len(inside[2]) <= _MOST_SHOWN:
                yield inside[1], inside[2], f" = {inside[2]}"
    elif not _OPENS.match(found[2]) and len(found[2]) <= _MOST_SHOWN:
        yield found[1], found[2], line[found.end(1) :]


_MOST_OF_LINE = 1000
"""Characters of a line with an inline table that are looked at."""

_MOST_SHOWN = 60
"""Characters of a value that an error repeats; longer ones are left to the parser's own words."""


# Tables as TOML text.

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def format_toml(values: Mapping[str, object]) -> str:
    """Format the tables of a file as TOML; tables inside of them are inline tables."""
    lines = format_toml_lines({k: v for k, v in values.items() if not isinstance(v, Mapping)})
    for name, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_format_key(name)}]", *format_toml_lines(table)]
    return "\n".join(lines).lstrip("\n") + "\n"


def format_toml_lines(values: Mapping[str, object]) -> list[str]:
    """Format each key and its value as a line of TOML."""
    return [f"{_format_key(key)} = {_format_toml_value(value)}" for key, value in values.items()]


def format_toml_keys(values: Mapping[str, object]) -> str:
    """Format the keys and values in one line of prose: "nothing" if there are none."""
    return ", ".join(format_toml_lines(values)) or "nothing"


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _format_toml_value(key)


def _format_toml_value(value: object) -> str:
    match value:
        case str():
            # TOML's escapes are JSON's, without surrogates and with one for DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            return "true" if value else "false"
        case Mapping():
            return "{ " + ", ".join(format_toml_lines(value)) + " }" if value else "{}"
        case list() | tuple() | set() | frozenset():
            return f"[{', '.join(map(_format_toml_value, value))}]"
        case date() | time():
            return value.isoformat()
    return repr(value)


# Mistakes are collected and raised together in one line.


class Mistakes(list[DataError]):
    """The mistakes of one file, in the order of detection."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Appends a DataError of the block instead of raising it."""
        try:
            yield
        except DataError as error:
            self.append(error)

    def raise_all(self) -> None:
        """Raises the first mistake as a DataError that lists the others in the same line, with bars
        between them."""
        if not self:
            return
        first, *others = self
        if not others:
            raise first
        further = " | ".join(
            f"{one.problem}; {one.hint}" if one.where == first.where else str(one) for one in others
        )
        hint = f"{first.hint}; and {len(others)} more: {further}"
        raise DataError(first.where, first.problem, hint)


# Decoding of a table: each key by its type.


def decode_table(table: TomlTable, kinds: Kinds, required: Sequence[str] = ()) -> dict[str, Any]:
    """Like decode_keys, but raises a DataError with all mistakes of the table."""
    mistakes = Mistakes()
    decoded = decode_keys(table, kinds, mistakes, required)
    mistakes.raise_all()
    return decoded


def decode_keys(
    table: TomlTable, kinds: Kinds, mistakes: Mistakes, required: Sequence[str] = ()
) -> dict[str, Any]:
    """Decodes the table's values; unknown, missing and invalid ones are added to mistakes."""
    decoded, known = {}, tuple(kinds)
    for key in table.values:
        # A file of a stranger may have 100,000 of them, and each suggestion takes milliseconds.
        if key not in kinds and len(mistakes) < _MAX_MISTAKES:
            hint = f"write {join_choices(find_nearest_words(key, known))}"
            mistakes.append(table.build_error(key, "unknown key", hint))
    for key in required:
        if key not in table.values:
            mistakes.append(table.build_error(key, "missing", f"give {key}"))
    for key, value in table.values.items():
        if key in kinds and value is not None:
            with mistakes.collect():
                decoded[key] = _decode_value(table, key, value, kinds[key])
    return decoded


def decode_section(
    table: TomlTable, key: str, kind: type[_T], base: _T | None, mistakes: Mistakes, **defaults: Any
) -> _T | None:
    """Decodes the subtable of a key to a dataclass; missing keys are taken from base.

    Without a base, missing keys are taken from defaults or from those of the fields; any other
    missing key is a mistake. Returns base if there is no such table, or if one of its required keys
    is missing or invalid.
    """
    if not isinstance(table.values.get(key), dict):
        return base
    required = (
        []
        if base is not None
        else [name for name in list_required_keys(kind) if name not in defaults]
    )
    table_type: Any = kind  # a type variable is not hashable to mypy
    kinds = {**collect_kinds(table_type), "source": str}
    stated = decode_keys(table.get_subtable(key), kinds, mistakes, required)
    if not all(name in stated for name in required):
        return base
    values = {**defaults, **select_fields(kind, stated)}
    return kind(**values) if base is None else replace(base, **values)  # type: ignore[type-var]


@lru_cache(maxsize=64)
def collect_kinds(kind: type) -> Kinds:
    """Returns the type of each key of the dataclass in a file, in the order of its fields.

    Cached, since evaluating annotations takes a millisecond, and the presets have many tables.
    """
    hints = get_type_hints(kind, include_extras=True)
    return {
        key: _normalize_kind(hints[field.name])
        for field in fields(kind)
        if (key := field.metadata.get(KEY, field.name))
    }


def list_required_keys(kind: type) -> tuple[str, ...]:
    """Lists the keys of the fields without a default."""
    return tuple(
        field.metadata.get(KEY, field.name) for field in fields(kind) if field.default is MISSING
    )


def select_fields(kind: type, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the values of the dataclass's fields from those of a file, by field name."""
    keys = {field.name: field.metadata.get(KEY) or field.name for field in fields(kind)}
    return {name: stated[key] for name, key in keys.items() if key in stated}


def replace_aliases(table: TomlTable, aliases: Mapping[str, Mapping[str, str]]) -> TomlTable:
    """Replaces aliases in the table's values, by key, with the canonical words, all in small
    letters."""
    own = {
        key: words.get(value.lower(), value.lower())
        for key, words in aliases.items()
        if isinstance(value := table.values.get(key), str)
    }
    return replace(table, values={**table.values, **own})


def _normalize_kind(kind: Any) -> Any:
    """The type of a field in a file: without None, and a table for a dataclass."""
    if get_origin(kind) in (Union, UnionType):
        kind = Union[tuple(each for each in get_args(kind) if each is not NoneType)]  # noqa: UP007
    return _TABLE if is_dataclass(kind) else kind


def _decode_value(table: TomlTable, key: str, value: object, kind: Any) -> Any:
    if kind == AsDecimal and isinstance(value, float) and value.is_integer():
        value = int(value)
    if can_convert(value, kind):
        return convert(value, kind)
    if kind == list[_TABLE]:
        raise table.build_error(
            key, f"{value!r} is not a list of tables", f"write [[{table.join_key(key)}]]"
        )
    if kind == _TABLE:
        raise table.build_error(key, f"{value!r} is not a table", f"write [{table.join_key(key)}]")
    place, problem, hint = _describe(value, kind)
    raise table.build_error(f"{key}{place}", problem, hint)


# One value: its conversion by msgspec, and the description of a mistake.


def convert(value: object, kind: Any) -> Any:
    """Converts the value to its type. Imports msgspec only here, to keep imports fast."""
    import msgspec

    return msgspec.convert(value, _apply_limits(kind), strict=True)


def can_convert(value: object, kind: Any) -> bool:
    import msgspec

    try:
        convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


@lru_cache(maxsize=256)
def _apply_limits(kind: Any) -> Any:
    """Returns the type with its limits in msgspec's form."""
    from msgspec import Meta

    plain = {
        int: Annotated[int, Meta(ge=1, le=MAX_NUMBER)],
        float: Annotated[float, Meta(gt=0, le=MAX_NUMBER)],
        str: Annotated[str, Meta(min_length=1)],
    }
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[arguments[0], Meta(ge=arguments[1].least, le=arguments[1].most)]
    if origin in (Union, UnionType, tuple, frozenset):
        entries = tuple(map(_apply_limits, arguments))
        return Union[entries] if origin is UnionType else origin[entries]  # noqa: UP007
    return plain.get(kind, kind)


_PROBLEMS = {
    bool: ("is neither true nor false", "write true or false"),
    str: ("is not a string", "write it in quotes"),
    float: ("is not a valid number", "write a number > 0"),
    int: ("is not a valid count", "write an integer >= 1"),
}


def _describe(value: object, kind: Any) -> tuple[str, str, str]:
    """Returns the position of the mistake in the value ("" or "[2]"), the problem and the hint."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        # Chooses the likely type of a key with several: the literals for a string, else the last.
        words = [kind for kind in arguments if get_origin(kind) is Literal]
        return _describe(value, words[0] if words and isinstance(value, str) else arguments[-1])
    if origin in (tuple, frozenset):
        return _describe_list(value, arguments[0])
    if origin is Literal:
        hint = f"write {join_choices(find_nearest_words(str(value), arguments))}"
        return "", f"{value!r} is unknown", hint
    if origin is Annotated:
        return "", *_describe_limits(value, *arguments)
    problem, hint = _PROBLEMS[kind]
    return "", f"{value!r} {problem}", hint


def _describe_limits(value: object, kind: type, limits: NumberLimits) -> tuple[str, str]:
    if kind is float:
        return f"{value!r} is not a valid number", f"write a number >= {limits.least}"
    if limits.label and can_convert(value, Annotated[int, NumberLimits(limits.least)]):
        known = [str(number) for number in range(limits.least, limits.most + 1)]
        return f"{value!r} is not a valid {limits.label}", f"write {join_choices(known)}"
    return f"{value!r} is not a valid count", f"write an integer >= {limits.least}"


def _describe_list(value: object, entry: Any) -> tuple[str, str, str]:
    words = get_origin(entry) is Literal
    if entry is str:
        return "", f"{value!r} is not a list of strings", 'write ["...", "..."]'
    if not isinstance(value, list):
        hint = f"write {'strings' if words else 'integers'} in [ ]"
        return "", f"{value!r} is not a list", hint
    place = next(i for i, each in enumerate(value) if not can_convert(each, entry))
    _, problem, hint = _describe(value[place], entry)
    return "" if words else f"[{place}]", problem, hint


# Suggestions for an unknown word.

_MAX_WORD = 100
"""Letters of it that are compared; no known word is so long."""


def find_nearest_words(word: str, known: Sequence[str]) -> Sequence[str]:
    """Finds the known words closest to this one, those of the same kind (h100-) first; all if there
    are few."""
    if len(known) <= _MAX_CHOICES:
        return known
    most = _FEW if len(known) <= _FEW else _MAX_CHOICES
    word = word[:_MAX_WORD].lower()
    kind = word[: word.find("-") + 1]
    alike = [one for one in known if kind and one.startswith(kind)]
    near = [
        one
        for words in (alike, known)
        for one in difflib.get_close_matches(word, words, n=most, cutoff=0.0)
    ]
    return list(dict.fromkeys(near))[:most]


def join_choices(words: Sequence[str]) -> str:
    """Joins words as a choice: a, b or c."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def list_stated_keys(table: TomlTable) -> frozenset[str]:
    """The keys that the tables of a job state: "training.dtype"."""
    return frozenset(
        f"{section}.{key}"
        for section, values in table.values.items()
        if isinstance(values, Mapping)
        for key in values
    )
