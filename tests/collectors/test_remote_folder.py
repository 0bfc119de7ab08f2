"""`record --out URL` copies the recording; `--finish-hook` runs a command on it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest
from support.waiting import until

from stepsplit.collectors import __main__ as collectors
from stepsplit.collectors.__main__ import main
from stepsplit.collectors.formats.rank_record import RankRecord, write_record
from stepsplit.collectors.formats.run_spec import RankInfo, RunSpec, write_run_json
from stepsplit.collectors.record import command, remote_folder
from stepsplit.collectors.record.plan import RecordPlan

URL = "memory://bucket/runs/exp1"

WRITTEN = {
    "run.json": b"{}", "rank0_trace.json.gz": b"t0", "rank1_trace.json.gz": b"t1",
    "rank0_record.json": b"r0", "rank1_record.json": b"r1", "nccl/host.log": b"log",
    ".rank1_flight.json.7.raw": b"a draft",
}  # fmt: skip


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """fsspec's memory, empty, and a training of two ranks that has just ended."""

    def train(command: Sequence[str], plan: RecordPlan, nccl: object) -> int:
        for name, content in WRITTEN.items():
            path = Path(plan.out, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        Path(plan.out, "run.json").write_text(json.dumps({"name": plan.name}))
        return int(command[-1])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collectors, "record", train)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()


def run_record(*options: str, status: int = 0) -> int:
    return main(["record", *options, "--", "train", str(status)])


