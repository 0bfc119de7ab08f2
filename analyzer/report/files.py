"""A report's folder: report.json and tables/."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.errors import unwritable, write
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables, write_tables
from stepsplit.analyzer.report.wire import REPORT_NAME, to_json

TABLES_NAME = "tables"


def save(folder: Path, report: Report, tables: Tables) -> None:
    """Writes the tables, then report.json: a folder that holds a report is complete.

    Raises UsageError where that cannot be written.
    """
    try:
        write_tables(folder / TABLES_NAME, tables)
    except OSError as error:
        raise unwritable(folder, error) from None
    write(folder / REPORT_NAME, to_json(report))
