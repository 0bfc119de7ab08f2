"""Uploads are stored under their run, other sites are refused, and a run gets its report."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.report_builders import analysis
from support.store_builders import claimed, known_analysis, state

from stepsplit.analyzer.report.io import from_json, read_report
from stepsplit.dashboard.pages.store_pages import parse_address
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import build_content_policy
from stepsplit.dashboard.web.page_builder import PageBuilder
from stepsplit.dashboard.web.report_cache import ReportCache
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits

RUNS = "/api/v1/runs"
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "pp2_m2"
LIMITS = Limits(file_bytes=1000, run_bytes=1500, run_files=3, spare_bytes=0)


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


def test_an_address_that_no_database_can_hold_is_not_found(client: FlaskClient) -> None:
    """PostgreSQL has no text with a zero byte."""
    for method, path in (
        ("GET", f"{RUNS}/a%00"), ("DELETE", f"{RUNS}/a%00"), ("GET", f"{RUNS}/a%00/report.json"),
        ("DELETE", "/api/v1/tokens/a%00"), ("GET", "/run/a%00"),
    ):  # fmt: skip
        assert client.open(path, method=method).status_code == 404, path


def test_pages_of_damaged_tables_say_so(client: FlaskClient, store: Store) -> None:
    run_id = store.import_report("damaged", analysis().report, analysis().tables)
    (store.find_folder(run_id) / "tables" / "segments.parquet").write_bytes(b"PAR1 damaged PAR1")

    pages = PageBuilder(store, ReportCache(store))
    shown = str(pages.build_content(parse_address(f"/run/{run_id}/timeline", "")).children)
    overview = str(pages.build_content(parse_address(f"/run/{run_id}", "")).children)
    answers = [client.get(f"{RUNS}/{run_id}/{part}") for part in ("timeline", "report.html")]

    assert "This run cannot be read" in shown
    assert "cannot read a table" in shown
    assert "Top bottlenecks" in overview, "which needs no tables"
    assert [answer.status_code for answer in answers] == [404, 404]
    assert {"cannot read a table" in answer.get_data(as_text=True) for answer in answers} == {True}


@pytest.mark.parametrize("part", ["report.json", "perfetto", "timeline", "report.html"])
def test_a_link_among_the_files_of_a_run_is_no_internal_error(
    part: str, client: FlaskClient, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = store.import_report("linked", analysis().report, analysis().tables)
    (file := store.find_folder(run_id) / "report.json").rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")

    answer = client.get(f"{RUNS}/{run_id}/{part}")

    said = answer.get_json()["error"]
    assert answer.status_code >= 400 and "internal" not in said and str(tmp_path) not in said
    assert all(record.exc_info is None for record in caplog.records)


def test_a_page_that_fails_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr("stepsplit.dashboard.web.page_builder.build_run_page", fail)
    monkeypatch.setattr("stepsplit.dashboard.pages.compare.compare_page", fail)
    run_id = store.import_report("odd", analysis().report, analysis().tables)
    pages = PageBuilder(store, ReportCache(store))
    both = f"?baseline={run_id}&candidate={run_id}"

    page = str(pages.build_content(parse_address(f"/run/{run_id}/timeline", "")).children)
    compared = str(pages.build_content(parse_address("/compare", both)).children)

    assert "This page cannot be shown" in page
    assert "These runs cannot be compared" in compared
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


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


@pytest.mark.parametrize(
    ("mesh", "source", "error"),
    [
        ("tp=2\n", "stated", None),
        ("tp=4", None, "stated mesh tp=4 has 4 ranks, but the job has 2; state a mesh of 2"),
        ("ep=2", None, "mesh.txt: 'ep=2' is not an axis and a size; use tp=2,pp=2,dp=2 or fsdp=4"),
    ],
)
def test_an_upload_may_state_the_mesh(
    store: Store, mesh: str, source: str | None, error: str | None
) -> None:
    client = create_server(store).test_client()
    run_id = _create(client)
    for file in (*sorted(SAMPLE.glob("*_trace.json.gz")), SAMPLE / "run.json"):
        client.put(f"{RUNS}/{run_id}/files/pp2_m2/{file.name}", data=file.read_bytes())
    client.put(f"{RUNS}/{run_id}/files/mesh.txt", data=mesh.encode())
    client.post(f"{RUNS}/{run_id}/finish")

    process_job(store, claimed(store), analyze_upload)

    outcome, message = state(store, run_id)
    assert outcome == ("failed" if error else "done")
    assert (error or "") in (message or "")
    if source:
        report = store.load_report(run_id)
        assert report.run.mesh_source == source
        assert "mesh_contradicted" in {row.code for row in report.warnings}


def test_runs_are_listed_by_tag_and_state(client: FlaskClient, store: Store) -> None:
    report, tables = analysis().report, analysis().tables
    old = store.import_report("old", report, tables, [Tag("branch", "main")])
    new = store.import_report("new", report, tables, [Tag("branch", "main"), Tag("gpu", "a=b")])
    open_run = store.add("open", [Tag("branch", "main")])

    def ids(query: str) -> list[str]:
        return [row["id"] for row in client.get(f"{RUNS}?{query}").json["runs"]]  # type: ignore[index]

    assert ids("") == [open_run, new, old]
    assert ids("tag=branch%3Dmain&state=done") == [new, old]
    assert ids("tag=branch%3Dmain&state=done&last=1") == [new]
    assert ids("tag=branch%3Dmain&tag=gpu%3Da%3Db") == [new]
    assert ids("tag=branch%3Dother") == []
    for query in ("tag=branch", "last=-1", "last=x"):
        assert client.get(f"{RUNS}?{query}").status_code == 400


def test_the_result_of_a_check_is_stored_with_its_run(client: FlaskClient, store: Store) -> None:
    run_id = _create(client)
    said = {"answer": "regressed", "headline": "REGRESSED: calls"}
    assert client.post(f"{RUNS}/{run_id}/check", json=said).status_code == 204
    run = store.find_run(run_id)
    assert run is not None and run.verdict is not None
    assert (run.verdict.answer, run.verdict.words) == ("regressed", "REGRESSED: calls")
    for body in ({}, {"answer": "fine", "headline": ""}, {"answer": "pass", "headline": 3}, [1]):
        assert client.post(f"{RUNS}/{run_id}/check", json=body).status_code == 400
    assert client.post(f"{RUNS}/missing/check", json=said).status_code == 404


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
        "note": "",
        "job": None,
        "job_label": None,
        "progress": 0.25,
        "progress_note": "reading",
        "files": 1,
        "received_bytes": 5,
        "roles": [],
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
        "a%ff",
        "%ed%a0%80",
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

    first = client.put(f"{RUNS}/{run_id}/files/a", data=b"x" * 600)
    second = client.put(f"{RUNS}/{run_id}/files/b", data=b"x" * 901)
    again = client.put(f"{RUNS}/{run_id}/files/a", data=b"y" * 900)

    assert (first.status_code, second.status_code, again.status_code) == (201, 413, 201)
    assert [path.read_bytes() for path in _files(tmp_path)] == [b"y" * 900]


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

    message = "the server's disk is full; delete old runs (stepsplit delete)"
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
        {"name": None},
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
    run_id = _create(client)
    large = client.post(RUNS, data=b"x" * 100_000, content_type="application/json")
    unknown = [
        client.open(path, method=method)
        for path in ("/api", "/api/", "/api/v1/nothing", f"{RUNS}/", f"{RUNS}/{run_id}/files/")
        for method in ("GET", "POST", "PUT", "DELETE")
    ]
    wrong_methods = [client.get(f"{RUNS}/{run_id}/finish"), client.patch(RUNS, json={})]

    assert {answer.status_code for answer in unknown} == {404}
    assert [answer.headers["Allow"] for answer in wrong_methods] == ["POST", "GET, HEAD, POST"]
    assert [answer.status_code for answer in (*wrong_methods, large)] == [405, 405, 413]
    for answer in (*unknown, *wrong_methods, large):
        assert answer.json is not None and list(answer.json) == ["error"]


@pytest.mark.parametrize(
    "body",
    [b"[" * 60_000, b'{"name": "x", "tags": ' + b'{"a":' * 10_000, b'{"name": "\\ud800"}', b"\xff"],
    ids=["deep list", "deep object", "surrogate", "not UTF-8"],
)
def test_odd_json_is_refused(body: bytes, client: FlaskClient) -> None:
    check = f"{RUNS}/{_create(client)}/check"

    answers = [client.post(path, data=body, content_type="application/json")
               for path in (RUNS, check)]  # fmt: skip

    assert [answer.status_code for answer in answers] == [400, 400]


@pytest.mark.parametrize("last", ["9" * 5000, "9" * 10, "-1", "1.5", "\u0662", ""])
def test_an_odd_number_of_runs_is_refused(last: str, client: FlaskClient) -> None:
    assert client.get(RUNS, query_string={"last": last}).status_code == 400


@pytest.mark.parametrize("run_id", ["a%00b", "%ed%a0%80", "%ff", "..", "0" * 5000])
def test_an_odd_run_id_is_not_found(run_id: str, client: FlaskClient) -> None:
    paths = [f"{RUNS}/{run_id}/report.json", f"{RUNS}/{run_id}/timeline", f"{RUNS}/{run_id}"]

    assert {client.get(path).status_code for path in paths} == {404}


def _create(client: FlaskClient) -> str:
    answer = client.post(RUNS, json={"name": "exp1"})
    assert answer.status_code == 201 and answer.json is not None
    return str(answer.json["id"])


def _files(folder: Path) -> list[Path]:
    return [path for path in (folder / "artifacts").rglob("*") if path.is_file()]
