"""Bubble rates of schedules, against those that Qi et al. calculated from profiled times."""

from __future__ import annotations

from stepsplit.analyzer.model.schedule.closed import bubble_rate
from stepsplit.analyzer.model.validate.gather import equality
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row

COLUMNS = {
    "bubble_1F1B": "1f1b",
    "bubble_1F1B_I": "interleaved",
    "bubble_ZB_H1": "zb-h1",
    "bubble_ZB_H2": "zb-h2",
    "bubble_ZB_1p": "zb-h1",
}
"""ZB-1p is the order of ZB-H1 here; ZB-2p is found by a search and has no closed form."""
OPEN = 1e-4


def bubble_checks(published: Published) -> tuple[Check, ...]:
    records = published.records("zero_bubble_table5_9_bubble_rates")
    return (equality("Zero Bubble table 5, bubble rates", records, _rates),)


def _rates(row: Record) -> tuple[Row, ...]:
    return tuple(_rate(row, column) for column in COLUMNS)


def _rate(row: Record, column: str) -> Row:
    schedule = COLUMNS[column]
    chunks = row.count("vpp_max_chunks") if schedule == "interleaved" else 1
    times = row.number("TF_ms") * 1e6, row.number("TB_ms") * 1e6, row.number("TW_ms") * 1e6
    found = bubble_rate(
        schedule, row.count("pp"), row.count("num_microbatches"), times, chunks,
        row.number("Tcomm_ms") * 1e6,
    )  # fmt: skip
    assert found is not None, f"{row.id}: no closed form of {schedule}"
    said = row.number(column)
    return Row(row.table, row.id, column, said, found, "ratio", tolerance=OPEN)
