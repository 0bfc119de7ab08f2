"""A report's folder: report.json and tables/."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables, write_tables
from stepsplit.analyzer.report.wire import REPORT_NAME, to_json
from stepsplit.collectors.run_spec import write_whole

TABLES_NAME = "tables"


def save(folder: Path, report: Report, tables: Tables) -> None:
    """Writes the tables, then report.json: a folder that holds a report is complete.

    Raises UsageError where that cannot be written.
    """
    try:
        write_tables(folder / TABLES_NAME, tables)
    except OSError as error:
        raise _unwritable(folder, error) from None
    write(folder / REPORT_NAME, to_json(report))


def write(path: Path, content: bytes) -> None:
    """Writes the file, whole or not at all. Raises UsageError where it cannot be written."""
    try:
        write_whole(path, content)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError | ValueError) -> UsageError:
    reason = getattr(error, "strerror", None) or "not a file"
    return UsageError(f"{path}: {reason}; choose a place that can be written")
