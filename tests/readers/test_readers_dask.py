"""A recording read on a real Dask cluster gives the report that it gives on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.fleet import Fleet, run_fleet, write_fleet
from support.required import absent

from stepsplit.analyzer import UsageError
from stepsplit.analyzer.analysis import Analysis, examine_or_find_hang
from stepsplit.analyzer.readers import event_store
from stepsplit.analyzer.readers.dask_cluster import check_address, connect
from stepsplit.analyzer.report.io import to_json
from stepsplit.dashboard import cli

COMMAND = "from stepsplit.dashboard.cli import main; main()"


@dataclass(frozen=True)
class StartedCluster:
    address: str
    workers: tuple[subprocess.Popen[bytes], ...]


@contextmanager
def start_process(module: str, *arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StartedCluster]:
    """A scheduler and two workers, each a process in a folder other than the test's."""
    if find_spec("distributed") is None:
        absent("distributed", "Dask is not installed: pip install 'stepsplit[scale]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ExitStack() as stack:
        where = ("--host", "127.0.0.1", "--no-dashboard")
        log = folder / "scheduler.log"
        stack.enter_context(start_process("dask_scheduler", *where, "--port", str(port), log=log))
        options = (address, *where, "--no-nanny", "--nthreads", "1")
        workers = tuple(
            stack.enter_context(start_process("dask_worker", *options, log=folder / f"{n}.log"))
            for n in range(2)
        )
        wait_for_workers(address, 2)
        yield StartedCluster(address, workers)


def wait_for_workers(address: str, count: int) -> None:
    with connect(address) as cluster:
        deadline = time.monotonic() + 60
        while len(cluster.client.nthreads()) != count:
            assert time.monotonic() < deadline, f"the cluster has not {count} workers"
            time.sleep(0.05)


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    folder = tmp_path / "fleet"
    job = Fleet(pp=4, dp=2, microbatches=4, layers=1, slow_ranks={5: 1.3})
    write_fleet(run_fleet(job), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "in the store"])
def test_a_worker_killed_midway_does_not_change_the_report(
    cluster: StartedCluster, fleet: Path, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stored:
        monkeypatch.setattr(event_store, "LEAST_BYTES", 0)
    seen: list[int] = []

    def kill_at_the_first(done: int, total: int) -> None:
        if not seen:
            cluster.workers[0].kill()
        seen.append(done)
        assert done <= total

    with connect(cluster.address) as both:
        assert both.worker_count == 2
        there = examine_or_find_hang([fleet], both, kill_at_the_first)
        assert len(both.client.nthreads()) == 1
    here = examine_or_find_hang([fleet])

    assert isinstance(there, Analysis) and isinstance(here, Analysis)
    assert len(here.report.run.ranks) == len(seen) == 64
    assert seen == sorted(seen)
    assert to_json(there.report) == to_json(here.report)


@pytest.mark.slow
def test_the_command_reads_a_relative_path_on_workers_of_another_folder(
    cluster: StartedCluster, fleet: Path
) -> None:
    command = [sys.executable, "-c", COMMAND, "analyze", fleet.name]
    for out, options in (("there", ("--scheduler", cluster.address)), ("here", ())):
        done = subprocess.run(
            [*command, "--out", out, *options], cwd=fleet.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    files = [
        {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
        for top in (fleet.parent / "there", fleet.parent / "here")
    ]
    assert "report.json" in files[1]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.1:8786", "tcp://scheduler:8786", "tcp://0.0.0.0:8786"]
)
def test_a_scheduler_elsewhere_needs_tls(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["stepsplit", "analyze", "sample_traces", "--scheduler", address]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "needs TLS; write tls://HOST:PORT" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("address", ["", "scheduler", "tcp://127.0.0.1", "http://127.0.0.1:80"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a scheduler"):
        check_address(address)


@pytest.mark.parametrize(
    "address", ["tls://10.0.0.1:8786", "tcp://127.0.0.1:8786", "tcp://[::1]:8786"]
)
def test_tls_and_this_machine_are_accepted(address: str) -> None:
    check_address(address)
