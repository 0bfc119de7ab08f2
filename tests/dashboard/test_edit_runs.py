"""Runs are renamed, tagged, noted and analyzed again, by the API, the page and the command."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from dash import dcc, html
from flask.testing import FlaskClient
from msgspec import structs
from support.browser_builders import running_server
from support.dashboard_processes import open_store
from support.job_builders import SAMPLES
from support.page_text import find, read_text
from support.report_builders import analysis
from support.store_builders import ask_page, claimed, found, known_analysis, queued, state, uploaded

from stepsplit.analyzer.analysis import Analysis, examine
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.dashboard import cli
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.compare import MAX_FOUND, build_run_pickers, select_runs
from stepsplit.dashboard.pages.run_actions import RunRights, build_run_actions, build_run_labels
from stepsplit.dashboard.pages.runs import build_runs_page
from stepsplit.dashboard.pages.tables import DataTable
from stepsplit.dashboard.store.ingest import process_job
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.run_row import RunEdit, Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.upload_files import choose_run_name
from stepsplit.dashboard.web.options import choose_access
from stepsplit.dashboard.web.server import create_server

RUNS = "/api/v1/runs"


def test_a_run_is_renamed_tagged_and_noted(client: FlaskClient, store: Store) -> None:
    run_id = uploaded(store)
    edited = {"name": " exp 2 ", "tags": {"branch": "main", "gpus": "8"}, "note": "warm\ncaches"}

    answers = [
        client.patch(f"{RUNS}/{run_id}", json=edited).json,
        client.patch(f"{RUNS}/{run_id}", json={"note": ""}).json,
        client.patch(f"{RUNS}/{run_id}", json={"tags": {"gpus": "16"}}).json,
    ]

    assert [(one["name"], one["tags"], one["note"]) for one in answers if one] == [
        ("exp 2", {"branch": "main", "gpus": "8"}, "warm caches"),
        ("exp 2", {"branch": "main", "gpus": "8"}, ""),
        ("exp 2", {"gpus": "16"}, ""),
    ]
    shown = [(one.action, one.target) for one in store.audit.list_entries(10)[::-1]]
    assert shown == [
        ("run edited", f"{run_id} run: name exp 2, tags branch=main gpus=8, note warm caches"),
        ("run edited", f"{run_id} exp 2: no note"),
        ("run edited", f"{run_id} exp 2: tags gpus=16"),
    ]


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({}, "name, note, tags"),
        ([], "name, note, tags"),
        ({"id": "x"}, "name, note, tags"),
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"note": 3}, "note must be text"),
        ({"note": "x" * 1001}, "1000 characters"),
        ({"tags": ["a"]}, "tags"),
        ({"tags": {"": "a"}}, "tag's key"),
    ],
    ids=str,
)
def test_odd_edits_change_nothing(
    client: FlaskClient, store: Store, sent: object, says: str
) -> None:
    before = found(store, uploaded(store))

    answer = client.patch(f"{RUNS}/{before.id}", json=sent)

    assert answer.status_code == 400 and answer.json is not None
    assert says in answer.json["error"]
    assert store.list_runs() == (before,)
    assert client.patch(f"{RUNS}/{'0' * 12}", json={"name": "x"}).status_code == 404


def test_a_run_is_analyzed_again_and_its_pages_show_the_new_report(
    client: FlaskClient, store: Store
) -> None:
    run_id = queued(store)
    assert process_job(store, claimed(store), known_analysis) == "done"
    before = ask_page(client, f"/run/{run_id}")
    made = analysis()

    def analyze(folder: Path, progress: Progress) -> Analysis:
        assert [path.name for path in folder.iterdir()] == ["rank0"]
        run = structs.replace(made.report.run, torch="9.9.9")
        return structs.replace(made, report=structs.replace(made.report, run=run))

    answer, waits = client.post(f"{RUNS}/{run_id}/analyze"), ask_page(client, f"/run/{run_id}")
    twice = client.post(f"{RUNS}/{run_id}/analyze")
    assert process_job(store, claimed(store), analyze) == "done"

    assert (answer.status_code, twice.status_code) == (202, 409)
    assert twice.json == {"error": "its analysis has not ended yet"}
    assert "Queued for analysis" in waits
    after = ask_page(client, f"/run/{run_id}")
    assert ("torch 9.9.9" in before, "torch 9.9.9" in after) == (False, True)
    assert [one.action for one in store.audit.list_entries(9)] == ["run queued"]


def test_what_the_job_was_called_becomes_tags_unless_the_run_has_others(
    store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    shutil.copytree(SAMPLES / "pp2_m2", folder)
    described = json.loads((folder / "run.json").read_text())
    described["labels"] = {"SLURM_JOB_ID": "4711", "nemo.run.id": "a1"}
    (folder / "run.json").write_text(json.dumps(described))
    made = examine([folder])
    run_id = queued(store)
    store.edit(run_id, RunEdit(tags=(Tag("nemo.run.id", "mine"),)))
    assert process_job(store, claimed(store), lambda folder, progress: made) == "done"
    tags = {tag.key: tag.value for tag in found(store, run_id).tags}
    assert tags == {"SLURM_JOB_ID": "4711", "nemo.run.id": "mine"}


def test_another_machine_reads_the_report_of_the_newest_analysis(tmp_path: Path) -> None:
    where, database = f"memory://{uuid.uuid4().hex}", f"sqlite:///{tmp_path}/runs.db"
    worker, web = (Store.open(database, where, tmp_path / machine) for machine in ("a", "b"))
    run_id, made = queued(worker), analysis()
    run = structs.replace(made.report.run, torch="9.9.9")
    newer = structs.replace(made, report=structs.replace(made.report, run=run))

    assert process_job(worker, claimed(worker), known_analysis) == "done"
    assert web.load_report(run_id) == made.report
    assert web.analyze_again(run_id)
    assert process_job(worker, claimed(worker), lambda *_: newer) == "done"

    assert web.load_report(run_id) == newer.report
    assert web.load_tables(run_id) is not None
    fsspec.filesystem("memory").store.clear()
    worker.close()
    web.close()


def test_the_runs_to_compare_are_picked_on_the_page(store: Store) -> None:
    made = analysis()
    names = ("first", "second", "third")
    first, second, third = (store.import_report(name, made.report, made.tables) for name in names)
    queued(store, "waits")
    client = create_server(store).test_client()

    rows, chosen = store.list_runs(), AddressQuery({"candidate": third})
    page = build_run_pickers(rows, select_runs(rows, chosen), chosen)

    (chosen_runs,) = find(page, html.Ol)
    assert [read_text(one) for one in find(chosen_runs, dcc.Link)] == ["remove third"]
    (table,) = find(page, DataTable)
    shown = [(read_text(row[0].content), row[0].content.href) for row in table.cells]
    # The chosen candidate stays the candidate.
    assert shown == [
        ("use as baseline second", f"/compare?baseline={second}&candidate={third}"),
        ("use as baseline first", f"/compare?baseline={first}&candidate={third}"),
    ]
    assert "Select runs" in ask_page(client, "/compare", f"?candidate={third}")
    both = ask_page(client, "/compare", f"?baseline={first}&candidate={third}")
    assert "Difference by bucket" in both and "add a run" in both


def test_any_run_is_found_on_the_page_of_comparisons(store: Store) -> None:
    made = analysis()
    ids = [store.import_report(f"run-{n:02}", made.report, made.tables) for n in range(15)]
    rows = store.list_runs()

    def search(**values: str) -> tuple[list[str], str]:
        chosen = AddressQuery(values)
        page = build_run_pickers(rows, select_runs(rows, chosen), chosen)
        tables = list(find(page, DataTable))
        links = [row[0].content.href for table in tables for row in table.cells]
        return links, read_text(page)

    newest, text = search()
    assert len(newest) == MAX_FOUND and "5 more: search to see them" in text
    oldest, _ = search(find="run-00")
    assert oldest == [f"/compare?baseline={ids[0]}&find=run-00"]
    with_it, _ = search(find="run-01", baseline=ids[0])
    assert with_it == [f"/compare?baseline={ids[0]}&candidate={ids[1]}"]
    third, _ = search(find="run-02", baseline=ids[0], candidate=ids[1])
    assert third == [f"/compare?runs={ids[0]},{ids[1]},{ids[2]}"]
    none, text = search(find="no such run")
    assert none == [] and "No other finished run matches" in text


def test_what_has_no_files_is_not_analyzed_again(client: FlaskClient, store: Store) -> None:
    made = analysis()
    imported = store.import_report("imported", made.report, made.tables)
    begun = uploaded(store)

    answers = [client.post(f"{RUNS}/{run_id}/analyze") for run_id in (imported, begun)]

    assert [answer.json for answer in answers] == [
        {"error": "the store has only its report, not its files; upload the recording"},
        {"error": "its upload is not finished"},
    ]
    assert state(store, imported)[0] == "done"


def test_a_failed_run_is_analyzed_again_with_new_attempts(store: Store) -> None:
    run_id = queued(store)
    old = claimed(store)
    assert store.jobs.fail(old, "out of memory")

    assert store.analyze_again(run_id)
    new = claimed(store)

    assert (new.attempt, state(store, run_id)) == (1, ("running", None))
    assert process_job(store, new, known_analysis) == "done"
    assert state(store, run_id) == ("done", None)


def test_a_run_without_a_name_is_named_by_its_files(client: FlaskClient, store: Store) -> None:
    made = client.post(RUNS, json={"tags": {"branch": "main"}}).json
    assert made is not None
    run = f"{RUNS}/{made['id']}"
    for path in ("runs/exp7_rank0.json", "runs/exp7_rank1.json", "mesh.txt"):
        client.put(f"{run}/files/{path}", data=b"{}")
    before = client.get(run).json

    client.post(f"{run}/finish")

    assert before is not None and before["name"] == made["id"]
    assert found(store, made["id"]).name == "runs"
    assert store.audit.list_entries(1)[0].target == f"{made['id']} runs"


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["rank0.json"], "rank0.json"),
        (["rank0.json", "mesh.txt"], "rank0.json"),
        (["a/b/rank0.json", "a/b/rank1.json"], "a"),
        (["a/run.json", "a/x/rank0.json"], "a"),
        (["exp_rank0.json.gz", "exp_rank1.json.gz", "run.json"], "exp"),
        (["exp-12.json", "exp-13.json"], "exp"),
        (["rank0.json", "rank1.json"], "rank0.json and 1 more"),
        (["a/rank0.json", "b/rank1.json"], "a and 1 more"),
        (["NOTES.txt", "exp_rank0.json", "exp_rank1.json", "report.json"], "exp"),
        (["NOTES.txt", "rank0.json", "rank1.json"], "rank0.json and 1 more"),
    ],
)
def test_the_name_of_files(paths: list[str], name: str) -> None:
    assert choose_run_name(paths) == name


def test_runs_are_edited_and_analyzed_again_by_the_commands(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = queued(store)
    assert process_job(store, claimed(store), known_analysis) == "done"
    words = ["--store", store.url, "--artifacts", str(tmp_path / "artifacts")]
    edit = ["edit", run_id, "--name", "exp2", "--tag", "a=1", "--tag", "b=2", *words]

    assert cli.run(edit) == 0
    assert cli.run(["edit", run_id, "--untag", "a", "--tag", "b=3", "--note", "good", *words]) == 0
    assert cli.run(["retry", run_id, *words]) == 0
    assert cli.run(["retry", run_id, *words]) == 2

    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f"{run_id}  exp2  a=1  b=2",
        f"{run_id}  exp2  b=3  good",
        f"queued {run_id}  exp2",
    ]
    assert "its analysis has not ended yet" in printed.err
    assert state(store, run_id)[0] == "queued"
    assert [one.action for one in store.audit.list_entries(9)] == [
        "run queued", "run edited", "run edited",
    ]  # fmt: skip


def test_the_pages_offer_what_the_user_may_do(store: Store) -> None:
    run_id = queued(store)
    assert process_job(store, claimed(store), known_analysis) == "done"
    run = replace(found(store, run_id), note="warm caches")

    def list_buttons(rights: RunRights) -> list[Any]:
        return [part.children for part in build_run_actions(run, rights)]  # type: ignore[attr-defined]

    own = ["edit", "describe the job", "analyze again"]
    assert list_buttons(RunRights()) == [*own, "delete"]
    assert list_buttons(RunRights(delete=False)) == own
    assert list_buttons(RunRights(edit=False, delete=False)) == []
    kinds = [type(part) for part in build_run_labels(run, RunRights())]
    assert kinds == [html.P, html.Dialog]
    assert [type(part) for part in build_run_labels(run, RunRights(edit=False))] == [html.P]


def test_only_who_may_upload_sees_the_form(store: Store) -> None:
    run_id = queued(store)
    access = choose_access("0.0.0.0", password="adm")
    client = create_server(store, access).test_client()
    pages = {
        role: ask_page(
            client,
            f"/run/{run_id}",
            Authorization=f"Bearer {store.tokens.create('x', role).secret}",
        )
        for role in Role
    }

    shown = {role: ("edit-run" in page, "data-delete" in page) for role, page in pages.items()}
    assert shown == {
        Role.VIEWER: (False, False), Role.UPLOADER: (True, False), Role.ADMIN: (True, True),
    }  # fmt: skip


def test_columns_that_are_empty_for_all_shown_runs_are_hidden(store: Store) -> None:
    made = analysis()
    plain = store.import_report("plain", structs.replace(made.report, mfu=None), made.tables)
    waits = queued(store)

    def list_heads() -> list[str]:
        page = build_runs_page(store.list_runs(), AddressQuery())
        heads = [part for part in page._traverse() if isinstance(part, html.Th)]
        texts = [getattr(head.children, "children", head.children) for head in heads]
        rows = [part for part in page._traverse() if isinstance(part, html.Tr)]
        for row in rows:
            assert sum(getattr(one, "colSpan", None) or 1 for one in row.children) == len(heads)
        return [str(text).split(" ")[0] for text in texts]

    before = list_heads()
    store.verdicts.record(plain, "pass", "fine")
    store.delete(waits)

    assert ("check" in before, "MFU" in before, "step" in before) == (False, False, True)
    assert "check" in list_heads()


@pytest.mark.slow
def test_a_run_is_named_at_the_drop_zone_and_edited_on_its_page(
    tmp_path: Path, browser: Any
) -> None:
    trace = tmp_path / "rank0_trace.json"
    trace.write_bytes(b"{}")
    with running_server(tmp_path) as url:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        page.locator("#upload-name").fill("exp9")
        page.locator("#upload-tags").fill("branch=main, gpus=8")
        page.locator("#upload-files").set_input_files(trace)
        page.wait_for_url("**/run/*")
        page.locator(".tabs").wait_for()
        page.locator("[data-edit]").click()
        page.locator("#edit-name").fill("exp10")
        page.locator("#edit-tags").fill("branch=dev")
        page.locator("#edit-note").fill("warm caches")
        page.locator("#edit-save").click()
        page.locator("h1", has_text="exp10").wait_for()
        page.locator(".run-note", has_text="warm caches").wait_for()
        page.locator("[data-retry]").click()
        with open_store(tmp_path) as store:
            deadline = time.monotonic() + 60
            while store.audit.list_entries(1)[0].action != "run queued":
                assert time.monotonic() < deadline
                time.sleep(0.1)
            (run,) = store.list_runs()
            actions = [one.action for one in store.audit.list_entries(9)]

    assert (run.name, run.note) == ("exp10", "warm caches")
    assert [(tag.key, tag.value) for tag in run.tags] == [("branch", "dev")]
    assert actions == ["run queued", "run edited", "upload"]
