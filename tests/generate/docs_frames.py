"""Writes docs/frames.md: the columns of each table of a report.

cd tests && ../.venv/bin/python -m generate.docs_frames
"""

from __future__ import annotations

import inspect
from pathlib import Path

from stepsplit.analyzer import Report
from stepsplit.analyzer.report.frames import ReportFrames, find_row_type, list_columns
from stepsplit.analyzer.report.meanings import read_meanings

PAGE = Path(__file__).parents[2] / "docs" / "frames.md"

FRAMES = tuple(
    name.removesuffix("_frame")
    for name in vars(ReportFrames)
    if name.endswith("_frame") and not name.startswith("_")
)
"""The tables, by the field of the report."""

HEAD = """\
# Tables of a report

A report gives each kind of its rows as a pandas table: `report.steps_frame()`. Columns and dtypes
are the same whatever is in it, also without rows. Times are nanoseconds from the report's time 0,
sizes bytes, ratios 0..1. Whole numbers are `int64`, or `Int64` where some may be unknown (`<NA>`).
The same meanings are in the JSON Schema of the report.
"""


def build_page() -> str:
    """The page, from the docstrings of the rows."""
    parts = [HEAD]
    for name in FRAMES:
        row = find_row_type(Report, name)
        meanings = read_meanings(row)
        doc = inspect.getdoc(getattr(Report, f"{name}_frame")) or ""
        parts.append(f"## {name}_frame\n\n{doc.partition(';')[0]}, one row per `{row.__name__}`.\n")
        parts.append("| column | dtype | meaning |\n|---|---|---|")
        for column, dtype in list_columns(row):
            meaning = meanings.get(column, "") or _find_inner(row, column)
            cell = meaning.replace("|", "\\|")
            parts.append(f"| {column} | {dtype} | {cell} |")
        parts.append("")
    return "\n".join(parts)


def _find_inner(row: type, column: str) -> str:
    """The meaning of a column that is a field of a record in the row."""
    import msgspec

    outer, _, inner = column.partition("_")
    for field in msgspec.inspect.type_info(row).fields:  # type: ignore[attr-defined]
        kinds = getattr(field.type, "types", (field.type,))
        if field.name == outer:
            for kind in kinds:
                if hasattr(kind, "cls"):
                    return read_meanings(kind.cls).get(inner, "")
    return ""


if __name__ == "__main__":
    PAGE.write_text(build_page())
