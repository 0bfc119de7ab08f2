"""The files of a run: what was uploaded, report.json and tables/."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.report.files import TABLES_NAME
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables, read_tables
from stepsplit.analyzer.report.wire import read_report

INPUT_NAME = "input"


def load_report(folder: Path) -> Report:
    """The report of a finished run. Raises DataError."""
    return read_report(folder)


def load_tables(folder: Path) -> Tables | None:
    """The tables of a finished run; None where someone has removed them to save space."""
    try:
        return read_tables(folder / TABLES_NAME)
    except FileNotFoundError:
        return None
