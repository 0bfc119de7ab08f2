"""What is recorded and stored is for its owner only, whatever the umask; other outputs have it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.report_builders import analysis
from support.store_builders import claimed, known_analysis, uploaded

from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder
from stepsplit.collectors.formats.run_spec import RunSpec, write_run_json
from stepsplit.collectors.formats.watch_notes import (
    NoteFile,
    RankEnded,
    RankStarted,
    RankWindow,
    request_capture,
)
from stepsplit.collectors.record import command, rank_files
from stepsplit.collectors.record.rank_files import RankFiles
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.ingest import process_job
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits

SAMPLES = Path(__file__).parents[2] / "sample_traces"
TRACE = '{"traceEvents": [{"ph": "X"}]}'

_SCRIPT = Path(__file__).parents[1] / "collector_jobs" / "watched.py"
JOB = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
JOB += [str(_SCRIPT), "400"]


@pytest.fixture
def open_umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The umask of who shares everything."""
    before = os.umask(0)
    yield
    os.umask(before)


def _list_open(folder: Path) -> list[str]:
    """The files and folders that others may read, write or enter, of at least one of each."""
    places = [folder, *folder.rglob("*")]
    assert any(place.is_file() for place in places)
    return [
        f"{place.relative_to(folder)} {stat.filemode(place.lstat().st_mode)}"
        for place in places
        if place.lstat().st_mode & 0o077
    ]


@pytest.mark.usefixtures("open_umask")
def test_a_store_and_all_of_its_files_are_private(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with closing(Store.open(f"sqlite:///{root}/runs.db", root / "artifacts")) as store:
        client = create_server(store, limits=Limits(spare_bytes=0)).test_client()
        run_id = str((client.post("/api/v1/runs", json={"name": "x"}).json or {})["id"])
        file = f"/api/v1/runs/{run_id}/files"
        assert client.put(f"{file}/exp/rank0", data=b"a").status_code == 201
        part = {"Upload-Offset": "0"}
        assert client.patch(f"{file}/exp/deep/rank1", data=b"b", headers=part).status_code == 200
        assert client.put(f"{file}/exp/deep/rank1", data=b"bb").status_code == 201
        assert client.post(f"/api/v1/runs/{run_id}/finish").status_code == 202
        assert process_job(store, claimed(store), known_analysis) == "done"
        assert store.attach_job(run_id, b'[hardware]\npreset = "h100-sxm"\n')
        made = analysis()
        store.import_report("imported", made.report, made.tables)

        assert {path.name for path in root.iterdir()} >= {"runs.db", "runs.db-wal", "runs.db-shm"}
        assert _list_open(tmp_path / "a") == []


@pytest.mark.usefixtures("open_umask")
def test_copies_of_remote_files_are_private(tmp_path: Path) -> None:
    def open_on(machine: str) -> Store:
        remote = f"local://{tmp_path}/bucket"
        return Store.open(f"sqlite:///{tmp_path}/db/runs.db", remote, tmp_path / machine)

    with closing(open_on("here")) as here, closing(open_on("there")) as there:
        made = analysis()
        imported = here.import_report("imported", made.report, made.tables)
        run_id = uploaded(here, **{"deep": b"x"})
        there.load_tables(imported)
        there.artifacts.fetch_uploads(run_id)

    assert [_list_open(tmp_path / name) for name in ("there", "db")] == [[], []]


@pytest.mark.usefixtures("open_umask")
def test_the_default_store_and_its_note_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    assert cli.run(["token", "create", "x"]) == 0

    assert [_list_open(tmp_path / name) for name in (".stepsplit", "state")] == [[], []]


def _record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that a rank writes, with a trace and a dump of files that all may read."""
    monkeypatch.setattr(rank_files, "dump_flight_json", lambda rank, since: b'{"entries": []}')
    files = RankFiles(folder, 0)
    files.make_folder()
    export = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(TRACE))
    assert files.write(export, 0, thin=False)
    files.wait()


@pytest.mark.usefixtures("open_umask")
def test_a_recording_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    command.make_folder(runs / "exp1")
    _record(runs / "exp1", monkeypatch)
    write_run_json(runs / "exp1", RunSpec("exp1", 1, "gloo", None))
    shutil.copytree(SAMPLES / "pp2_m2", runs / "exp2")

    names = {path.name for path in (runs / "exp1").iterdir()}
    assert names >= {"nccl", "run.json", "rank0_trace.json.gz", "rank0_flight.json.gz"}
    assert _list_open(runs / "exp1") == []
    assert runs.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("open_umask")
def test_a_folder_that_the_user_has_shared_stays_so_and_its_files_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the user shares them too: a file that is written again keeps its mode."""
    shared = tmp_path / "shared"
    shared.mkdir(0o750)
    shared.chmod(0o750)
    spec = RunSpec("exp1", 1, "gloo", None)
    _record(shared, monkeypatch)
    write_run_json(shared, spec)

    assert stat.S_IMODE(shared.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()} == {0o600}
    (shared / "run.json").chmod(0o640)
    write_run_json(shared, spec)
    assert stat.S_IMODE((shared / "run.json").stat().st_mode) == 0o640


@pytest.mark.usefixtures("open_umask")
def test_a_watch_is_private(tmp_path: Path) -> None:
    folder, second = tmp_path / "watch", 10**9
    NoteFile(folder, 0).write(
        [
            RankStarted(0, 1, "h1", 1, 0, 0.005, second),
            RankWindow(0, 1, 20, second, 2 * second, 20, 8, 10, 12),
            RankEnded(0, 20, 3 * second),
        ]
    )
    request_capture(folder)
    reducer = Reducer(WatchFolder(folder, "exp1", "h1"))
    assert reducer.collect(is_last=True) is not None

    assert {path.name for path in (folder / "hosts").iterdir()} > {"h1.jsonl"}
    assert _list_open(folder) == []


@pytest.mark.slow
@pytest.mark.in_turn("collectors/record", "collectors/safe_io", "collectors/watch")
@pytest.mark.parametrize("command", ["record --steps 3", "record --memory --stacks", "watch"])
def test_what_a_real_job_leaves_is_private(tmp_path: Path, command: str) -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "stepsplit.dashboard", *command.split()]
    words += ["--every", "100steps", "--budget", "50"] if command == "watch" else []
    words += ["--out", str(tmp_path / "runs" / "job"), "--", *JOB]
    done = subprocess.run(words, umask=0, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    assert _list_open(tmp_path / "runs") == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_what_is_made_for_others_has_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        sample = str(SAMPLES / "pp2_m2")
        out = tmp_path / "out"
        words = ["--json", "x.json", "--html", "x.html", "--out", "tables"]
        words = [word if word[0] == "-" else str(out / word) for word in words]
        assert cli.run(["analyze", sample, *words]) == 0
        assert cli.run(["export", str(out / "tables"), "--perfetto", str(out / "x.gz")]) == 0
        assert cli.run(["redact", sample, "--out", str(tmp_path / "copy")]) == 0
    finally:
        os.umask(before)

    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) >= 8 and {stat.S_IMODE(path.stat().st_mode) for path in made} == {mode}
