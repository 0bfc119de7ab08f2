"""stepsplit reduce: a table per rank gives the report of the trace."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from stepsplit.analyzer import DataError, Report, analyze
from stepsplit.analyzer.readers.any_file import read_files
from stepsplit.analyzer.readers.events_file import EventsFile, write_events
from stepsplit.analyzer.readers.kernel_rules import read_rules
from stepsplit.analyzer.readers.reduction import reduce_recording
from stepsplit.analyzer.trace import Events, Lane, Shapes
from stepsplit.dashboard.cli import stepsplit

SAMPLES = Path(__file__).parents[2] / "sample_traces"


def test_tables_give_the_reports_of_their_traces(tmp_path: Path) -> None:
    """On CPU with Flight Recorder dumps, on a device of several hosts, and in a pipeline."""

    for name in ("dp4", "built_tp_pp_dp_slow_rank", "pp2_m2"):
        reduce_recording([SAMPLES / name], tmp_path / name)

        assert analyze(tmp_path / name) == analyze(SAMPLES / name), name


def test_hosts_reduce_their_ranks_into_one_folder(tmp_path: Path) -> None:
    sample, tables = SAMPLES / "dp4", tmp_path / "dp4"
    for ranks in ((0, 1), (2, 3)):
        files = [path for rank in ranks for path in sample.glob(f"rank{rank}_trace*")]
        done = reduce_recording(files, tables)
        assert done.ranks == ranks

    assert [row.split for row in analyze(tables).steps] == [
        row.split for row in analyze(sample).steps
    ]


def test_rules_classify_the_kernels_of_a_table(tmp_path: Path) -> None:
    """A table holds names, not classes."""
    sample, tables = SAMPLES / "built_tp_pp_dp_slow_rank", tmp_path / "tables"
    reduce_recording([sample], tables)
    rules_file = tmp_path / "rules.toml"
    rules_file.write_text('[[kernel]]\nmatch = "gemm"\nis = "copy"\n')
    rules = read_rules(rules_file)

    reports = [analyze(place, rules=rules) for place in (tables, sample)]

    assert reports[0] == reports[1] != analyze(sample)


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "tables"

    result = CliRunner().invoke(stepsplit, ["reduce", str(SAMPLES / "pp2_m2"), "--out", str(out)])

    assert result.exit_code == 0
    assert result.output.startswith(f"{out}: tables of 2 ranks, ")
    assert sorted(path.name for path in out.iterdir()) == [
        "rank0_events.parquet",
        "rank1_events.parquet",
        "run.json",
    ]


def test_a_damaged_table_is_refused_or_left_out(tmp_path: Path) -> None:
    sample, tables = SAMPLES / "pp2_m2", tmp_path / "tables"
    reduce_recording([sample], tables)
    table = tables / "rank1_events.parquet"
    whole = table.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:4], whole[:4] + bytes(100)):
        table.write_bytes(damaged)
        with pytest.raises(DataError, match=r"rank1_events\.parquet.*not a rank table"):
            analyze(table)
        report: Report = analyze(tables)
        assert report.run.ranks == (0,)
        assert "file_skipped" in {warning.code for warning in report.warnings}


def test_a_table_with_values_out_of_range_is_refused(tmp_path: Path) -> None:
    reduce_recording([SAMPLES / "pp2_m2"], tmp_path)
    table = tmp_path / "rank0_events.parquet"
    file = EventsFile(table)
    about = msgspec.msgpack.decode(file.about)

    def check(change: dict[str, object], problem: str) -> None:
        events, shapes = file.read_events(("op",) * 9_999, (Lane("", "", -1, -1),) * 999, ())
        other = tmp_path / "other_rank0.parquet"
        write_events(other, events, shapes, msgspec.msgpack.encode(about | change))
        with pytest.raises(DataError, match=problem):
            analyze(other)

    check({"schema": "stepsplit.rank_table/2"}, "its schema is 'stepsplit.rank_table/2'")
    check({"names": ["aten::mm"]}, "column name_id is out of range")
    check({"lanes": []}, "column lane is out of range")
    check({"calls": about["calls"] | {"groups": []}}, "column group is out of range")
    check({"rank": "zero"}, "Expected `int`, got `str`")


def test_a_table_is_read_as_any_file(tmp_path: Path) -> None:
    reduce_recording([SAMPLES / "pp2_m2"], tmp_path)

    [file] = read_files(tmp_path / "rank0_events.parquet")

    assert str(SAMPLES).encode() not in (tmp_path / "rank0_events.parquet").read_bytes()
    assert (file.kind, file.refused) == ("rank table", "")
    [trace] = file.content
    assert isinstance(trace.events, Events) and isinstance(trace.shapes, Shapes)
    assert file.events == len(trace.events)


def test_a_parquet_file_of_something_else_is_no_trace(tmp_path: Path) -> None:
    other = tmp_path / "prices.parquet"
    pq.write_table(pa.table({"price": [1.0]}), other)
    reduce_recording([SAMPLES / "pp2_m2"], tmp_path)

    [file] = read_files(other)
    assert (file.kind, file.refused) == ("rank table", "unknown format")
    assert analyze(tmp_path) == analyze(SAMPLES / "pp2_m2")
    with pytest.raises(DataError, match="no trace found"):
        analyze(other)
