"""The job.toml of an upload: found by name or content; every other .toml file gives a warning."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config_decode import TomlTable, parse_table, read_table
from stepsplit.analyzer.model.hardware_config import list_referenced_files
from stepsplit.analyzer.report.report import WarningRow

JOB_FILE = "job.toml"

_NAMES = (JOB_FILE, "run.toml")
"""Names of a job config, in any case; the second one is used by older recordings."""

_JOB_TABLES = ("model", "parallel", "training")


def find_job_file(folder: Path) -> Path | None:
    """The job config of the upload: a job.toml (else run.toml) in any case, else a TOML file with
    the tables of one; the nearest to the top of the folder. None without any."""
    files = _list_toml_files(folder)
    found = [path for path in files if _rank_name(path) < len(_NAMES)]
    found = found or [path for path in files if _has_job_tables(path)]
    return min(found, key=_order, default=None)


def list_unused_files(folder: Path, job_file: Path | None) -> tuple[WarningRow, ...]:
    """A warning for each TOML file of the upload that the analysis does not use."""
    used: set[Path] = set()
    reason = "it has none of the tables " + ", ".join(f"[{name}]" for name in _JOB_TABLES)
    if job_file is not None:
        used = {job_file.resolve(), *_find_named_files(job_file).values()}
        reason = f"{job_file.relative_to(folder)} describes the job"
    return tuple(
        WarningRow("unused_toml", f"{path.relative_to(folder)} is not used: {reason}")
        for path in _list_toml_files(folder)
        if path.resolve() not in used
    )


def check_named_files(job_file: Path, folder: Path) -> None:
    """Raises DataError if the job file refers to files outside of the upload."""
    root = folder.resolve()
    for name, file in _find_named_files(job_file).items():
        if not file.is_relative_to(root):
            problem = f"refers to {name}, which is not in the upload"
            raise DataError(job_file, problem, "upload that file too, and use a relative path")


def check_job_text(text: bytes) -> None:
    """Raises DataError unless the text is TOML with a table of a job config and names no files."""
    table = parse_table(JOB_FILE, text)
    known = (*_JOB_TABLES, "hardware")
    if not _has_tables(table, known):
        needed = ", ".join(f"[{name}]" for name in known)
        raise DataError(JOB_FILE, f"has none of the tables {needed}", "see docs/gap.md")
    if list_referenced_files(table):
        hint = "upload the recording with both files"
        raise DataError(JOB_FILE, "refers to another file", hint)


def _list_toml_files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() == ".toml" and path.is_file()
    )


def _rank_name(path: Path) -> int:
    name = path.name.lower()
    return _NAMES.index(name) if name in _NAMES else len(_NAMES)


def _order(path: Path) -> tuple[int, int, bool, Path]:
    return _rank_name(path), len(path.parts), path.name != path.name.lower(), path


def _has_job_tables(path: Path) -> bool:
    try:
        return _has_tables(read_table(path), _JOB_TABLES)
    except DataError:
        return False


def _has_tables(table: TomlTable, names: tuple[str, ...]) -> bool:
    return any(isinstance(table.values.get(name), dict) for name in names)


def _find_named_files(job_file: Path) -> dict[str, Path]:
    """The files that the job file refers to, by the name it gives them."""
    names = list_referenced_files(read_table(job_file))
    return {name: (job_file.parent / name).resolve() for name in names}
