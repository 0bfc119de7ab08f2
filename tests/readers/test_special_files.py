"""Pipes, sockets and devices in a recording are named and never opened; links lead nowhere else."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from stepsplit.analyzer import DataError, UsageError, examine, read_files
from stepsplit.analyzer.diagnose.hang.find import read_dumps
from stepsplit.analyzer.diagnose.hang.rank_states import read_states
from stepsplit.analyzer.errors import read_toml
from stepsplit.analyzer.model.config_file import read_job
from stepsplit.analyzer.readers.reduction import reduce_recording
from stepsplit.analyzer.redact import redact_recording
from stepsplit.analyzer.report.io import TABLES_NAME, load_tables, save
from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder
from stepsplit.collectors.formats.watch_notes import RANKS, count_incarnations
from stepsplit.collectors.record.gather import gather
from stepsplit.collectors.safe_io.regular_file import open_regular
from stepsplit.dashboard.store.ingest import read_mesh_file
from stepsplit.dashboard.upload_files import LeftOut, collect_files

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "dp4"
PIPE, SOCKET, DEVICE = (f"{kind}, not a file" for kind in ("a named pipe", "a socket", "a device"))
SPECIAL = {
    "job.toml": PIPE,
    "linked.json": PIPE,
    "logs/ras.json": PIPE,
    "logs/socket": SOCKET,
    "more.zip": PIPE,
    "notes": PIPE,
    "rank7_state.json": PIPE,
    "rank8_trace.json.gz": DEVICE,
    "rank9_trace.json": PIPE,
    "report.json": PIPE,
    "run.json": PIPE,
}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording that holds what is no file, by names that are looked for."""
    folder = shutil.copytree(SAMPLE, tmp_path / "hostile")
    (folder / "logs").mkdir()
    for name, kind in SPECIAL.items():
        (folder / name).unlink(missing_ok=True)
        if kind == PIPE and name != "linked.json":
            os.mkfifo(folder / name)
    (folder / "linked.json").symlink_to("notes")
    (folder / "rank8_trace.json.gz").symlink_to("/dev/zero")
    monkeypatch.chdir(folder / "logs")  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    return folder


def test_an_analysis_names_them_and_goes_on(hostile: Path) -> None:
    report = examine([hostile]).report

    assert report.run.world_size == 4
    skipped = {row.message for row in report.warnings if row.code == "file_skipped"}
    # A pipe is one file, whatever links to it.
    names = {f"{Path(name).name}: {kind}" for name, kind in SPECIAL.items()}
    assert skipped == names - {f"notes: {PIPE}"} or skipped == names - {f"linked.json: {PIPE}"}


def test_each_other_reader_of_recordings_names_them(hostile: Path, tmp_path: Path) -> None:
    redacted = redact_recording([hostile], tmp_path / "redacted")
    left_out = {str(Path(place).relative_to(hostile)): why for place, why in redacted.left_out}
    refused = {
        str(Path(one.where).relative_to(hostile)): one.refused for one in read_files(hostile)
    }
    reduction = reduce_recording([hostile], tmp_path / "reduced")
    _, warnings = read_dumps([hostile])

    found = {name: kind for name, kind in SPECIAL.items() if name != "notes"}
    assert left_out.items() >= (found | {"rank8_trace.json.gz": "a link out of the folder"}).items()
    assert refused.items() >= found.items()
    assert len(reduction.skipped) == len(warnings) == len(found)
    assert read_states([hostile]) == ()


def test_one_that_is_named_is_an_error_of_one_line(hostile: Path) -> None:
    with pytest.raises(DataError, match="notes: a named pipe, not a file; leave it out"):
        examine([hostile / "notes"])
    with pytest.raises(UsageError, match="notes: a named pipe, not a file"):
        collect_files([hostile / "notes"])


def test_a_url_of_this_machine_is_no_way_around(hostile: Path) -> None:
    pytest.importorskip("fsspec")
    assert examine([f"file://{hostile}"]).report.run.world_size == 4


