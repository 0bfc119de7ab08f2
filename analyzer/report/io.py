"""report.json and a report's folder, in and out."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from stepsplit.analyzer.errors import DataError, unwritable, write
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import job_in
from stepsplit.analyzer.model.hardware_config import hardware_file
from stepsplit.analyzer.model.prediction import Prediction, prediction_from_json, prediction_to_json
from stepsplit.analyzer.report.report import SCHEMA, JobTables, PredictionRow, Report
from stepsplit.analyzer.report.tables import Tables, write_tables

# A report's folder: report.json and tables/.

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


# report.json in and out.

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


# The prediction that a report holds, and the job that it is of.


def build_prediction_row(prediction: Prediction) -> PredictionRow:
    """The prediction as report.json holds it."""
    return msgspec.json.decode(prediction_to_json(prediction), type=PredictionRow)


def prediction_of(report: Report) -> Prediction | None:
    """What the run should cost, None where it was held against no model. Raises DataError."""
    if report.prediction is None:
        return None
    return prediction_from_json(msgspec.json.encode(report.prediction).decode(), "report.json")


def build_job_tables(run: TomlTable) -> JobTables:
    """The tables of a job.toml as report.json holds them: what they take from a file of the
    hardware stands in them, and no file is named."""
    stated = run.inner("hardware")
    file = hardware_file(stated)
    values = {**(file.values if file is not None else {}), **stated.values}
    kept = {key: value for key, value in values.items() if key not in ("file", "measured")}
    return msgspec.json.decode(
        msgspec.json.encode({**run.values, "hardware": kept}), type=JobTables
    )


def job_of_report(report: Report) -> JobConfig | None:
    """The job that the run was held against, None where there is none. Raises DataError."""
    if report.job is None:
        return None
    return job_in(TomlTable("report.json", "", msgspec.structs.asdict(report.job)))
