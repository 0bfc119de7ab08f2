"""Formulas with their citations, and the rules of thumb that they correct."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

# A formula that a prediction rests on, and who says so.


@dataclass(frozen=True, slots=True)
class Formula:
    """One formula: its id (module.name), the text with its symbols, and the citation."""

    id: str
    text: str
    citation: str


# Which rules of thumb of the field touch on a job's formulas and do not hold as they are said.


def heard(explained: Sequence[Explained]) -> tuple[Folk, ...]:
    """The field's rules about these formulas, without those that are right.

    What a formula already says of a rule, with the job's own numbers, is not said again.
    """
    formulas = {one.formula.id for one in explained}
    told = {name for one in explained for rule in one.folk for name in rule.folk}
    return tuple(
        folk
        for folk in folk_rules()
        if folk.verdict != "right"
        and folk.id not in told
        and not formulas.isdisjoint(folk.formulas)
    )


# One formula with a job's own numbers, and the rules of thumb that say something else.

Unit = Literal[
    "", "bytes", "bytes_per_s", "flops", "flops_per_s", "memory_bytes", "ns", "parameters", "ratio"
]
"""What a value is: memory_bytes lie in device memory, bytes are sent or belong to one item."""

NOTABLE = 0.01
"""A rule of thumb that comes this close to the formula is right here, and not shown."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A letter of the formula, what it stands for, and its value in this job."""

    name: str
    meaning: str
    value: float
    unit: Unit = ""


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """What people say instead, the value that it gives here in the formula's unit, and why not.

    folk names the rules of rules_of_thumb.toml that it answers.
    """

    rule: str
    value: float
    why: str
    folk: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explained:
    """A formula that a prediction rests on, its symbols, its value and the folk rules beside it.

    what names the value in words; value is the prediction's own, in unit. note says how the formula
    is applied here, where its text alone does not give the value.
    """

    formula: Formula
    what: str
    symbols: tuple[Symbol, ...]
    value: float
    unit: Unit
    folk: tuple[RuleOfThumb, ...] = ()
    note: str = ""


def differing(value: float, rules: Iterable[RuleOfThumb]) -> tuple[RuleOfThumb, ...]:
    """The rules whose value is another than the formula's, by more than NOTABLE of it."""
    return tuple(rule for rule in rules if abs(rule.value - value) > NOTABLE * abs(value))


# Rules of thumb that people of the field repeat, and what holds: rules_of_thumb.toml.

Verdict = Literal["right", "wrong", "half", "unit"]

FILE = Path(__file__).parent / "rules_of_thumb.toml"


@dataclass(frozen=True, slots=True)
class Folk:
    """One rule: what people say, whether it holds, what does, and who says so.

    half: it holds under a condition that the rule leaves out; unit: in another unit than people
    take it for. formulas are the ids of those that it stands beside, none for a bare fact.
    """

    id: str
    rule: str
    verdict: Verdict
    reference: str
    citation: str
    formulas: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def folk_rules() -> tuple[Folk, ...]:
    """All rules, in the order of the file."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Folk(id=name, **table | {"formulas": tuple(table.get("formulas", ()))})
        for name, table in tables.items()
    )
