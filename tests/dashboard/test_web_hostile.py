"""Malicious uploads are refused, fail with one line, or are harmless."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.report_builders import analysis
from support.store_builders import ask_page, claimed, state

from stepsplit.analyzer.readers import compression
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits

RUNS = "/api/v1/runs"
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "pp2_m2"
SCRIPT = "<img src=x onerror=alert(1)>.json"


class _Harm:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.mark), "w")


def test_a_pickle_is_never_run(client: FlaskClient, store: Store, tmp_path: Path) -> None:
    mark = tmp_path / "harm"
    harm = pickle.dumps(_Harm(mark))

    for name in ("rank0_trace.json", "memory/rank0.pickle", "nccl/dump.pkl"):
        ended, error = _ingested(client, store, {name: harm})
        assert ended == "failed" and error
    whole = {file.name: file.read_bytes() for file in SAMPLE.iterdir()}
    assert _ingested(client, store, whole | {"snapshot.pickle": harm}) == ("done", None)

    assert not mark.exists()


def test_an_archive_stays_in_its_folder(client: FlaskClient, store: Store, tmp_path: Path) -> None:
    trace = (SAMPLE / "rank0_trace.json.gz").read_bytes()
    packed = {"evil.zip": _zip({"../../evil.gz": trace}), "evil.tar": _tar(trace)}

    for name, content in packed.items():
        _ingested(client, store, {name: content})

    outside = [path for path in tmp_path.rglob("*") if path.is_file() and path.name == "evil.gz"]
    assert outside == []


def test_names_of_thousands_of_digits_are_sorted(client: FlaskClient, store: Store) -> None:
    traces = [(SAMPLE / f"rank{rank}_trace.json.gz").read_bytes() for rank in (0, 1)]
    names = [f"rank{'9' * 5000}_{rank}.json.gz" for rank in (0, 1)]
    packed = _zip(dict(zip(names, traces, strict=True)))
    assert _ingested(client, store, {"long.zip": packed}) == ("done", None)


def test_an_archive_of_more_files_than_a_job_has_is_refused(
    client: FlaskClient, store: Store
) -> None:
    packed = _zip({str(number): b"" for number in range(32_769)})
    _, error = _ingested(client, store, {"many.zip": packed})
    assert error == "many.zip: more than 32,768 files; pack only the traces"


@pytest.mark.parametrize("name", ["bomb.json.gz", "bomb.zip"])
def test_an_archive_bomb_fails_with_a_one_line_error(
    name: str, client: FlaskClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "FREE_BYTES", 16 << 20)
    zeros = b'{"traceEvents": [' + b" " * (20 << 20)
    packed = gzip.compress(zeros, 1) if name.endswith("gz") else _zip({"rank0.json": zeros})

    ended, error = _ingested(client, store, {name: packed})

    assert ended == "failed" and error is not None
    assert "unpacks to over 100 times its size" in error


@pytest.mark.parametrize(
    "content",
    [b"", b"MZ\x90\0" * 1000, b"<html><script>alert(1)</script></html>", b'{"traceEvents": 3}',
     b"[" * 100_000, b'{"traceEvents": [' + b"1," * 100, b"\xff\xfe" * 100],
)  # fmt: skip
def test_an_invalid_trace_fails_with_a_one_line_error(
    content: bytes, client: FlaskClient, store: Store
) -> None:
    ended, error = _ingested(client, store, {"rank0_trace.json": content})

    assert ended == "failed" and error is not None
    assert "internal error" not in error and "\n" not in error
    assert str(store.find_folder("0" * 12).parent) not in error


def test_names_with_script_in_them_are_text(client: FlaskClient, store: Store) -> None:
    answer = client.post(RUNS, json={"name": SCRIPT, "tags": {SCRIPT: SCRIPT}})
    assert answer.json is not None
    run_id = answer.json["id"]
    put = client.put(f"{RUNS}/{run_id}/files/{SCRIPT}", data=b"x")
    answer = client.get(f"{RUNS}/{run_id}")

    assert put.status_code == 201
    assert answer.content_type == put.content_type == "application/json"
    assert answer.json is not None and answer.json["tags"] == {SCRIPT: SCRIPT}
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    client.post(f"{RUNS}/{run_id}/finish")
    assert process_job(store, claimed(store), analyze_upload) == "failed"


def test_ten_thousand_tiny_files_are_refused_at_the_limit(store: Store) -> None:
    client = create_server(store, limits=Limits(spare_bytes=0, run_files=60)).test_client()
    run_id = _create(client)

    codes = [
        client.put(f"{RUNS}/{run_id}/files/d{n % 10}/{n}", data=b"x").status_code for n in range(80)
    ]

    assert codes == [201] * 60 + [413] * 20
    assert store.files.sum_size(run_id).files == 60


def test_requests_after_finish_leave_the_analysis_alone(client: FlaskClient, store: Store) -> None:
    run_id = _create(client)
    files = f"{RUNS}/{run_id}/files"
    for sent in SAMPLE.iterdir():
        assert client.put(f"{files}/{sent.name}", data=sent.read_bytes()).status_code == 201
    stored = _stored(store, run_id)
    assert client.post(f"{RUNS}/{run_id}/finish").status_code == 202

    start, late = {"Upload-Offset": "0"}, {"Upload-Offset": "7"}
    answers = [
        client.put(f"{files}/job.toml", data=b"[job"),
        client.put(f"{files}/run.json", data=b"{"),
        client.patch(f"{files}/job.toml", data=b"[job", headers=start),
        client.patch(f"{files}/mesh.txt", data=b"tp=9", headers=late),
        client.patch(f"{files}/mesh.txt/part", data=b"tp=9", headers=start),
        client.delete(f"{files}/run.json"),
    ]

    assert [answer.status_code for answer in answers] == [409] * len(answers)
    assert _stored(store, run_id) == stored
    assert process_job(store, claimed(store), analyze_upload) == "done"


def test_a_wrong_run_toml_fails_with_a_one_line_error(client: FlaskClient, store: Store) -> None:
    whole = {file.name: file.read_bytes() for file in SAMPLE.iterdir()}
    for lie in (b"\0", b"[model]\npreset = '/etc/passwd'", b"[hardware]\nfile = '/etc/passwd'"):
        ended, error = _ingested(client, store, whole | {"job.toml": lie})
        assert ended == "failed" and error is not None
        assert "root:" not in error and "internal error" not in error


@pytest.mark.parametrize(
    "place",
    [
        "[hardware]\nfile = '/etc/hostname'",
        "[hardware]\nfile = '../../../runs.db'",
        "[hardware]\nmeasured = ['/etc']",
        "[training]\nfile = '/etc/hostname'",
        "file = '/etc/hostname'",
    ],
)
def test_a_run_toml_reads_no_file_of_the_server(
    place: str, client: FlaskClient, store: Store
) -> None:
    whole = {file.name: file.read_bytes() for file in SAMPLE.iterdir()}

    ended = _ingested(client, store, whole | {"job.toml": place.encode()})

    named = place.split("'")[1]
    message = f"job.toml: refers to {named}, which is not in the upload; "
    assert ended == ("failed", message + "upload that file too, and use a relative path")


def test_a_trace_with_huge_numbers_fails_or_is_harmless(client: FlaskClient, store: Store) -> None:
    trace = json.loads(gzip.decompress((SAMPLE / "rank0_trace.json.gz").read_bytes()))
    trace["distributedInfo"] = {"rank": 10**30, "world_size": 10**30}

    ended, error = _ingested(client, store, {"t.json": json.dumps(trace).encode()})

    assert ended in ("done", "failed")
    assert ended == "done" or (error is not None and "\n" not in error)


def _ingested(client: FlaskClient, store: Store, files: dict[str, bytes]) -> tuple[str, str | None]:
    run_id = _create(client)
    for name, content in files.items():
        assert client.put(f"{RUNS}/{run_id}/files/{name}", data=content).status_code == 201
    assert client.post(f"{RUNS}/{run_id}/finish").status_code == 202
    process_job(store, claimed(store), analyze_upload)
    return state(store, run_id)


def _stored(store: Store, run_id: str) -> dict[str, bytes | None]:
    """Everything in the folder of the uploads: the content of files, None for folders."""
    found = (store.find_folder(run_id) / "input").rglob("*")
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def _create(client: FlaskClient) -> str:
    answer = client.post(RUNS, json={"name": "run"})
    assert answer.json is not None
    return str(answer.json["id"])


def _zip(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def _tar(trace: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("../../evil.gz", "/tmp/evil.gz"):
            entry = tarfile.TarInfo(name)
            entry.size = len(trace)
            archive.addfile(entry, io.BytesIO(trace))
        link = tarfile.TarInfo("link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return packed.getvalue()


@pytest.mark.parametrize("damaged", ["report.json", "tables"])
def test_no_error_names_a_folder_of_the_server(
    damaged: str, client: FlaskClient, store: Store
) -> None:
    known = analysis()
    run_id = store.import_report("run", known.report, known.tables)
    folder = store.find_folder(run_id)
    for file in folder.glob("tables/*.parquet") if damaged == "tables" else [folder / damaged]:
        file.write_bytes(b"damaged")
    (folder / "job.toml").write_bytes(b"[job")
    files = f"{RUNS}/{_create(client)}/files"
    client.put(f"{files}/a", data=b"x")
    rules = client.application.url_map.iter_rules()
    reads = [rule.rule for rule in rules if "GET" in (rule.methods or ())]
    paths = [rule.replace("<run_id>", run_id) for rule in reads if "<run_id>" in rule]
    pages = ("", "/timeline", "/memory", "/collectives", "/compute", "/pipeline", "/model")

    answers = [
        *(_get_text(client, path) for path in paths),
        *(ask_page(client, f"/run/{run_id}{page}") for page in pages),
        ask_page(client, "/compare", f"?baseline={run_id}&candidate={run_id}"),
        client.put(f"{files}/a/b", data=b"x").text,
        client.put(f"{files}/../a", data=b"x").text,
        client.put(f"{RUNS}/{run_id}/job", data=b"[hardware]\nfile = '/etc/passwd'").text,
    ]

    assert any("report" in answer for answer in answers)
    assert [answer for answer in answers if str(folder.parent) in answer] == []


def test_only_scripts_and_styles_may_be_kept_by_caches(client: FlaskClient, store: Store) -> None:
    known = analysis()
    run_id = store.import_report("run", known.report, known.tables)
    private = ("/", f"/run/{run_id}", "/login", RUNS, f"{RUNS}/{run_id}", "/_dash-layout",
               f"{RUNS}/{run_id}/report.json", f"{RUNS}/{run_id}/report.html", f"{RUNS}/x",
               "/metrics", "/assets/none.css")  # fmt: skip

    (style,) = re.findall(r"/assets/style\.css\?m=\w+", _get_text(client, "/"))

    kept = {}
    for path in (*private, style, "/assets/style.css?m=1"):
        with client.get(path) as answer:
            kept[path] = answer.headers["Cache-Control"]

    assert "immutable" in kept.pop(style)
    assert kept.pop("/assets/style.css?m=1") == "no-cache"
    assert kept == dict.fromkeys(private, "private, no-store")


def _get_text(client: FlaskClient, path: str) -> str:
    with client.get(path) as answer:
        return str(answer.get_data(as_text=True))


def test_scripts_that_are_none_are_not_found(client: FlaskClient) -> None:
    """Dash raises an error for each; it stays out of the log."""
    client.application.testing = False
    names = ("os/path.py", "dash/..%2f..%2fdash.py", "dash/none.js")
    statuses = [client.get(f"/_dash-component-suites/{name}").status_code for name in names]
    assert statuses == [404, 404, 404]
