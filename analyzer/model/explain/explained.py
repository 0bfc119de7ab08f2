"""One formula with a job's own numbers, and the rules of thumb that say something else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stepsplit.analyzer.model.formula import Formula

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

    folk names the rules of folk.toml that it answers.
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