def test_the_recording_is_copied_and_stays_on_the_disk(
    files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_record("--out", URL, status=3) == 3

    copied = {path.removeprefix("/bucket/runs/exp1/") for path in files.find("/bucket")}
    assert copied == {name for name in WRITTEN if not name.startswith(".")}
    # The run is named by the place that people know.
    assert json.loads(files.cat("/bucket/runs/exp1/run.json")) == {"name": "exp1"}
    assert (tmp_path / "runs/record/rank1_trace.json.gz").read_bytes() == b"t1"
    assert f"copied to {URL}" in capsys.readouterr().err


def test_a_chain_of_other_places_is_one(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_record("--out", f"simplecache::{URL}") == 0
    assert f"copied to simplecache::{URL}" in capsys.readouterr().err
    assert files.cat("/bucket/runs/exp1/nccl/host.log") == b"log"


def test_a_file_url_is_a_folder(files: Any, tmp_path: Path) -> None:
    assert run_record("--out", f"file://{tmp_path}/else where/exp1") == 0
    assert (tmp_path / "else where/exp1/nccl/host.log").read_bytes() == b"log"


def test_a_copy_on_the_disk_is_for_its_owner_only_and_follows_no_link_of_others(
    files: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exp1, own = tmp_path / "shared/exp1", tmp_path / "bashrc"
    own.write_bytes(b"mine")
    (exp1 / "nccl").mkdir(parents=True)
    (exp1 / "nccl/host.log").symlink_to(own)
    # Each rank of srun copies its own files, and the logs of all.
    for name in ("SLURM_PROCID", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    previous = os.umask(0)
    try:
        assert run_record("--out", f"file://{exp1}") == 0
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("SLURM_PROCID")
        assert run_record("--out", f"file://{tmp_path}/new/exp1") == 0
    finally:
        os.umask(previous)

    assert own.read_bytes() == b"mine"
    assert (exp1 / "nccl/host.log").read_bytes() == b"log"
    written = [exp1 / "nccl/host.log", exp1 / "run.json", *(tmp_path / "new").rglob("*")]
    modes = {path.relative_to(tmp_path): oct(path.stat().st_mode & 0o777) for path in written}
    assert modes == {
        path.relative_to(tmp_path): "0o700" if path.is_dir() else "0o600" for path in written
    }
    assert oct((tmp_path / "new").stat().st_mode & 0o777) == "0o700"


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two ranks of srun, which copies a log to where it is there already."""
    for name in ("SLURM_PROCID", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def _link(place: Path, target: Path) -> None:
    place.symlink_to(target)


def _link_of_another(place: Path, target: Path) -> None:
    place.symlink_to(target)
    os.lchown(place, 12345, 12345)


def _folder_of_another(place: Path, target: Path) -> None:
    place.mkdir()
    os.chown(place, 12345, 12345)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes folders of another user")


@pytest.mark.parametrize(
    ("taken", "take", "problem"),
    [
        ("exp1/nccl", _link, "exp1/nccl is a link"),
        ("exp1-2", _link, "exp1-2 is a link"),
        pytest.param("exp1", _link_of_another, "exp1 is a link of another user", marks=as_root),
        pytest.param(
            "exp1/nccl", _folder_of_another, "exp1/nccl belongs to another user", marks=as_root
        ),
        pytest.param("exp1-2", _folder_of_another, "exp1-2 belongs to another user", marks=as_root),
    ],
)
@pytest.mark.usefixtures("first_rank")
def test_a_folder_that_another_user_may_have_made_gets_nothing(
    taken: str, take: Callable[[Path, Path], None], problem: str, files: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shared, other = tmp_path / "shared", tmp_path / "other"
    other.mkdir()
    (other / "host.log").write_bytes(b"of another job")
    (shared / taken).parent.mkdir(parents=True)
    take(shared / taken, other)
    if taken == "exp1-2":
        (shared / "exp1").mkdir()
        (shared / "exp1/rank0_trace.json.gz").write_bytes(b"earlier")
    before = sorted(tmp_path.rglob("*"))

    assert run_record("--out", f"file://{shared}/exp1", status=3) == 3

    out = tmp_path / "runs/job-record"
    said = [line for line in capsys.readouterr().err.splitlines() if "not copied" in line]
    url = f"file://{shared}"
    assert said == [
        f"stepsplit: {url}/exp1: not copied ({url}/{problem}); the recording is in {out}"
    ]
    kept = [path for path in sorted(tmp_path.rglob("*")) if tmp_path / "runs" not in path.parents]
    assert kept == sorted({*before, tmp_path / "runs"})
    assert (other / "host.log").read_bytes() == b"of another job"
    assert (out / "nccl/host.log").read_bytes() == b"log"


@pytest.mark.usefixtures("first_rank")
def test_the_folder_that_the_user_names_may_be_a_link_of_his_own(
    files: Any, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "exp1").symlink_to(scratch)

    assert run_record("--out", f"file://{tmp_path}/exp1") == 0

    assert (scratch / "nccl/host.log").read_bytes() == b"log"
    assert (tmp_path / "exp1").is_symlink()


@as_root
@pytest.mark.usefixtures("first_rank")
def test_a_file_system_that_gives_all_files_one_owner_has_folders_of_this_user(
    files: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As NFS does with what root makes."""
    real_open = os.open

    def open_as_nfs(path: str, flags: int, *arguments: Any, **options: Any) -> int:
        made = real_open(path, flags, *arguments, **options)
        if str(tmp_path / "shared") in str(Path(f"/proc/self/fd/{made}").readlink()):
            os.fchown(made, 65534, 65534)
        return made

    monkeypatch.setattr(remote_folder.os, "open", open_as_nfs)

    assert run_record("--out", f"file://{tmp_path}/shared/exp1") == 0

    assert (tmp_path / "shared/exp1/nccl").stat().st_uid == 65534
    assert (tmp_path / "shared/exp1/run.json").exists()


def list_copied(files: Any) -> dict[str, set[str]]:
    """The files in each folder next to URL's."""
    copied: dict[str, set[str]] = {}
    for path in files.find("/bucket/runs"):
        folder, _, name = path.removeprefix("/bucket/runs/").partition("/")
        copied.setdefault(folder, set()).add(name)
    return copied


def test_an_earlier_recording_stays_and_the_copy_goes_beside_it(
    files: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = {"rank7_trace.json.gz", "nccl/old.log", "tables/a", "report.json", "notes.md"}
    for name in earlier:
        files.pipe(f"/bucket/runs/exp1/{name}", b"old")

    assert run_record("--out", URL, status=3) == 3
    assert run_record("--out", URL) == 0

    new = {name for name in WRITTEN if not name.startswith(".")}
    assert list_copied(files) == {"exp1": earlier, "exp1-2": new, "exp1-3": new}
    said = [line for line in capsys.readouterr().err.splitlines() if URL in line]
    assert said == [
        f"stepsplit: {URL} has a recording: this one is copied to {URL}-2",
        f"copying it to {URL}; Ctrl-C or SIGTERM ends that",
        f"copied to {URL}-2",
        f"stepsplit: {URL} has a recording: this one is copied to {URL}-3",
        f"copying it to {URL}; Ctrl-C or SIGTERM ends that",
        f"copied to {URL}-3",
    ]


def test_two_jobs_that_run_at_the_same_time_replace_no_file_of_each_other(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen an empty folder."""
    train = collectors.record

    def train_beside_another(*arguments: Any) -> int:
        files.pipe("/bucket/runs/exp1/rank1_trace.json.gz", b"of the other job")
        return train(*arguments)

    monkeypatch.setattr(collectors, "record", train_beside_another)

    assert run_record("--out", URL) == 0

    assert files.cat("/bucket/runs/exp1/rank1_trace.json.gz") == b"of the other job"
    copied = list_copied(files)
    assert (len(copied["exp1"]), len(copied["exp1-2"])) == (1, 6)


def test_a_hundred_recordings_are_enough(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that says so of any folder is not asked on while the training runs."""
    for end in ("", *(f"-{number}" for number in range(2, 101))):
        files.pipe(f"/bucket/runs/exp1{end}/run.json", b"{}")

    assert run_record("--out", URL) == 0

    problem = "it and all up to -100 have recordings; choose another --out"
    assert f"{URL}: {problem}; it is tried again at the end" in capsys.readouterr().err
    assert len(files.find("/bucket")) == 100


def write_part(plan: RecordPlan, pids: Mapping[int, int], own: Sequence[int]) -> None:
    """What a host has of a job of two hosts with one rank each; run.json on that of rank 0."""
    infos = {rank: RankInfo(rank, 0, f"host{rank}", pid, "cpu") for rank, pid in pids.items()}
    for rank in own:
        Path(plan.out, f"rank{rank}_trace.json.gz").write_bytes(str(pids[rank]).encode())
        write_record(Path(plan.out), RankRecord(plan.name, infos[rank], 2, "gloo"))
        if rank == 0:
            write_run_json(
                Path(plan.out), RunSpec(plan.name, 2, "gloo", ranks=tuple(infos.values()))
            )


@pytest.mark.parametrize("is_shared", [False, True])
def test_torchrun_in_a_task_for_each_host_copies_all_ranks_of_the_host(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """`srun --ntasks-per-node=1 stepsplit record --out URL -- torchrun --nproc-per-node 2 ...`"""
    infos = [RankInfo(rank, rank % 2, f"host{rank // 2}", 100 + rank, "cpu") for rank in range(4)]

    def train(command: Sequence[str], plan: RecordPlan, nccl: object) -> int:
        out, here = Path(plan.out), int(os.environ["SLURM_PROCID"])
        out.mkdir(parents=True, exist_ok=True)
        for info in infos:
            if is_shared or info.host == f"host{here}":
                (out / f"rank{info.rank}_trace.json.gz").write_bytes(b"t")
                write_record(out, RankRecord(plan.name, info, 4, "gloo"))
        if is_shared or here == 0:
            write_run_json(out, RunSpec(plan.name, 4, "gloo", ranks=tuple(infos)))
        if here == 0:  # the other host trains at the same time, and ends first
            run_task(1)
            become(0)
        return 0

    def become(host: int) -> None:
        monkeypatch.setattr("socket.gethostname", lambda: f"host{host}")
        monkeypatch.setenv("SLURM_PROCID", str(host))

    def run_task(host: int) -> None:
        become(host)
        assert run_record("--out", URL) == 0

    def choose_disk(*_: object) -> Path:
        return tmp_path / ("shared" if is_shared else f"host{os.environ['SLURM_PROCID']}")

    monkeypatch.setattr(collectors, "record", train)
    monkeypatch.setattr(collectors, "choose_out", choose_disk)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    run_task(0)

    assert sorted(path.rpartition("/")[2] for path in files.find(URL)) == sorted(
        ["run.json"]
        + [f"rank{rank}_{kind}" for rank in range(4) for kind in ("record.json", "trace.json.gz")]
    )
    assert files.find(f"{URL}-2") == []


Part = tuple[int, str, bool]
"""A rank of which files are on the disk of host0: its number, its host, and whether it was killed
and so left a dump alone."""


@pytest.mark.parametrize(
    ("environment", "size", "parts", "expected", "said"),
    [
        pytest.param({"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"}, 2,
                     [(1, "host0", False)], {1}, False, id="numbered otherwise by torchrun"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"}, 2,
                     [(0, "host1", False), (1, "host0", False)], {1}, False,
                     id="numbered otherwise, on a shared disk"),
        pytest.param({"SLURM_PROCID": "1", "SLURM_TASKS_PER_NODE": "1(x2)"}, 8,
                     [(rank, "host0", True) for rank in (4, 5, 6, 7)], {4, 5, 6, 7}, False,
                     id="all ranks of the host were killed"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1(x4)"}, 8,
                     [(0, "host0", True), (1, "host0", True)], {0, 1}, False,
                     id="all ranks of the first host were killed"),
        pytest.param({"SLURM_PROCID": "1", "SLURM_TASKS_PER_NODE": "1(x2)"}, 2,
                     [(0, "host1", True), (1, "host0", True)], {1}, False,
                     id="both were killed, on a shared disk"),
        pytest.param({"SLURM_PROCID": "0"}, 4,
                     [(0, "host0", False), (1, "host0", True), (2, "host1", True)], {0, 1}, False,
                     id="one was killed, and another host has not ended"),
        pytest.param({"SLURM_PROCID": "0"}, 4, [(2, "host1", False), (3, "host1", False)],
                     set(), True, id="none is of this host"),
        pytest.param({"RANK": "0", "LOCAL_RANK": "0"}, 2,
                     [(0, "host0", True), (1, "host0", False)], {0}, False,
                     id="a rank that was killed copies its own"),
    ],
)  # fmt: skip
def test_a_host_copies_the_ranks_that_are_its_own(
    environment: Mapping[str, str], size: int, parts: Sequence[Part], expected: set[int],
    said: bool, files: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whatever the launcher has numbered, and whether or not the ranks have noted their end."""

    def train(command: Sequence[str], plan: RecordPlan, nccl: object) -> int:
        out = Path(plan.out)
        out.mkdir(parents=True)
        for rank, host, is_killed in parts:
            if is_killed:
                (out / f"rank{rank}_flight.json.gz").write_bytes(b"f")
            else:
                info = RankInfo(rank, rank % max(1, size // 2), host, 100 + rank, "cpu")
                write_record(out, RankRecord(plan.name, info, size, "gloo"))
        return 0

    monkeypatch.setattr(collectors, "record", train)
    monkeypatch.setattr("socket.gethostname", lambda: "host0")
    tasks = re.search(r"x(\d)", environment.get("SLURM_TASKS_PER_NODE", ""))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE" if "RANK" in environment else "SLURM_NTASKS",
                       tasks[1] if tasks else "2")  # fmt: skip

    assert run_record("--out", URL) == 0

    ranks = {int(re.findall(r"/rank(\d)_", path)[0]) for path in files.find(URL)}
    assert ranks == expected
    assert ("no rank of this host is in" in capsys.readouterr().err) == said


def run_host(
    rank: int, pids: Mapping[int, int], monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """`record` on the host of a rank; meanwhile: what another one does during the training."""

    def train(command: Sequence[str], plan: RecordPlan, nccl: object) -> int:
        Path(plan.out).mkdir(parents=True)
        write_part(plan, pids, [rank])
        meanwhile()
        return 0

    monkeypatch.setattr(collectors, "record", train)
    assert run_record("--out", URL) == 0


FILES_OF = {
    0: {"run.json", "rank0_trace.json.gz", "rank0_record.json"},
    1: {"rank1_trace.json.gz", "rank1_record.json"},
}


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 0)])
def test_hosts_of_one_job_copy_to_one_folder(
    first: int, last: int, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever ends first, and next to an earlier recording."""
    files.pipe("/bucket/runs/exp1/rank0_trace.json.gz", b"earlier")
    pids = {0: 10, 1: 11}

    run_host(last, pids, monkeypatch, lambda: run_host(first, pids, monkeypatch))

    assert list_copied(files) == {
        "exp1": {"rank0_trace.json.gz"}, "exp1-2": FILES_OF[0] | FILES_OF[1],
    }  # fmt: skip
    assert files.cat("/bucket/runs/exp1/rank0_trace.json.gz") == b"earlier"


def test_a_host_that_is_restarted_mixes_no_attempts(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host goes on, and its ranks are started again with the new ones."""
    attempts = {0: 20, 1: 11}, {0: 30, 1: 31}

    def restart() -> None:
        run_host(1, attempts[0], monkeypatch)
        run_host(1, attempts[1], monkeypatch)

    run_host(0, attempts[1], monkeypatch, restart)

    assert list_copied(files) == {"exp1": FILES_OF[1], "exp1-2": FILES_OF[0] | FILES_OF[1]}
    assert files.cat("/bucket/runs/exp1/rank1_trace.json.gz") == b"11"
    assert files.cat("/bucket/runs/exp1-2/rank1_trace.json.gz") == b"31"


@pytest.mark.parametrize("failing", ["put_file", "makedirs"])
def test_a_failed_copy_leaves_the_recording_on_the_disk(
    failing: str, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("The bucket\n\x1b[2Jis gone")

    monkeypatch.setattr(type(files), failing, fail)

    assert run_record("--out", URL, "--finish-hook", "true") == 0

    printed = capsys.readouterr().err
    folder = tmp_path / "runs/record"
    assert (
        f"{URL}: not copied (The bucket \\x1b[2Jis gone); the recording is in {folder}" in printed
    )
    assert "copied to" not in printed
    assert (folder / "rank0_trace.json.gz").exists()


def fail_first(files: Any, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not answer when it is asked the first times."""
    ls, asked = type(files).ls, iter(range(sys.maxsize))

    def answer(*arguments: Any, **options: Any) -> Any:
        if next(asked) < times:
            raise TimeoutError("no answer in 5 s")
        return ls(*arguments, **options)

    monkeypatch.setattr(type(files), "ls", answer)


@pytest.mark.parametrize("earlier", ["rank7_trace.json.gz", "run.json"])
def test_a_server_that_was_away_is_asked_again_before_the_copy(
    earlier: str, files: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files.pipe(f"/bucket/runs/exp1/{earlier}", b"earlier")
    fail_first(files, 1, monkeypatch)

    assert run_record("--out", URL) == 0

    assert f"{URL}: no answer in 5 s; it is tried again at the end" in capsys.readouterr().err
    copied = list_copied(files)
    assert (copied["exp1"], len(copied["exp1-2"])) == ({earlier}, 6)


def test_to_a_server_that_stays_away_nothing_is_copied(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_first(files, float("inf"), monkeypatch)

    assert run_record("--out", URL, status=4) == 4

    kept = f"the recording is in {tmp_path / 'runs/record'}"
    assert f"{URL}: not copied (no answer in 5 s); {kept}" in capsys.readouterr().err
    assert list_copied(files) == {}


def test_a_server_that_hangs_holds_up_neither_the_training_nor_its_end(
    files: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_folder, "CHECK_LIMIT_S", 0.1)
    monkeypatch.setattr(remote_folder, "FILE_LIMIT_S", 0.2)
    monkeypatch.setattr(type(files), "ls", lambda *arguments, **options: time.sleep(20))

    start_s = time.monotonic()
    assert run_record("--out", URL, status=3) == 3

    assert time.monotonic() - start_s < 10
    printed = capsys.readouterr().err
    assert f"{URL}: no answer within 0.1 s; it is tried again at the end" in printed
    assert f"{URL}: not copied (no answer within 0.2 s); the recording is in " in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_during_the_copy_does_not_change_the_status(
    number: signal.Signals, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """SIGINT and SIGTERM end it; the others are for the training."""
    put_file = type(files).put_file

    def put(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        put_file(*arguments, **options)

    monkeypatch.setattr(type(files), "put_file", put)

    assert run_record("--out", URL, "--finish-hook", "touch called", status=3) == 3

    ends = number in (signal.SIGINT, signal.SIGTERM)
    problem = f"{number.name}: what follows the training ends here; the recording is in "
    assert (f"{problem}{tmp_path / 'runs/record'}" in capsys.readouterr().err) == ends
    assert (tmp_path / "called").exists() != ends


def test_a_folder_that_cannot_be_listed_does_not_change_the_status(
    files: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(40, "Too many levels of symbolic links")

    monkeypatch.setattr(remote_folder, "list_files", fail)

    assert run_record("--out", URL, status=3) == 3
    assert f"{URL}: not copied (Too many levels of symb" in capsys.readouterr().err


class _ObjectStorage(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """As s3fs: a folder would be a new bucket, and a file in no bucket is an error."""

    protocol = "objects"

    def ls(self, path: str, detail: bool = True, **options: object) -> list[str]:
        raise FileNotFoundError(path)

    def put_file(self, lpath: str, rpath: str, **options: object) -> None:
        raise FileNotFoundError(f"no bucket of {rpath}")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError(f"{path} would be a bucket")


def test_a_misspelt_bucket_is_not_made(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fsspec.register_implementation("objects", _ObjectStorage, clobber=True)

    assert run_record("--out", "objects://buckt/exp1") == 0

    printed = capsys.readouterr().err
    assert "objects://buckt/exp1: not copied (no bucket of buckt/exp1/" in printed


RANKS: list[tuple[Mapping[str, str], set[str]]] = [
    ({"RANK": "0", "LOCAL_RANK": "0"},
     {"run.json", "rank0_trace.json.gz", "rank0_record.json", "nccl/host.log"}),
    ({"RANK": "1", "LOCAL_RANK": "1"}, {"rank1_trace.json.gz", "rank1_record.json"}),
    ({"RANK": "1", "LOCAL_RANK": "0"},
     {"rank1_trace.json.gz", "rank1_record.json", "nccl/host.log"}),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "expected"), RANKS)
def test_of_ranks_that_each_record_every_one_copies_its_own(
    environment: Mapping[str, str], expected: set[str], files: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And none is refused for what the others have copied meanwhile."""
    for name, value in (environment | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    train = collectors.record

    def train_with_others(*arguments: Any) -> int:
        files.pipe("/bucket/runs/exp1/rank9_record.json", b"of another rank")
        files.pipe("/bucket/runs/exp1/nccl/host.log", b"copied by another host")
        return train(*arguments)

    monkeypatch.setattr(collectors, "record", train_with_others)

    assert run_record("--out", URL) == 0

    copied = {path.removeprefix("/bucket/runs/exp1/") for path in files.find("/bucket")}
    assert copied == expected | {"rank9_record.json", "nccl/host.log"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--out", "nonesuch://a/b"], "nonesuch://a/b: Protocol not known: nonesuch"),
        (["--out", "memory://"], "memory://: name a folder"),
        (["--out", "simplecache::file://a/b"], "simplecache::file://a/b: a chain to local files; "),
        (["--out", "dir::dir::local://a"], "dir::dir::local://a: a chain to local files; name the"),
        (["--out", "dir:///::/tmp/a"], "dir:///::/tmp/a: a chain to local files; name their fol"),
        (["--out", "file::memory://a"], "file::memory://a: a chain to local files; name their fo"),
        (["--out", URL, "--overwrite"], "--overwrite: nothing at a URL is replaced; choose ano"),
        (["--out", "run", "--role", "a", "--standby"], "attach, which has no roles"),
        (["--out", URL, "--standby"], "--standby leaves the recording to stepsplit attach"),
        (["--finish-hook", "true", "--standby"], "--standby leaves the recording"),
        (["--finish-hook", "a 'b"], 'argument --finish-hook: No closing quotation in "a \'b"'),
        (["--finish-hok", "true"], "--finish-hok is no option: see stepsplit record --help"),
        (["--finish-hook", " "], "argument --finish-hook: the command is empty"),
    ],
)
def test_what_cannot_work_is_said_before_the_training(
    options: list[str], problem: str, files: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run_record(*options) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


SECRETS = [
    ("nonesuch://me:hunter2@host/b", "nonesuch://...@host/b: "),
    ("nonesuch://me:hun/ter2@host/b", "nonesuch://...@host/b: "),
    ("nonesuch://me:hun?ter2@host/b", "nonesuch://...: "),
    ("nonesuch://me:hun%3Fter2@host/b", "nonesuch://...@host/b: "),
    ("nonesuch://host/b?sig=hunter2", "nonesuch://host/b: "),
    ("nonesuch://host/b?sig=hun@ter2", "nonesuch://...: "),
    ("a::nonesuch://me:hunter2@host/b", "a::nonesuch://...@host/b: "),
]


@pytest.mark.parametrize(("url", "shown"), SECRETS)
def test_no_secret_of_a_url_is_shown(
    url: str, shown: str, files: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Nor in an error of the package that connects, which may quote it all or in parts."""

    def fail(url: str) -> None:
        raise RuntimeError(f"{url}: 401 for {unquote(url)[15:]}")

    assert run_record("--out", url) == 2
    assert main(["attach", "--out", url]) == 2
    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    assert run_record("--out", url) == 0
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert run_record("--out", url) == 2

    printed = capsys.readouterr().err
    assert printed.count(shown) >= 3
    assert re.findall("hun|ter2", printed) == []


def test_attach_takes_no_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attach", "--out", URL]) == 2
    assert f"{URL} is a URL: attach to a folder, and copy that" in capsys.readouterr().err


def test_the_hook_gets_the_folder_and_no_shell(files: Any, tmp_path: Path) -> None:
    """Whatever the folder is called."""
    program = tmp_path / "hook.py"
    program.write_text("import sys, json; json.dump(sys.argv[1:], open('called', 'w'))")
    out = tmp_path / "runs; touch owned $(touch owned)"
    hook = f"{sys.executable} {program} '$HOME' '*' ';' touch owned"

    assert run_record("--out", str(out), "--finish-hook", hook, status=5) == 5

    called = json.loads((tmp_path / "called").read_text())
    assert called == ["$HOME", "*", ";", "touch", "owned", str(out)]
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        ("false", "--finish-hook false: exit status 1; the recording is in "),
        ("nonesuch", "--finish-hook: nonesuch: No such file or directory; is it on PATH?; the"),
        ("sh -c 'kill -9 $$'", "--finish-hook sh: SIGKILL; the recording is in "),
        ("sh -c 'kill -37 $$'", "--finish-hook sh: signal 37; the recording is in "),
    ],
)
def test_a_hook_that_fails_is_a_warning(
    hook: str, problem: str, files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_record("--out", "run", "--finish-hook", hook) == 0

    printed = capsys.readouterr().err
    assert [line for line in printed.splitlines() if problem in line] != []
    assert (tmp_path / "run/rank0_trace.json.gz").exists()


def test_without_a_recording_no_hook_runs_and_nothing_is_copied(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectors, "record", lambda command, plan, nccl: 1)

    assert run_record("--out", URL, "--finish-hook", "touch called") == 1

    assert not (tmp_path / "called").exists()
    assert files.find("/bucket") == []


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "HOOK_LIMIT_S", 1.2)
    monkeypatch.setattr(command, "_HOOK_END_S", 0.4)


LEFT_BEHIND = "sh -c 'trap \"\" TERM INT; sleep 60 & echo $! > child; wait; sleep 60'"
"""A hook that ignores signals, as does the process that it has started."""


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or only not yet waited for by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.usefixtures("short_times")
def test_a_hook_that_hangs_is_ended_with_all_that_it_started(
    files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would hold the nodes of the job until the end of their time."""
    start_s = time.monotonic()
    assert run_record("--out", "run", "--finish-hook", LEFT_BEHIND, status=3) == 3

    assert 1.2 < time.monotonic() - start_s < 20
    problem = "--finish-hook sh: ended, as it took longer than 0.02 minutes; the recording is in "
    assert f"{problem}{tmp_path / 'run'}" in capsys.readouterr().err
    assert (tmp_path / "run/rank0_trace.json.gz").exists()
    child = int((tmp_path / "child").read_text())
    # Killed with the hook, it takes a moment to go on a machine that others use too.
    until(lambda: has_ended(child), 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        # It is cancelled as a hook that ends cleanly, as one that does not handle signals, and as
        # one that ignores them.
        ('trap "echo ended > end; exit 0" TERM INT; kill -{0} $PPID; sleep 9 & wait', ""),
        ("kill -{0} $PPID; exec sleep 60", "sh: SIG{0}; the recording is in "),
        ('trap "" TERM INT; kill -{0} $PPID; sleep 60', "killed, as it went on after SIG{0}; the"),
    ],
)
def test_a_job_that_is_cancelled_ends_its_hook(
    hook: str, problem: str, number: signal.Signals, files: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "HOOK_LIMIT_S", 30)
    monkeypatch.setattr(command, "_HOOK_END_S", 1)
    name = number.name.removeprefix("SIG")

    assert run_record("--out", "run", "--finish-hook", f"sh -c '{hook.format(name)}'") == 0

    printed = capsys.readouterr().err
    assert problem.format(name) in printed
    assert ("--finish-hook" in printed) == bool(problem)
    assert (tmp_path / "end").exists() == (not problem)


def test_a_hook_has_no_terminal_to_wait_at(files: Any, tmp_path: Path) -> None:
    hook = "sh -c 'cat > typed; tty > /dev/null || : > none; (: < /dev/tty) || : > no_tty'"
    assert run_record("--out", "run", "--finish-hook", hook) == 0
    assert (tmp_path / "typed").read_text() == ""
    assert (tmp_path / "none").exists()
    assert (tmp_path / "no_tty").exists()
