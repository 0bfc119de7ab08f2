"""Jobs of several ranks over NCCL on one GPU: what is recorded, recognized and found in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

import pytest

torch = pytest.importorskip("torch")

from support.example_runs import EXAMPLES, JOBS, SEEN, Example, outcome  # noqa: E402

from stepsplit.analyzer import Report, analyze, examine  # noqa: E402
from stepsplit.analyzer.report.report import Finding  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

HERE = Path(__file__).parent
STEPSPLIT = [sys.executable, "-m", "stepsplit.dashboard"]
PLAIN = HERE.parents[1] / "examples" / "plain_ddp.py"
# DeepSpeed's are of a package that few have; a GPU shows the offload of FSDP that a CPU hides.
SHOWN = [run for run in JOBS if "deepspeed" not in run.script and run.name != "fsdp-offload"]


@pytest.fixture(scope="module", autouse=True)
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """CUDA's MPS daemon, if there is one: the kernels of all ranks run at the same time."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    folder = str(tmp_path_factory.mktemp("mps"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_MPS_PIPE_DIRECTORY", folder)
        patch.setenv("CUDA_MPS_LOG_DIRECTORY", folder)
        subprocess.run([control, "-d"], check=True)
        yield
        subprocess.run([control], input="quit\n", text=True, check=True)


def build_job(ranks: int, script: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(HERE / "one_gpu.py"), str(ranks), str(script), *arguments]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def read_loss(output: str) -> str:
    (found,) = re.findall(r"loss (\S+)", output)
    return str(found)


@pytest.mark.gpu("20 NCCL: each strategy is recorded, recognized, and its messages counted")
@pytest.mark.parametrize("example", SHOWN, ids=lambda example: example.name)
def test_strategies(example: Example, tmp_path: Path) -> None:
    run(build_job(example.ranks, EXAMPLES / example.script, *example.arguments,
                  "--out", str(tmp_path)))  # fmt: skip
    report = analyze(tmp_path)
    found = outcome(example, tmp_path)

    full = [step for step in report.steps if step.kind == "full"]
    assert {step.rank for step in full} == set(range(example.ranks))
    assert all(step.split.step_ns == step.step_ns for step in report.steps)
    assert (found.strategies, found.mesh) == SEEN[example.name]
    assert [row for row in found.messages.rows if not row.equal] == []
    # All calls are matched by number: of the traces, or of the Flight Recorder before torch 2.13.
    codes = {warning.code for warning in report.warnings}
    assert not codes & {"order_ambiguous", "unmatched", "groups_unknown"}


@pytest.mark.gpu("21 NCCL: record changes no digit of the loss; its log has every call")
def test_record(tmp_path: Path) -> None:
    job = build_job(2, PLAIN, "--steps", "30")
    words = ["record", "--out", str(tmp_path / "run"), "--nccl-calls", "--steps", "3", "--"]
    recorded = run([*STEPSPLIT, *words, *job])

    assert read_loss(recorded.stdout) == read_loss(run(job).stdout)
    assert "Profiler clears events" not in recorded.stderr
    report = analyze(tmp_path / "run")
    counted = [step for step in report.steps if step.kind == "full"]
    assert {step.rank for step in counted} == {0, 1}
    logs = [path.read_text(errors="replace") for path in (tmp_path / "run" / "nccl").iterdir()]
    assert sum("AllReduce: opCount" in line for log in logs for line in log.splitlines()) >= 60


