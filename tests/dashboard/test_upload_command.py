"""stepsplit upload against a server in the same process that drops connections."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from support.store_builders import App, Serving, claimed, known_analysis, settled, state

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard import cli, upload
from stepsplit.dashboard.connection import Connection
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.upload_files import FileToSend
from stepsplit.dashboard.web.options import Access
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "pp2_m2"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", 1000)
    monkeypatch.setattr(upload, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr("stepsplit.dashboard.commands.upload.ASK_EVERY_S", 0.05)


@pytest.fixture
def usual_parts(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample's trace is hundreds of small parts."""
    monkeypatch.setattr(upload, "PART_BYTES", 100_000)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    folder = tmp_path / "exp1"
    (folder / "nccl").mkdir(parents=True)
    (folder / "rank0.json").write_bytes(b"0" * 2500)
    (folder / "nccl" / "debug é#1.log").write_bytes(b"")
    (folder / ".DS_Store").write_bytes(b"x")
    return folder


def test_a_folder_arrives_whole(
    store: Store, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Serving(_server(store)) as url:
        asked = ["upload", str(recording), "--to", url, "--tag", "branch=main"]
        assert cli.run(asked) == 0

    (run,) = store.list_runs()
    assert capsys.readouterr().out == f"{url}/run/{run.id}\n"
    assert (run.name, run.tags, run.state) == ("exp1", (Tag("branch", "main"),), "queued")
    kept = store.find_folder(run.id) / "input" / "exp1"
    assert (kept / "rank0.json").read_bytes() == b"0" * 2500
    assert (kept / "nccl" / "debug é#1.log").read_bytes() == b""
    assert store.files.sum_size(run.id).files == 2


@pytest.mark.usefixtures("usual_parts")
def test_a_redacted_upload_names_neither_the_folder_nor_the_host(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = shutil.copytree(SAMPLE, tmp_path / "acme")
    with Serving(_server(store)) as url:
        assert cli.run(["upload", str(private), "--to", url, "--redact"]) == 0

    (run,) = store.list_runs()
    sent = store.find_folder(run.id) / "input" / "redacted"
    assert run.name == "redacted"
    assert sorted(path.name for path in sent.iterdir()) == [
        "rank0_trace.json.gz",
        "rank1_trace.json.gz",
        "run.json",
    ]
    assert b'"vm"' not in (sent / "run.json").read_bytes()


def test_a_server_that_fails_now_and_then_gets_it_all(store: Store, recording: Path) -> None:
    """Every third answer is lost: some after the work was done, some before."""
    inner, count = _server(store), iter(range(10_000))

    def flaky(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        number = next(count)
        if number % 6 == 2:
            start("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        if number % 6 == 5:
            list(inner(environ, lambda *_: lambda _: None))
            raise ConnectionResetError
        return inner(environ, start)

    with Serving(_without_noise(flaky)) as url:
        sender = upload.Sender(Connection(url, None), sleep=lambda _: None)
        run_id = sender.create("run", {})
        size = (recording / "rank0.json").stat().st_size
        sender.send(run_id, FileToSend(recording / "rank0.json", "rank0.json", size))
        sender.finish(run_id)

    assert (store.find_folder(run_id) / "input" / "rank0.json").read_bytes() == b"0" * 2500
    assert state(store, run_id) == ("queued", None)


def test_giving_up_prints_how_to_resume(
    store: Store, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner, patches = _server(store), iter(range(10_000))

    def dying(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if environ["REQUEST_METHOD"] == "PATCH" and next(patches) >= 2:
            start("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        return inner(environ, start)

    with Serving(dying) as url:
        assert cli.run(["upload", str(recording), "--to", url]) == 2
    (run,) = store.list_runs()
    error = capsys.readouterr().err
    again = f"stepsplit upload {recording} --to {url} --resume {run.id}"
    assert error.endswith(f"the server answered 503; resume with: {again}\n")
    assert store.files.sum_size(run.id).bytes == 1000

    with Serving(inner) as url:
        assert cli.run(["upload", str(recording), "--to", url, "--resume", run.id]) == 0
        assert cli.run(["upload", str(recording), "--to", url, "--resume", run.id]) == 0
    assert state(store, run.id) == ("queued", None)
    assert store.files.sum_size(run.id).bytes == 2500


@pytest.mark.usefixtures("usual_parts")
def test_the_mesh_of_the_job_may_be_stated(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = [str(file) for file in sorted(SAMPLE.glob("*_trace.json.gz"))]
    with Serving(_server(store)) as url:
        assert cli.run(["upload", *recorded, "--to", url, "--mesh", "tp=2"]) == 0
        assert cli.run(["upload", *recorded, "--to", url, "--mesh", "ep=2"]) == 2
    assert "stepsplit: --mesh: 'ep=2' is not an axis and a size" in capsys.readouterr().err

    (run,) = store.list_runs()
    assert run.name == f"{Path(recorded[0]).name} and {len(recorded) - 1} more"
    process_job(store, claimed(store), analyze_upload)
    report = store.load_report(run.id)
    assert (report.run.mesh_source, report.run.world_size) == ("stated", 2)


def test_a_resumed_upload_keeps_its_mesh(
    store: Store, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if environ["REQUEST_METHOD"] == "PATCH":
            start("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        return _server(store)(environ, start)

    with Serving(refusing) as url:
        assert cli.run(["upload", str(recording), "--to", url, "--mesh", "dp=2"]) == 2
    (run,) = store.list_runs()
    again = f"stepsplit upload {recording} --mesh dp=2 --to {url} --resume {run.id}"
    assert capsys.readouterr().err.endswith(f"{again}\n")


def test_a_missing_token_is_an_error(
    store: Store, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = create_server(store, Access(local=False, guarded=True), Limits(spare_bytes=0))
    token = store.tokens.create("ci").secret

    with Serving(server) as url:
        asked = ["upload", str(recording), "--to", url]
        assert cli.run(asked) == 2
        assert "set it with --token or STEPSPLIT_TOKEN" in capsys.readouterr().err
        assert cli.run([*asked, "--token", token]) == 0


def test_a_viewers_token_is_refused_with_the_role_that_is_needed(
    store: Store, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = create_server(store, Access(local=False, guarded=True), Limits(spare_bytes=0))
    token = store.tokens.create("wall", Role.VIEWER).secret

    with Serving(server) as url:
        assert cli.run(["upload", str(recording), "--to", url, "--token", token]) == 2

    refused = "this needs the role uploader; yours is viewer"
    assert capsys.readouterr().err == f"stepsplit: the server refused: {refused}\n"
    assert store.list_runs() == ()


def test_waiting_ends_with_the_analysis(
    store: Store, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        while (job := store.jobs.claim("w")) is None:
            pass
        store.jobs.fail(job, "the trace is torn; record it again")

    worker = threading.Thread(target=work)
    worker.start()
    with Serving(_server(store)) as url:
        assert cli.run(["upload", str(recording), "--to", url, "--wait"]) == 2
    worker.join()

    message = "the analysis failed: the trace is torn; record it again"
    assert capsys.readouterr().err == f"stepsplit: {message}\n"


def test_a_refusal_is_one_line(
    store: Store, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = create_server(store, limits=Limits(file_bytes=1500, spare_bytes=0))
    with Serving(server) as url:
        assert cli.run(["upload", str(recording), "--to", url]) == 2

    message = "the server refused: the file exceeds the limit of this server (1500 bytes)"
    assert capsys.readouterr().err == f"stepsplit: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--to", "http://x"], "nowhere: no such file or folder"),
        (["{empty}", "--to", "http://x"], "no files to upload"),
        (["{file}", "--to", "ftp://x"], "not a dashboard address"),
        (["{file}", "--to", "http://x:port"], "http://x:port"),
        (["{file}", "--to", "http://x", "--tag", "a"], "write KEY=VALUE"),
        (["{file}", "{file}", "--to", "http://x"], "is given twice"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    places = {"empty": tmp_path / "empty", "file": tmp_path / "file"}

    assert cli.run(["upload", *(part.format(**places) for part in arguments)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_file_that_became_shorter_is_not_sent(store: Store, recording: Path) -> None:
    with Serving(_server(store)) as url:
        sender = upload.Sender(Connection(url, None))
        run_id = sender.create("run", {})
        path = recording / "rank0.json"
        part = {"Upload-Offset": "0"}
        asked = f"/api/v1/runs/{run_id}/files/rank0.json"
        Connection(url, None).request("PATCH", asked, b"0" * 100, part)

        with pytest.raises(UsageError, match="is shorter than the part already uploaded"):
            sender.send(run_id, FileToSend(path, "rank0.json", 50))


def test_the_answer_is_there_once_a_worker_has_it(store: Store, recording: Path) -> None:
    with Serving(_server(store)) as url:
        assert cli.run(["upload", str(recording / "rank0.json"), "--to", url]) == 0
    (run,) = store.list_runs()

    process_job(store, claimed(store), known_analysis)

    assert (run.name, settled(store, run.id)) == ("rank0.json", ("done", None))


def _server(store: Store) -> Flask:
    return create_server(store, limits=Limits(spare_bytes=0))


def _without_noise(app: App) -> App:
    """An answer that is lost is no error of the server's that the test should print."""

    def quiet(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        try:
            return app(environ, start)
        except ConnectionResetError:
            environ["wsgi.errors"] = None
            start("500 Lost", [("Content-Length", "9"), ("Connection", "close")])
            return [b""]

    return quiet
