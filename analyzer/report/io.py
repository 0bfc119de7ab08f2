"""Reading and writing report.json and the folder of a report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import DataError, make_write_error, write
from stepsplit.analyzer.readers.kineto.schema import UNDECODABLE
from stepsplit.analyzer.report.report import SCHEMA, JobTables, PredictionRow, Report
from stepsplit.analyzer.report.tables import Tables, read_tables, write_tables
from stepsplit.collectors.formats.file_names import is_trace_name
from stepsplit.collectors.safe_io.regular_file import open_regular, read_regular

if TYPE_CHECKING:
    from stepsplit.analyzer.model.config import JobConfig
    from stepsplit.analyzer.model.config_decode import TomlTable
    from stepsplit.analyzer.model.prediction import Prediction

_T = TypeVar("_T")

# A report's folder: report.json and tables/.

TABLES_NAME = "tables"


def save(folder: Path, report: Report, tables: Tables) -> None:
    """Write the tables, then report.json, so that a folder with a report is complete.

    Both are read back before report.json is there. Raises UsageError if the folder is not
    writable, and DataError if what was written cannot be read.
    """
    text = to_json(report)
    _verify_readable(text, report)
    try:
        write_tables(folder / TABLES_NAME, tables)
    except OSError as error:
        raise make_write_error(folder, error) from None
    # A pipe or device in the place of a table cannot be read back.
    if all(path.is_file() for path in (folder / TABLES_NAME).iterdir()):
        load_tables(folder / TABLES_NAME)
    write(folder / REPORT_NAME, text)


def _verify_readable(text: bytes, report: Report) -> None:
    hint = "please report it as a bug, with the recording"
    try:
        differs = from_json(text) != report
    except DataError as error:
        raise DataError(REPORT_NAME, f"cannot be read back: {error.problem}", hint) from None
    if differs:
        raise DataError(REPORT_NAME, "differs once it is read back", hint)


def load_tables(folder: Path) -> Tables:
    """The tables that `save` wrote into the folder. Raises DataError if one cannot be read."""
    try:
        return read_tables(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # Not the whole path, which is the server's in a store.
        where = f"{folder.parent.name}/{folder.name}"
        problem = " ".join(str(error).replace(str(folder), where).split())
        raise DataError(
            where, f"cannot read a table ({problem})", "analyze the run again"
        ) from None


# report.json.

REPORT_NAME = "report.json"

_COPIED_S = 60.0
"""Time that the files of one copy or checkout may lie apart."""


def is_analyzed(folder: Path) -> bool:
    """Whether the folder has a report, and no trace that was recorded after it."""
    if not (folder / REPORT_NAME).is_file():
        return False
    written_s = (folder / REPORT_NAME).stat().st_mtime
    traces = (file for file in folder.iterdir() if is_trace_name(file.name))
    return all(file.stat().st_mtime <= written_s + _COPIED_S for file in traces)


_HEAD = re.compile(rb'\A\s*\{\s*"schema"\s*:\s*"stepsplit\.report/')

_HEAD_BYTES = 256
"""Of these bytes a file's head is: blanks, a brace and the schema."""


_MOST_INDENTED_BYTES = 2_000_000
"""Above it, the indentation adds a third to a text too long to compare by eye."""


def to_json(report: Report) -> bytes:
    """The report as JSON text, indented so that a diff is readable unless it is very long."""
    text = msgspec.json.encode(report)
    if len(text) <= _MOST_INDENTED_BYTES:
        text = msgspec.json.format(text, indent=1)
    return text + b"\n"


def from_json(text: bytes, source: object = REPORT_NAME) -> Report:
    """Decode a report. Raises DataError if the text does not have this schema."""
    document = Document(Report, SCHEMA, "a stepsplit report", "analyze the run again")
    return document.decode(text, source)


class _SchemaField(msgspec.Struct, frozen=True):
    schema: str


class Document(Struct, Generic[_T], frozen=True):
    """A JSON format of stepsplit: the type of its content, its schema, its name in errors, and what
    to do about a file that is not of this format."""

    content: type[_T]
    schema: str
    name: str
    hint: str

    def decode(self, text: bytes, source: object) -> _T:
        """Decode a text; source is the file name in errors. Raises DataError."""
        try:
            schema = msgspec.json.decode(text, type=_SchemaField).schema
            if schema == self.schema:
                return msgspec.json.decode(text, type=self.content)
        except (*UNDECODABLE, AssertionError) as error:
            raise DataError(source, f"not {self.name} ({error})", self.hint) from None
        raise DataError(source, f"schema {schema} instead of {self.schema}", self.hint)


def is_report(path: Path) -> bool:
    """Whether the file is a report, of any schema version."""
    return has_head(path, _HEAD)


def has_head(path: Path, head: re.Pattern[bytes]) -> bool:
    """Whether the path is a regular file whose first bytes match."""
    try:
        with open_regular(path) as file:
            return head.match(file.read(_HEAD_BYTES)) is not None
    except (OSError, ValueError):
        return False


def read_report(path: Path) -> Report:
    """Read a report from a file, or from report.json in a folder. Raises DataError."""
    file = path / REPORT_NAME if path.is_dir() else path
    try:
        return from_json(read_regular(file), file)
    except OSError as error:
        raise DataError(file, error.strerror or "unreadable", "pass a report.json") from None


# The prediction and the job config in a report. The model is loaded where it is used: most reports
# have neither.


def build_prediction_row(prediction: Prediction) -> PredictionRow:
    """Convert a prediction to its row in report.json."""
    from stepsplit.analyzer.model.prediction import prediction_to_json

    return msgspec.json.decode(prediction_to_json(prediction), type=PredictionRow)


def extract_prediction(report: Report) -> Prediction | None:
    """The prediction in the report; None without a model comparison. Raises DataError."""
    if report.prediction is None:
        return None
    from stepsplit.analyzer.model.prediction import prediction_from_json

    return prediction_from_json(msgspec.json.encode(report.prediction).decode(), "report.json")


def build_job_tables(job: TomlTable) -> JobTables:
    """Convert the tables of a job.toml to their form in report.json.

    The values of a hardware file are included, and the reference to the file is removed.
    """
    from stepsplit.analyzer.model.hardware_config import read_hardware_file

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
    from stepsplit.analyzer.model.config_decode import TomlTable
    from stepsplit.analyzer.model.config_file import decode_job

    return decode_job(TomlTable("report.json", "", msgspec.structs.asdict(report.job)))
