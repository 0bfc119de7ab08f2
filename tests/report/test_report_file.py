"""The text of a report; files that are no report, or lack a table, are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.report_builders import analysis

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.io import from_json, load_tables, save, to_json


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"schema": ' + b"[" * 100_000, b"{", b"\xff", b""]
)
def test_another_text_is_no_report(text: bytes) -> None:
    with pytest.raises(DataError, match=r"report\.json: not a stepsplit report"):
        from_json(text)


def test_a_missing_table_is_named_below_its_run(tmp_path: Path) -> None:
    made = analysis()
    save(tmp_path / "run", made.report, made.tables)
    (tmp_path / "run" / "tables" / "segments.parquet").unlink()

    with pytest.raises(DataError) as raised:
        load_tables(tmp_path / "run" / "tables")
    assert str(raised.value).startswith("run/tables: cannot read a table (")
    assert "run/tables/segments.parquet" in str(raised.value)
    assert str(tmp_path) not in str(raised.value)


def test_a_report_is_indented_unless_it_is_very_long() -> None:
    """As that of a thousand ranks is, whose text would be a third longer."""
    report = analysis().report
    longer = replace(report, steps=report.steps * 400)

    assert to_json(report).startswith(b'{\n "schema": ')
    assert to_json(longer).startswith(b'{"schema":')
    assert [from_json(to_json(one)) for one in (report, longer)] == [report, longer]
