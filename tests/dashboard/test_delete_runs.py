"""Runs are deleted by the API, the page and the command, with their files."""

from __future__ import annotations

from pathlib import Path

import pytest
from dash import html
from flask.testing import FlaskClient
from sqlalchemy import create_engine, text
from support.report_builders import analysis
from support.store_builders import claimed, known_analysis, queued, uploaded

from stepsplit.dashboard import cli
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.run_pages import build_run_page, build_waiting_page
from stepsplit.dashboard.pages.store_pages import parse_address
from stepsplit.dashboard.store.ingest import process_job
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.options import choose_access
from stepsplit.dashboard.web.server import create_server

RUNS = "/api/v1/runs"


def test_a_run_is_deleted_with_its_files(client: FlaskClient, store: Store) -> None:
    run_id, other = queued(store), uploaded(store, "other")
    assert process_job(store, claimed(store), known_analysis) == "done"

    answers = [client.delete(f"{RUNS}/{run_id}"), client.delete(f"{RUNS}/{run_id}")]

    assert [answer.status_code for answer in answers] == [204, 404]
    assert client.get(f"{RUNS}/{run_id}/report.json").status_code == 404
    assert not store.find_folder(run_id).exists()
    assert [run.id for run in store.list_runs()] == [other]
    assert store.files.list_files(run_id) == ()


def test_a_run_is_deleted_while_it_is_analyzed(client: FlaskClient, store: Store) -> None:
    run_id = queued(store)
    job = claimed(store)

    assert client.delete(f"{RUNS}/{run_id}").status_code == 204
    process_job(store, job, known_analysis)

    assert (store.list_runs(), store.find_folder(run_id).exists()) == ((), False)


def test_only_who_may_upload_may_delete(store: Store) -> None:
    run_id = uploaded(store)
    guarded = create_server(store, choose_access("0.0.0.0", password="right"))
    client = guarded.test_client()

    assert client.delete(f"{RUNS}/{run_id}").status_code == 401
    assert client.delete(f"{RUNS}/{run_id}", auth=("me", "right"),
                         headers={"Origin": "https://evil.example"}).status_code == 403  # fmt: skip
    assert len(store.list_runs()) == 1
    assert client.delete(f"{RUNS}/{run_id}", auth=("me", "right")).status_code == 204


def test_the_pages_of_a_run_have_a_button_that_deletes_it(store: Store) -> None:
    run_id = uploaded(store)
    (run,) = store.list_runs()
    made = analysis()
    address = parse_address(f"/run/{run_id}", "")
    assert address is not None

    done = build_run_page(View("run", made.report, made.tables, run_id), address, run)

    for page in (done, build_waiting_page(run)):
        buttons = [
            part.to_plotly_json()["props"]
            for part in page._traverse()
            if isinstance(part, html.Button)
        ]
        assert run_id in [button.get("data-delete") for button in buttons]


def test_old_runs_are_deleted_by_the_command(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, torn, new = queued(store, "old"), store.add("torn"), uploaded(store, "new")
    assert process_job(store, claimed(store), known_analysis) == "done"
    waits = queued(store, "waits")
    _set_age(tmp_path, {old: 40, torn: 31, new: 29, waits: 90})
    words = ["--store", store.url, "--artifacts", str(tmp_path / "artifacts")]

    assert cli.run(["delete", "--older-than", "30", "--dry-run", *words]) == 0
    assert capsys.readouterr().out.count("would delete") == 2
    assert len(store.list_runs()) == 4
    assert cli.run(["delete", "--older-than", "30", *words]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [torn, old]
    assert {run.id for run in store.list_runs()} == {new, waits}
    assert not store.find_folder(old).exists()


def test_runs_are_deleted_by_id_all_or_none(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = uploaded(store, "first"), queued(store, "second")
    words = ["--store", store.url, "--artifacts", str(tmp_path / "artifacts")]

    assert cli.run(["delete", first, "0" * 12, *words]) == 2
    assert len(store.list_runs()) == 2
    assert cli.run(["delete", first, second, first, *words]) == 0

    assert store.list_runs() == ()


def _set_age(folder: Path, days: dict[str, int]) -> None:
    engine = create_engine(f"sqlite:///{folder}/runs.db")
    older = text("UPDATE runs SET created_unix_ns = created_unix_ns - :ns WHERE id = :id")
    with engine.begin() as connection:
        for run_id, age in days.items():
            connection.execute(older, {"ns": age * 86_400 * 10**9, "id": run_id})
    engine.dispose()
