"""Health checks of the server and its database, metrics, request logs and compression."""

from __future__ import annotations

import gzip
import json
import logging
import re
import time
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError
from support.report_builders import analysis
from support.store_builders import queued
from werkzeug.test import TestResponse

from stepsplit.dashboard import figures
from stepsplit.dashboard.store.logs import JsonFormatter
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server

ASSETS = Path(__file__).parents[2] / "dashboard" / "web" / "assets"


def test_metrics_count_runs_jobs_and_requests(store: Store) -> None:
    client = create_server(store).test_client()
    before = _samples(client.get("/metrics").get_data(as_text=True))
    queued(store, rank0=b"12345")
    store.add("uploading")
    created = client.post("/api/v1/runs", json={"name": "x"})
    assert created.json is not None
    file = f"/api/v1/runs/{created.json['id']}/files/rank1"
    client.put(file, data=b"1234567")
    client.open("/api/v1/runs", method="BREW")

    after = _samples(client.get("/metrics").get_data(as_text=True))

    assert after['stepsplit_runs{state="queued"}'] == 1
    assert after['stepsplit_runs{state="uploading"}'] == 2
    assert after['stepsplit_jobs{state="queued"}'] == 1
    assert 0 < after["stepsplit_oldest_queued_seconds"] < 60
    assert after["stepsplit_upload_bytes"] == 12
    put = 'stepsplit_requests_total{method="PUT",route="/api/v1/runs/<run_id>/files/<path:path>",'
    assert after[put + 'status="201"}'] - before.get(put + 'status="201"}', 0) == 1
    got = after["stepsplit_received_bytes_total"] - before["stepsplit_received_bytes_total"]
    assert got == 7 + len(b'{"name": "x"}')
    assert any('method="other"' in name for name in after)
    assert created.json["id"] not in "".join(after)


def test_an_unavailable_database_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client = create_server(store).test_client()

    def away() -> None:
        raise OperationalError("select", {}, Exception("gone"))

    monkeypatch.setattr(store._database, "begin_read", away)

    answers = [client.get(path) for path in ("/healthz", "/readyz", "/api/v1/runs/0123456789ab")]

    assert [answer.status_code for answer in answers] == [200, 503, 503]
    assert answers[2].json == {"error": "the database is unavailable; try again"}
    assert answers[2].headers["Retry-After"] == "5"


