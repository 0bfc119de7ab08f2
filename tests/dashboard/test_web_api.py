"""Uploads are stored under their run, other sites are refused, and a run gets its report."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from report_builders import analysis
from store_builders import claimed, known_analysis, state

from stepsplit.analyzer.report.io import from_json, read_report
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.runs import Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import build_content_policy
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits

RUNS = "/api/v1/runs"
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "pp2_m2"
LIMITS = Limits(file_bytes=1000, run_bytes=1500, run_files=3, spare_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/runs.db", tmp_path / "artifacts")
    yield opened
    opened.close()


@pytest.fixture
def client(store: Store) -> FlaskClient:
    return create_server(store, limits=LIMITS).test_client()


def test_an_upload_becomes_a_report(client: FlaskClient, store: Store) -> None:
    run_id = _create(client)
    put = client.put(f"{RUNS}/{run_id}/files/exp1/rank0_trace.json.gz", data=b"trace")
    finish = client.post(f"{RUNS}/{run_id}/finish")

    assert (put.status_code, finish.status_code) == (201, 202)
    assert process_job(store, claimed(store), known_analysis) == "done"
    uploaded = store.find_folder(run_id) / "input" / "exp1" / "rank0_trace.json.gz"
    assert uploaded.read_bytes() == b"trace"
    answer = client.get(f"{RUNS}/{run_id}/report.json")
    assert from_json(answer.data) == analysis().report
    answer.close()


def test_a_sample_uploaded_gives_its_golden_split(store: Store) -> None:
    """The real analyzer behind the real routes: all files of a recording, its report.json too."""
    client = create_server(store).test_client()
    run_id = _create(client)
    for file in sorted(SAMPLE.iterdir()):
        url = f"{RUNS}/{run_id}/files/pp2_m2/{file.name}"
        assert client.put(url, data=file.read_bytes()).status_code == 201
    client.post(f"{RUNS}/{run_id}/finish")

    process_job(store, claimed(store), analyze_upload)

    assert state(store, run_id) == ("done", None)
    golden = read_report(SAMPLE)
    assert store.load_report(run_id).steps == golden.steps
    assert store.load_report(run_id).exposed == golden.exposed
    assert store.load_tables(run_id) is not None


def test_a_status_has_all_fields(client: FlaskClient, store: Store) -> None:
    answer = client.post(RUNS, json={"name": " exp1 ", "tags": {"branch": "main", "gpus": "8"}})
    assert answer.json is not None
    run_id = answer.json["id"]
    client.put(f"{RUNS}/{run_id}/files/a", data=b"12345")
    client.post(f"{RUNS}/{run_id}/finish")
    job = claimed(store)
    store.jobs.record_progress(job, 0.25, "reading")

    assert client.get(f"{RUNS}/{run_id}").json == {
        "id": run_id,
        "name": "exp1",
        "state": "running",
        "error": None,
        "tags": {"branch": "main", "gpus": "8"},
        "progress": 0.25,
        "progress_note": "reading",
        "files": 1,
        "received_bytes": 5,
    }
    run = store.find_run(run_id)
    assert run is not None and run.tags == (Tag("branch", "main"), Tag("gpus", "8"))


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
    assert _files(tmp_path) == []


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
    assert store.list_runs() == ()


def test_a_file_over_the_limit_leaves_nothing(client: FlaskClient, tmp_path: Path) -> None:
    run_id = _create(client)

    announced = client.put(f"{RUNS}/{run_id}/files/big", data=b"x" * 1001)
    chunked = client.put(
        f"{RUNS}/{run_id}/files/big",
        input_stream=io.BytesIO(b"x" * 1001),
        environ_overrides={"wsgi.input_terminated": True},
    )

    assert (announced.status_code, chunked.status_code) == (413, 413)
    assert _files(tmp_path) == []


def test_a_run_over_the_limit_keeps_what_fitted(client: FlaskClient, tmp_path: Path) -> None:
    run_id = _create(client)

    first = client.put(f"{RUNS}/{run_id}/files/a", data=b"x" * 900)
    second = client.put(f"{RUNS}/{run_id}/files/b", data=b"x" * 900)
    again = client.put(f"{RUNS}/{run_id}/files/a", data=b"y" * 1000)

    assert (first.status_code, second.status_code, again.status_code) == (201, 413, 201)
    assert [path.read_bytes() for path in _files(tmp_path)] == [b"y" * 1000]


def test_a_run_has_only_so_many_files(client: FlaskClient) -> None:
    run_id = _create(client)
    for name in "abc":
        assert client.put(f"{RUNS}/{run_id}/files/{name}", data=b"x").status_code == 201

    answer = client.put(f"{RUNS}/{run_id}/files/d", data=b"x")

    message = "a run may have at most 3 files; pack small files into a zip or tar archive"
    assert (answer.status_code, answer.json) == (413, {"error": message})
    assert client.put(f"{RUNS}/{run_id}/files/c", data=b"y").status_code == 201


def test_an_upload_is_refused_before_the_disk_is_full(store: Store, tmp_path: Path) -> None:
    client = create_server(store, limits=Limits(spare_bytes=1 << 60)).test_client()
    run_id = _create(client)

    answer = client.put(f"{RUNS}/{run_id}/files/a", data=b"x")

    message = "the server's disk is full; ask its administrator to delete old runs"
    assert (answer.status_code, answer.json) == (507, {"error": message})
    assert _files(tmp_path) == []


def test_a_body_cut_off_leaves_nothing(client: FlaskClient, tmp_path: Path) -> None:
    run_id = _create(client)

    answer = client.put(
        f"{RUNS}/{run_id}/files/torn",
        input_stream=io.BytesIO(b"half"),
        environ_overrides={"CONTENT_LENGTH": "8"},
    )

    assert answer.status_code == 400
    assert _files(tmp_path) == []


def test_a_file_and_a_folder_of_one_name_are_refused(client: FlaskClient) -> None:
    run_id = _create(client)

    assert client.put(f"{RUNS}/{run_id}/files/a", data=b"x").status_code == 201
    assert client.put(f"{RUNS}/{run_id}/files/a/b", data=b"x").status_code == 409


def test_a_finished_run_accepts_no_files(client: FlaskClient) -> None:
    run_id = _create(client)
    assert client.post(f"{RUNS}/{run_id}/finish").status_code == 400

    client.put(f"{RUNS}/{run_id}/files/a", data=b"x")
    client.post(f"{RUNS}/{run_id}/finish")

    assert client.put(f"{RUNS}/{run_id}/files/b", data=b"x").status_code == 409
    assert client.post(f"{RUNS}/{run_id}/finish").status_code == 409


def test_missing_resources_are_json_errors(client: FlaskClient) -> None:
    answer = client.get(f"{RUNS}/{'0' * 12}")

    assert (answer.status_code, answer.json) == (404, {"error": "run not found"})
    assert client.put(f"{RUNS}/..%2f..%2fx/files/a", data=b"x").status_code in (404, 405)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"name": 3},
        {"name": "  "},
        {"name": "a\0b"},
        {"name": "\udcff"},
        {"name": "x", "tags": ["a"]},
        {"name": "x", "tags": {"a": 1}},
        {"name": "x", "tags": {"": "a"}},
        {"name": "x", "tags": {"k": "v" * 201}},
        {"name": "x", "tags": {str(n): "v" for n in range(33)}},
    ],
)
def test_a_run_needs_a_valid_name_and_tags(body: object, client: FlaskClient) -> None:
    assert client.post(RUNS, json=body).status_code == 400


def test_every_answer_has_a_strict_policy(client: FlaskClient) -> None:
    for path in ("/", "/healthz", "/nothing/here", "/assets/upload.js"):
        with client.get(path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'self'; script-src 'self'" in policy
            assert "unsafe-eval" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "'unsafe-inline'" not in build_content_policy([]).split("script-src")[1].split(";")[0]


def test_every_process_serves_the_scripts_of_a_page(store: Store) -> None:
    """Requests for one page go to several processes."""
    page = create_server(store).test_client().get("/").get_data(as_text=True)
    scripts = [part.partition('"')[0] for part in page.split('<script src="')[1:]]
    other = create_server(store).test_client()

    assert len(scripts) > 5
    for script in scripts:
        with other.get(script) as answer:
            assert answer.status_code == 200, script


def test_errors_of_the_api_are_json(client: FlaskClient) -> None:
    unknown = client.post("/api/v1/nothing")
    large = client.post(RUNS, data=b"x" * 100_000, content_type="application/json")

    assert (unknown.status_code, large.status_code) == (405, 413)
    assert unknown.json is not None and "error" in unknown.json
    assert large.json is not None and "error" in large.json


def _create(client: FlaskClient) -> str:
    answer = client.post(RUNS, json={"name": "exp1"})
    assert answer.status_code == 201 and answer.json is not None
    return str(answer.json["id"])


def _files(folder: Path) -> list[Path]:
    return [path for path in (folder / "artifacts").rglob("*") if path.is_file()]
