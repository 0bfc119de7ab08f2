"""A finished run as pages see it."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables


@dataclass(frozen=True, slots=True)
class View:
    """A run's name as people gave it, its report, and its tables (None where they are gone).

    run_id is "" where there is no server: then nothing leads to other pages.
    """

    name: str
    report: Report
    tables: Tables | None
    run_id: str = ""
