"""Tables whose columns are the keys of job.toml: measured jobs, and published training runs."""

from __future__ import annotations

import tomllib
from typing import Any

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import decode_job
from stepsplit.analyzer.model.parameters import CONVENTIONS, count_model_flops
from stepsplit.analyzer.validation.tables import Case, Family, PublishedRow

# A row as a job.

TABLES = ("model", "parallel", "training", "hardware")


def build_stated_job(row: PublishedRow) -> JobConfig:
    """The job of a row: columns such as model.layers are keys of job.toml, empty ones left out.

    Raises DataError or UsageError as read_job.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    for column in row.values:
        table, _, key = column.partition(".")
        if key and row.has_value(column):
            tables[table][key] = _parse_value(row.read_text(column))
    return decode_job(TomlTable(f"{row.table}.csv, {row.id}", "", tables))


def _parse_value(text: str) -> object:
    """A number, a boolean, a list or an inline table, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


# Training runs that others reported; no constant is fitted on them.

REPORTS_TABLE = "training_reports"

SPEEDS = ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
"""The columns of which a report has one."""

REPORT_FAMILIES: dict[str, Family] = {
    "ampere": "A100 reports",
    "hopper": "H100 reports",
    "blackwell": "Blackwell reports",
    "cdna2": "AMD reports",
    "cdna3": "AMD reports",
    "cdna4": "AMD reports",
}


def build_training_report(row: PublishedRow) -> tuple[Case, ...]:
    """The job of a row, and its step by its time or its throughput.

    TFLOP/s count FLOPs by the convention in the column flops.
    """
    job = build_stated_job(row)
    step_ns = _compute_step_s(row, job) * 1e9
    return (Case(row.table, row.id, _find_family(job), job, step_ns, row.read_text("publisher")),)


def _compute_step_s(row: PublishedRow, job: JobConfig) -> float:
    column = next(filter(row.has_value, SPEEDS), "")
    speed = row.read_number(column) if column else 0.0
    if speed <= 0:
        problem = f"{row.id} has no speed above 0"
        raise DataError(f"{row.table}.csv", problem, f"give one of {', '.join(SPEEDS)}")
    ranks = job.parallel.world_size
    if column == "step_s":
        return speed
    if column == "tokens_per_s_per_gpu":
        return job.training.global_batch * job.training.seq_len / (speed * ranks)
    convention = row.read_choice("flops", {name: name for name in CONVENTIONS})
    return count_model_flops(job, convention) / (speed * 1e12 * ranks)


def _find_family(job: JobConfig) -> Family:
    if job.model.experts is not None:
        return "reports with experts"
    family = job.hardware.family
    if family not in REPORT_FAMILIES:
        known = ", ".join(REPORT_FAMILIES)
        raise UsageError(f"reports are of {known}, not {family}; use measured_jobs.csv")
    return REPORT_FAMILIES[family]
