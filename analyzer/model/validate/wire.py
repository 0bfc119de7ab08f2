"""The checks as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from stepsplit.analyzer.model.validate.tables import Check, Row

SCHEMA = "stepsplit.validation/1"


def to_json(checks: Iterable[Check]) -> str:
    """All checks with all rows; error is predicted / published - 1, null where 0 was published."""
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
