"""Rules of thumb that people of the field repeat, and what holds: folk.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Verdict = Literal["right", "wrong", "half", "unit"]
FILE = Path(__file__).parent / "folk.toml"


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
