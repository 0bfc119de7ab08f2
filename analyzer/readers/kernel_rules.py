"""Rules that classify kernels by name, built in or from a TOML file."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import list_distinct, union
from stepsplit.analyzer.errors import DataError, read_toml
from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.trace import (
    COMPILES,
    OPS,
    Bool,
    Calls,
    Category,
    EventKind,
    EventKinds,
    Events,
)

SCHEMA = "stepsplit.rules/1"

_KINDS: Mapping[str, KernelKind] = {
    "communication": "communication",
    "compute": "compute",
    "copy": "copy",
    "fused": "fused",
}

_OPS = OPS[1:]

_BACKREFERENCE = re.compile(r"\\[1-9]|\(\?P")


def read_rules(place: str | Path) -> Rules:
    """Reads a TOML file of kernel rules and combines it with the built-in rules.

    Args:
        place: Path of the file. A [[kernel]] table has `match` (a regular expression, searched
            anywhere in the name, case-insensitive), `is` ("communication", "compute", "copy" or
            "fused") and optionally `op`; a [[family]] table has `match` and `family`.

    Returns:
        The rules. Those of the file come first; the built-in ones apply to all other names.

    Raises:
        DataError: The file is missing, not TOML, or has an invalid rule; names the key and the fix.

    Examples:
        >>> from pathlib import Path
        >>> text = 'kernel = [{match = "my_sum", is = "communication", op = "all_reduce"}]'
        >>> size = Path("rules.toml").write_text(text)
        >>> read_rules("rules.toml").kernels[0]
        KernelRule(match='my_sum', kind='communication', op='all_reduce')
    """
    return read_own_rules(place).combine(BUILT_IN)


def read_own_rules(place: str | Path) -> Rules:
    """The rules of the file without the built-in ones, in file order. Raises DataError."""
    kernels, families = _decode_rules(place)
    for i, kernel in enumerate(kernels):
        _check_pattern(place, f"kernel[{i}].match", kernel.match)
    for i, family in enumerate(families):
        _check_pattern(place, f"family[{i}].match", family.match)
    return Rules(kernels, families)


def _decode_rules(place: str | Path) -> tuple[tuple[KernelRule, ...], tuple[FamilyRule, ...]]:
    """The rules of the file; their patterns are not checked yet."""
    table = read_toml(place, "see docs/rules.md for the format")
    _check_keys(place, "", table, ("schema", "kernel", "family"))
    if table.get("schema", SCHEMA) != SCHEMA:
        problem = f"schema: {table['schema']!r} is not {SCHEMA!r}"
        raise DataError(place, problem, "convert them to this version's format")
    kernels, families = [], []
    for at, entry in _list_entries(place, table, "kernel"):
        _check_keys(place, at, entry, ("match", "is", "op"))
        kind = _check_choice(place, f"{at}is", entry.get("is"), tuple(_KINDS))
        op = entry.get("op")
        if op is not None and kind != "communication":
            problem = f"{at}op: not allowed for a kernel that is {kind}"
            raise DataError(place, problem, "leave op out")
        op_name = "" if op is None else _check_choice(place, f"{at}op", op, _OPS)
        kernels.append(KernelRule(_read_pattern(place, at, entry), _KINDS[kind], op_name))
    for at, entry in _list_entries(place, table, "family"):
        _check_keys(place, at, entry, ("match", "family"))
        family = entry.get("family")
        if not isinstance(family, str) or not family.strip():
            raise DataError(place, f"{at}family: {family!r} is not a name", "name a family")
        families.append(FamilyRule(_read_pattern(place, at, entry), family.strip()))
    return tuple(kernels), tuple(families)


def _list_entries(
    place: str | Path, table: Mapping[str, Any], kind: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables of one kind of rule, each with the kind and index by which errors refer to it."""
    entries = table.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(place, f"{kind}: not a list of tables", f"begin each rule with [[{kind}]]")
    yield from ((f"{kind}[{i}].", entry) for i, entry in enumerate(entries))


