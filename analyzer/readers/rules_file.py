"""A TOML file of rules -> Rules."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.rules import FamilyRule, KernelKind, KernelRule, Rules, compiled
from stepsplit.analyzer.trace import OPS

SCHEMA = "stepsplit.rules/1"
_KINDS: Mapping[str, KernelKind] = {
    "communication": "communication",
    "compute": "compute",
    "fused": "fused",
}
_OPS = OPS[1:]
_MOST_BYTES = 1 << 20
_REFERS = re.compile(r"\\[1-9]|\(\?P")
_T = TypeVar("_T")


def read_rules(place: str | Path) -> Rules:
    """The rules of the file, and the built-in ones where none of them matches.

    Raises DataError, which names the file, the key and the mend.
    """
    return rules_in(place).before(BUILT_IN)


def rules_in(place: str | Path) -> Rules:
    """The rules of the file alone, in its order. Raises DataError."""
    kernels, families = _stated(place)
    for i, kernel in enumerate(kernels):
        _check_pattern(place, f"kernel[{i}].match", kernel.match)
    for i, family in enumerate(families):
        _check_pattern(place, f"family[{i}].match", family.match)
    return Rules(kernels, families)


def _stated(place: str | Path) -> tuple[tuple[KernelRule, ...], tuple[FamilyRule, ...]]:
    """The rules of the file, whose patterns nobody has tried."""
    table = _table(place)
    _known(place, "", table, ("schema", "kernel", "family"))
    if table.get("schema", SCHEMA) != SCHEMA:
        problem = f"schema: {table['schema']!r} is not {SCHEMA!r}"
        raise DataError(place, problem, "write them in this version's form")
    kernels = tuple(_each(place, table, "kernel", _kernel))
    return kernels, tuple(_each(place, table, "family", _family))


def _table(place: str | Path) -> dict[str, Any]:
    try:
        with Path(place).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DataError(place, error.strerror or "unreadable", "check the path") from None
    if len(text) > _MOST_BYTES:
        raise DataError(place, "too large for rules", "name a TOML file of rules")
    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(place, f"not TOML ({error})", "see docs/rules.md for the form") from None


_Maker = Callable[[str | Path, str, Mapping[str, Any]], _T]


def _each(place: str | Path, table: Mapping[str, Any], kind: str, rule: _Maker[_T]) -> Iterable[_T]:
    """The rules of one kind, each with the name by which an error calls it."""
    entries = table.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(place, f"{kind}: no list of tables", f"begin each rule with [[{kind}]]")
    return (rule(place, f"{kind}[{i}].", entry) for i, entry in enumerate(entries))


def _kernel(place: str | Path, at: str, entry: Mapping[str, Any]) -> KernelRule:
    _known(place, at, entry, ("match", "is", "op"))
    kind = _one_of(place, f"{at}is", entry.get("is"), tuple(_KINDS))
    op = entry.get("op")
    if op is not None and kind != "communication":
        raise DataError(place, f"{at}op: of a kernel that is {kind}", "leave op out")
    named = "" if op is None else _one_of(place, f"{at}op", op, _OPS)
    return KernelRule(_match(place, at, entry), _KINDS[kind], named)


def _family(place: str | Path, at: str, entry: Mapping[str, Any]) -> FamilyRule:
    _known(place, at, entry, ("match", "family"))
    family = entry.get("family")
    if not isinstance(family, str) or not family.strip():
        raise DataError(place, f"{at}family: {family!r} is no name", "name a family")
    return FamilyRule(_match(place, at, entry), family.strip())


def _match(place: str | Path, at: str, entry: Mapping[str, Any]) -> str:
    match = entry.get("match")
    if not isinstance(match, str) or not match:
        mend = "write a regular expression in quotes"
        raise DataError(place, f"{at}match: {match!r} is no pattern", mend)
    return match


def _check_pattern(place: str | Path, key: str, match: str) -> None:
    try:
        pattern = compiled(match)
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"{key}: {match!r} is no regular expression ({error})"
        raise DataError(place, problem, "mend the pattern") from None
    if _REFERS.search(match):
        mend = "match without references and named groups"
        raise DataError(place, f"{key}: {match!r} refers to a group", mend)
    if pattern.search("") is not None:
        raise DataError(place, f"{key}: {match!r} matches every name", "mend the pattern")


def _one_of(place: str | Path, key: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise DataError(place, f"{key}: {value!r} is unknown", f"write one of {', '.join(known)}")
    return value


def _known(place: str | Path, at: str, entry: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in entry:
        if key not in keys:
            mend = f"write {', '.join(keys)}"
            raise DataError(place, f"{at}{key}: unknown key", mend)


BUILT_IN_FILE = Path(__file__).with_name("rules.toml")
BUILT_IN = Rules(*_stated(BUILT_IN_FILE))
"""The rules that come with stepsplit; patterns of families wait until somebody asks for one."""
