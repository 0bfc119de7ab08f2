"""One unchanged training, recorded in three ways without changing its result."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.waiting import until

from stepsplit.analyzer import Report, analyze
from stepsplit.collectors.formats.rank_record import read_record
from stepsplit.collectors.probes.step_clock import MAX_KEPT_STEPS

pytestmark = [pytest.mark.slow, pytest.mark.in_turn("collectors")]

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_ddp.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
COLLECTORS = [sys.executable, "-m", "stepsplit.collectors"]


def torchrun(steps: int, *launch: str, step_ms: int = 0) -> list[str]:
    where = launch or ("--standalone", "--nproc-per-node", "2")
    arguments = ["--steps", str(steps), "--step-ms", str(step_ms)]
    return [*TORCHRUN, *where, str(SCRIPT), *arguments]


def environment(runtime: Path, **more: str) -> dict[str, str]:
    own = {"STEPSPLIT_SOCKETS": str(runtime), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | own | more


def run(command: list[str], runtime: Path) -> str:
    done = subprocess.run(
        command, env=environment(runtime), capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def loss(output: str) -> str:
    (found,) = re.findall(r"loss (\S+)", output)
    return str(found)


def marks(folder: Path) -> list[list[int]]:
    """The steps of each rank by their numbers in its trace."""
    report = analyze(folder)
    return [[s.step for s in report.steps if s.rank == rank] for rank in report.run.ranks]


def conserved(report: Report) -> bool:
    return all(step.split.step_ns == step.step_ns for step in report.steps)


def test_an_unchanged_script_is_recorded_without_side_effects(tmp_path: Path) -> None:
    plain = run(torchrun(30), tmp_path / "sockets")

    command = [*COLLECTORS, "record", "--memory", "--steps", "3", "--out", str(tmp_path / "run")]
    recorded = run([*command, "--", *torchrun(30)], tmp_path / "sockets")

    assert loss(recorded) == loss(plain)
    report = analyze(tmp_path / "run")
    assert marks(tmp_path / "run") == [[10, 11, 12]] * 2
    assert conserved(report)
    assert report.run.profiling_slowdown is not None
    assert report.memory is not None and len(report.memory) == 2
    row = report.memory[0]
    assert row.weights_bytes == row.gradients_bytes
    assert row.optimizer_bytes is not None and row.weights_bytes is not None
    # Adam: two numbers per weight, and a step count per tensor.
    assert 0 <= row.optimizer_bytes - 2 * row.weights_bytes < 1024
    assert row.activations_bytes
    assert not list((tmp_path / "sockets").rglob("*.sock"))


def test_attach_records_the_same_steps_of_all_ranks(tmp_path: Path) -> None:
    runtime = tmp_path / "sockets"
    command = [*COLLECTORS, "record", "--standby", "--out", str(tmp_path / "none"), "--"]
    with subprocess.Popen(
        [*command, *torchrun(160, step_ms=10)],
        env=environment(runtime),
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        await_ranks(runtime, 2)
        for number in (1, 2):
            out = ["--out", str(tmp_path / f"run{number}"), "--steps", "2"]
            run([*COLLECTORS, "attach", str(job.pid), *out], runtime)
            await_after(tmp_path / f"run{number}", job)
        output = job.communicate(timeout=120)[0]

    assert job.returncode == 0
    assert loss(output) == loss(run(torchrun(160), runtime))
    for number in (1, 2):
        first, second = marks(tmp_path / f"run{number}")
        assert first == second and len(first) == 2
    assert not (tmp_path / "none").exists()


def test_an_attach_to_a_job_that_ends_before_says_so_at_once(tmp_path: Path) -> None:
    """All of its steps are over before the ranks can agree on one."""
    runtime = tmp_path / "sockets"
    command = [*COLLECTORS, "record", "--standby", "--out", str(tmp_path / "none"), "--"]
    with subprocess.Popen(
        [*command, *torchrun(8, step_ms=20)], env=environment(runtime), stdout=subprocess.PIPE
    ) as job:
        await_ranks(runtime, 2)
        out = tmp_path / "run"
        done = subprocess.run(
            [*COLLECTORS, "attach", str(job.pid), "--steps", "2", "--out", str(out)],
            env=environment(runtime), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        job.communicate(timeout=60)

    assert done.returncode == 2
    assert "the job ended before step " in done.stderr


def test_an_attach_reaches_ranks_of_other_hosts_through_the_store(tmp_path: Path) -> None:
    port = str(29600 + os.getpid() % 200)
    jobs = [
        subprocess.Popen(
            [*COLLECTORS, "record", "--standby", "--out", str(tmp_path / "none"), "--",
             *torchrun(3000, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1",
                       "--master-addr", "127.0.0.1", "--master-port", port, step_ms=50)],
            env=environment(tmp_path / f"host{node}"),
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        await_ranks(tmp_path / "host0", 1)
        await_ranks(tmp_path / "host1", 1)
        out = ["--out", str(tmp_path / "run"), "--steps", "2"]
        run([*COLLECTORS, "attach", *out], tmp_path / "host0")
        until(lambda: len(list((tmp_path / "run").glob("rank*_trace.json.gz"))) == 2)
    finally:
        for job in jobs:
            job.terminate()
        for job in jobs:
            job.wait(60)

    first, second = marks(tmp_path / "run")
    assert first == second and len(first) == 2
    other = read_record((tmp_path / "run" / "rank1_record.json").read_bytes())
    # Both "hosts" are this machine, so their clocks are the same one.
    assert abs(other.clocks[0].offset_ns) <= other.clocks[0].round_trip_ns


def test_a_job_with_kineto_use_daemon_is_attached_to_unchanged(tmp_path: Path) -> None:
    with subprocess.Popen(
        torchrun(3000, step_ms=10), env=environment(tmp_path / "sockets", KINETO_USE_DAEMON="1")
    ) as job:
        try:
            until(lambda: job.poll() is not None or len(descendants(job.pid)) >= 2)
            time.sleep(3.0)
            out = ["--out", str(tmp_path / "run"), "--steps", "3"]
            run([*COLLECTORS, "attach", str(job.pid), *out], tmp_path / "sockets")
        finally:
            job.terminate()
            job.wait(60)

    report = analyze(tmp_path / "run")
    assert report.run.ranks == (0, 1)
    assert conserved(report)
    for rank in (0, 1):
        kept = [step for step in report.steps if step.rank == rank and step.kind == "full"]
        assert len(kept) >= 2


def descendants(pid: int) -> list[int]:
    from stepsplit.collectors.attach.processes import list_process_tree, read_environment

    return [each for each in list_process_tree(pid) if "RANK" in read_environment(each)]


def await_ranks(runtime: Path, count: int) -> None:
    until(lambda: len(list(runtime.rglob("*.sock"))) == count)


def await_after(folder: Path, job: "subprocess.Popen[str]") -> None:
    """Waits until the ranks have timed enough unprofiled steps and are on standby again."""
    records = [folder / f"rank{rank}_record.json" for rank in (0, 1)]

    def timed() -> bool:
        return all(
            len(read_record(path.read_bytes()).steps.after_ns) >= MAX_KEPT_STEPS for path in records
        )

    until(lambda: job.poll() is not None or timed())
