"""The job.toml that is inferred from real trainings is the truth; run.json has no model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from integrations.ranks import needs
from support.splitting import RunSplit, recording_of, split_of

pytest.importorskip("torch")

from stepsplit.analyzer.gap.config_from_trace import draft_job
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.collectors.demo.arguments import DemoArgs
from stepsplit.collectors.formats.run_spec import RunSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.in_turn("analyzer/gap/model_from_shapes.py"),
]

SCRIPT = Path(__file__).parents[1] / "collector_jobs" / "models.py"
TRAINING = """
[training]
seq_len = 48
micro_batch = 4
global_batch = 8
dtype = "fp32"
framework = "fsdp2"
[parallel]
dp = 1
zero = 0
[hardware]
preset = "cpu"
"""
GPT = """
[model]
layers = 3
hidden = 128
heads = 4
ffn = 512
vocab = 160
learned_positions = 64
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
norm = "rms"
biases = false
"""
DEMO = DemoArgs(steps=6, active=2)
DEMO_JOB = """
[model]
layers = 2
hidden = 512
heads = 8
vocab = 32
learned_positions = 64
tied = false
norm = "rms"
biases = false
[training]
seq_len = 64
micro_batch = 4
microbatches = 4
dtype = "fp32"
framework = "fsdp2"
[parallel]
{parallel}
[hardware]
preset = "cpu"
"""


@pytest.mark.parametrize(
    ("kind", "package", "truth"),
    [
        ("nanogpt", "torch", GPT + TRAINING),
        ("autocast_nanogpt", "torch", GPT + TRAINING.replace("fp32", "bf16")),
        ("gpt2", "transformers", GPT + 'activation = "gelu_new"\n' + TRAINING),
        ("llama", "transformers", LLAMA + TRAINING),
    ],
)
def test_the_job_of_a_model(kind: str, package: str, truth: str, tmp_path: Path) -> None:
    needs(package)
    subprocess.run([sys.executable, SCRIPT, kind, tmp_path / "run"], check=True)
    draft = draft_job(*drafted_from(tmp_path / "run"))
    assert draft.missing == ()
    assert parse_job(draft.text) == parse_job(truth)


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "fsdp=2"])
def test_the_job_of_the_demo(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT]
    options = ["--out", folder, "--parallel", layout, *DEMO.format_arguments()]
    subprocess.run([*command, *options], check=True)
    spec, split = drafted_from(folder)
    draft = draft_job(spec, split)
    assert draft.missing == ()
    axis, ranks = layout.replace("fsdp", "dp").split("=")
    parallel = f"{axis} = {ranks}\nzero = {3 if axis == 'dp' else 0}"
    truth = parse_job(DEMO_JOB.format(parallel=parallel))
    found = parse_job(draft.text)
    # Which weights both ends of a pipeline share cannot be seen.
    tied = found.model.tied if axis == "pp" else truth.model.tied
    assert found.model == replace(truth.model, tied=tied)
    assert found.training == truth.training
    assert found.parallel.world_size == truth.parallel.world_size


def drafted_from(folder: Path) -> tuple[RunSpec, RunSplit]:
    """The recording with what run.json says of its ranks and its mesh, but not of the job."""
    recording = recording_of(folder)
    spec = recording.spec
    assert spec is not None
    bare: RunSpec = replace(spec, model=None, training=None)
    return bare, split_of(recording, bare)
