"""The compute of the parts of a report, for tests of where work is placed."""

from __future__ import annotations

from stepsplit.analyzer.report.report import Report


def list_part_compute(report: Report) -> dict[tuple[int | None, str, str], int]:
    """The compute of each part of a layer and pass in the mean step, in us; without those that have
    none."""
    return {
        (row.layer, row.part, row.phase): row.compute_ns // 1000
        for row in report.parts
        if row.compute_ns
    }
