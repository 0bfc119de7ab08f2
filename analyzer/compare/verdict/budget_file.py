"""Budgets in TOML: a table [budgets] of metric = "limit"."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from stepsplit.analyzer.compare.verdict.budget import Budget, budget_of, parse_budget
from stepsplit.analyzer.errors import DataError, UsageError


def budgets_of(rules: Sequence[str]) -> tuple[Budget, ...]:
    """The budgets of rules and of files that hold rules; of two for one metric the last counts.

    Raises UsageError, and DataError for a file that is none of budgets.
    """
    found: dict[str, Budget] = {}
    for rule in rules:
        read = [parse_budget(rule)] if ":" in rule else read_budgets(Path(rule))
        found |= {budget.metric: budget for budget in read}
    return tuple(found.values())


def read_budgets(path: Path) -> list[Budget]:
    """The budgets of the file. Raises UsageError and DataError."""
    try:
        body = tomllib.loads(path.read_text())
    except OSError as error:
        mend = 'name a TOML file, or write a rule such as "exposed_comm:5%"'
        raise UsageError(f"{path}: {error.strerror or 'unreadable'}; {mend}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(path, f"no TOML ({error})", 'write [budgets] and exposed_comm = "5%"') \
            from None  # fmt: skip
    table = body.get("budgets")
    if not isinstance(table, dict) or not table:
        raise DataError(path, "has no table [budgets]", 'write [budgets] and exposed_comm = "5%"')
    return [_budget(path, name, limit) for name, limit in table.items()]


def _budget(path: Path, name: str, limit: object) -> Budget:
    if not isinstance(limit, str):
        raise DataError(path, f"the limit of {name} is no text", f'write {name} = "5%"')
    try:
        return budget_of(name, limit)
    except UsageError as error:
        raise DataError(path, str(error), "see stepsplit check --help") from None
