"""What released versions wrote opens in this one: reports, tables, baselines and stores."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from generate.released import NAME, RELEASED

from stepsplit.analyzer.report.io import load_tables, read_report
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.store import Store

VERSIONS = sorted(path.name for path in RELEASED.iterdir())
SPLIT = [(45_000, 40_000, 5_000), (100_000, 40_000, 60_000), (100_000, 40_000, 60_000)]
"""Of each step: its length, compute and idle in ns."""


def find_report(version: str) -> Path:
    (report,) = (RELEASED / version / "artifacts").iterdir()
    return report


@pytest.mark.parametrize("version", VERSIONS)
def test_a_report_of_a_released_version_opens(version: str, tmp_path: Path) -> None:
    folder = find_report(version)
    report, tables = read_report(folder), load_tables(folder / "tables")

    assert [(row.step_ns, row.compute_ns, row.idle_ns) for row in report.steps] == SPLIT
    assert tables.segments.dur_ns.sum() == sum(step_ns for step_ns, _, _ in SPLIT)
    assert list(tables.slices) == [0]
    exported = ["export", str(folder), "--perfetto", str(tmp_path / "trace.gz")]
    assert cli.run(exported) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_baseline_of_a_released_version_is_compared_with(version: str) -> None:
    baseline = str(RELEASED / version / "baseline.json")
    words = [str(find_report(version)), "--baseline", baseline, "--budget", "calls:exact"]
    assert cli.run(["check", *words]) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_of_a_released_version_opens(version: str, tmp_path: Path) -> None:
    shutil.copytree(RELEASED / version / "artifacts", tmp_path / "artifacts")
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.executescript((RELEASED / version / "store.sql").read_text())

    store = Store.open(f"sqlite:///{tmp_path}/store.db", tmp_path / "artifacts")

    (run,) = store.list_runs()
    assert (run.name, run.state) == (NAME, "done")
    assert store.load_report(run.id) == read_report(find_report(version))
    tables = store.load_tables(run.id)
    assert tables is not None and len(tables.segments.dur_ns) > 0
    store.close()


def test_a_report_of_a_newer_schema_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = shutil.copytree(find_report(VERSIONS[0]), tmp_path / "newer") / "report.json"
    report.write_text(report.read_text().replace("stepsplit.report/1", "stepsplit.report/2"))

    assert cli.run(["check", str(report.parent), "--budget", "step:<=1s"]) == 2

    assert capsys.readouterr().err == (
        f"stepsplit: {report}: schema stepsplit.report/2 instead of stepsplit.report/1;"
        " analyze the run again\n"
    )
