"""Where outputs go: regular files are replaced whole, anything else is opened and written."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.doctor_builders import HEALTHY
from support.gate_builders import run as run_of

from stepsplit.analyzer.regression.metrics import to_json
from stepsplit.analyzer.report.tables import read_tables
from stepsplit.analyzer.validation.tables import PUBLISHED
from stepsplit.collectors.safe_io.atomic_file import SHARED, replace_whole, write_whole
from stepsplit.dashboard import cli

SAMPLES = Path(__file__).parents[2] / "sample_traces"
SAMPLE = str(SAMPLES / "pp2_m2")
JOB = """\
[model]
preset = "gpt2-355m"
[parallel]
tp = 2
[training]
seq_len = 64
micro_batch = 1
global_batch = 2
[hardware]
preset = "h100-sxm"
"""
CHECK = ["check", SAMPLE, "--baseline", SAMPLE, "--budget", "calls:exact"]
COMMANDS = {
    "analyze --json": ["analyze", SAMPLE, "--json"],
    "analyze --html": ["analyze", SAMPLE, "--html"],
    "analyze --write-job": ["analyze", SAMPLE, "--write-job"],
    "audit --json": ["audit", "--store", "sqlite:///audit.db", "--json"],
    "baseline --budgets-out": ["baseline", "runs.json", "--out", "same.json", "--budgets-out"],
    "baseline --out": ["baseline", SAMPLE, "--out"],
    "calibrate --json": ["calibrate", SAMPLE, "--json"],
    "calibrate --out": ["calibrate", SAMPLE, "--out"],
    "check --bencher": [*CHECK, "--bencher"],
    "check --benchmark-action": [*CHECK, "--benchmark-action"],
    "check --codequality": [*CHECK, "--codequality"],
    "check --json": [*CHECK, "--json"],
    "check --junit": [*CHECK, "--junit"],
    "check --markdown": [*CHECK, "--markdown"],
    "check --openmetrics": [*CHECK, "--openmetrics"],
    "check --summary": [*CHECK, "--summary"],
    "compare --json": ["compare", SAMPLE, SAMPLE, "--json"],
    "doctor --json": ["doctor", "--json"],
    "export --perfetto": ["export", SAMPLE, "--perfetto"],
    "hang --json": ["hang", str(SAMPLES / "dp4"), "--json"],
    "model --json": ["model", "job.toml", "--json"],
    "plan --json": ["plan", "job.toml", "--gpus", "2", "--json"],
    "validate --json": ["validate", "measured", "--json"],
    "what-if --json": ["what-if", SAMPLE, "--json"],
}
"""Every option of every command that names a file to write, as the last word of its command."""
NEW_ONLY = {"redact --key"}
"""A key is only written to a file that does not exist."""
LARGE = "analyze --html"
PLACES = ("device", "link to a device", "pipe", "link to a file", "file")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with job.toml, a baseline of three runs and a table of measurements, in which the
    command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stepsplit.dashboard.commands.doctor.read_environment", lambda: HEALTHY)
    Path("job.toml").write_text(JOB)
    runs = [run_of(f"run{i}", {"exposed_comm": 10 + i, "bubble": 5 + i}) for i in range(3)]
    Path("runs.json").write_bytes(to_json(runs))
    Path("measured").mkdir()
    shutil.copy(PUBLISHED / "zero_table1_model_states.csv", "measured")


def null_device(path: Path) -> Path:
    """A device of our own that takes everything, like /dev/null."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        path.write_bytes(b"")
    except OSError as error:
        path.unlink(missing_ok=True)
        pytest.skip(f"no device can be made here: {error}")
    return path


@dataclass
class Pipe:
    """A named pipe, and what its reader got."""

    path: Path
    got: bytes = b""


@contextmanager
def read_pipe(path: Path) -> Iterator[Pipe]:
    os.mkfifo(path)
    pipe = Pipe(path)

    def read() -> None:
        pipe.got = path.read_bytes()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    yield pipe
    reader.join(timeout=30)
    assert not reader.is_alive(), "nothing opened the pipe"


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def run(words: list[str], target: Path) -> None:
    # validate and check have more answers than 0; none of them is about the file.
    assert cli.run([*words, str(target)]) in (0, 1, 3)


