"""One process under `record` does what it does without: how it ends, forks and is signalled."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from collector_jobs.starting import COLLECTORS, Ended, end, run, start

torch = pytest.importorskip("torch")

IN_TURN = pytest.mark.in_turn("collectors")
SLOW_IN_TURN = (pytest.mark.slow, IN_TURN)

TRAINING = """
import os, signal, sys, time, torch

weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)

def train(steps, pause_s=0.0):
    for _ in range(steps):
        weight.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause_s)
"""


def write_script(folder: Path, body: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(TRAINING + body)
    return [sys.executable, str(script)]


def record(out: Path, *options: str) -> list[str]:
    return [*COLLECTORS, "record", "--out", str(out), *options, "--"]


def watch(out: Path) -> list[str]:
    return [sys.executable, "-m", "stepsplit.dashboard", "watch", "--out", str(out), "--"]


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        pytest.param("", 0, id="ends", marks=SLOW_IN_TURN),
        pytest.param("raise KeyError('x')", 1, id="raises", marks=SLOW_IN_TURN),
        pytest.param("sys.exit(4)", 4, id="exits"),
    ],
)
@pytest.mark.parametrize(
    "steps", [1, *(pytest.param(steps, marks=SLOW_IN_TURN) for steps in (0, 2))]
)
def test_a_job_that_ends_after_its_first_steps_keeps_its_status(
    steps: int, ends: str, status: int, tmp_path: Path
) -> None:
    """Its profiler runs already; one that is left running crashes the interpreter at its end."""
    script = write_script(tmp_path, f"train({steps})\n{ends}\n")
    assert run([*record(tmp_path / "run"), *script]).status == status


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("watched", [False, True])
def test_a_forked_child_that_ends_as_python_ends_does_not_hang(
    watched: bool, tmp_path: Path
) -> None:
    body = """
train(2)
time.sleep(1.0)
if (child := os.fork()) == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
train(2)
"""
    out = tmp_path / "run"
    command = watch(out) if watched else record(out, "--standby")
    found = run([*command, *write_script(tmp_path, body)])
    assert (found.status, found.out) == (0, "3\n")


@pytest.mark.slow
@IN_TURN
def test_a_forked_child_that_trains_does_not_replace_the_recording(tmp_path: Path) -> None:
    body = """
train(3)
if (child := os.fork()) == 0:
    train(40)
    os._exit(0)
os.waitpid(child, 0)
print(os.getpid())
train(20)
"""
    found = run([*record(tmp_path / "run"), *write_script(tmp_path, body)])
    recorded = json.loads((tmp_path / "run" / "rank0_record.json").read_text())
    assert (found.status, recorded["rank"]["pid"]) == (0, int(found.out))
    trace = gzip.decompress((tmp_path / "run" / "rank0_trace.json.gz").read_bytes())
    assert f'"pid": {recorded["rank"]["pid"]}'.encode() in trace


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_to_all_processes_is_handled_once_by_the_script(
    number: signal.Signals, tmp_path: Path
) -> None:
    """As Slurm sends it before the end of a job's time."""
    body = f"""
got = []
signal.signal({int(number)}, lambda number, frame: got.append(number))
train(1)
open({str(tmp_path / "ready")!r}, "w").close()
while not got:
    train(1, 0.01)
train(5, 0.01)
print(got)
sys.exit(7)
"""
    process = start([*record(tmp_path / "run"), *write_script(tmp_path, body)])
    until_s = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    os.killpg(process.pid, number)
    found: Ended = end(process)
    assert (found.status, found.out) == (7, f"[{int(number)}]\n")


def test_an_empty_part_of_pythonpath_is_still_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("NUMBER = 42\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text("import beside; print(beside.NUMBER)\n")
    monkeypatch.chdir(tmp_path)
    job = [sys.executable, "sub/script.py"]
    path = f"{os.pathsep}/nowhere"
    assert run(job, PYTHONPATH=path).out == "42\n"
    assert run([*record(tmp_path / "run"), *job], PYTHONPATH=path).out == "42\n"


def test_a_run_in_a_relative_folder_is_whole_though_the_script_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepsplit.collectors import profile_run

    monkeypatch.setenv("RANK", "high")  # a variable of the script's own
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with profile_run("run", wait=0, warmup=0, active=2) as recording:
        os.chdir("elsewhere")
        for _ in range(4):
            torch.ones(4).sum()
            recording.step()
    # A test before may have communicated in this process: the Flight Recorder keeps its calls.
    assert {path.name for path in (tmp_path / "run").iterdir()} - {"rank0_flight.json.gz"} == {
        "rank0_record.json", "rank0_trace.json.gz", "run.json",
    }  # fmt: skip
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.slow
@IN_TURN
def test_ranks_that_end_at_different_steps_are_named(tmp_path: Path) -> None:
    """Two processes without a process group: rank 0 has the steps of the plan."""
    job = write_script(tmp_path, "train(12 if os.environ['RANK'] == '0' else 9)\n")
    both = f"for r in (0, 1): subprocess.run({job!r}, env=os.environ | dict(RANK=str(r)))"
    started = [sys.executable, "-c", f"import os, subprocess\n{both}"]
    found = run([*record(tmp_path / "run"), *started], WORLD_SIZE="2")
    assert found.err.splitlines()[-1].startswith(
        "recorded 2 ranks, which ended at different steps: ranks 1 before step 10, and have their "
        "first steps instead; analyze with"
    )


@pytest.mark.slow
@IN_TURN
def test_a_restart_that_ends_early_keeps_what_was_recorded_before(tmp_path: Path) -> None:
    job = write_script(tmp_path, "train(18 if os.environ['ATTEMPT'] == '0' else 9)\n")
    again = f"for a in '01': subprocess.run({job!r}, env=os.environ | dict(ATTEMPT=a))"
    started = [sys.executable, "-c", f"import os, subprocess\n{again}"]
    found = run([*record(tmp_path / "a run"), *started])
    assert found.err.splitlines()[-1] == (
        f"recorded 1 rank; analyze with: stepsplit analyze '{tmp_path}/a run'"
    )
    trace = gzip.decompress((tmp_path / "a run" / "rank0_trace.json.gz").read_bytes())
    steps = {event["name"] for event in json.loads(trace)["traceEvents"] if "name" in event}
    assert {f"ProfilerStep#{n}" for n in range(10, 15)} <= steps


@pytest.mark.slow
@IN_TURN
def test_a_compiled_optimizer_step_is_watched(tmp_path: Path) -> None:
    body = "optimizer.step = torch.compile(optimizer.step, fullgraph=False, backend='eager')\n"
    job = write_script(tmp_path, f"{body}train(12)\n")
    found = run([*watch(tmp_path / "run"), *job])
    assert found.status == 0
    assert "lost" not in found.err
    assert "watched 12 steps" in found.err
