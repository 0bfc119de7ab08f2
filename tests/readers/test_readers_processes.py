"""Parallel and sequential reading give the same result and leave no files."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from collector_jobs.starting import heed_interrupts
from support.builders import GpuTrace
from support.reading import on_disk
from support.waiting import until

from stepsplit.analyzer import DataError, KinetoFile
from stepsplit.analyzer.readers import workers as processes
from stepsplit.analyzer.readers.kineto import json_stream, reader
from stepsplit.analyzer.readers.workers import Task, ignore_progress, run_all


@pytest.fixture(autouse=True)
def import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of this file are called in the other processes too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(os.path.isabs, sys.path)))


def halved(number: int) -> int:
    if number % 2:
        raise DataError(f"{number}.json", "odd", "name an even one")
    return number // 2


def killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_results_come_in_order_and_errors_whole(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LEAST_BYTES", 0)
    seen: list[tuple[int, int]] = []
    tasks = [Task(f"{n}.json", 10, halved, (n,)) for n in (4, 7, 8)]
    first, second, third = run_all(tasks, workers, lambda done, total: seen.append((done, total)))
    assert (first, third) == (2, 4)
    assert isinstance(second, DataError)
    assert (second.where, second.problem, second.hint) == ("7.json", "odd", "name an even one")
    assert seen == [(10, 30), (20, 30), (30, 30)]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_line_that_names_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "LEAST_BYTES", 0)
    tasks = [Task("big.json", 10, killed, ()), Task("4.json", 10, halved, (4,))]
    with pytest.raises(DataError, match="a worker process died, possibly out of memory"):
        run_all(tasks, 2)


@pytest.mark.slow
def test_a_large_file_read_in_ranges_is_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LEAST_BYTES", 0)
    monkeypatch.setattr(json_stream, "LEAST_RANGE_BYTES", 2_000)
    monkeypatch.setattr(reader, "LEAST_RANGE_BYTES", 2_000)
    trace = GpuTrace()
    for start in range(0, 1000, 10):
        trace.kernel("gemm<{a}, {b}>", start, start + 5)
    file = trace.write(tmp_path)
    plain = tmp_path / "rank0.json"
    plain.write_bytes(gzip.decompress(file.read_bytes()))
    alone, shared = (
        reader.read_traces([on_disk(plain)], workers, ignore_progress)[0] for workers in (1, 2)
    )
    assert isinstance(alone, KinetoFile)
    assert isinstance(shared, KinetoFile)
    assert len(alone.rows.events) == 200
    assert shared.rows.events.start_ns.tolist() == alone.rows.events.start_ns.tolist()
    assert shared.rows.events.names == alone.rows.events.names


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """Two workers hold a file each under the temporary folder when the interrupt comes."""
    (tmp_path / "holding.py").write_text(
        "import time, tempfile, pathlib\n"
        "def hold():\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        pathlib.Path(folder, 'held').write_text('x')\n"
        "        time.sleep(60)\n"
    )
    program = tmp_path / "read.py"
    program.write_text(
        "from holding import hold\n"
        "from stepsplit.analyzer.readers.workers import Task, run_all\n"
        "run_all([Task(str(i), 1 << 30, hold, ()) for i in range(2)], 2)\n"
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(tmp_path)}
    job = subprocess.Popen(
        [sys.executable, program], env=environment,
        start_new_session=True, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts,
    )  # fmt: skip
    until(lambda: len(list(temporary.rglob("held"))) == 2)
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(timeout=20) != 0
    assert list(temporary.iterdir()) == []
    until(lambda: not _alive(job.pid))


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
