"""Over how many steps the report's sums go."""

from __future__ import annotations

from collections import Counter

from stepsplit.analyzer.report.report import Report


def summed_steps(report: Report) -> Counter[int]:
    """By rank, over how many steps its sums go: its full ones, or all where none is full."""
    full = Counter(row.rank for row in report.steps if row.kind == "full")
    return Counter(row.rank for row in report.steps if row.kind == "full" or not full[row.rank])
