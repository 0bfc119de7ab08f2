"""A prediction is fast and needs only the standard library."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support.machine import slowness, usual_seconds

from stepsplit.analyzer.model import hardware_config, model_table
from stepsplit.analyzer.model.config import JobConfig, ParallelConfig, TrainingConfig
from stepsplit.analyzer.model.predict import predict

RUN = """\
[model]
preset = "llama-7b"

[parallel]
tp = 2
pp = 4
dp = 8

[training]
seq_len = 2048
micro_batch = 1
microbatches = 32

[hardware]
preset = "a100-sxm-80gb"
"""
HEAVY = ("pandas", "numpy", "pyarrow", "torch", "rich", "plotly", "dash")
COMMAND = "import sys; from stepsplit.dashboard.cli import main; main()"
LOADED = f"""
import sys
from stepsplit.dashboard.cli import run
status = run(sys.argv[1:])
print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)
sys.exit(status)
"""
MOST_S, MOST_THOUSAND_S = 0.3, 2.0
PIECE = 25
"""What a million additions take on the machines that the limits are for; where others slow the
machine down, the limits are as much longer."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(RUN)
    return file


def run_program(program: str, run_file: Path) -> subprocess.CompletedProcess[str]:
    """stepsplit model job.toml --json -, in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", program, "model", str(run_file), "--json", "-"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip


def test_a_prediction_imports_no_heavy_module(run_file: Path) -> None:
    done = run_program(LOADED, run_file)
    assert done.stderr == "\n"
    assert json.loads(done.stdout)["schema"] == "stepsplit.prediction/1"


@pytest.mark.slow
@pytest.mark.alone
def test_one_prediction_is_fast(run_file: Path) -> None:
    assert min(_seconds(run_file) for _ in range(5)) < MOST_S * slowness()


def _seconds(run_file: Path) -> float:
    start = time.perf_counter()
    run_program(COMMAND, run_file)
    return time.perf_counter() - start


LAYOUTS = (
    ParallelConfig(tp=8, dp_replicate=8, zero=1, sequence_parallel=True),
    ParallelConfig(dp_shard=64, zero=3, overlap=frozenset({"dp"})),
    ParallelConfig(tp=4, pp=4, dp_replicate=4),
    ParallelConfig(tp=2, pp=2, dp_replicate=4, cp=4, zero=1),
    ParallelConfig(tp=2, pp=8, dp_replicate=4, schedule="interleaved", chunks=2),
    ParallelConfig(tp=4, pp=4, dp_replicate=4, schedule="zb-h1"),
    ParallelConfig(tp=2, pp=4, dp_replicate=8, schedule="dualpipe-v"),
    ParallelConfig(tp=8, pp=2, dp_replicate=4, schedule="gpipe"),
)
MODELS = ("llama-7b", "llama-3.1-70b", "gpt3-175b", "llama-2-70b", "qwen2.5-32b")


def thousand_jobs(seq_len: int) -> list[JobConfig]:
    """5 models in 8 layouts with 25 batches, all different."""
    recipes = [TrainingConfig(seq_len, micro_batch=1, global_batch=256 * n) for n in range(1, 26)]
    hardware = hardware_config.load_hardware("h100-sxm")
    return [
        JobConfig(model_table.load_model(name), layout, each, hardware)
        for name in MODELS
        for layout in LAYOUTS
        for each in recipes
    ]


@pytest.mark.slow
@pytest.mark.alone
def test_a_thousand_predictions_take_less_than_two_seconds() -> None:
    jobs = thousand_jobs(1024)
    assert len(set(jobs)) == 1000
    pieces = [partial(_predict, jobs[i : i + PIECE]) for i in range(0, len(jobs), PIECE)]
    assert usual_seconds(pieces) < MOST_THOUSAND_S


def _predict(jobs: list[JobConfig]) -> None:
    for one in jobs:
        predict(one)
