"""A real MLflow server, and a real training with profile_run(log_to=...)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.dashboard_processes import find_free_port
from support.waiting import until
from test_sinks import read_wandb_history

from stepsplit.analyzer import analyze
from stepsplit.collectors.record.log_to import STEP
from stepsplit.dashboard import cli
from stepsplit.dashboard.sinks.scalars import build_report_points

pytestmark = [
    pytest.mark.slow,
    pytest.mark.in_turn("collectors/record/log_to.py", "dashboard/sinks"),
]

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "sample_traces" / "tp2_pp2"
JOB = ROOT / "tests" / "collector_jobs" / "logged.py"


# MLflow, which takes 850 MB and a minute to install: in an environment of its own.


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with MLflow: that of STEPSPLIT_MLFLOW, else a new one."""
    if "STEPSPLIT_MLFLOW" in os.environ:
        return os.environ["STEPSPLIT_MLFLOW"]
    folder = tmp_path_factory.mktemp("mlflow")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "mlflow>=3.17"]
    if subprocess.run(install, timeout=240, capture_output=True).returncode:
        pytest.skip("pip cannot install mlflow here")
    return python


@contextmanager
def _running_mlflow(python: str, folder: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := find_free_port())}"
    command = [python, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
        except OSError:
            return False

    try:
        until(answers, 90)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


_READ = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
read = client.get_metric_history
experiment = client.get_experiment_by_name("stepsplit")
for run in client.search_runs([experiment.experiment_id]):
    history = {
        key: [(m.step, m.timestamp, m.value) for m in read(run.info.run_id, key)]
        for key in run.data.metrics
    }
    print(json.dumps([run.info.run_name, run.info.status, history]))
"""


@pytest.mark.timeout(600)
def test_a_real_mlflow_server_has_one_run_of_a_recording_that_is_logged_twice(
    mlflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with _running_mlflow(mlflow, tmp_path) as url:
        for _ in range(2):
            assert cli.run(["analyze", str(TRACES), "--log-to", f"mlflow:{url}"]) == 0
        read = [mlflow, "-c", _READ, url]
        done = subprocess.run(read, capture_output=True, text=True, check=True, cwd=tmp_path)

    (run,) = map(json.loads, done.stdout.splitlines())
    (point,) = build_report_points(analyze(TRACES))
    at = (point.step, point.unix_ns // 10**6)
    # MLflow keeps a value once that is logged again for the same step and time.
    assert run == [
        point.run, "FINISHED",
        {one.name: [[*at, pytest.approx(one.value)]] for one in point.scalars},
    ]  # fmt: skip


# profile_run(log_to=...) in a real training.


def _train(folder: Path, *sinks: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(JOB), "rec", "400", *sinks]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=folder, timeout=200,
        env=inherited | environment,
    )  # fmt: skip


def _wait_for_line(file: Path) -> dict[str, Any]:
    until(lambda: file.exists() and file.read_text().endswith("\n"), 60)
    (line,) = file.read_text().splitlines()
    values: dict[str, Any] = json.loads(line)
    return values


def test_a_recording_is_logged_to_the_run_of_the_training_and_to_dead_sinks_without_effect(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("wandb")
    (tmp_path / "plain").mkdir()
    plain = _train(tmp_path / "plain")

    logged = _train(
        tmp_path, "wandb", "json:numbers.jsonl", "otlp:http://127.0.0.1:9", WANDB_MODE="offline"
    )

    assert logged.stdout == plain.stdout
    assert logged.stderr.count("stepsplit: otlp:http://127.0.0.1:9/v1/metrics: ") == 1
    values = _wait_for_line(tmp_path / "numbers.jsonl")
    (point,) = build_report_points(analyze(tmp_path / "rec"))
    assert values[STEP] == point.step
    assert {one.name: values[one.name] for one in point.scalars} == {
        one.name: one.value for one in point.scalars
    }
    # The script logs with explicit steps: W&B drops none of them, and has the numbers once.
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    history = read_wandb_history(file)
    assert [row["_step"] for row in history] == list(range(400))
    assert all("loss" in row for row in history)
    ours = [row for row in history if STEP in row]
    assert [row["stepsplit/idle_share"] for row in ours] == [values["stepsplit/idle_share"]]


def test_without_a_run_of_wandb_the_line_says_how_to_log_later(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = _train(tmp_path, "wandb")

    lines = [line for line in done.stderr.splitlines() if line.startswith("stepsplit: ")]
    assert lines == [
        f"stepsplit: no W&B run is active on rank 0: log it with: stepsplit analyze "
        f"{tmp_path / 'rec'} --log-to wandb:PROJECT/RUN"
    ]