def test_a_saved_report_with_a_pipe_for_a_table_is_refused(tmp_path: Path) -> None:
    made = examine([SAMPLE])
    save(tmp_path, made.report, made.tables)
    for name in ("segments.parquet", "slices.parquet"):
        table = tmp_path / TABLES_NAME / name
        table.rename(tmp_path / name)
        os.mkfifo(table)
        with pytest.raises(DataError, match=f"{name}: a named pipe"):
            load_tables(tmp_path / TABLES_NAME)
        (tmp_path / name).replace(table)


def test_files_that_are_found_by_name_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mesh.txt")
    with pytest.raises(DataError, match="a named pipe"):
        read_mesh_file(tmp_path)

    (tmp_path / "job.toml").write_text('[hardware]\nfile = "mesh.txt"\n')
    with pytest.raises(DataError, match="a named pipe"):
        read_job(tmp_path / "job.toml")

    (gathered := tmp_path / "gathered").mkdir()
    os.mkfifo(gathered / "rank0_record.json")
    with pytest.raises(OSError, match="a named pipe"):
        gather([tmp_path], gathered)

    (tmp_path / RANKS).mkdir()
    os.mkfifo(tmp_path / RANKS / "rank0.jsonl")
    with pytest.raises(OSError, match="a named pipe"):
        count_incarnations(tmp_path)

    watch = WatchFolder(tmp_path, "run", "host")
    watch.batches.parent.mkdir()
    os.mkfifo(watch.batches)
    with pytest.raises(UsageError, match="a named pipe"):
        Reducer(watch)


def test_a_toml_file_is_no_pipe_but_one_that_a_shell_hands_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.toml")
    with pytest.raises(DataError, match=r"job\.toml: a named pipe"):
        read_toml(tmp_path / "job.toml")

    reading, writing = os.pipe()
    os.write(writing, b"a = 1")
    os.close(writing)
    assert read_toml(f"/dev/fd/{reading}") == {"a": 1}
    os.close(reading)


def test_a_file_that_becomes_a_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rank0.json"
    os.mkfifo(file)
    status = os.stat_result((stat.S_IFREG, *[0] * 9))
    monkeypatch.setattr(Path, "stat", lambda *_, **__: status)

    with pytest.raises(OSError, match="a named pipe"):
        open_regular(file)


def test_an_upload_sends_no_file_from_elsewhere(tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    (run := tmp_path / "run").mkdir()
    (run / "rank0.json").write_text("{}")
    (run / ".hidden").write_text("secret")
    os.mkfifo(run / "pipe")
    for name, target in {
        "absolute": secret,
        "above": "../id_rsa",
        "again.json": "rank0.json",
        "by_hidden": ".hidden",
        "chain": "above",
        "folder": tmp_path,
        "loop": "loop",
        "named": "pipe",
        "nothing": "missing",
        "zero": "/dev/zero",
    }.items():
        (run / name).symlink_to(target)
    left_out: list[LeftOut] = []

    files = collect_files([run], left_out.append)

    assert [one.path for one in files] == ["run/rank0.json"]
    assert {one.path: one.reason for one in left_out} == {
        "run/absolute": "a link out of the folder",
        "run/above": "a link out of the folder",
        "run/by_hidden": "a link to a hidden file",
        "run/chain": "a link out of the folder",
        "run/folder": "a link out of the folder",
        "run/loop": "a link to a folder, or to nothing",
        "run/named": PIPE,
        "run/nothing": "a link to a folder, or to nothing",
        "run/pipe": PIPE,
        "run/zero": DEVICE,
    }
    # One that the user names is sent.
    [named] = collect_files([run / "absolute"])
    assert (named.file, named.path) == (secret, "absolute")


def test_a_redacted_copy_has_no_trace_from_elsewhere(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLE, tmp_path / "run")
    (folder / "rank3_trace.json.gz").rename(tmp_path / "private.json.gz")
    (folder / "rank3_trace.json.gz").symlink_to(tmp_path / "private.json.gz")

    done = redact_recording([folder], tmp_path / "redacted")

    assert (str(folder / "rank3_trace.json.gz"), "a link out of the folder") in done.left_out
    assert not (tmp_path / "redacted" / "rank3_trace.json.gz").exists()