def _read_pattern(place: str | Path, at: str, entry: Mapping[str, Any]) -> str:
    match = entry.get("match")
    if not isinstance(match, str) or not match:
        hint = "write a regular expression in quotes"
        raise DataError(place, f"{at}match: {match!r} is not a pattern", hint)
    return match


def _check_pattern(place: str | Path, key: str, match: str) -> None:
    try:
        # A pattern that a later version of Python will read otherwise is refused today.
        with warnings.catch_warnings(action="error", category=FutureWarning):
            pattern = compile_pattern(match)
    except (re.error, RecursionError, OverflowError, FutureWarning) as error:
        problem = f"{key}: {match!r} is not a regular expression ({error})"
        raise DataError(place, problem, "fix the pattern") from None
    if _BACKREFERENCE.search(match):
        # The patterns become one: their groups would get other numbers.
        hint = "match without references and named groups"
        raise DataError(place, f"{key}: {match!r} refers to a group", hint)
    if pattern.search("") is not None:
        raise DataError(place, f"{key}: {match!r} matches every name", "fix the pattern")


def _check_choice(place: str | Path, key: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise DataError(place, f"{key}: {value!r} is unknown", f"write one of {', '.join(known)}")
    return value


def _check_keys(
    place: str | Path, at: str, entry: Mapping[str, Any], keys: tuple[str, ...]
) -> None:
    for key in entry:
        if key not in keys:
            hint = f"write {', '.join(keys)}"
            raise DataError(place, f"{at}{key}: unknown key", hint)


BUILT_IN_FILE = Path(__file__).with_name("rules.toml")

KernelKind = Literal["communication", "compute", "copy", "fused"]
"""fused kernels compute and communicate at once, and count as compute."""


class KernelRule(Struct, frozen=True):
    """Kernels whose name matches are of this kind.

    Attributes:
        match: The regular expression.
        kind: "communication", "compute", "copy" or "fused".
        op: The op of a communication kernel; "" infers it from the name.
    """

    match: str
    kind: KernelKind
    op: str = ""


class FamilyRule(Struct, frozen=True):
    """Compute kernels (ops of a CPU run) whose name matches are of this family.

    Attributes:
        match: The regular expression.
        family: Name of the family such as "gemm".
    """

    match: str
    family: str


_ESCAPES = re.compile(r"\\[xu0-9]")
"""Escapes that give a character by its code."""


@lru_cache(None)
def compile_pattern(match: str) -> re.Pattern[str]:
    """The compiled pattern of a rule. Raises re.error."""
    return re.compile(f"(?:{match})", re.IGNORECASE)


OTHER = "other"
"""The family of names without a matching rule."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that classify kernels by name; the first rule that matches decides.

    Patterns are regular expressions without backreferences, searched anywhere in a name,
    case-insensitively.

    Attributes:
        kernels: Which kernels communicate, compute, or do both.
        families: The families of compute kernels.
        suspect: Derived from kernels, for speed.

    Examples:
        >>> from stepsplit.analyzer import FamilyRule, KernelRule, analyze
        >>> rules = Rules((KernelRule("gloo", "communication"),), (FamilyRule("mm", "gemm"),))
        >>> report = analyze("sample_traces/pp2_m2", rules=rules)
    """

    kernels: tuple[KernelRule, ...]
    families: tuple[FamilyRule, ...]
    suspect: re.Pattern[str] = field(init=False, repr=False, compare=False)
    """Matches the lower case of every name that may be more than compute; few names match."""

    def __post_init__(self) -> None:
        # One pattern for names in lower case, which matches if any of the patterns does. Without
        # the flag for any case, which is slow, unless a pattern has upper case or an escape.
        suspect = "|".join(
            f"(?:{match})"
            if match == match.lower() and not _ESCAPES.search(match)
            else f"(?i:{match})"
            for match in (rule.match for rule in self.kernels if rule.kind != "compute")
        )
        object.__setattr__(self, "suspect", re.compile(suspect or r"(?!)"))

    @property
    def reading_key(self) -> str:
        """Changes if the rules change what the readers return."""
        return hashlib.sha256(repr(self.kernels).encode()).hexdigest()[:16]

    def combine(self, fallback: Rules) -> Rules:
        """These rules, followed by the others as fallback."""
        return Rules(self.kernels + fallback.kernels, self.families + fallback.families)

    def classify_kernel(self, name: str) -> KernelKind:
        """The kind of a kernel or copy of this name; compute if no rule matches."""
        if (stated := parse_stated_class(name)) is not None:
            return stated.kind
        rule = self._find_kernel_rule(name)
        return "compute" if rule is None else rule.kind

    def is_communication(self, name: str) -> bool:
        """Whether a kernel or copy of this name is a collective, send or receive."""
        return self.classify_kernel(name) == "communication"

    def find_op(self, name: str) -> str:
        """The op of a communication kernel of this name, "unknown" if not determined."""
        if (stated := parse_stated_class(name)) is not None:
            return stated.op
        rule = self._find_kernel_rule(name)
        return rule.op if rule is not None and rule.op else parse_op(name)

    def find_family(self, name: str) -> str:
        """The family of a compute kernel, or of an op of a CPU run; "other" if no rule matches."""
        if (stated := parse_stated_class(name)) is not None:
            return stated.family
        families = (
            rule.family for rule in self.families if compile_pattern(rule.match).search(name)
        )
        return next(families, OTHER)

    def _find_kernel_rule(self, name: str) -> KernelRule | None:
        # One search of all patterns at once; only few names need the rules one by one.
        return None if self.suspect.search(name.lower()) is None else self._find_rule(name)

    def _find_rule(self, name: str) -> KernelRule | None:
        matching = (rule for rule in self.kernels if compile_pattern(rule.match).search(name))
        return next(matching, None)


def has_kernel_rule(rules: Rules, name: str) -> bool:
    """Whether a rule knows a kernel of this name; in a redacted name that of compute is lost."""
    stated = parse_stated_class(name)
    return stated.kind != "compute" if stated else rules._find_rule(name) is not None


# The class that a redacted name states: it is used before any rule.

_STATED = re.compile(
    r"\A(?:\w+::?)*[a-z]+\d+(?:::)? \{kind=(communication|compute|copy|fused) op=(\w+)"
    r" family=([^{}]+)\}(?: \w+)*"
)


class StatedClass(Struct, frozen=True):
    """Kind, op ("unknown" if it has none) and family of a kernel or op whose name is redacted."""

    kind: KernelKind
    op: str
    family: str


def parse_stated_class(name: str) -> StatedClass | None:
    """The class that a redacted name states; None for other names."""
    match = _STATED.fullmatch(name) if "{kind=" in name else None
    return match and StatedClass(_KINDS[match[1]], match[2], match[3])


def format_stated_class(rules: Rules, name: str, redact_family: Callable[[str], str]) -> str:
    """The class of a name by the rules, as it follows the pseudonym of the name in a trace."""
    family = redact_family(rules.find_family(name))
    return f"{{kind={rules.classify_kernel(name)} op={rules.find_op(name)} family={family}}}"


BUILT_IN = Rules(*_decode_rules(BUILT_IN_FILE))
"""The rules that come with stepsplit; family patterns are compiled on first use."""


class EventClassifier:
    """Classifies events by rules; each name of a recording is looked up once."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._kind, self._family = dict[str, EventKind](), dict[str, str]()

    def classify(self, events: Events, calls: Calls) -> EventKinds:
        """The kind of each event; calls are the communication calls of these events.

        On a device, all kernels except pure communication and copies are compute, and copies that
        are not part of a call are copies. In a CPU run, compute is the ops of training threads that
        only compute.
        """
        kind = np.zeros(len(events), dtype=np.uint8)
        kernels = events.is_category(Category.KERNEL)
        kind[kernels] = EventKind.COMPUTE
        kind[events.is_category(Category.MEMCPY, Category.MEMSET)] = EventKind.COPY
        # After the copies: a copy that is a part of a call is communication.
        kind[calls.event] = EventKind.COMMUNICATION
        if events.on_device:
            # The kind of each kernel by its name; other events may have names of kernels.
            named = np.full(len(events.names), EventKind.OTHER, dtype=np.uint8)
            for number in list_distinct(events.name_id[kernels]).tolist():
                name = events.names[number]
                if name not in self._kind:
                    self._kind[name] = EventKind[self._rules.classify_kernel(name).upper()]
                named[number] = self._kind[name]
            named_kind = np.where(kernels, named[events.name_id], EventKind.OTHER)
            kind[named_kind == EventKind.FUSED] = EventKind.FUSED
            kind[(named_kind == EventKind.COPY) & (kind == EventKind.COMPUTE)] = EventKind.COPY
        else:
            kind[_find_computing_ops(events)] = EventKind.COMPUTE
        computes = (kind == EventKind.COMPUTE) | (kind == EventKind.FUSED)
        families = {OTHER: 0}
        family = np.zeros(len(events.names), dtype=np.int32)
        for number in list_distinct(events.name_id[computes]).tolist():
            name = events.names[number]
            if name not in self._family:
                self._family[name] = self._rules.find_family(name)
            family[number] = families.setdefault(self._family[name], len(families))
        return EventKinds(kind, family, tuple(families))


# Compute ops of a CPU run.

_COMM_PREFIXES = ("c10d::", "_c10d_functional::", "c10d_functional::")

_WRAPPER_PREFIXES = ("autograd::engine", "torch::autograd::", "PythonSubclass")


def _find_computing_ops(events: Events) -> Bool:
    """Which ops of a CPU run are compute: those of training threads that only compute.

    Excludes ops that wrap arbitrary others, ops around a collective, which contain its wait, and
    those in or around a range of the compiler, whose tensors have no data.
    """
    ops = events.is_category(Category.OP)
    communicates = ops & events.match_prefix(*_COMM_PREFIXES)
    computes = ops & ~communicates & ~events.match_prefix(*_WRAPPER_PREFIXES)
    training = _find_training_lanes(events)
    computes &= training[events.lane]
    compiles = events.is_category(Category.OP, Category.ANNOTATION) & events.match_names(COMPILES)
    for lane in np.flatnonzero(training).tolist():
        here = events.lane == lane
        rows = np.flatnonzero(computes & here)
        calls = events.start_ns[communicates & here]
        first = np.searchsorted(calls, events.start_ns[rows], side="left")
        # A call that begins within the op: the op's time has its wait.
        after = np.searchsorted(calls, events.ends_of(rows), side="left")
        computes[rows[after > first]] = False
        ranges = compiles & here
        if ranges.any():
            compiling = union(events.start_ns[ranges], events.ends_of(ranges))
            ended = np.searchsorted(compiling.end_ns, events.start_ns[rows], side="right")
            begun = np.searchsorted(compiling.start_ns, events.ends_of(rows), side="left")
            computes[rows[begun > ended]] = False
    return computes


def _find_training_lanes(events: Events) -> Bool:
    """Which threads train: those that step the profiler or run autograd.

    Without marks, or if no op ran on the marked threads, all threads but gloo's train.
    """
    steps = events.match_prefix("ProfilerStep#")
    marks = steps | events.match_prefix("autograd::engine")
    has_op = np.bincount(
        events.lane[events.is_category(Category.OP) & ~steps], minlength=len(events.lanes)
    )
    if not has_op[events.lane[marks]].any() or not steps.any():
        # gloo's own threads run its algorithms; a send or recv is recorded on the caller's thread.
        messages = events.match_prefix("gloo:send") | events.match_prefix("gloo:recv")
        marks = ~(events.match_prefix("gloo:") & ~messages)
        moves_bytes = np.bincount(events.lane[~marks], minlength=len(events.lanes)) > 0
        return np.asarray(~moves_bytes)
    return np.asarray(np.bincount(events.lane[marks], minlength=len(events.lanes)) > 0)
