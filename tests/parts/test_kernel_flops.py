"""The FLOPs of the kernel table beside those that the model times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from integrations.ranks import needs

from stepsplit.analyzer import examine, predict, read_job
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.collectors.demo.arguments import DemoArgs

SCRIPT = Path(__file__).parents[1] / "collector_jobs" / "models.py"
TRAINING = """
[training]
flash_attention = {fused}
seq_len = {seq}
micro_batch = 4
global_batch = {batch}
dtype = "fp32"
framework = "fsdp2"
[parallel]
dp = {dp}
zero = 0
tp = {tp}
[hardware]
preset = "cpu"
"""
LLAMA = """
[model]
layers = 3
hidden = 128
heads = 8
kv_heads = 2
ffn = 352
vocab = 160
gated = true
tied = false
"""
GPT2 = """
[model]
layers = 3
hidden = 128
heads = 4
ffn = 512
vocab = 160
learned_positions = 1024
"""
DEMO = """
[model]
layers = 2
hidden = 512
heads = 8
vocab = 32
learned_positions = 1024
tied = false
"""


def count_flops(prediction: Prediction) -> float:
    """What a rank executes in a step by the model: its times at its rates."""
    parts = [one for one in prediction.compute_parts if one.name in ("GEMM", "attention")]
    return sum(one.ns * one.rate for one in parts) / 1e9


def predict_text(folder: Path, text: str) -> Prediction:
    path = folder / "job.toml"
    path.write_text(text)
    return predict(read_job(path))


def test_the_model_counts_the_causal_half_and_two_and_a_half_times_of_it_backward(
    tmp_path: Path,
) -> None:
    tokens, seq, hidden, layers, vocab = 8 * 1024, 1024, 512, 2, 32
    job = DEMO + TRAINING.format(seq=seq, batch=8, dp=1, tp=1, fused="true")
    products = 6 * tokens * (layers * 12 * hidden**2 + hidden * vocab)
    core = 3.5 * layers * 2 * tokens * seq * hidden
    assert count_flops(predict_text(tmp_path, job)) == pytest.approx(products + core, rel=1e-5)


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/parts", "analyzer/model/layer_time.py")
@pytest.mark.parametrize(
    ("kind", "model", "fused"),
    # With dropout attention is not fused: its products are of both halves.
    [("llama", LLAMA, "true"), ("gpt2", GPT2, "false")],
    ids=["llama", "gpt2"],
)
def test_the_table_of_a_model_of_transformers(
    kind: str, model: str, fused: str, tmp_path: Path
) -> None:
    needs("transformers")
    subprocess.run([sys.executable, SCRIPT, kind, tmp_path / "run"], check=True)
    compare(tmp_path, model + TRAINING.format(seq=48, batch=8, dp=1, tp=1, fused=fused))


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/parts", "analyzer/model/layer_time.py")
@pytest.mark.parametrize(("layout", "dp", "tp"), [("tp=2", 1, 2), ("fsdp=2", 2, 1)])
def test_the_table_of_the_demo(layout: str, dp: int, tp: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT]
    options = DemoArgs(steps=6, active=2).format_arguments()
    arguments = ["--out", tmp_path / "run", "--parallel", layout, *options]
    subprocess.run([*command, *arguments], check=True)
    compare(tmp_path, DEMO + TRAINING.format(seq=64, batch=16 * dp, dp=dp, tp=tp, fused="true"))


def compare(folder: Path, job: str) -> None:
    analysis = examine([folder / "run"])
    steps = sum(row.kind == "full" for row in analysis.report.steps)
    table = sum((row.flops or 0) * row.calls for row in analysis.tables.kernels) / steps
    assert table == pytest.approx(count_flops(predict_text(folder, job)), rel=0.01)
