"""Uploads land whole below their run, strangers are refused, and a run gets to its report."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from report_builders import analysis

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.wire import from_json, read_report
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.app import create_app
from stepsplit.dashboard.web.run_page import run_page
from stepsplit.dashboard.web.security import content_policy
from stepsplit.dashboard.web.serve import free_port, serve

RUNS = "/api/v1/runs"
SAMPLE = Path(__file__).parent.parent / "sample_traces" / "pp2_m2"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/runs.db", tmp_path / "artifacts")
    yield opened
    opened.close()


@pytest.fixture
def client(store: Store) -> FlaskClient:
    return create_app(store, analyze=analysis, file_limit_bytes=1000).server.test_client()


def test_an_upload_becomes_a_report(client: FlaskClient, store: Store) -> None:
    run_id = _create(client)
    put = client.put(f"{RUNS}/{run_id}/files/exp1/rank0_trace.json.gz", data=b"trace")
    finish = client.post(f"{RUNS}/{run_id}/finish")

    assert (put.status_code, finish.status_code) == (201, 202)
    assert _settled(client, run_id) == ("done", None)
    uploaded = store.folder(run_id) / "input" / "exp1" / "rank0_trace.json.gz"
    assert uploaded.read_bytes() == b"trace"
    answer = client.get(f"{RUNS}/{run_id}/report.json")
    assert from_json(answer.data) == analysis().report
    answer.close()


def test_a_sample_uploaded_gives_its_golden_split(store: Store) -> None:
    """The real analyzer behind the real routes: all files of a recording, its report.json too."""
    client = create_app(store).server.test_client()
    run_id = _create(client)
    for file in sorted(SAMPLE.iterdir()):
        url = f"{RUNS}/{run_id}/files/pp2_m2/{file.name}"
        assert client.put(url, data=file.read_bytes()).status_code == 201
    client.post(f"{RUNS}/{run_id}/finish")

    assert _settled(client, run_id) == ("done", None)
    assert store.report(run_id) == read_report(SAMPLE)
    assert store.tables(run_id) is not None


@pytest.mark.parametrize(
    "path",
    [
        "../escape",
        "a/../../escape",
        "%2e%2e/escape",
        "/etc/passwd",
        "%2fetc/passwd",
        "a//b",
        "a/./b",
        "a\\..\\b",
        "a%00b",
        "a%0ab",
        "x" * 300,
        "d/" * 20 + "x",
    ],
)
def test_a_path_never_leaves_the_run(
    path: str, client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    run_id = _create(client)

    answer = client.put(f"{RUNS}/{run_id}/files/{path}", data=b"x")

    assert answer.status_code in (400, 404, 405)
    assert not [p for p in (tmp_path / "artifacts").rglob("*") if p.is_file()]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"])
def test_another_host_name_is_refused(host: str, client: FlaskClient) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8050", "localhost", "[::1]:8050"])
def test_this_machines_names_are_served(host: str, client: FlaskClient) -> None:
    assert client.get("/healthz", headers={"Host": host}).json == {"status": "ok"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_writes_from_another_site_are_refused(
    headers: dict[str, str], client: FlaskClient, store: Store
) -> None:
    answer = client.post(RUNS, json={"name": "x"}, headers=headers)
    dash = client.post("/_dash-update-component", json={}, headers=headers)

    assert (answer.status_code, dash.status_code) == (403, 403)
    assert store.runs() == ()


def test_a_file_over_the_limit_leaves_nothing(client: FlaskClient, tmp_path: Path) -> None:
    run_id = _create(client)

    announced = client.put(f"{RUNS}/{run_id}/files/big", data=b"x" * 1001)
    chunked = client.put(
        f"{RUNS}/{run_id}/files/big",
        input_stream=io.BytesIO(b"x" * 1001),
        environ_overrides={"wsgi.input_terminated": True},
    )

    assert (announced.status_code, chunked.status_code) == (413, 413)
    assert not [p for p in (tmp_path / "artifacts").rglob("*") if p.is_file()]


def test_a_body_cut_off_leaves_nothing(client: FlaskClient, tmp_path: Path) -> None:
    run_id = _create(client)

    answer = client.put(
        f"{RUNS}/{run_id}/files/torn",
        input_stream=io.BytesIO(b"half"),
        environ_overrides={"CONTENT_LENGTH": "8"},
    )

    assert answer.status_code == 400
    assert not [p for p in (tmp_path / "artifacts").rglob("*") if p.is_file()]


def test_a_file_and_a_folder_of_one_name_are_told(client: FlaskClient) -> None:
    run_id = _create(client)

    assert client.put(f"{RUNS}/{run_id}/files/a", data=b"x").status_code == 201
    assert client.put(f"{RUNS}/{run_id}/files/a/b", data=b"x").status_code == 409


def test_a_finished_run_takes_nothing_more(client: FlaskClient) -> None:
    run_id = _create(client)
    assert client.post(f"{RUNS}/{run_id}/finish").status_code == 400

    client.put(f"{RUNS}/{run_id}/files/a", data=b"x")
    client.post(f"{RUNS}/{run_id}/finish")

    assert client.put(f"{RUNS}/{run_id}/files/b", data=b"x").status_code == 409
    assert client.post(f"{RUNS}/{run_id}/finish").status_code == 409
    _settled(client, run_id)


def test_a_report_that_is_gone_is_told_on_its_page(store: Store) -> None:
    made = analysis()
    run_id = store.import_report("gone", made.report, made.tables)
    (store.folder(run_id) / "report.json").unlink()
    run = store.run(run_id)

    assert run is not None
    assert "report.json" in str(run_page(store, run, None))


def test_what_is_not_there_is_told_in_json(client: FlaskClient) -> None:
    answer = client.get(f"{RUNS}/{'0' * 12}")

    assert (answer.status_code, answer.json) == (404, {"error": "there is no such run"})
    assert client.put(f"{RUNS}/..%2f..%2fx/files/a", data=b"x").status_code in (404, 405)


@pytest.mark.parametrize("body", [None, [], {}, {"name": 3}, {"name": "  "}])
def test_a_run_needs_a_name(body: object, client: FlaskClient) -> None:
    assert client.post(RUNS, json=body).status_code == 400


def test_every_answer_has_a_strict_policy(client: FlaskClient) -> None:
    for path in ("/", "/healthz", "/nothing/here", "/assets/upload.js"):
        with client.get(path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'self'; script-src 'self'" in policy
            assert "unsafe-eval" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "'unsafe-inline'" not in content_policy([]).split("script-src")[1].split(";")[0]


def test_the_server_is_for_this_machine_alone(store: Store) -> None:
    with pytest.raises(UsageError, match="not of this machine"):
        serve(store, "0.0.0.0", free_port())


def _create(client: FlaskClient) -> str:
    answer = client.post(RUNS, json={"name": "exp1"})
    assert answer.status_code == 201 and answer.json is not None
    return str(answer.json["id"])


def _settled(client: FlaskClient, run_id: str) -> tuple[str, str | None]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        run = client.get(f"{RUNS}/{run_id}").json
        assert run is not None
        if run["state"] in ("done", "failed"):
            return run["state"], run["error"]
        time.sleep(0.02)
    raise TimeoutError(run_id)
