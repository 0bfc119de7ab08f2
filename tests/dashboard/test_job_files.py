"""The job.toml of an upload: found by content, attached later, and doubted if it does not fit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from browser_builders import running_server
from dashboard_processes import open_store
from flask.testing import FlaskClient
from report_builders import analysis
from store_builders import claimed, known_analysis, queued, settled, state

from stepsplit.analyzer import analyze
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.job_files import find_job_file, list_unused_files
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits

RUNS = "/api/v1/runs"
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "dp4"
JOB = b'[hardware]\npreset = "a100-sxm-80gb"\n'


@pytest.fixture
def client(store: Store) -> FlaskClient:
    return create_server(store, limits=Limits(spare_bytes=0)).test_client()


@pytest.mark.parametrize(
    ("files", "used", "unused"),
    [
        (["exp/job.toml"], "exp/job.toml", []),
        (["exp/Job.TOML", "exp/run.toml"], "exp/Job.TOML", ["exp/run.toml"]),
        (["exp/RUN.toml"], "exp/RUN.toml", []),
        (["exp/gpt.toml", "exp/ruff.toml"], "exp/gpt.toml", ["exp/ruff.toml"]),
        (["job.toml", "a/JOB.toml", "a/job.toml"], "job.toml", ["a/JOB.toml", "a/job.toml"]),
        (["JOB.toml", "job.toml"], "job.toml", ["JOB.toml"]),
        (["exp/ruff.toml"], None, ["exp/ruff.toml"]),
        (["exp/broken.toml"], None, ["exp/broken.toml"]),
    ],
)  # fmt: skip
def test_a_job_file_is_found_by_name_in_any_case_or_by_content(
    tmp_path: Path, files: list[str], used: str | None, unused: list[str]
) -> None:
    texts = {"ruff.toml": "[lint]\n", "broken.toml": "[model"}
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(texts.get(Path(name).name, "[parallel]\ndp = 2\n"))

    found = find_job_file(tmp_path)
    warnings = list_unused_files(tmp_path, found)

    assert found == (tmp_path / used if used else None)
    assert [one.message.split(" is not used")[0] for one in warnings] == unused
    reason = f"{used} describes the job" if used else "none of the tables [model]"
    assert all(reason in one.message for one in warnings)


def test_a_run_gets_a_job_file_later(client: FlaskClient, store: Store) -> None:
    run_id = queued(store, **{path.name: path.read_bytes() for path in SAMPLE.glob("r*")})
    assert process_job(store, claimed(store), analyze_upload) == "done"
    before = store.load_report(run_id).job

    for _ in range(2):
        answer = client.put(f"{RUNS}/{run_id}/job", data=JOB)
        early = client.put(f"{RUNS}/{run_id}/job", data=JOB)
        assert process_job(store, claimed(store), analyze_upload) == "done"

    after = store.load_report(run_id).job
    assert (answer.status_code, early.status_code) == (202, 409)
    assert before is not None and before.hardware["preset"] != "a100-sxm-80gb"
    assert after is not None and after.hardware["preset"] == "a100-sxm-80gb"
    assert [row.path for row in store.files.list_files(run_id)].count("job.toml") == 1
    assert [one.action for one in store.audit.list_entries(9)] == ["job attached"] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[model", "job.toml"),
        (b"[lint]\n", "none of the tables"),
        (b"\xff", "job.toml"),
        (b'[hardware]\nfile = "mine.toml"\n', "refers to another file"),
    ],
)
def test_what_is_no_job_file_changes_nothing(
    client: FlaskClient, store: Store, text: bytes, says: str
) -> None:
    run_id = queued(store)
    assert process_job(store, claimed(store), known_analysis) == "done"

    answer = client.put(f"{RUNS}/{run_id}/job", data=text)

    assert answer.status_code == 400 and answer.json is not None
    assert says in answer.json["error"]
    assert state(store, run_id) == ("done", None)


def test_an_imported_report_gets_no_job_file(client: FlaskClient, store: Store) -> None:
    made = analysis()
    run_id = store.import_report("imported", made.report, made.tables)

    answer = client.put(f"{RUNS}/{run_id}/job", data=JOB)

    assert (answer.status_code, state(store, run_id)[0]) == (409, "done")


def test_the_command_adds_a_job_file(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = queued(store)
    assert process_job(store, claimed(store), known_analysis) == "done"
    job = tmp_path / "mine.toml"
    job.write_bytes(JOB)
    words = ["--store", store.url, "--artifacts", str(tmp_path / "artifacts")]

    assert cli.run(["retry", run_id, "--job", str(job), *words]) == 0

    assert capsys.readouterr().out == f"queued {run_id}  run\n"
    assert (store.find_folder(run_id) / "input" / "job.toml").read_bytes() == JOB


@pytest.mark.slow
def test_the_form_describes_the_job_of_a_run(tmp_path: Path, browser: Any) -> None:
    def open_form(url: str) -> Any:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{url}/run/{run_id}")
        page.locator("[data-job]").click()
        return page

    def wait_for_job(text: str) -> None:
        deadline = time.monotonic() + 60
        while not job.exists() or job.read_text() != text:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with open_store(tmp_path) as store:
            assert settled(store, run_id, 60) == ("done", None)

    with open_store(tmp_path) as store:
        run_id = queued(store)
        assert process_job(store, claimed(store), known_analysis) == "done"
    job = tmp_path / "artifacts" / run_id / "input" / "job.toml"
    mine = tmp_path / "Mine.toml"
    mine.write_bytes(JOB)
    with running_server(tmp_path) as url:
        page = open_form(url)
        page.locator("#job-send").click()
        empty = page.locator("#job-status").text_content()
        page.locator("#job-hardware").select_option("h100-sxm")
        page.locator("#job-mesh").fill("pp=2, tp=2")
        page.locator("#job-send").click()
        wait_for_job('[parallel]\npp = 2\ntp = 2\n[hardware]\npreset = "h100-sxm"\n')
        page = open_form(url)
        page.locator("#job-upload").set_input_files(mine)
        wait_for_job(JOB.decode())

    assert empty == "Choose the hardware, a mesh or a file."


def test_a_job_that_cannot_be_that_of_the_recording_is_doubted(tmp_path: Path) -> None:
    """Four CPUs are not four A100s: the step is hundreds of times too long."""
    job = tmp_path / "job.toml"
    job.write_bytes(JOB)

    report = analyze(SAMPLE, job=job)

    assert report.gap is not None
    assert report.gap.confidence == "low"
    assert report.gap.notes[0].startswith("this job.toml does not describe this recording: ")
    assert [one.message for one in report.warnings if one.code == "job_mismatch"] == [
        report.gap.notes[0]
    ]
    assert report.findings == analyze(SAMPLE).findings


def test_an_mfu_above_one_is_not_shown(tmp_path: Path) -> None:
    """The model is a thousand times the recorded one on the same four processors."""
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nhidden = 8192\nlayers = 80\nheads = 64\n[hardware]\npreset = "a100-sxm-80gb"\n'
    )

    report = analyze(SAMPLE, job=job)

    assert report.gap is not None and report.mfu is None
    assert "the MFU would be" in report.gap.notes[0]