def test_every_option_that_names_a_file_is_tried_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = set()
    for verb in cli.COMMANDS:
        cli.run([verb, "--help"])
        for line in capsys.readouterr().out.splitlines():
            words = line.split()
            if words[1:2] == ["FILE"] and ("rite" in line or "Append" in line):
                found.add(f"{verb} {words[0]}")
    assert found == set(COMMANDS) | NEW_ONLY


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_keeps_what_is_not_a_regular_file(name: str, job: None, tmp_path: Path) -> None:
    if name == LARGE:
        pytest.importorskip("dash")
    device = null_device(tmp_path / "null")
    link = tmp_path / "to-null"
    link.symlink_to("null")

    run(COMMANDS[name], link)

    assert link.is_symlink()
    assert stat.S_ISCHR(device.stat().st_mode)
    assert device.stat().st_rdev == os.makedev(1, 3)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_gets_what_a_file_would_get(name: str, job: None, tmp_path: Path) -> None:
    if name == LARGE:
        pytest.importorskip("dash")
    run(COMMANDS[name], tmp_path / "file")
    with read_pipe(tmp_path / "pipe") as pipe:
        run(COMMANDS[name], pipe.path)

    assert stat.S_ISFIFO(pipe.path.stat().st_mode)
    assert pipe.got == (tmp_path / "file").read_bytes() != b""
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_keeps_its_mode_and_a_link_its_file(name: str, job: None, tmp_path: Path) -> None:
    if name == LARGE:
        pytest.importorskip("dash")
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "file"
    file.write_text("old\n")
    file.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to("elsewhere/file")

    run(COMMANDS[name], link)

    assert link.readlink() == Path("elsewhere/file")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.read_bytes() != b"old\n"
    assert file.read_bytes().startswith(b"old\n") == (name == "check --summary")
    assert not leftovers(tmp_path) + leftovers(file.parent)


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("option", ["--json", "--summary"])
def test_standard_output_by_its_path_is_added_to(
    place: str, option: str, job: None, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    words = ["model", "job.toml", option] if option == "--json" else [*CHECK, option]
    run(words, tmp_path / "expected")
    out = tmp_path / "out"
    with out.open("wb") as file:
        file.write(b"before\n")
        file.flush()
        command = [sys.executable, "-m", "stepsplit.dashboard", *words, place]
        done = subprocess.run(command, stdout=file, cwd=tmp_path, check=True)
        file.write(b"after\n")
    output = out.read_bytes()
    expected = (tmp_path / "expected").read_bytes().strip()
    assert done.returncode == 0
    assert output.startswith(b"before\n")
    assert output.endswith(b"after\n")
    assert output.count(expected) == 1
    assert len(output) > len(expected) + 100, "the screen is missing"


def test_tables_in_the_place_of_devices_and_links(tmp_path: Path) -> None:
    out = tmp_path / "out" / "tables"
    out.mkdir(parents=True)
    device = null_device(out / "waits.parquet")
    kept = tmp_path / "kept.parquet"
    (out / "slices.parquet").symlink_to(kept)

    assert cli.run(["analyze", SAMPLE, "--out", str(out.parent)]) == 0

    assert stat.S_ISCHR(device.stat().st_mode)
    assert kept.stat().st_size > 0
    device.unlink()
    shutil.copy(out / "boxes.parquet", out / "waits.parquet")
    assert json.loads((out.parent / "report.json").read_text())["steps"]


def test_tables_through_a_pipe_are_the_same_tables(tmp_path: Path) -> None:
    (tmp_path / "piped" / "tables").mkdir(parents=True)
    with read_pipe(tmp_path / "piped" / "tables" / "segments.parquet") as pipe:
        assert cli.run(["analyze", SAMPLE, "--out", str(tmp_path / "piped")]) == 0
    assert cli.run(["analyze", SAMPLE, "--out", str(tmp_path / "out")]) == 0
    assert pipe.got == (tmp_path / "out" / "tables" / "segments.parquet").read_bytes()
    assert len(read_tables(tmp_path / "out" / "tables").segments.dur_ns)


def test_a_gzipped_trace_goes_through_a_pipe(tmp_path: Path) -> None:
    with read_pipe(tmp_path / "trace.gz") as pipe:
        assert cli.run(["export", SAMPLE, "--perfetto", str(pipe.path)]) == 0
    assert gzip.decompress(pipe.got)


def test_a_socket_and_a_folder_are_refused_and_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.chdir(tmp_path)  # a socket's address has room for about 100 characters
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for place in ("socket", ".", "/proc/self/fd/999"):
            assert cli.run(["analyze", SAMPLE, "--json", place]) == 2
            assert "choose a place that can be written" in capsys.readouterr().err
        assert stat.S_ISSOCK(Path("socket").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["socket"]


def test_an_output_never_replaces_a_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the value of an option is forgotten, and the next word is a trace."""
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    trace, run_json = str(folder / "rank0_trace.json.gz"), str(folder / "run.json")
    for words in (
        ["export", SAMPLE, "--perfetto", trace],
        ["analyze", SAMPLE, "--json", run_json],
        ["baseline", SAMPLE, "--out", trace],
        [*CHECK, "--markdown", trace],
    ):
        assert cli.run(words) == 2
        assert "is a file of a recording; choose another name" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for _ in range(2):
        assert cli.run(["analyze", SAMPLE, "--json", str(tmp_path / "run.json")]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    file = write_whole(tmp_path / "file", b"old")
    os.chown(file, 12345, 23456)
    file.chmod(0o604)
    write_whole(file, b"new")
    after = file.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (12345, 23456, 0o604)
    assert file.read_bytes() == b"new"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_whose_owner_cannot_be_kept_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_whole(tmp_path / "file", b"old")
    os.chown(file, 12345, 23456)
    file.chmod(0o444)

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", refused)
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o444


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", b"new", SHARED)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_draft_is_no_more_readable_than_its_file(tmp_path: Path) -> None:
    file = write_whole(tmp_path / "file", b"secret")
    file.chmod(0o600)
    with replace_whole(file) as draft:
        draft.write_bytes(b"more")
        assert stat.S_IMODE(draft.stat().st_mode) == 0o600
    assert file.read_bytes() == b"more"


def test_what_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = write_whole(tmp_path / "file", b"old")
    with pytest.raises(ZeroDivisionError), replace_whole(file) as draft:
        draft.write_bytes(b"half")
        raise ZeroDivisionError
    assert file.read_bytes() == b"old"
    assert not leftovers(tmp_path)


def test_a_link_to_nothing_yet_makes_its_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    write_whole(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_loop_of_links_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to("link")
    assert cli.run(["analyze", SAMPLE, "--json", str(tmp_path / "link")]) == 2
    assert "choose a place that can be written" in capsys.readouterr().err
