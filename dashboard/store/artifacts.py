"""The files of a run: what was uploaded, report.json and tables/."""

from __future__ import annotations

import os
from pathlib import Path

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables, read_tables, write_tables
from stepsplit.analyzer.report.wire import REPORT_NAME, read_report, to_json

INPUT_NAME = "input"
TABLES_NAME = "tables"


def save(folder: Path, report: Report, tables: Tables) -> None:
    """Writes the tables, then report.json: a folder that holds a report is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(folder / TABLES_NAME, tables)
    draft = folder / f".{REPORT_NAME}.{os.getpid()}"
    draft.write_bytes(to_json(report))
    draft.replace(folder / REPORT_NAME)


def load_report(folder: Path) -> Report:
    """The report of a finished run. Raises DataError."""
    return read_report(folder)


def load_tables(folder: Path) -> Tables | None:
    """The tables of a finished run; None where someone has removed them to save space."""
    try:
        return read_tables(folder / TABLES_NAME)
    except FileNotFoundError:
        return None
