"""Processes are killed, stopped, or take too long: no data is lost, no process stays."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.dashboard_processes import is_gone, open_store, running_dashboard, store_url
from support.store_builders import queued, settled, state
from support.waiting import until

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.units import format_size
from stepsplit.dashboard.connection import Connection
from stepsplit.dashboard.upload import Sender
from stepsplit.dashboard.upload_files import FileToSend

pytestmark = [pytest.mark.slow, pytest.mark.in_turn("dashboard/store", "dashboard/web")]
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "pp2_m2"
TRACE = "rank0_trace.json.gz"
_WORKER = """
import json, os, signal, sys, tempfile, time
from support.store_builders import known_analysis
from stepsplit.dashboard.store.logs import set_up_logs
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.worker import WorkerOptions, run_worker
options = json.loads(sys.argv[3])
def analyze(folder, progress):
    print("begun", flush=True)
    tempfile.NamedTemporaryFile(delete=False)
    taken = [bytearray(b"x" * (1 << 20)) for _ in range(int(options.get("allocate_mib", 0)))]
    if options["sleep_s"] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(options["sleep_s"])
    return known_analysis(folder, progress)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
set_up_logs("json")
store = Store.open(sys.argv[1], sys.argv[2])
memory_bytes = int(options.get("memory_mib", 1 << 20)) << 20
limit_s = options.get("limit_s", 60)
run_worker(store, WorkerOptions("w1", limit_s, memory_bytes, poll_s=0.1), analyze)
"""


def test_a_killed_server_has_lost_nothing_of_an_upload(tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 96
    trace = tmp_path / "rank0_trace.json"
    trace.write_bytes(content)
    one, ids = FileToSend(trace, trace.name, len(content)), []
    arrived = threading.Semaphore(0)

    def send(url: str) -> None:
        sender = Sender(Connection(url, None), lambda _: arrived.release(), _never)
        ids.append(sender.create("run", {}))
        with pytest.raises(UsageError):
            sender.send(ids[0], one)

    with running_dashboard(tmp_path, "--workers", "0") as dashboard:
        uploading = threading.Thread(target=send, args=(dashboard.url,))
        uploading.start()
        for _ in range(4):
            arrived.acquire()
        dashboard.kill_all()
        uploading.join()
    with open_store(tmp_path) as store:
        (row,) = store.files.list_files(ids[0])
        assert 16 << 20 <= row.received_bytes < len(content) and not row.complete
        kept = (store.find_folder(ids[0]) / "input" / trace.name).read_bytes()
        assert kept[: row.received_bytes] == content[: row.received_bytes]

    with running_dashboard(tmp_path, "--workers", "0") as dashboard:
        connection, sizes = Connection(dashboard.url, None), []
        sender = Sender(connection, sizes.append)
        sender.send(ids[0], one)
        sender.finish(ids[0])
        connection.close()
        every = dashboard.processes()
        dashboard.process.kill()
        dashboard.process.wait()
        until(lambda: all(is_gone(pid) for pid in every), 20)

    assert sizes[0] == row.received_bytes
    with open_store(tmp_path) as store:
        assert (store.find_folder(ids[0]) / "input" / trace.name).read_bytes() == content
        assert state(store, ids[0]) == ("queued", None)


def test_a_killed_worker_is_replaced_and_its_job_done(tmp_path: Path) -> None:
    with running_dashboard(tmp_path, "--log-format", "json") as dashboard:
        until(dashboard.workers)
        (first,) = dashboard.workers()
        with open_store(tmp_path) as store:
            run_id = queued(store, **_slow_upload())
            until(lambda: state(store, run_id)[0] == "running")
            os.kill(first, signal.SIGKILL)

            assert settled(store, run_id) == ("done", None)
            assert store.load_report(run_id).steps and store.load_tables(run_id) is not None
        assert first not in dashboard.workers()
        until(lambda: "job" in _events(dashboard.log))
    (job,) = [line for line in _lines(dashboard.log) if line["event"] == "job"]
    assert (job["run"], job["ended"], job["attempt"]) == (run_id, "done", 2)


def test_processes_count_together_and_end_together(tmp_path: Path) -> None:
    with running_dashboard(tmp_path, "--workers", "2") as dashboard:
        for _ in range(20):
            urllib.request.urlopen(f"{dashboard.url}/healthz").close()
        with urllib.request.urlopen(f"{dashboard.url}/metrics") as answer:
            metrics = answer.read().decode()
        answers = [
            _raw(dashboard.url, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + huge + b"\r\n")
            for huge in (b"A: " + b"x" * 100_000 + b"\r\n", b"A: x\r\n" * 10_000)
        ]
        body = (
            b"POST /api/v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        answers.append(_raw(dashboard.url, body + b"Content-Length: 99999999999\r\n\r\n"))
        urllib.request.urlopen(f"{dashboard.url}/readyz").close()
        until(lambda: len(dashboard.workers()) == 2)
        every = dashboard.processes()

    assert dashboard.process.returncode == 0
    assert len(every) == 5 and all(is_gone(pid) for pid in every)
    counted = 'stepsplit_requests_total{method="GET",route="/healthz",status="200"} 20.0'
    assert counted in metrics
    codes = [answer.split(b" ", 2)[1][:1] for answer in answers]
    assert codes == [b"4", b"4", b"4"]


def test_a_stopped_worker_returns_its_job(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        run_id = queued(store)
        worker = _worker(tmp_path, sleep_s=60)
        assert worker.stdout is not None and worker.stdout.readline() == "begun\n"
        worker.terminate()
        worker.communicate(timeout=20)

        assert (worker.returncode, state(store, run_id)) == (0, ("queued", None))
        job = store.jobs.claim("w2")
    assert job is not None and job.attempt == 1


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (("--limit", "0.01"), "took longer than 0.01 minutes (#); upload fewer steps or ranks, or "
         "raise --limit"),
        (("--memory", "0.01"), "needed more than 10 MiB of memory (#); upload fewer steps or "
         "ranks, or raise --memory"),
    ],
    ids=["time", "memory"],
)  # fmt: skip
def test_a_large_upload_beyond_the_dashboards_limits_fails(
    limits: tuple[str, str], error: str, tmp_path: Path
) -> None:
    files = _slow_upload()
    size = f"{len(files)} files, {format_size(sum(map(len, files.values())))}"
    with running_dashboard(tmp_path, *limits) as dashboard, open_store(tmp_path) as store:
        run_id = queued(store, **files)

        assert settled(store, run_id, 90.0) == (
            "failed",
            f"the analysis {error.replace('#', size)}",
        )
        urllib.request.urlopen(f"{dashboard.url}/run/{run_id}").close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"limit_s": 0.3, "sleep_s": 60}, "took longer than 0.005 minutes (1 file, 5 B)"),
        ({"memory_mib": 400, "allocate_mib": 4_000, "sleep_s": 60},
         "needed more than 400 MiB of memory (1 file, 5 B)"),
    ],
    ids=["time", "memory"],
)  # fmt: skip
def test_an_analysis_beyond_a_limit_fails_alone(
    options: dict[str, float], error: str, tmp_path: Path
) -> None:
    """Its process ends with its temporary files, and the worker takes the next job."""
    with open_store(tmp_path) as store:
        large = queued(store)
        worker = _worker(tmp_path, **options)
        failure = settled(store, large, 90.0)
        assert worker.poll() is None
        second = queued(store)
        settled(store, second, 90.0)
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
        until(lambda: not children.read_text().strip())
        worker.terminate()
        worker.communicate(timeout=20)

    option = "--limit" if "limit_s" in options else "--memory"
    advice = f"upload fewer steps or ranks, or raise {option}"
    assert failure == ("failed", f"the analysis {error}; {advice}")
    assert not list((tmp_path / "tmp").iterdir())


def test_an_analysis_that_is_killed_is_tried_three_times(tmp_path: Path) -> None:
    """As by the kernel, when memory is short: the worker stays."""
    with open_store(tmp_path) as store:
        run_id = queued(store)
        worker = _worker(tmp_path, sleep_s=-9)

        assert settled(store, run_id, 90.0)[1] == (
            "the analysis crashed 3 times without an error message, perhaps out of memory; "
            "upload fewer ranks or steps"
        )
        assert worker.poll() is None
        worker.terminate()
        worker.communicate(timeout=20)


def _worker(folder: Path, **options: float) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": f"{folder}/tmp"}
    place = [store_url(folder), str(folder / "artifacts"), json.dumps(options)]
    command = [sys.executable, "-c", _WORKER, *place]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _slow_upload() -> dict[str, bytes]:
    """The sample, with a trace that takes seconds to read."""
    files = {file.name: file.read_bytes() for file in SAMPLE.iterdir()}
    head, begin, events = gzip.decompress(files[TRACE]).partition(b'"traceEvents": [')
    assert begin
    event = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":1,"dur":0},\n'
    return files | {TRACE: gzip.compress(head + begin + event * 2_500_000 + events, 1)}


def _never(pause_s: float) -> None:
    """The connection does not come back."""


def _raw(url: str, request: bytes) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as link:
        with suppress(OSError):
            link.sendall(request)
        return link.recv(200)


def _lines(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def _events(log: Path) -> list[object]:
    return [line["event"] for line in _lines(log)]
