"""Files that are no report, or lack a table, are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_builders import analysis

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.io import from_json, load_tables, save


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
