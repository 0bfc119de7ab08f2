"""One name for the communication of groups along several axes, wherever it is shown."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from support.builders import GpuTrace
from support.page_text import read_tables
from support.perfetto_file import read

from stepsplit.analyzer import Report, what_if
from stepsplit.analyzer.analysis import Analysis, examine
from stepsplit.analyzer.regression.compare import compare_reports
from stepsplit.analyzer.regression.metrics import extract_metrics
from stepsplit.analyzer.report.axis_names import name_groups
from stepsplit.analyzer.report.report import GroupRow
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.collectors import Mesh, RunSpec
from stepsplit.collectors.formats.run_spec import to_json
from stepsplit.dashboard import cli
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.overview import (
    build_blame_table,
    build_collective_table,
    build_exposed_table,
)
from stepsplit.dashboard.pages.timeline import build_band
from stepsplit.dashboard.reporters.compare import build_exposed_section
from stepsplit.dashboard.reporters.perfetto import perfetto_trace
from stepsplit.dashboard.reporters.terminal import build_collectives_table

MESH = Mesh.of({"pp": 2, "dp_replicate": 2, "tp": 2})
GROUPS = [
    ("9", "WEIGHTS_GROUP", [0, 1, 2, 3]), ("9", "WEIGHTS_GROUP", [4, 5, 6, 7]),
    ("8", "HEADS_GROUP", [0, 1, 4, 5]), ("8", "HEADS_GROUP", [2, 3, 6, 7]),
]  # fmt: skip
NAMES = {"pp x tp", "dp_replicate x tp"}


def record(
    folder: Path, late_us: int = 200, mesh: Mesh | None = MESH, groups: list[Any] = GROUPS
) -> Path:
    """Eight ranks, of which the last comes late to an all_reduce over the ranks of its stage, and
    then to one over those of its replica."""
    folder.mkdir()
    (folder / "run.json").write_text(to_json(RunSpec("run", 8, "nccl", mesh=mesh)))
    for rank in range(8):
        trace = GpuTrace(rank, 8, groups=[one for one in groups if rank in one[2]])
        own = late_us if rank == 7 else 0
        for step in range(3):
            begin, end = 4000 * step, 4000 * step + 4000
            trace.step(step, begin, end).kernel("gemm", begin, begin + 1000 + own)
            trace.all_reduce(begin + 1000 + own, begin + 1400 + late_us, group="9")
            trace.kernel("gemm", begin + 1400 + late_us, begin + 2000 + late_us + own)
            trace.all_reduce(begin + 2000 + late_us + own, begin + 2500 + 2 * late_us, group="8")
            trace.kernel("gemm", begin + 2500 + 2 * late_us, end)
        trace.write(folder)
    return folder


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return examine([record(tmp_path_factory.mktemp("names") / "run")])


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return examine([record(tmp_path_factory.mktemp("names") / "run", late_us=500)]).report


def list_axes(report: Report) -> set[str]:
    """What the tables of the pages call the axes."""
    sections = [
        *build_exposed_table(report),
        *build_collective_table(report),
        *build_blame_table(View("run", report, None)),
    ]
    return {row["axis"] for rows in read_tables(sections) for row in rows}


def test_every_table_names_both_kinds_by_their_axes(analysis: Analysis) -> None:
    assert list_axes(analysis.report) == NAMES
    assert {*build_collectives_table(analysis.report).columns[0].cells} == NAMES


def test_the_compared_runs_have_a_row_for_each_kind(analysis: Analysis, slower: Report) -> None:
    comparison = compare_reports(analysis.report, slower)
    assert {row.axis for row in comparison.collectives} == NAMES
    assert {row.axis for row in comparison.exposed} == NAMES
    screen = Console(file=io.StringIO(), width=100)
    screen.print(*build_exposed_section(comparison))
    text = screen.file.getvalue()
    assert "pp x tp skew" in text or "pp x tp bubble" in text
    assert "other" not in text


def test_the_timeline_and_its_export_name_the_calls_alike(analysis: Analysis) -> None:
    tables = analysis.tables
    assert {*tables.waits.axis.tolist()} == NAMES
    band = build_band(6, tables.segments, tables.waits)
    assert {*band.names} == {"", *(f"all_reduce on {name}" for name in NAMES)}
    exported = read(b"".join(perfetto_trace(analysis.report, tables)))
    waits = {one.name.partition("(")[2] for one in exported.slices if "waits for" in one.name}
    assert waits == {f"{name} all_reduce)" for name in NAMES}


def test_what_if_on_other_hardware_lists_each_kind(tmp_path: Path) -> None:
    found = what_if(record(tmp_path / "run"), hardware="h200-sxm", recorded_on="h100-sxm")
    assert found.carried is not None
    assert {one.axis for one in found.carried.calls} == NAMES


def test_metrics_keep_the_keys_of_older_baselines(analysis: Analysis) -> None:
    """Calls by the description of their group, and times and values of single axes only."""
    metrics = extract_metrics(analysis.report, "run")
    assert metrics.calls is not None
    assert {one.axis for one in metrics.calls} == {"WEIGHTS_GROUP", "HEADS_GROUP"}
    assert {one.axis for one in metrics.times} == {None}
    assert {one.axis for one in metrics.blame} == {None}
    assert not [one for one in metrics.values if " x " in one.metric]


def test_without_a_mesh_a_group_has_its_description(tmp_path: Path) -> None:
    report = examine([record(tmp_path / "run", mesh=None) / "rank7_trace.json.gz"]).report
    assert {*name_groups(report).values()} == {"WEIGHTS_GROUP", "HEADS_GROUP"}
    assert {row.axis for row in report.exposed} == {"WEIGHTS_GROUP", "HEADS_GROUP"}


def test_descriptions_have_no_column_of_the_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be many and long: what the buckets hold of axes would not fit."""
    trace = record(tmp_path / "run", mesh=None) / "rank7_trace.json.gz"
    assert cli.run(["analyze", str(trace)]) == 0
    (heads,) = (one for one in capsys.readouterr().out.splitlines() if "worst rank" in one)
    assert heads.split() == ["measured", "share", "worst", "rank"]


def test_a_group_that_the_script_did_not_describe_is_not_called_so(tmp_path: Path) -> None:
    """torch writes "undefined"."""
    groups = [(name, "undefined", ranks) for name, _, ranks in GROUPS]
    folder = record(tmp_path / "run", mesh=None, groups=groups)
    report = examine([folder / "rank7_trace.json.gz"]).report
    assert {*name_groups(report).values()} == {"other"}
    assert {row.axis for row in report.exposed} == {None}


def test_a_report_of_an_older_version_has_what_it_states(analysis: Analysis) -> None:
    groups = tuple(structs.replace(one, name="") for one in analysis.report.groups)
    without = CollectiveRow(-1, "all_reduce", "float32", 4, 8, 1, 2, None, None)
    older = structs.replace(analysis.report, groups=(*groups, GroupRow(9, "tp", "mesh_tp", (0, 1))),
                            collectives=(*analysis.report.collectives, without))  # fmt: skip
    names = name_groups(older)
    assert {names[one.id] for one in older.groups} == {
        "WEIGHTS_GROUP",
        "HEADS_GROUP",
        "tp",
    }
    assert names[-1] == "other"
