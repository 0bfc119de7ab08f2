"""Raw files on their way to packed ones: nothing whole is lost, whatever ends the job."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.builders import GpuTrace
from support.waiting import until

from stepsplit.analyzer import analyze
from stepsplit.collectors.attach.processes import list_process_tree
from stepsplit.collectors.record import pack, rank_files, scratch_disk
from stepsplit.collectors.record.pack import MOST_AT_ONCE, take_turn
from stepsplit.collectors.record.packer import Packer, PackTask
from stepsplit.collectors.record.rank_files import RankFiles
from stepsplit.collectors.record.scratch_disk import choose_raw_folder

TRACE = '{"traceEvents": [{"ph": "X"}]}'


@pytest.fixture(autouse=True)
def own_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the turns of these packings apart from those of others on this machine."""
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(tmp_path / "turns"))


RANK = """
import shutil, sys, time
from pathlib import Path
from types import SimpleNamespace
from stepsplit.collectors.record import rank_files

rank_files.dump_flight_json = lambda rank, since: None
export = lambda path: shutil.copy(sys.argv[1], path)
files = rank_files.RankFiles(Path(sys.argv[2]), 0)
files.make_folder()
files.write(SimpleNamespace(export_chrome_trace=export), 0, thin=False)
print("written", flush=True)
time.sleep(60)
"""
"""A rank that writes its files in a step and trains on."""


def write_large_trace(path: Path) -> None:
    """A trace that takes about a second to pack."""
    body = GpuTrace(0, 1).step(1, 0, 100).kernel("gemm", 0, 100).body()
    padding = [f"{number * 2654435761 % (1 << 64):020}" for number in range(1_000_000)]
    path.write_text(json.dumps(body | {"padding": padding}))


def test_a_packer_killed_with_the_cgroup_of_the_job_leaves_a_whole_file(tmp_path: Path) -> None:
    write_large_trace(tmp_path / "exported")
    run = tmp_path / "run"
    job = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path / "exported"), str(run)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert job.stdout is not None and job.stdout.readline() == b"written\n"
        until(lambda: list(run.glob(".rank0_trace.json.gz.*")))
    finally:
        groups = list_process_tree(job.pid)
        for pid in groups:
            os.killpg(pid, signal.SIGKILL)
        job.communicate()
    assert len(groups) == 2

    assert [path.name for path in run.iterdir() if path.name[0] != "."] == ["rank0_trace.json"]
    assert [step.compute_ns for step in analyze(run).steps] == [100_000]


def test_a_raw_file_next_to_its_packed_one_is_not_read(tmp_path: Path) -> None:
    packed = GpuTrace(0, 1).step(1, 0, 100).kernel("gemm", 0, 100).write(tmp_path)
    alone = analyze(tmp_path)
    (tmp_path / "rank0_trace.json").write_bytes(gzip.decompress(packed.read_bytes()))

    both = analyze(tmp_path)

    assert (both.steps, both.warnings) == (alone.steps, alone.warnings)


def test_raw_files_that_are_not_packed_when_the_process_ends_get_their_own_names(
    tmp_path: Path,
) -> None:
    scratch, run = tmp_path / "scratch" / "run-1", tmp_path / "run"
    scratch.mkdir(parents=True)
    (scratch / "rank0_trace.json").write_text(TRACE)
    packer = Packer()
    with take_turn(), take_turn():
        packer.pack([PackTask(scratch / "rank0_trace.json", run / "rank0_trace.json.gz")])
        packer.finish(timeout_s=0.5)

    assert (run / "rank0_trace.json").read_text() == TRACE
    assert [path.name for path in run.iterdir()] == ["rank0_trace.json"]
    assert list((tmp_path / "scratch").iterdir()) == []
    assert packer.wait(0.0)


def test_a_raw_file_of_another_disk_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.replace

    def refuse_other_folder(self: Path, target: Path) -> Path:
        if self.parent != target.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", refuse_other_folder)
    raw = tmp_path / "scratch" / "rank0_trace.json"
    raw.parent.mkdir()
    raw.write_text(TRACE)

    assert pack.keep_all([(raw, tmp_path / "run" / "rank0_trace.json.gz")]) == 0

    assert (tmp_path / "run" / "rank0_trace.json").read_text() == TRACE
    assert not raw.parent.exists()


