"""Several recordings in one folder: a run for each, by the command and by the form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.browser_builders import running_server
from support.dashboard_processes import open_store
from support.report_builders import analysis
from support.store_builders import Serving, claimed, queued

from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.analyzer.report.report import Host, WarningRow
from stepsplit.dashboard import cli
from stepsplit.dashboard.figures.run import draw_split_by_rank
from stepsplit.dashboard.pages.components import format_subtitle
from stepsplit.dashboard.store.ingest import process_job
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.upload_files import collect_files, split_recordings
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two recordings of two ranks, and a job.toml for both."""
    top = tmp_path / "week"
    for name in ("monday", "tuesday"):
        for rank in range(2):
            trace = top / name / f"host{rank}" / f"rank{rank}_trace.json"
            trace.parent.mkdir(parents=True)
            trace.write_text("{}")
    (top / "job.toml").write_text("")
    return top


def test_two_recordings_are_named_and_nothing_is_sent(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["upload", str(folder), "--to", "http://127.0.0.1:1"]) == 2

    assert capsys.readouterr().err == (
        "stepsplit: these are 2 recordings: week/monday, week/tuesday; upload one of the folders, "
        "or each as a run of its own with --each\n"
    )


def test_each_recording_becomes_a_run(
    store: Store, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Serving(create_server(store, limits=Limits(spare_bytes=0))) as url:
        assert cli.run(["upload", str(folder), "--to", url, "--each", "--tag", "a=1"]) == 0
        assert cli.run(["upload", str(folder), "--to", url, "--each", "--name", "exp"]) == 0

    assert len(capsys.readouterr().out.splitlines()) == 4
    runs = store.list_runs()[::-1]
    assert [run.name for run in runs] == ["monday", "tuesday", "exp monday", "exp tuesday"]
    assert [row.path for row in store.files.list_files(runs[0].id)] == [
        "job.toml", "monday/host0/rank0_trace.json", "monday/host1/rank1_trace.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a/rank0.json", "a/rank1.json"], []),
        (["a/host0/rank0.json", "a/host1/rank1.json", "a/run.json"], []),
        (["a/0/trace.json", "a/1/trace.json"], []),
        (["a/x/rank0.json", "a/y/rank0.json"], ["a/x", "a/y"]),
        (["a/x/1/rank0.json", "a/y/2/rank0.json", "a/y/2/rank1.json"], ["a/x", "a/y"]),
        (["a/rank0.json", "a/old/rank0.json", "a/job.toml"], ["a", "a/old"]),
    ],
)
def test_what_counts_as_several_recordings(
    tmp_path: Path, paths: list[str], expected: list[str]
) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()

    found = split_recordings(collect_files([tmp_path / "a"]))

    assert [one.folder for one in found] == expected


def test_warnings_do_not_name_folders_of_the_server(store: Store) -> None:
    run_id = queued(store)
    made = analysis()

    def analyze(folder: Path, progress: Progress) -> Analysis:
        warning = WarningRow("older_captures", f"the latest is used ({folder}/b/rank0.json)")
        return structs.replace(made, report=structs.replace(made.report, warnings=(warning,)))

    assert process_job(store, claimed(store), analyze) == "done"

    assert [one.message for one in store.load_report(run_id).warnings] == [
        "the latest is used (b/rank0.json)"
    ]


def test_hosts_that_are_not_recorded_are_not_counted() -> None:
    report = analysis().report
    unnamed = structs.replace(report.run, hosts=(Host("unknown", (0, 1, 2, 3)),))
    other = structs.replace(report, run=unnamed)

    assert "2 hosts" in format_subtitle(report)
    assert "hosts not recorded" in format_subtitle(other)
    assert "on node01" in str(draw_split_by_rank(report))
    assert "on unknown" not in str(draw_split_by_rank(other))


@pytest.mark.slow
def test_the_form_asks_before_it_uploads_two_recordings(
    folder: Path, tmp_path: Path, browser: Any
) -> None:
    with running_server(tmp_path) as url:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        page.locator("#drop-zone").wait_for()
        page.locator("#upload-folder").set_input_files(folder)
        question = page.locator("#upload-question p").text_content()
        with open_store(tmp_path) as store:
            before = store.list_runs()
        page.get_by_role("button", name="A run for each").click()
        page.locator("td >> text=tuesday").wait_for()
        page.locator("td >> text=monday").wait_for()

    assert (question, before) == ("These are 2 recordings: week/monday, week/tuesday", ())
    with open_store(tmp_path) as store:
        runs = store.list_runs()[::-1]
        assert [run.name for run in runs] == ["monday", "tuesday"]
        assert [row.path for row in store.files.list_files(runs[1].id)] == [
            "week/job.toml", "week/tuesday/host0/rank0_trace.json",
            "week/tuesday/host1/rank1_trace.json",
        ]  # fmt: skip
