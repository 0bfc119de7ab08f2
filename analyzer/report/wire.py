"""report.json in and out."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.report import SCHEMA, Report

REPORT_NAME = "report.json"
_HEAD = re.compile(rb'\s*\{\s*"schema"\s*:\s*"stepsplit\.report/')
_HEAD_BYTES = 256


def to_json(report: Report) -> bytes:
    """The report as JSON text, one key a line at the top so that a diff can be read."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def from_json(text: bytes, source: object = REPORT_NAME) -> Report:
    """The report of the text. Raises DataError where the text is none of this schema."""
    try:
        report = msgspec.json.decode(text, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, AssertionError) as error:
        raise DataError(
            source, f"not a stepsplit report ({error})", "analyze the run again"
        ) from None
    if report.schema != SCHEMA:
        raise DataError(source, f"of schema {report.schema}, not {SCHEMA}", "analyze the run again")
    return report


def is_report(path: Path) -> bool:
    """Whether the file says that it is a report, of whatever schema."""
    try:
        with path.open("rb") as file:
            return _HEAD.match(file.read(_HEAD_BYTES)) is not None
    except (OSError, ValueError):
        return False


def read_report(path: Path) -> Report:
    """The report in the file, or in the folder's report.json. Raises DataError."""
    file = path / REPORT_NAME if path.is_dir() else path
    try:
        return from_json(file.read_bytes(), file)
    except OSError as error:
        raise DataError(file, error.strerror or "unreadable", "name a report.json") from None
