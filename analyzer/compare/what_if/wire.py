"""What-ifs as JSON, schema "stepsplit.what_if/1"."""

from __future__ import annotations

import json

from stepsplit.analyzer.compare.what_if.what_if import WhatIfs

SCHEMA = "stepsplit.what_if/1"


def to_json(found: WhatIfs) -> str:
    """{"schema", "step_ns", "slowdown", "changes": [{"change", "step_ns", "gain_ns"}]}"""
    rows = [
        {"change": str(one.change), "step_ns": one.step_ns, "gain_ns": one.gain_ns}
        for one in found.changes
    ]
    body = {
        "schema": SCHEMA, "step_ns": found.step_ns, "slowdown": found.slowdown, "changes": rows,
    }  # fmt: skip
    return json.dumps(body, indent=1, allow_nan=False) + "\n"