def test_a_request_is_one_line_of_json(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    client = create_server(store).test_client()

    with caplog.at_level(logging.INFO, "stepsplit.requests"):
        client.get("/healthz?secret=x")
    (record,) = caplog.records
    line = JsonFormatter().format(record)

    record = json.loads(line)
    assert "\n" not in line and "secret" not in line
    assert record.pop("ms") >= 0 and record.pop("time").endswith("+00:00")
    assert record == {
        "level": "info",
        "event": "request",
        "method": "GET",
        "path": "/healthz",
        "status": 200,
        "bytes": 0,
        "address": "127.0.0.1",
    }


def _samples(text: str) -> dict[str, float]:
    return {
        sample.name + _labels(sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "}" if labels else ""


def _answer(client: FlaskClient, path: str, encodings: str, etag: str = "") -> TestResponse:
    return client.get(path, headers={"Accept-Encoding": encodings, "If-None-Match": etag})


PLOTLY = "/_dash-component-suites/plotly/package_data/plotly.min.js"


def test_the_script_of_the_charts_has_the_traces_that_they_use(store: Store) -> None:
    script = create_server(store).test_client().get(PLOTLY).text
    assert (
        script.startswith("/**\n* plotly.js (cartesian - minified) v") and len(script) < 2_000_000
    )
    folder = Path(figures.__file__).parent
    used = {
        kind
        for path in folder.rglob("*.py")
        for kind in re.findall(r"\bgo\.([A-Z]\w*)\(", path.read_text(encoding="utf-8"))
    } - {"Figure"}
    assert {"Bar", "Heatmap", "Scatter"} == used, "others may not be in the script"


@pytest.mark.parametrize("path", [PLOTLY, "/_dash-layout"])
def test_pages_and_scripts_are_compressed_for_who_accepts_it(path: str, store: Store) -> None:
    client = create_server(store).test_client()

    plain, packed = _answer(client, path, ""), _answer(client, path, "deflate, gzip")

    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.data) == plain.data
    assert len(packed.data) < 0.6 * len(plain.data)
    assert "Accept-Encoding" in packed.headers["Vary"]


def test_a_script_is_not_sent_again(store: Store) -> None:
    client = create_server(store).test_client()
    known = _answer(client, PLOTLY, "gzip").headers["ETag"]

    assert _answer(client, PLOTLY, "gzip", known).status_code == 304


@pytest.mark.parametrize("encodings", ["", "gzip"])
def test_a_style_has_one_tag_in_all_processes(
    encodings: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_tag(now_s: float) -> str:
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: now_s)
            client = create_server(store).test_client()
            return _answer(client, "/assets/style.css", encodings).headers["ETag"]

    assert read_tag(1_800_000_000.0) == read_tag(1_800_000_500.0)


def test_a_page_with_charts_names_their_scripts_at_once(store: Store) -> None:
    made = analysis()
    run_id = store.import_report("run", made.report, made.tables)
    client = create_server(store).test_client()
    named = re.findall(
        r"<([^>]+)>; rel=preload; as=script", client.get(f"/run/{run_id}").headers["Link"]
    )
    assert PLOTLY in named
    for script in named:
        with client.get(script) as answer:
            assert answer.status_code == 200 and "javascript" in answer.headers["Content-Type"]
    for path in ("/run/0123456789ab", "/nothing"):
        assert "Link" not in client.get(path).headers


@pytest.mark.parametrize("path", ["/", "/?page=2", "/access"])
def test_a_page_without_charts_names_what_dash_asks_for_first(path: str, store: Store) -> None:
    client = create_server(store).test_client()

    named = re.findall(r"<([^>]+)>; rel=preload; as=(\w+)", client.get(path).headers["Link"])

    assert named == [("/_dash-layout", "fetch"), ("/_dash-dependencies", "fetch")]
    assert all(client.get(fetched).status_code == 200 for fetched, _ in named)


def test_the_scripts_of_a_version_are_kept(store: Store) -> None:
    client = create_server(store).test_client()
    addresses = re.findall(r"/assets/\w+\.(?:js|css)\?m=[0-9a-f]+", client.get("/").text)

    assert len(addresses) == 2, "all scripts are one, which no other waits for"
    for address in addresses:
        with client.get(address, headers={"Accept-Encoding": "gzip"}) as kept:
            assert kept.headers["Cache-Control"] == "public, max-age=31536000, immutable"
            assert kept.headers["Content-Encoding"] == "gzip"
    with client.get("/assets/stepsplit.js") as unversioned:
        assert unversioned.headers["Cache-Control"] == "no-cache"
        for script in ASSETS.glob("*.js"):
            own = script.read_text() in unversioned.text
            assert own is (script.name != "theme.js"), f"{script.name}: theme.js runs before it"
    for other in ("/assets/stepsplit.js?m=1", "/assets/stepsplit.js?m="):
        with client.get(other) as answer:
            assert answer.headers["Cache-Control"] == "no-cache", "it is not that version"
    with client.get("/assets/none.js?m=1") as missing:
        assert "immutable" not in missing.headers.get("Cache-Control", "")


def test_downloads_are_sent_as_they_are(store: Store) -> None:
    made = analysis()
    run_id = store.import_report("run", made.report, made.tables)
    client = create_server(store).test_client()

    with _answer(client, f"/api/v1/runs/{run_id}/report.json", "gzip, zstd") as report:
        assert "Content-Encoding" not in report.headers
        assert report.json is not None
    with _answer(client, f"/api/v1/runs/{run_id}/perfetto", "gzip, zstd") as trace:
        assert "Content-Encoding" not in trace.headers
        assert trace.data[:2] == b"\x1f\x8b"


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("llama 8B / fix", "llama-8B-fix-"),
        ('a"; filename=evil.exe', "a-filename-evil.exe-"),
        ("../../etc/passwd", "etc-passwd-"),
        ("训练", ""),
        ("x" * 200, f"{'x' * 80}-"),
    ],
)
def test_downloads_have_the_name_of_the_run(store: Store, name: str, plain: str) -> None:
    made = analysis()
    run_id = store.import_report(name, made.report, made.tables)
    client = create_server(store).test_client()
    for path, suffix in (("report.html", ".html"), ("perfetto", ".pftrace.gz")):
        with _answer(client, f"/api/v1/runs/{run_id}/{path}", "gzip") as answer:
            disposition = answer.headers["Content-Disposition"]
            assert disposition == f"attachment; filename={plain}{run_id}{suffix}"


def test_the_data_of_the_timeline_is_compressed_like_its_page(store: Store) -> None:
    made = analysis()
    run_id = store.import_report("run", made.report, made.tables)
    client = create_server(store).test_client()

    with _answer(client, f"/api/v1/runs/{run_id}/timeline", "gzip") as index:
        assert index.headers["Content-Encoding"] == "gzip"
        assert b"stage 1" in gzip.decompress(index.data)