@pytest.mark.gpu("22 NCCL: a job on standby is attached to twice")
def test_attach(tmp_path: Path) -> None:
    sockets = {"STEPSPLIT_SOCKETS": str(tmp_path / "sockets")}
    standby = [*STEPSPLIT, "record", "--standby", "--out", str(tmp_path / "none"), "--"]
    # An attach starts seconds ahead, so that every rank hears of it in time.
    job = build_job(2, PLAIN, "--steps", "2000", "--step-ms", "20")
    with subprocess.Popen(
        [*standby, *job], env=os.environ | sockets, stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 90
        while len(list((tmp_path / "sockets").rglob("*.sock"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for number in (1, 2):
            out = ["--out", str(tmp_path / f"run{number}"), "--steps", "3"]
            run([*STEPSPLIT, "attach", str(process.pid), *out], **sockets)
        process.communicate(timeout=200)

    assert process.returncode == 0
    for number in (1, 2):
        steps = analyze(tmp_path / f"run{number}").steps
        assert {step.rank for step in steps if step.kind == "full"} == {0, 1}


@pytest.mark.gpu("04 NCCL: all_reduces of replayed CUDA graphs are matched across the ranks")
def test_graphs(tmp_path: Path) -> None:
    report = record_fault(tmp_path, "graph", "none")
    full = [step for step in report.steps if step.kind == "full"]
    assert {step.rank for step in full} == {0, 1}
    assert all(step.split.collective_ns > 0 for step in full)
    codes = {warning.code for warning in report.warnings}
    assert "groups_inferred" in codes
    assert not codes & {"groups_unknown", "unmatched", "device_work_lost"}


HANGS = {
    "missing_call": ([1], "order"),
    "size": ([1], "mismatch"),
    "exception": ([1], "raised"),
    "loader": ([1], "not_called"),
    "stopped": ([1], "stopped"),
}


@pytest.mark.gpu("25 NCCL: a hang is explained by its rank and cause")
@pytest.mark.parametrize("kind", HANGS)
def test_hangs(kind: str, tmp_path: Path) -> None:
    own = {"STEPSPLIT_SOCKETS": str(tmp_path / "sockets")}
    standby = [*STEPSPLIT, "record", "--standby", "--out", str(tmp_path / "run"), "--"]
    job = build_job(4, HERE.parent / "collector_jobs" / "hangs.py", kind)
    process = subprocess.Popen(
        [*standby, *job], env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == "step 6 begins\n"
        command = [*STEPSPLIT, "hang", str(process.pid), "--json", "-"]
        answer = subprocess.run(
            command, env=os.environ | own, capture_output=True, text=True, check=False
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    body = json.loads(answer.stdout)
    (tmp_path / "answer.json").write_text(answer.stdout)
    [culprit] = body["culprits"]
    assert (culprit["ranks"], culprit["cause"]) == HANGS[kind], culprit["message"]


# Faults: the truth is the difference of unprofiled steps, by CUDA events.

NEAR = 0.4
FAULTS = {
    ("ddp", "slow_host"): ("host_stall", (1,)),
    ("ddp", "slow_device"): ("uneven_ranks", (1,)),
    ("ddp", "extra_all_reduce"): ("extra_reductions", ()),
    ("fsdp", "slow_host"): ("host_stall", (1,)),
    ("fsdp", "slow_device"): ("uneven_ranks", (1,)),
    ("tensor", "slow_host"): ("host_stall", (1,)),
    ("tensor", "slow_device"): ("uneven_ranks", (1,)),
    ("pipeline", "slow_host"): ("host_stall", (1,)),
    ("pipeline", "extra_all_reduce"): ("extra_reductions", ()),
}


@pytest.mark.gpu("23 NCCL: an injected fault is the first finding, at its rank")
@pytest.mark.parametrize(("way", "fault"), FAULTS)
def test_faults(tmp_path: Path, way: str, fault: str) -> None:
    report = record_fault(tmp_path, way, fault)
    first = report.findings[0]
    assert (first.code, first.ranks) == FAULTS[way, fault]
    truth_ns = 1e6 * read_truth_ms(tmp_path)
    assert first.gain_ns == pytest.approx(truth_ns, rel=NEAR)


@pytest.mark.gpu("24 NCCL: a training without a fault has no finding of 5 % of the step")
@pytest.mark.parametrize("way", ("ddp", "fsdp", "tensor", "pipeline"))
def test_clean(tmp_path: Path, way: str) -> None:
    report = record_fault(tmp_path, way, "none")
    steps = [step.step_ns for step in report.steps if step.kind == "full"]
    assert [one for one in report.findings if is_large(one, mean(steps))] == []


def is_large(finding: Finding, step_ns: float) -> bool:
    return (
        finding.code in {code for code, _ in FAULTS.values()} and finding.gain_ns > 0.05 * step_ns
    )


def record_fault(folder: Path, way: str, fault: str) -> Report:
    run(build_job(2, HERE / "ranks.py", way, fault, str(folder)))
    return examine([folder / "run"]).report


def read_truth_ms(folder: Path) -> float:
    """How much longer a step is with the fault than without it, mean of the ranks."""
    ranks = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    return mean(median(rank["faulty_ms"]) - median(rank["clean_ms"]) for rank in ranks)
