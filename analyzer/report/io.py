"""Reading and writing report.json and the folder of a report."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from stepsplit.analyzer.errors import DataError, make_write_error, write
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import decode_job
from stepsplit.analyzer.model.hardware_config import read_hardware_file
from stepsplit.analyzer.model.prediction import Prediction, prediction_from_json, prediction_to_json
from stepsplit.analyzer.report.report import SCHEMA, JobTables, PredictionRow, Report
from stepsplit.analyzer.report.tables import Tables, write_tables

# A report's folder: report.json and tables/.

TABLES_NAME = "tables"


def save(folder: Path, report: Report, tables: Tables) -> None:
    """Write the tables, then report.json, so that a folder with a report is complete.

    Raises UsageError if the folder is not writable.
    """
    try:
        write_tables(folder / TABLES_NAME, tables)
    except OSError as error:
        raise make_write_error(folder, error) from None
    write(folder / REPORT_NAME, to_json(report))


# report.json.

REPORT_NAME = "report.json"

_HEAD = re.compile(rb'\s*\{\s*"schema"\s*:\s*"stepsplit\.report/')

_HEAD_BYTES = 256


def to_json(report: Report) -> bytes:
    """The report as JSON text, indented so that a diff is readable."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def from_json(text: bytes, source: object = REPORT_NAME) -> Report:
    """Decode a report. Raises DataError if the text does not have this schema."""
    try:
        report = msgspec.json.decode(text, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, AssertionError) as error:
        raise DataError(
            source, f"not a stepsplit report ({error})", "analyze the run again"
        ) from None
    if report.schema != SCHEMA:
        raise DataError(
            source, f"schema {report.schema} instead of {SCHEMA}", "analyze the run again"
        )
    return report


def is_report(path: Path) -> bool:
    """Whether the file is a report, of any schema version."""
    try:
        with path.open("rb") as file:
            return _HEAD.match(file.read(_HEAD_BYTES)) is not None
    except (OSError, ValueError):
        return False


def read_report(path: Path) -> Report:
    """Read a report from a file, or from report.json in a folder. Raises DataError."""
    file = path / REPORT_NAME if path.is_dir() else path
    try:
        return from_json(file.read_bytes(), file)
    except OSError as error:
        raise DataError(file, error.strerror or "unreadable", "pass a report.json") from None


# The prediction and the job config in a report.


def build_prediction_row(prediction: Prediction) -> PredictionRow:
    """Convert a prediction to its row in report.json."""
    return msgspec.json.decode(prediction_to_json(prediction), type=PredictionRow)


def extract_prediction(report: Report) -> Prediction | None:
    """The prediction in the report; None without a model comparison. Raises DataError."""
    if report.prediction is None:
        return None
    return prediction_from_json(msgspec.json.encode(report.prediction).decode(), "report.json")


def build_job_tables(job: TomlTable) -> JobTables:
    """Convert the tables of a job.toml to their form in report.json.

    The values of a hardware file are included, and the reference to the file is removed.
    """
    hardware = job.get_subtable("hardware")
    file = read_hardware_file(hardware)
    values = {**(file.values if file is not None else {}), **hardware.values}
    remaining = {key: value for key, value in values.items() if key not in ("file", "measured")}
    return msgspec.json.decode(
        msgspec.json.encode({**job.values, "hardware": remaining}), type=JobTables
    )


def extract_job(report: Report) -> JobConfig | None:
    """The job config in the report; None without a model comparison. Raises DataError."""
    if report.job is None:
        return None
    return decode_job(TomlTable("report.json", "", msgspec.structs.asdict(report.job)))
