"""Peak memory of other programs, after one of each model's runs has been looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stepsplit.analyzer.model.memory.calibrate import calibrate
from stepsplit.analyzer.model.memory.memory import memory_of
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.validate.gather import gathered
from stepsplit.analyzer.model.validate.jobs.nanotron import nanotron
from stepsplit.analyzer.model.validate.jobs.zero_bubble import SCHEDULES, zero_bubble
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row

BAR = (0.10, 0.10)
"""Mean and maximum of the absolute errors."""
TABLE4, NANOTRON = "zero_bubble_table4_throughput_memory", "nanotron_best_configs_h100"


def calibrated_checks(published: Published) -> tuple[Check, ...]:
    pipelines = [row for row in published.records(TABLE4) if row.text("schedule") in SCHEDULES]
    plain = sorted(pipelines, key=lambda row: row.text("schedule") != "1F1B")
    grid = published.records(NANOTRON)
    first, later = _firsts(plain, "model"), _firsts(grid, "params_B")
    return (
        gathered(
            "Zero Bubble table 4, peak memory", plain,
            lambda row: _peak(row, first[row.text("model")], "memory_GB", zero_bubble),
            "mean/max", BAR, {row.id for row in first.values()},
            note="calibrated on the first 1F1B run of each model",
        ),
        gathered(
            "nanotron, peak memory", grid,
            lambda row: _peak(row, later[row.text("params_B")], "memory_GB_as_printed", nanotron),
            "mean/max", (), {row.id for row in later.values()},
            note="calibrated on the first run of each model; allocated or reserved is not said",
        ),
    )  # fmt: skip


def _firsts(records: Iterable[Record], column: str) -> dict[str, Record]:
    """The first record of each model: it is calibrated on, and so not reported."""
    found: dict[str, Record] = {}
    for row in records:
        found.setdefault(row.text(column), row)
    return found


def _peak(
    row: Record, first: Record, column: str, job_of: Callable[[Record], Job]
) -> tuple[Row, ...]:
    measured = (round(first.number(column) * 2**30),)
    calibration = calibrate(memory_of(job_of(first)), measured, first.id)
    stages = memory_of(job_of(row), calibration)
    predicted = max(stage.total_bytes for stage in stages) / 2**30
    return (Row(row.table, row.id, "peak", row.number(column), predicted, "GiB"),)
