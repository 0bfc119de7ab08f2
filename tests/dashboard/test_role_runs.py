"""Jobs of several roles in the dashboard: a run of their own kind, whose roles have the pages of a
run each."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from msgspec import structs
from plotly.utils import PlotlyJSONEncoder
from support.browser_builders import running_server
from support.dashboard_processes import open_store
from support.role_builders import Job, make_one_group, make_rollouts, make_trainer
from support.store_builders import Serving, ask_page, claimed, found, queued

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.io import from_json
from stepsplit.analyzer.report.rl_step import PhaseRow, RoleTime
from stepsplit.analyzer.report.roles import PathLink, PathRow, roles_from_json
from stepsplit.collectors.formats.run_spec import RunSpec, write_run_json
from stepsplit.dashboard import cli
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.roles import _build_clock, _build_path, _build_phases
from stepsplit.dashboard.store.ids import locate_run
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.run_row import RunEdit
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.upload_files import collect_files, split_recordings
from stepsplit.dashboard.web.server import create_server


def ask(client: FlaskClient, path: str, search: str = "") -> str:
    """A page, with its slashes as they are shown."""
    return ask_page(client, path, search).replace("\\u002f", "/")


def add(store: Store, job: Job, **more: bytes) -> str:
    """The id of a run of these files, analyzed."""
    files = {
        str(path.relative_to(job.folder.parent)): path.read_bytes()
        for path in job.folder.rglob("*")
        if path.is_file()
    }
    run_id = queued(store, "rl", **files, **more)
    process_job(store, claimed(store), analyze_upload)
    return run_id


def test_several_roles_are_a_run_that_shows_the_whole_job_first(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    run_id = add(store, make_one_group(tmp_path))

    run = found(store, run_id)
    assert run.roles == ("rollout", "trainer") and run.has_roles and not run.is_hang
    page = ask(client, f"/run/{run_id}")
    for words in (
        "look first at", "trainer/2", "Phases on one clock", "Critical path across roles",
        "Waits between roles", f"/run/{run_id}.0", f"/run/{run_id}.1", "Roles",
    ):  # fmt: skip
        assert words in page
    listed = ask(client, "/")
    assert "2 roles" in listed and "all others wait for trainer/2" in listed
    job = roles_from_json(client.get(f"/api/v1/runs/{run_id}/roles.json").data)
    assert sum(row.time.window_ns for row in job.path) == job.step_ns
    assert [role.place for role in job.roles] == ["exp1/rollout", "exp1/trainer"]


def test_each_role_has_the_pages_and_the_report_of_a_run(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    own = make_one_group(tmp_path)
    known = own.examine().analyses
    run_id = add(store, own)
    for number, role in enumerate(("rollout", "trainer")):
        at = f"{run_id}.{number}"
        with client.get(f"/api/v1/runs/{at}/report.json") as answer:
            report = from_json(answer.data)
        assert report.steps == known[role].report.steps
        for page in ("", "/timeline", "/collectives", "/structure", "/model"):
            text = ask(client, f"/run/{at}{page}")
            assert f"rl: {role}" in text and "cannot be" not in text
        assert client.get(f"/run/{at}").status_code == 200
        assert client.get(f"/api/v1/runs/{at}/timeline").status_code == 200
        assert client.get(f"/api/v1/runs/{at}/perfetto").status_code == 200
        assert f"rl: {role}" in client.get(f"/api/v1/runs/{at}/report.html").text


def test_a_role_cannot_be_changed_and_no_other_number_is_one(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    run_id = add(store, make_one_group(tmp_path))
    for at in (f"{run_id}.0", f"{run_id}.2", f"{run_id}.00", f"{run_id}.x", f"{run_id}./"):
        assert client.patch(f"/api/v1/runs/{at}", json={"name": "x"}).status_code == 404
        assert client.delete(f"/api/v1/runs/{at}").status_code == 404
        assert client.post(f"/api/v1/runs/{at}/analyze").status_code == 404
        assert client.put(f"/api/v1/runs/{at}/job", data=b"").status_code == 404
        check = {"answer": "pass", "headline": "x"}
        assert client.post(f"/api/v1/runs/{at}/check", json=check).status_code == 404
        assert client.put(f"/api/v1/runs/{at}/files/x", data=b"x").status_code == 404
        if at != f"{run_id}.0":
            assert client.get(f"/api/v1/runs/{at}/report.json").status_code == 404
            assert "not found" in ask(client, f"/run/{at}")
    assert "data-edit" not in ask(client, f"/run/{run_id}.0")
    for text in ("../x", f"{run_id}.1/..", f"{run_id}.-1", f"{run_id}.99999", "a.1"):
        with pytest.raises(UsageError):
            locate_run(text)


def test_the_whole_has_no_report_and_is_not_compared(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    run_id = add(store, make_one_group(tmp_path))
    answer = client.get(f"/api/v1/runs/{run_id}/report.json")
    assert answer.status_code == 404
    assert "has several roles: get roles.json" in answer.json["error"]  # type: ignore[index]
    assert client.get(f"/api/v1/runs/{run_id}/hang.json").status_code == 404
    assert client.get(f"/api/v1/runs/{run_id}/timeline").status_code == 404
    assert "cannot be" not in ask(client, "/compare", f"?baseline={run_id}")
    assert "have no report of their own" in ask(client, "/compare", f"?runs={run_id}")
    listed = client.get("/api/v1/runs").json["runs"]  # type: ignore[index]
    assert listed[0]["roles"] == ["rollout", "trainer"] and listed[0]["error"]


def test_roles_are_compared_with_each_other(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    run_id = add(store, make_one_group(tmp_path))
    for query in (
        f"?runs={run_id}.0,{run_id}.1", f"?baseline={run_id}.0&candidate={run_id}.1",
    ):  # fmt: skip
        page = ask(client, "/compare", query)
        assert "rl: rollout" in page and "rl: trainer" in page and "Difference by bucket" in page
        assert "not finished" not in page and "cannot be" not in page
    assert "1 runs of the address" in ask(client, "/compare", f"?runs={run_id}.0,{run_id}.2")
    words = "A role of a job is not compared with a model"
    assert words in ask(client, f"/run/{run_id}.1")
    assert words in client.get(f"/api/v1/runs/{run_id}.1/report.html").text


def test_what_is_known_of_a_role_is_as_the_api_says(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    run_id = add(store, make_one_group(tmp_path))
    whole, role = (client.get(f"/api/v1/runs/{one}").json for one in (run_id, f"{run_id}.0"))
    assert role["id"] == f"{run_id}.0" and role["files"] == whole["files"] > 0  # type: ignore[index]
    paths = client.get("/api/v1/openapi.json").json["paths"]  # type: ignore[index]
    described = {
        path: "ID.N" in one["description"]
        for path, own in paths.items()
        for one in own.get("get", {"parameters": ()})["parameters"]
        if one["name"] == "run_id"
    }
    assert len(described) > 8
    for path, has_role in described.items():
        answer = client.get(path.replace("{run_id}", f"{run_id}.0"))
        # An address that takes roles may still lack what it has to be asked with.
        is_unknown = answer.status_code == 404 and "run not found" in answer.text
        assert is_unknown != has_role, (path, answer.text[:200])
        answer.close()


def test_shares_on_the_page_add_up_as_printed(tmp_path: Path) -> None:
    job = make_one_group(tmp_path).examine().job
    third = RoleTime(3_000, 1_000, 1_000, 1_000, 0, 0, 0)
    step = structs.replace(job.steps[0], step_ns=9_000, is_counted=True)
    path = [PathRow("trainer", 2, name, third) for name in ("a", "b", "c")]
    phases = [PhaseRow("trainer", name, True, third) for name in ("a", "b", "c")]
    links = [
        PathLink(step.step, "trainer", 2, name, 3_000 * at, third)
        for at, name in enumerate(("a", "b", "c"))
    ]
    odd = structs.replace(
        job,
        steps=(step,),
        path=tuple(path),
        path_links=tuple(links),
        phases=tuple(phases),
        held=(),
    )
    for build in (_build_path, _build_phases, lambda one: _build_clock(one, AddressQuery(), "")):
        shown = re.findall(r'"(33\.[34]) %"', json.dumps(build(odd), cls=PlotlyJSONEncoder))
        assert sorted(shown) == ["33.3", "33.3", "33.4"], build
    # The first of the path has the same share on each screen.
    shown = re.findall(r'"(33\.[34]) %"', json.dumps(_build_path(odd), cls=PlotlyJSONEncoder))
    assert f"({shown[0]} %)" in odd.first_line


def test_a_run_of_roles_has_their_names_in_the_list(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = add(store, make_one_group(tmp_path))
    where = ["--store", store.url, "--artifacts", store.artifacts.url]
    assert cli.run(["runs", *where]) == 0
    line = capsys.readouterr().out
    assert line.startswith(run_id) and line.endswith(
        "  -         rl  (2 roles: rollout, trainer)\n"
    )
    many = replace(found(store, run_id), roles=tuple(f"r{n}" for n in range(10_000)))
    assert many.roles_words.startswith("10,000 roles: r0, r1, ")
    assert many.roles_words.endswith(", r15 and 9,984 more")


def test_a_role_of_a_run_is_checked_as_a_run(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = add(store, make_one_group(tmp_path))
    with Serving(create_server(store)) as url:
        for place in (url, store.url):
            where = ["--store", place, "--artifacts", store.artifacts.url]
            one, whole = f"store:{run_id}.1", f"store:{run_id}"
            budget = ["--budget", "calls:exact"]
            assert cli.run(["check", one, "--baseline", one, *budget, *where]) == 0
            assert cli.run(["check", whole, "--baseline", one, *budget, *where]) == 2
            assert cli.run(["check", f"{whole}.7", "--baseline", one, *budget, *where]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert found(store, run_id).verdict is None


def test_the_file_of_the_whole_has_its_page(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    run_id = add(store, make_one_group(tmp_path))
    text = client.get(f"/api/v1/runs/{run_id}/report.html").text
    assert "Critical path across roles" in text and run_id not in text


def test_names_of_strangers_are_texts(client: FlaskClient, store: Store, tmp_path: Path) -> None:
    """The mark of a stranger is shown as text, a role with a path as its name is refused."""
    mark = "<script>alert(1)</script>"
    job = Job(tmp_path / "exp1")
    rollouts = make_rollouts()
    for rollout in rollouts:
        for step in (1, 2, 3):
            rollout.annotation(mark, 100 * step + 1, 100 * step + 60)
    job.add("rollout", 2, *rollouts)
    job.add("trainer", 1, make_trainer())
    run_id = add(store, job)
    whole = client.get(f"/api/v1/runs/{run_id}/report.html").text
    assert mark not in whole and "&lt;script&gt;alert(#)" in whole

    path = job.folder / "rollout" / "run.json"
    for role in ("../../x", "<b>", "", "a/b", "x" * 40, "nccl"):
        spec = json.loads(path.read_text()) | {"role": role}
        path.write_text(json.dumps(spec))
        other = found(store, add(store, job))
        assert not any(role and role in name for name in other.roles)
        # The word of the search is in no page but that of the runs.
        listed = ask(client, "/")
        assert f"/run/{other.id}" in listed and "<b>" not in listed
    assert not list(tmp_path.rglob("x"))


def test_what_an_upload_lacks_is_said(client: FlaskClient, store: Store, tmp_path: Path) -> None:
    job = make_one_group(tmp_path)
    next((job.folder / "rollout").glob("rank1_trace*")).unlink()
    cut = next((job.folder / "trainer").glob("rank2_trace*"))
    run_id = add(store, job, **{"mesh.txt": b"dp=3"})
    page = ask(client, f"/run/{run_id}")
    assert "these are not recorded: 1" in page and "what mesh.txt says" in page

    cut.write_bytes(cut.read_bytes()[:40])
    run = found(store, add(store, job))
    assert run.has_roles and "input" not in str(store.load_roles(run.id).lacks)
    assert "what trainer did: exp1/trainer: " in store.load_roles(run.id).lacks[0]


def test_another_analysis_replaces_the_roles_and_a_deletion_removes_them(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    run_id = add(store, make_one_group(tmp_path))
    assert store.edit(run_id, RunEdit(name="new"))
    assert "new: trainer" in ask(client, f"/run/{run_id}.1")
    assert client.post(f"/api/v1/runs/{run_id}/analyze").status_code == 202
    assert "Queued for analysis" in ask(client, f"/run/{run_id}")
    assert "not found" in ask(client, f"/run/{run_id}.1")
    assert process_job(store, claimed(store), analyze_upload) == "done"
    assert found(store, run_id).roles == ("rollout", "trainer")
    folder = store.find_folder(run_id)
    assert (folder / "roles" / "0" / "report.json").exists()
    assert client.delete(f"/api/v1/runs/{run_id}").status_code == 204
    assert not folder.exists()


@pytest.mark.slow
def test_the_form_takes_roles_with_memory_snapshots_as_one_run(
    tmp_path: Path, browser: Any
) -> None:
    job = Job(tmp_path / "exp1")
    job.add("rollout", 2, *make_rollouts())
    job.add("trainer", 1, make_trainer())
    for role in ("rollout", "trainer"):
        (job.folder / role / "memory").mkdir()
        (job.folder / role / "memory" / "rank0_snapshot.pickle").write_bytes(b"")
    with running_server(tmp_path) as url:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        page.locator("#drop-zone").wait_for()
        page.locator("#upload-folder").set_input_files(job.folder)
        page.wait_for_url("**/run/*")
        assert page.locator("#upload-question button").count() == 0
    with open_store(tmp_path) as store:
        assert len(store.list_runs()) == 1


def test_the_roles_of_one_job_are_one_upload(tmp_path: Path) -> None:
    job = Job(tmp_path / "exp1")
    job.add("rollout", 2, *make_rollouts())
    job.add("trainer", 1, make_trainer())
    assert split_recordings(collect_files([job.folder])) == ()
    # Each role has memory snapshots, whose names are the same.
    for role in ("rollout", "trainer"):
        (job.folder / role / "memory").mkdir()
        (job.folder / role / "memory" / "rank0_snapshot.pickle").write_bytes(b"")
    assert split_recordings(collect_files([job.folder])) == ()
    # A trace of no role, whose name is in no other folder: the form looks at it too.
    (job.folder / "critic").mkdir()
    (job.folder / "critic" / "rank7_trace.json").write_text("{}")
    assert len(split_recordings(collect_files([job.folder]))) == 2
    shutil.rmtree(job.folder / "critic")
    # The same role twice: two attempts of a job.
    path = job.folder / "trainer" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"role": "rollout"}))
    assert len(split_recordings(collect_files([job.folder]))) == 2
    path.unlink()
    assert len(split_recordings(collect_files([job.folder]))) == 2


@pytest.mark.slow
def test_thousands_of_role_folders_are_one_upload_within_seconds(tmp_path: Path) -> None:
    for number in range(2000):
        folder = tmp_path / "exp1" / f"role{number}"
        folder.mkdir(parents=True)
        for name in ("rank0_trace.json", "rank0_record.json", "rank1_record.json"):
            (folder / name).write_text("{}")
        write_run_json(folder, RunSpec("exp1", 1, "nccl", role=f"role{number}"))
    files = collect_files([tmp_path / "exp1"])
    begin = time.process_time()
    assert split_recordings(files) == ()
    assert time.process_time() - begin < 4
