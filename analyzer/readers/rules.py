"""Which kernels communicate, which family the others are of: rules over names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from stepsplit.analyzer.readers.communication import op_named

KernelKind = Literal["communication", "compute", "fused"]
"""fused computes and communicates at once, and counts as compute."""
_CODES = re.compile(r"\\[xu0-9]")
"""What states a character by its number."""
OTHER = "other"
"""The family of what no rule knows."""


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


@lru_cache(None)
def compiled(match: str) -> re.Pattern[str]:
    """The pattern of a rule. Raises re.error."""
    return re.compile(f"(?:{match})", re.IGNORECASE)


def _any_of(matches: Iterable[str]) -> re.Pattern[str]:
    """Found in the lower case of a name where any of them is in the name, in any case."""
    return re.compile("|".join(map(_in_lower_case, matches)) or r"(?!)")


def _in_lower_case(match: str) -> str:
    """The pattern for names in lower case: without the costly flag where it has nothing to do."""
    is_plain = match == match.lower() and not _CODES.search(match)
    return f"(?:{match})" if is_plain else f"(?i:{match})"
