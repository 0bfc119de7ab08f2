"""Validation of the model against published tables or a user's measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.validation.equalities import (
    activation_checks,
    bubble_checks,
    count_checks,
    deepspeed_checks,
    rate_checks,
    states_checks,
    wire_checks,
)
from stepsplit.analyzer.validation.predictions import (
    busbw_checks,
    calibrated_checks,
    collective_checks,
    eager_checks,
    memory_checks,
    step_time_checks,
)
from stepsplit.analyzer.validation.tables import IDS, PUBLISHED, Check, Published, Row

# validate: all checks, on the published rows of the package or on other ones.

GROUPS = (
    states_checks, deepspeed_checks, activation_checks, count_checks, rate_checks, bubble_checks,
    wire_checks, memory_checks, calibrated_checks, eager_checks, step_time_checks,
    collective_checks, busbw_checks,
)  # fmt: skip


def validate(folder: Path | None = None) -> tuple[Check, ...]:
    """Check the model against published measurements, or against your own.

    Args:
        folder: CSV files with the names and columns of analyzer/validation/published; further
            columns are ignored, and a check without its file is skipped. Default None: the
            published tables of the package.

    Returns:
        The checks with their rows (published and predicted values with units), the result of each
        and the bar that it has to meet.

    Raises:
        UsageError: the folder has none of the files.
        DataError: a file cannot be read, or lacks a column.

    Example:
        >>> from stepsplit.analyzer import validate
        >>> all(check.met for check in validate() if not check.skipped)
        True
    """
    published = Published(folder or PUBLISHED)
    if not any(map(published.has, IDS)):
        raise UsageError(
            f"{published.folder}: contains no published table such as {next(iter(IDS))}.csv"
        )
    return tuple(each for group in GROUPS for each in group(published))


# The checks as JSON.

SCHEMA = "stepsplit.validation/1"


def to_json(checks: Iterable[Check]) -> str:
    """All checks with all rows; error is predicted / published - 1, null if published is 0."""
    return json.dumps({"schema": SCHEMA, "checks": [_check(each) for each in checks]}, indent=1)


def _check(each: Check) -> dict[str, object]:
    return {
        "name": each.name,
        "measure": each.measure,
        "bar": each.bar,
        "result": each.result,
        "met": None if each.skipped else each.met,
        "baseline": each.baseline,
        "note": each.note,
        "left_out": each.left_out,
        "rows": [_row(row) for row in each.rows],
    }


def _row(row: Row) -> dict[str, object]:
    return {
        "table": row.table,
        "case": row.case,
        "what": row.what,
        "published": row.published,
        "predicted": row.predicted,
        "unit": row.unit,
        "error": row.error if math.isfinite(row.error) else None,
        "fitted": row.fitted,
    }
