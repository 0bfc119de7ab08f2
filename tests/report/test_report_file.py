"""The text of a report; files that are no report, or lack a table, are refused in one line."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize("name", ["tp2_pp2_dp2", "pp2_m2/rank0_trace.json.gz"])
def test_saving_and_loading_leaves_pandas_alone(name: str, tmp_path: Path) -> None:
    """Its import takes a quarter of a second, and a page of the dashboard that is made in another
    thread meanwhile would fail on the half-imported module."""
    program = """
import sys
from pathlib import Path
from stepsplit import analyzer
from stepsplit.analyzer.report.io import load_tables, save

sample, out = map(Path, sys.argv[1:])
made = analyzer.examine([sample])
save(out, made.report, made.tables)
load_tables(out / "tables")
print("pandas" in sys.modules)
"""
    sample = Path(__file__).parents[2] / "sample_traces" / name
    command = [sys.executable, "-c", program, str(sample), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
