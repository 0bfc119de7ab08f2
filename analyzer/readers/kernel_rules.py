"""Rules that classify kernels by name: built in, and from a user's TOML file."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import op_named
from stepsplit.analyzer.trace import OPS

# A TOML file of rules -> Rules.

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

KernelKind = Literal["communication", "compute", "fused"]
"""fused computes and communicates at once, and counts as compute."""


@dataclass(frozen=True, slots=True)
class KernelRule:
    """A kernel with such a name is of that kind; op is "" where the name itself is to tell it."""

    match: str
    kind: KernelKind
    op: str = ""


@dataclass(frozen=True, slots=True)
class FamilyRule:
    """Compute with such a name is of that family."""

    match: str
    family: str


_CODES = re.compile(r"\\[xu0-9]")
"""What states a character by its number."""


def _in_lower_case(match: str) -> str:
    """The pattern for names in lower case: without the costly flag where it has nothing to do."""
    is_plain = match == match.lower() and not _CODES.search(match)
    return f"(?:{match})" if is_plain else f"(?i:{match})"


def _any_of(matches: Iterable[str]) -> re.Pattern[str]:
    """Found in the lower case of a name where any of them is in the name, in any case."""
    return re.compile("|".join(map(_in_lower_case, matches)) or r"(?!)")


@lru_cache(None)
def compiled(match: str) -> re.Pattern[str]:
    """The pattern of a rule. Raises re.error."""
    return re.compile(f"(?:{match})", re.IGNORECASE)


OTHER = "other"
"""The family of what no rule knows."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The first rule that matches decides.

    A match is a regular expression, without groups that it refers to, that is searched anywhere in
    a name, in any case.
    """

    kernels: tuple[KernelRule, ...]
    families: tuple[FamilyRule, ...]
    suspect: re.Pattern[str] = field(init=False, repr=False, compare=False)
    """Found in the lower case of every name that may be more than compute: nearly none is."""

    def __post_init__(self) -> None:
        more = [rule.match for rule in self.kernels if rule.kind != "compute"]
        object.__setattr__(self, "suspect", _any_of(more))

    @property
    def reading_key(self) -> str:
        """Differs where rules make readers read something else."""
        return hashlib.sha256(repr(self.kernels).encode()).hexdigest()[:16]

    def before(self, others: Rules) -> Rules:
        """These rules, and the others where none of these matches."""
        return Rules(self.kernels + others.kernels, self.families + others.families)

    def kind_of(self, name: str) -> KernelKind:
        """What a kernel or copy of that name does; compute where no rule matches."""
        rule = self._kernel_rule(name)
        return "compute" if rule is None else rule.kind

    def communicates(self, name: str) -> bool:
        """Whether a kernel or copy of that name is a collective or a message."""
        return self.kind_of(name) == "communication"

    def op_of(self, name: str) -> str:
        """The collective or message that such a kernel carries out, "unknown" where none says."""
        rule = self._kernel_rule(name)
        return rule.op if rule is not None and rule.op else op_named(name)

    def family_of(self, name: str) -> str:
        """The family of a kernel that computes, or of an op of a CPU run; OTHER where none is."""
        found = (rule.family for rule in self.families if compiled(rule.match).search(name))
        return next(found, OTHER)

    def _kernel_rule(self, name: str) -> KernelRule | None:
        if self.suspect.search(name.lower()) is None:
            return None
        found = (rule for rule in self.kernels if compiled(rule.match).search(name))
        return next(found, None)


BUILT_IN = Rules(*_stated(BUILT_IN_FILE))
"""The rules that come with stepsplit; patterns of families wait until somebody asks for one."""
