"""Formulas with their citations, and the rules of thumb that contradict them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Literal

# A formula of a prediction, with its citation.


@dataclass(frozen=True, slots=True)
class Formula:
    """One formula: its id (module.name), the text with its symbols, and the citation."""

    id: str
    text: str
    citation: str


# Common rules of thumb about a job's formulas that do not hold as stated.


def find_misleading_rules(
    explained: Sequence[Explanation], job: object = None, parameters: int = 0
) -> tuple[CheckedRule, ...]:
    """Finds the common rules about these formulas that are not right.

    Rules that an explanation already answers with the job's numbers are left out, and with a job
    (JobConfig) and the parameters of its model those about other settings and sizes.
    """
    formulas = {one.formula.id for one in explained}
    answered = {name for one in explained for rule in one.rules for name in rule.rule_ids}
    return tuple(
        rule
        for rule in read_checked_rules()
        if rule.verdict != "right"
        and rule.id not in answered
        and not formulas.isdisjoint(rule.formulas)
        and (job is None or rule.is_about(job, parameters))
    )


# One formula with a job's numbers, and the rules of thumb that differ from it.

Unit = Literal[
    "", "bytes", "bytes_per_s", "flops", "flops_per_s", "memory_bytes", "ns", "parameters", "ratio"
]
"""Unit of a value: memory_bytes are device memory, bytes are sent or the size of one item."""

TOLERANCE = 0.01
"""A rule of thumb within this relative error of the formula is not shown."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of the formula: its name, its meaning and its value in this job."""

    name: str
    meaning: str
    value: float
    unit: Unit = ""


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """A rule of thumb, its value for this job in the formula's unit, and why it is wrong.

    rule_ids are the ids of the rules in rules_of_thumb.toml that it answers.
    """

    rule: str
    value: float
    why: str
    rule_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """A formula of a prediction with its symbols, its value and the rules of thumb that differ.

    what describes the value; value is the prediction's, in unit. note explains how the formula is
    applied if its text alone does not give the value.
    """

    formula: Formula
    what: str
    symbols: tuple[Symbol, ...]
    value: float
    unit: Unit
    rules: tuple[RuleOfThumb, ...] = ()
    note: str = ""


def select_differing(value: float, rules: Iterable[RuleOfThumb]) -> tuple[RuleOfThumb, ...]:
    """Selects the rules whose value differs from the formula's by more than NOTABLE."""
    return tuple(rule for rule in rules if abs(rule.value - value) > TOLERANCE * abs(value))


# Common rules of thumb and what holds instead: rules_of_thumb.toml.

Verdict = Literal["right", "wrong", "half", "unit"]

FILE = Path(__file__).parent / "rules_of_thumb.toml"


@dataclass(frozen=True, slots=True)
class CheckedRule:
    """A common rule of thumb: whether it holds, what holds instead, and the citation.

    Verdict half: it holds under a condition that the rule leaves out; unit: it holds in another
    unit. formulas are the ids of the formulas that it is about; empty for a plain fact. when and
    billions are the settings and the size of the jobs that it is about.
    """

    id: str
    rule: str
    verdict: Verdict
    reference: str
    citation: str
    formulas: tuple[str, ...] = ()
    when: Mapping[str, Sequence[object]] = field(default_factory=dict)
    billions: Sequence[float] = ()

    def is_about(self, job: object, parameters: int) -> bool:
        """Whether the job has the settings and its model the size that the rule is about."""
        if self.billions and not self.billions[0] <= parameters / 1e9 <= self.billions[1]:
            return False
        return all(attrgetter(key)(job) in values for key, values in self.when.items())


@lru_cache(maxsize=1)
def read_checked_rules() -> tuple[CheckedRule, ...]:
    """Reads all rules, in the order of the file."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        CheckedRule(id=name, **table | {"formulas": tuple(table.get("formulas", ()))})
        for name, table in tables.items()
    )