def test_at_most_two_packings_run_at_once_on_a_host() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with take_turn():
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most == MOST_AT_ONCE


# Where raw files are written.

MOUNTINFO = """\
22 1 252:0 / / rw - {root} /dev/vda rw
23 22 0:40 / /lustre rw shared:1 - lustre mgs:/fs rw
24 22 0:41 / {tmp} rw - {kind} none rw
25 22 0:42 / /gcs/my\\040bucket rw - fuse.gcsfuse gcs rw
"""


def mount(patch: pytest.MonkeyPatch, folder: Path, tmp: str, kind: str, root: str = "ext4") -> None:
    (folder / "mountinfo").write_text(MOUNTINFO.format(tmp=tmp, kind=kind, root=root))
    patch.setattr(scratch_disk, "MOUNTS", folder / "mountinfo")
    for name in scratch_disk.SCRATCH_VARIABLES:
        patch.delenv(name, raising=False)


@pytest.mark.parametrize("out", ["/lustre/runs/exp", "/gcs/my bucket/exp"])
def test_raw_files_of_a_shared_file_system_go_to_a_disk_of_the_host(
    out: str, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mount(patch, tmp_path, str(tmp_path), "xfs")
        patch.setenv("SLURM_TMPDIR", str(tmp_path / "job"))
        patch.setattr(scratch_disk, "_has_space", lambda folder: True)

        chosen = choose_raw_folder(Path(out))

    assert chosen.parent == tmp_path / "job" and chosen.name.startswith("stepsplit-exp-")
    assert chosen.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("out", "kind", "root", "space"),
    [
        ("/runs/exp", "xfs", "ext4", True),  # a disk of this host
        ("/runs/exp", "xfs", "overlay", True),  # a container's own
        ("/lustre/exp", "tmpfs", "ext4", True),  # /tmp in memory
        ("/lustre/exp", "overlay", "overlay", True),  # /tmp of a pod with limited storage
        ("/lustre/exp", "xfs", "ext4", False),  # a full disk
    ],
)
def test_else_raw_files_lie_next_to_the_packed_ones(
    out: str, kind: str, root: str, space: bool, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mount(patch, tmp_path, "/tmp", kind, root)
        patch.setattr(scratch_disk, "_has_space", lambda folder: space)

        assert choose_raw_folder(Path(out)) == Path(out)


def test_a_rank_writes_raw_files_to_the_scratch_disk_and_packed_ones_to_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(monkeypatch, tmp_path, str(tmp_path / "shared"), "nfs4")
    monkeypatch.setenv("STEPSPLIT_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(scratch_disk, "_has_space", lambda folder: True)
    monkeypatch.setattr(rank_files, "dump_flight_json", lambda rank, since: None)
    written: list[Path] = []

    def export(path: str) -> None:
        written.append(Path(path))
        Path(path).write_text(TRACE)

    run = tmp_path / "shared" / "run"
    files = RankFiles(run, 0)
    files.make_folder()
    assert files.write(SimpleNamespace(export_chrome_trace=export), 0, thin=False)
    files.wait()

    assert (tmp_path / "scratch") in written[0].parents
    assert [path.name for path in run.iterdir()] == ["rank0_trace.json.gz"]
    assert not [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]


@pytest.mark.parametrize("thin", [False, True])
def test_a_trace_names_its_file_and_not_the_folders_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thin: bool
) -> None:
    monkeypatch.setattr(rank_files, "dump_flight_json", lambda rank, since: None)

    def export(path: str) -> None:
        Path(path).write_text(f'{{"traceEvents": [{{"ph": "X"}}],"traceName": "{path}", "a": 1 }}')

    files = RankFiles(tmp_path / "run", 3)
    files.make_folder()
    assert files.write(SimpleNamespace(export_chrome_trace=export), 0, thin)
    files.wait()

    with gzip.open(tmp_path / "run" / "rank3_trace.json.gz") as trace:
        text = trace.read()
    assert json.loads(text) == {
        "traceEvents": [{"ph": "X"}],
        "traceName": "rank3_trace.json",
        "a": 1,
    }
    assert str(tmp_path).encode() not in text
