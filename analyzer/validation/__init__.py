"""Validation of the model against published tables or a user's measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.validation.equalities import (
    check_activations,
    check_bubbles,
    check_counts,
    check_deepspeed,
    check_rates,
    check_states,
    check_volumes,
)
from stepsplit.analyzer.validation.predictions import (
    check_busbw,
    check_calibrated_memory,
    check_collectives,
    check_eager_activations,
    check_measured_jobs,
    check_memory,
    check_step_times,
    check_sweeps_over_nodes,
)
from stepsplit.analyzer.validation.tables import IDS, PUBLISHED, Check, Published

# validate: all checks, on the published rows of the package or on other ones.

GROUPS = (
    check_states, check_deepspeed, check_activations, check_counts, check_rates, check_bubbles,
    check_volumes, check_memory, check_calibrated_memory, check_eager_activations,
    check_measured_jobs, check_step_times,
    check_collectives, check_sweeps_over_nodes, check_busbw,
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

    Examples:
        >>> from stepsplit.analyzer import validate
        >>> all(check.met for check in validate() if not check.skipped)
        True
    """
    published = Published(folder or PUBLISHED)
    if not any(map(published.has, IDS)):
        raise UsageError(
            f"{published.folder}: contains no published table such as {next(iter(IDS))}.csv"
        )
    try:
        return tuple(each for group in GROUPS for each in group(published))
    except (ArithmeticError, KeyError, ValueError) as error:
        if folder is None:
            raise
        # A table of the user: a value that no row of ours has.
        problem = f"a value of a table cannot be used ({error})"
        raise DataError(folder, problem, "see the columns in docs/model.md") from None


# The checks as JSON.

SCHEMA = "stepsplit.validation/1"


def to_json(checks: Iterable[Check]) -> str:
    """All checks with all rows; error is predicted / published - 1, null if published is 0."""
    written = [
        {
            "name": check.name,
            "measure": check.measure,
            "bar": check.bar,
            "result": check.result,
            "met": None if check.skipped else check.met,
            "baseline": check.baseline,
            "note": check.note,
            "inside": check.inside if check.banded else None,
            "left_out": check.left_out,
            "rows": [
                {
                    "table": row.table,
                    "case": row.case,
                    "what": row.what,
                    "published": row.published,
                    "predicted": row.predicted,
                    "unit": row.unit,
                    "error": row.error if math.isfinite(row.error) else None,
                    "low": row.low if row.high else None,
                    "high": row.high or None,
                    "fitted": row.fitted,
                }
                for row in check.rows
            ],
        }
        for check in checks
    ]
    return json.dumps({"schema": SCHEMA, "checks": written}, indent=1)
