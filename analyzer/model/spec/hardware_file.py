"""The file that a [hardware] table names: what `stepsplit calibrate` wrote."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.model.spec.table import Table, read_table


def hardware_file(table: Table) -> Table | None:
    """The keys of [hardware] that the file states which the table names, None where it names none.

    The path is relative to the table's own file. Raises DataError.
    """
    name = table.text("file", None)
    return None if name is None else read_table(Path(table.where).parent / name)
