"""A check made of a table's records, without those that describe nothing that can be modelled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.validate.records import Record
from stepsplit.analyzer.model.validate.tables import Check, Measure, Row, check, marked

Build = Callable[[Record], tuple[Row, ...]]


def equality(name: str, records: Iterable[Record], build: Build) -> Check:
    """All rows must come out as printed."""
    return gathered(name, records, build, "equality", (1.0,))


def gathered(
    name: str,
    records: Iterable[Record],
    build: Build,
    measure: Measure,
    bar: tuple[float, ...],
    fitted: Collection[str] = (),
    note: str = "",
) -> Check:
    """The check of what build makes of each record. A record at which build raises an error of the
    input (an unknown model, an impossible job) is left out, and named in left_out."""
    rows: list[Row] = []
    left_out: list[str] = []
    for record in records:
        try:
            rows.extend(build(record))
        except StepsplitError as error:
            left_out.append(f"{record.id}: {error}")
    found = check(name, marked(rows, fitted), measure, bar, note=note)
    return replace(found, left_out=tuple(left_out))
